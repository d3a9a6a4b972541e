"""The back end that is late: right numbers for a program that waits, wrong ones for a program that does not."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.testing.equal import Mismatch, RankResult, compare
from megatron_lite.testing.layouts import Case, reference_of, tiny_gpt, tiny_llama
from megatron_lite.testing.ranks import RankFailed, run_ranks
from megatron_lite.testing.staged import NAME, Options, run_case_staged, stand_in_for_default_group

SHARDED = {"sequence_parallel": True, "zero_stage": 1, "overlap_grad_reduce": True}
SMALL = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 32}
LLAMA = Case(global_batch=4, model=tiny_llama(**SMALL))
GPT = Case(global_batch=4, model=tiny_gpt(**SMALL, hidden_dropout=0.2, attention_dropout=0.1), architecture="gpt")


@functools.cache
def alone(which: str) -> RankResult:
    return reference_of({"llama": LLAMA, "gpt": GPT}[which])


@pytest.mark.parametrize(
    ("which", "layout", "options"),
    [
        ("llama", Layout(tp=2), {"parallel": {"sequence_parallel": True}}),
        ("llama", Layout(dp=2), {"parallel": {"zero_stage": 1, "overlap_grad_reduce": True}}),
        ("llama", Layout(pp=2), {}),
        ("llama", Layout(dp=4), {"training": {"deterministic": True}, "parallel": {"zero_stage": 1}}),
        ("gpt", Layout(tp=2, pp=2), {"parallel": SHARDED}),
        ("gpt", Layout(tp=2, dp=2), {"parallel": SHARDED, "training": {"recompute_granularity": "full"}}),
    ],
    ids=str,
)
def test_layouts_compute_what_one_process_computes(which: str, layout: Layout, options: dict[str, Any]) -> None:
    """Every wait of the program is where it has to be: nothing is read early and no input is written to early."""
    case = replace({"llama": LLAMA, "gpt": GPT}[which], layout=layout, **options)
    found = run_ranks(layout.world_size, run_case_staged, case, Options(seed=layout.world_size))
    assert compare(found, alone(which)) < 1e-12


@pytest.mark.parametrize(
    ("kind", "layout", "parallel"),
    [
        ("all_reduce", Layout(tp=2), {}),
        ("all_gather", Layout(dp=2), {"zero_stage": 1}),
        ("reduce_scatter", Layout(dp=2), {"zero_stage": 1, "overlap_grad_reduce": True}),
        ("all_reduce", Layout(dp=2), {"overlap_grad_reduce": True}),
    ],
    ids=str,
)
def test_a_forgotten_wait_is_noticed(kind: str, layout: Layout, parallel: dict[str, Any]) -> None:
    """The tests' test: without the wait of one kind of operation the numbers are wrong."""
    case = replace(LLAMA, layout=layout, parallel=parallel)
    with pytest.raises((Mismatch, RankFailed)):
        compare(run_ranks(2, run_case_staged, case, Options(forget=frozenset([kind]))), alone("llama"))


def _operations() -> None:
    """Each operation of an axis and of a queue, in place and not, against what it means."""
    stand_in_for_default_group(Options(delay=0.005))
    with ProcessMesh.open(Layout(pp=2, dp=2), backend=NAME, numbered=True) as mesh:
        world, dp, me = mesh.axis("world"), mesh.axis("dp"), mesh.rank
        x = torch.full((4,), float(me))
        world.all_reduce(x).wait()
        assert x.tolist() == [6.0] * 4
        largest = torch.tensor([me])
        world.all_reduce(largest, op="max").wait()
        assert largest.item() == 3

        whole = torch.arange(8.0)
        own = whole[me * 2 : me * 2 + 2]
        own.fill_(me)
        handle = world.all_gather(whole, own, async_op=True)
        assert own.tolist() == [me, me]  # its own place is not touched while it is on its way
        handle.wait()
        assert whole.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]

        parts = torch.arange(8.0) * (me + 1)
        mine = torch.empty(2)
        world.reduce_scatter(mine, parts, async_op=True).wait()
        assert mine.tolist() == [20.0 * me, 10.0 * (2 * me + 1)]
        ordered = torch.arange(8.0)
        world.ordered_reduce_scatter(mine, ordered, async_op=True).wait()
        assert mine.tolist() == [8.0 * me, 4.0 * (2 * me + 1)]
        sent = torch.full((3,), float(me))
        dp.broadcast(sent, src_index=1)
        assert sent.tolist() == [float(dp.ranks[1])] * 3
        assert world.gather_json({"rank": me}) == [{"rank": r} for r in range(4)]

        late = torch.zeros(2)
        if mesh.coords.pp == 0:
            mesh.queue(0, 1, "forward").send(torch.tensor([1.0, 2.0]), 7).wait()
        else:
            handle = mesh.queue(0, 1, "forward").recv(late, 7)
            handle.wait()
            assert late.tolist() == [1.0, 2.0]


def test_operations() -> None:
    run_ranks(4, _operations)


def _early() -> list[float]:
    """What a program sees that reads an output right before it is written."""
    stand_in_for_default_group(Options(delay=0.05, seed=1))
    with ProcessMesh.open(Layout(tp=2), backend=NAME) as mesh:
        seen = []
        for _ in range(5):
            x = torch.ones(1)
            handle = mesh.axis("tp").all_reduce(x, async_op=True)
            while x.item() == 1.0:
                pass
            seen.append(x.item())
            handle.wait()
            assert x.item() == 2.0
        return seen


def test_outputs_are_poisoned_before_they_are_written() -> None:
    assert all(math.isnan(value) for values in run_ranks(2, _early) for value in values)


def _fails() -> str:
    """A job that fails in the thread: its wait says so, and so do those after it."""
    stand_in_for_default_group(Options())
    with ProcessMesh.open(Layout(tp=2), backend=NAME) as mesh:
        axis = mesh.axis("tp")
        axis.all_reduce(torch.ones(2, dtype=torch.complex64).real.contiguous()).wait()
        bad = torch.ones(2, dtype=torch.int16)  # gloo adds no such numbers
        try:
            axis.all_reduce(bad).wait()
        except RuntimeError as error:
            return str(error)
        return ""


def test_errors_come_out_of_wait() -> None:
    for text in run_ranks(2, _fails):
        assert text.startswith("all_reduce failed on the staged back end:")
