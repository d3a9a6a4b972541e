"""``--check-weight-hash-across-dp-replicas-interval``: copies of a weight that drift apart end the run, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from train_toys import MOCK, trained

from megatron_lite.testing.ranks import RankFailed

CHECKED = f"{MOCK} --train-iters 4 --check-weight-hash-across-dp-replicas-interval 2"
NAME = "blocks.1.mlp_norm.weight"


@contextlib.contextmanager
def drift(built: Any) -> Iterator[None]:
    """From its second step on, one rank holds another last bit in a norm."""
    run, calls = built.assembly.step.run, [0]

    def run_step(*args: Any, **kwargs: Any) -> Any:
        report = run(*args, **kwargs)
        calls[0] += 1
        if calls[0] == 2 and built.assembly.mesh.rank == 1:
            weight = built.assembly.gradients.parameters[NAME].data
            weight[0] = torch.nextafter(weight[0], torch.tensor(float("inf")))
        return report

    built.assembly.step.run = run_step
    yield


@pytest.mark.parametrize("layout", ["", "--use-distributed-optimizer", "--tensor-model-parallel-size 2 --sequence-parallel"])
def test_copies_that_agree_are_left_alone(layout: str, tmp_path: Path) -> None:
    assert trained(2, f"{CHECKED} {layout} --log-dir {tmp_path}")[0].code == 0


@pytest.mark.parametrize("layout", ["", "--tensor-model-parallel-size 2 --sequence-parallel"])
def test_one_bit_ends_the_run(layout: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=rf"after step 2 copies of weights differ: {NAME}: ranks \[1\]"):
        trained(2, (f"{CHECKED} {layout} --log-dir {tmp_path}", drift))
