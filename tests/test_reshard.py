"""A checkpoint of any layout is loaded in any other: every tensor bit by bit, and the run goes on as if it had been alone."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from train_toys import TINY, assert_same_run, make_data, tensors_of, trained

from megatron_lite.cli.train import read
from megatron_lite.config import exit_codes
from megatron_lite.train import resume
from megatron_lite.train.build import Built

STEPS, AT = 4, 2
MODELS = {
    "llama, untied": "--untie-embeddings-and-output-weights --add-qkv-bias --qk-layernorm",
    "gpt, tied, biases, dropout": "--model gpt --ffn-hidden-size 72 --attention-dropout 0.1 --hidden-dropout 0.1 "
    "--no-group-query-attention",
    "llama, tied, one kv head": "--num-query-groups 1",
}
SIZES = [(tp, pp, dp, zero) for tp, pp, dp, zero in product((1, 2), (1, 2), (1, 2), (0, 1)) if tp * pp * dp <= 4 and zero < dp]


def flags_of(size: tuple[int, int, int, int]) -> str:
    tp, pp, _, zero = size
    sequence = " --sequence-parallel" if tp > 1 and pp > 1 else ""
    return f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --zero-stage {zero}{sequence}"


@contextlib.contextmanager
def saved_at_once(built: Built, argv: str, directory: str) -> Iterator[None]:
    """What was loaded is saved again before the first step."""
    config = read(shlex.split(argv)).config
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, save=directory))
    resume.save(built.assembly, config, built.progress, built.rates, built.scaler, final=False, extra={}, beat=lambda: None)
    yield


def check(flags: str, pairs: list[tuple[Any, Any]], folder: Path) -> None:
    """Save in the first layout of each pair, load in the second."""
    whole = folder / "whole"
    trained(1, f"{flags} --save {whole}")
    saved: dict[Any, Path] = {}
    for source in sorted({source for source, _ in pairs}):
        saved[source] = folder / f"from{len(saved)}"
        run = f"{flags} {flags_of(source)} --save {saved[source]} --exit-interval {AT}"
        assert trained(source[0] * source[1] * source[2], run)[0].code == exit_codes.LIMIT
    for ranks in (1, 2, 4):
        here = [(s, t) for s, t in pairs if t[0] * t[1] * t[2] == ranks]
        runs: list[Any] = []
        for number, (source, target) in enumerate(here):
            there, again = folder / f"to{ranks}-{number}", folder / f"again{ranks}-{number}"
            shutil.copytree(saved[source], there)
            argv = f"{flags} {flags_of(target)} --save {there} --load {there}"
            runs.append((argv, saved_at_once, argv, str(again)))
        outcomes = trained(ranks, *runs, timeout=600) if runs else []
        assert [o.code for o in outcomes] == [exit_codes.DONE] * len(here), outcomes
        for number, (source, target) in enumerate(here):
            there, again = folder / f"to{ranks}-{number}", folder / f"again{ranks}-{number}"
            before, after = tensors_of(saved[source], AT), tensors_of(again, AT)
            assert before.keys() == after.keys(), (source, target)
            for key, value in before.items():
                assert torch.equal(value, after[key]), (source, target, key)
            assert_same_run(whole, there, STEPS, tolerance=1e-12)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = make_data(tmp_path_factory.mktemp("data"))
    # AdamW with a small eps makes roundings of gradients near zero large in the weights: see docs/equivalence.md.
    return f"{TINY} --data-path {prefix} --split 1,0,0 --fp64 --adam-eps 1e-5 --train-iters {STEPS}"


def test_every_layout_is_saved_and_loaded(data: str, tmp_path: Path) -> None:
    """Each layout loads what another saved (of those that split over dp, with the optimizer's state split or not)."""
    sizes = [size for size in SIZES if size not in ((1, 1, 2, 0), (1, 2, 2, 1), (2, 1, 2, 0))]
    shifted = [*sizes[3:], *sizes[:3]]
    check(f"{data} {MODELS['llama, untied']}", list(zip(sizes, shifted, strict=True)), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
def test_every_pair_of_layouts(model: str, data: str, tmp_path: Path) -> None:
    check(f"{data} {MODELS[model]}", list(product(SIZES, SIZES)), tmp_path)
