"""The equivalence matrix with all ranks on one device, over the staged back end.

CUDA tensors, the program's own streams, buckets and schedules; the collectives are late and poisoned
(megatron_lite/testing/staged.py). Everything is in fp64 and held to the measure of the matrix: losses, gradient norms,
every gradient and every weight after three steps. The reference is one process on the same device, which is held against
one process on the CPU first.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from gpu.part import Outcome, Settings
from megatron_lite.mesh.layout import Layout
from megatron_lite.testing.equal import Mismatch, RankResult, compare
from megatron_lite.testing.layouts import Case, reference_of, run_case, tiny_gpt, tiny_llama
from megatron_lite.testing.ranks import RankFailed, RankHang, run_ranks
from megatron_lite.testing.staged import Options, run_case_staged

SHARDED = {"sequence_parallel": True, "zero_stage": 1, "overlap_grad_reduce": True}


def models(settings: Settings) -> dict[str, Case]:
    """The models of the matrix; smaller ones without a GPU."""
    layers, batch = (4, 8) if settings.on_gpu else (2, 4)
    small = {"num_layers": layers, "hidden_size": 32, "ffn_hidden_size": 64}
    tied: dict[str, Any] = {"untie_embeddings_and_output_weights": False, "qk_layernorm": True, "num_query_groups": 1}
    dropout = tiny_gpt(**small, hidden_dropout=0.2, attention_dropout=0.1)
    return {
        "llama": Case(global_batch=batch, model=tiny_llama(**small)),
        "gpt with dropout": Case(global_batch=batch, model=dropout, architecture="gpt"),
        "tied, qk-norm, one kv head": Case(global_batch=batch, model=tiny_llama(**small, **tied, add_qkv_bias=True)),
    }


# The ones that show most come first: the time may not be enough for all.
MATRIX = (
    ("llama", Layout(tp=2, pp=2), {"parallel": SHARDED}),
    ("llama", Layout(dp=4), {"parallel": SHARDED}),
    ("gpt with dropout", Layout(tp=2, dp=2), {"parallel": SHARDED}),
    ("tied, qk-norm, one kv head", Layout(pp=2, dp=2), {"parallel": SHARDED}),
    ("tied, qk-norm, one kv head", Layout(tp=4), {"parallel": SHARDED}),
    ("llama", Layout(pp=4), {}),
    ("gpt with dropout", Layout(tp=2, pp=2), {"parallel": SHARDED, "training": {"recompute_granularity": "full"}}),
    ("llama", Layout(dp=2, pp=2), {"parallel": SHARDED, "training": {"deterministic": True}}),
    ("llama", Layout(dp=4), {"training": {"deterministic": True}}),
    ("gpt with dropout", Layout(pp=4), {"parallel": {"pipeline_schedule": "gpipe"}}),
    ("llama", Layout(tp=2, dp=2), {}),
    ("tied, qk-norm, one kv head", Layout(tp=2, pp=2), {}),
)
SHORT = (0,)  # of the matrix, without a GPU


def run(settings: Settings, outcome: Outcome) -> None:
    """Every cell of the matrix that there is time for, and one cell with a wait left out, which has to be noticed."""
    device = str(settings.where)
    cases = models(settings)
    references = References(cases, device, outcome)
    began = time.monotonic()
    run_ranks(4, started, device)
    outcome.say(f"4 ranks started in {time.monotonic() - began:.0f} s")
    forgotten_wait(cases["llama"], settings, outcome, references.of("llama"))
    rows = range(len(MATRIX)) if settings.on_gpu else SHORT
    for number in rows:
        key, layout, options = MATRIX[number]
        case = replace(cases[key], layout=layout, **options)
        if settings.time_is_short():
            outcome.skip(f"{key}, {case.name}: the time was over")
            continue
        want = references.of(key)
        try:
            found = run_ranks(
                layout.world_size, run_case_staged, case, Options(seed=number), device, timeout=settings.patience
            )
            worst = compare(found, want)
        except (Mismatch, RankFailed, RankHang) as error:
            outcome.check(False, f"{key}, {case.name}: {tail(error)}")
            continue
        outcome.numbers[f"{key}, {case.name}"] = worst
        outcome.check(True, f"{key}, {case.name}: largest relative deviation {worst:.1e}")


def started(device: str) -> str:
    """On a rank: open the device, so that no cell of the matrix pays for it."""
    import torch

    return str(torch.zeros(1, device=device).device)


class References:
    """What one process computes, on the device; the first time it is held against one process on the CPU."""

    def __init__(self, cases: dict[str, Case], device: str, outcome: Outcome) -> None:
        self.cases, self.device, self.outcome = cases, device, outcome
        self.known: dict[str, RankResult] = {}

    def of(self, key: str) -> RankResult:
        """The result of a model."""
        if key not in self.known:
            self.known[key] = on_cpu = reference_of(self.cases[key])
            if self.device != "cpu":
                self.known[key] = run_case(self.cases[key].alone(), device=self.device)
                try:
                    worst = compare([self.known[key]], on_cpu)
                    self.outcome.check(
                        True, f"{key}: one process on the device and one on the CPU differ by {worst:.1e}"
                    )
                except Mismatch as error:
                    self.outcome.check(False, f"{key}: one process on the device against one on the CPU: {error}")
        return self.known[key]


def forgotten_wait(base: Case, settings: Settings, outcome: Outcome, want: RankResult) -> None:
    """The check's own test: with a wait left out, numbers have to be wrong."""
    options = Options(forget=frozenset(["reduce_scatter"]))
    case = replace(base, layout=Layout(dp=2), parallel={"zero_stage": 1})
    try:
        worst = compare(run_ranks(2, run_case_staged, case, options, str(settings.where)), want)
    except (Mismatch, RankFailed) as error:
        outcome.check(True, f"a forgotten wait is noticed: {str(error).splitlines()[0]}")
    else:
        outcome.check(False, f"a forgotten wait is not noticed (deviation {worst:.1e})")


def tail(error: BaseException) -> str:
    """What was raised, on a rank or in the comparison."""
    return str(error).split("\nvalues at the last line:")[0].strip().splitlines()[-1]
