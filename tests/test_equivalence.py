"""The equivalence matrix: every layout of one to four ranks computes what one process computes (fp64, gloo)."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from megatron_lite.mesh.layout import Layout
from megatron_lite.testing.layouts import (
    Case,
    Mismatch,
    RankResult,
    compare,
    layouts,
    micro_batch_of,
    reference_of,
    run_case,
    tiny_gpt,
    tiny_llama,
)
from megatron_lite.testing.ranks import run_ranks

SHARDED = {"sequence_parallel": True, "zero_stage": 1, "overlap_grad_reduce": True}


@functools.cache
def _reference(key: str) -> tuple[Case, RankResult]:
    case = MODELS[key]
    return case, reference_of(case)


MODELS: dict[str, Case] = {
    "llama": Case(),
    "gpt": Case(model=tiny_gpt(), architecture="gpt"),
    "dropout": Case(model=tiny_gpt(hidden_dropout=0.2, attention_dropout=0.1, num_layers=2), architecture="gpt"),
    "llama tied, qk-norm, one kv head": Case(
        model=tiny_llama(untie_embeddings_and_output_weights=False, qk_layernorm=True, num_query_groups=1, add_qkv_bias=True)
    ),
    "depth 5": Case(model=tiny_llama(num_layers=5, hidden_size=16, ffn_hidden_size=32)),
    "one document a row": Case(documents=False, model=tiny_llama(num_layers=4, hidden_size=16, ffn_hidden_size=32)),
}


def check(key: str, layout: Layout, micro_batch: int | None = None, **options: dict[str, Any]) -> float:
    base, reference = _reference(key)
    size = micro_batch or micro_batch_of(layout, base.global_batch)
    case = replace(base, layout=layout, micro_batch=size, **options)  # type: ignore[arg-type]
    return compare(run_ranks(layout.world_size, run_case, case), reference)


@pytest.mark.parametrize("key", ["llama", "gpt"])
@pytest.mark.parametrize("parallel", [{}, SHARDED], ids=["plain", "sharded"])
@layouts()
def test_layouts(layout: Layout, parallel: dict[str, Any], key: str) -> None:
    check(key, layout, parallel=parallel)


@layouts(least_ranks=2)
def test_dropout(layout: Layout) -> None:
    if layout.pp > 2:
        pytest.skip("two blocks fill two stages")
    check("dropout", layout, parallel=SHARDED)


@layouts(least_ranks=2)
def test_tied_head_and_replicated_key_value_heads(layout: Layout) -> None:
    check("llama tied, qk-norm, one kv head", layout, parallel=SHARDED)


@layouts(least_ranks=2, pp=(2, 3, 4))
def test_depth_that_does_not_divide(layout: Layout) -> None:
    check("depth 5", layout)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2, pp=2), Layout(dp=3), Layout(dp=2, pp=2)], ids=str)
def test_rows_without_borders(layout: Layout) -> None:
    check("one document a row", layout, parallel=SHARDED)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("pp", [2, 4])
def test_microbatches_below_and_above_the_stages(pp: int, micro_batch: int, schedule: str) -> None:
    check("gpt", Layout(pp=pp), micro_batch, parallel={"pipeline_schedule": schedule})


@pytest.mark.parametrize("recompute", [("uniform", None), ("uniform", 2), ("block", 1)], ids=str)
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2, dp=2), Layout(tp=2, pp=2)], ids=str)
def test_recompute(layout: Layout, recompute: tuple[str, int | None]) -> None:
    training = {
        "recompute_granularity": "full",
        "recompute_method": recompute[0],
        "recompute_num_layers": recompute[1],
    }
    check("dropout", layout, parallel=SHARDED, training=training)


@pytest.mark.parametrize("layout", [Layout(dp=3), Layout(dp=4), Layout(dp=2, pp=2), Layout(tp=2, dp=2)], ids=str)
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_deterministic_sums(layout: Layout, zero_stage: int) -> None:
    check("llama", layout, parallel={"zero_stage": zero_stage}, training={"deterministic": True})


@pytest.mark.parametrize("bucket", [1, 500, 10**9])
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, pp=2)], ids=str)
def test_bucket_sizes(layout: Layout, bucket: int) -> None:
    check("gpt", layout, parallel={**SHARDED, "ddp_bucket_size": bucket})


def test_a_wrong_layout_is_noticed() -> None:
    """The comparison itself: one changed element anywhere is a mismatch."""
    case, reference = _reference("llama")
    other = run_case(replace(case, micro_batch=2))
    assert compare([other], reference) == 0.0
    name, shape, start, size, values = other.weights[3]
    changed = values.copy()
    changed.flat[0] += 1e-9
    other.weights[3] = (name, shape, start, size, changed)
    with pytest.raises(Mismatch, match=name.replace(".", r"\.")):
        compare([other], reference)
