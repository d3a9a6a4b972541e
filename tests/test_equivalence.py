"""The equivalence matrix: every layout of one to four ranks computes what one process computes (fp64, gloo).

A test is a layout; the cases in it, each a model with its options, run one after the other on the same ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from foreign.parallel_block import ParallelBlockConfig
from foreign.plain_linear import PlainConfig
from foreign.shared_block import SharedConfig

from megatron_lite.mesh.layout import Layout
from megatron_lite.testing.equal import Mismatch, RankResult, compare
from megatron_lite.testing.layouts import (
    TINY,
    Case,
    layouts,
    micro_batch_of,
    reference_of,
    run_case,
    run_cases,
    tiny_gpt,
    tiny_llama,
)
from megatron_lite.testing.ranks import run_ranks

SHARDED = {"sequence_parallel": True, "zero_stage": 1, "overlap_grad_reduce": True}
PLAIN: dict[str, Any] = {}
SMALL: dict[str, Any] = {"hidden_size": 16, "ffn_hidden_size": 32}

MODELS: dict[str, Case] = {
    "llama": Case(),
    "gpt": Case(model=tiny_gpt(), architecture="gpt"),
    "dropout": Case(model=tiny_gpt(hidden_dropout=0.2, attention_dropout=0.1, num_layers=2), architecture="gpt"),
    "llama tied, qk-norm, one kv head": Case(
        model=tiny_llama(
            untie_embeddings_and_output_weights=False, qk_layernorm=True, num_query_groups=1, add_qkv_bias=True
        )
    ),
    "depth 5": Case(model=tiny_llama(num_layers=5, **SMALL)),
    "one document a row": Case(documents=False, model=tiny_llama(**SMALL)),
    "shared block": Case(
        model=SharedConfig(**{**TINY, **SMALL, "aux_weight": 0.1}), architecture="foreign.shared_block:SharedModel"
    ),
    "parallel block": Case(
        model=ParallelBlockConfig(**{**TINY, **SMALL}), architecture="foreign.parallel_block:ParallelBlockModel"
    ),
    "plain linear": Case(
        model=PlainConfig(depth=4, width=16, vocab_size=61), architecture="foreign.plain_linear:PlainModel"
    ),
}

Options = dict[str, Any]  # fields of a Case


@functools.cache
def _reference(key: str) -> RankResult:
    return reference_of(MODELS[key])


def check(layout: Layout, cells: Iterable[tuple[str, Options]]) -> None:
    """Hold cells, (name of a model, options), of one layout against one process."""
    names, cases = [], []
    for key, options in cells:
        size = micro_batch_of(layout, MODELS[key].global_batch)
        cases.append(replace(MODELS[key], **{"layout": layout, "micro_batch": size, **options}))
        names.append(key)
    by_rank = run_ranks(layout.world_size, run_cases, cases, timeout=120)
    for i, (key, case) in enumerate(zip(names, cases, strict=True)):
        try:
            compare([results[i] for results in by_rank], _reference(key))
        except Mismatch as mismatch:
            raise Mismatch(f"{key}, {case.name}: {mismatch}") from None


@layouts()
def test_layouts(layout: Layout) -> None:
    check(layout, [(key, {"parallel": parallel}) for key in ("llama", "gpt") for parallel in (PLAIN, SHARDED)])


@layouts(least_ranks=2)
def test_ties_replicated_key_value_heads_and_dropout(layout: Layout) -> None:
    """Dropout has two blocks, so at most two stages."""
    keys = ["llama tied, qk-norm, one kv head", *(["dropout"] if layout.pp <= 2 else [])]
    check(layout, [(key, {"parallel": SHARDED}) for key in keys])


@layouts(least_ranks=2, pp=(2, 3, 4))
def test_depth_that_does_not_divide(layout: Layout) -> None:
    check(layout, [("depth 5", {})])


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2, pp=2), Layout(dp=3), Layout(dp=2, pp=2)], ids=str)
def test_rows_without_borders(layout: Layout) -> None:
    check(layout, [("one document a row", {"parallel": SHARDED})])


@pytest.mark.parametrize("pp", [2, 4])
def test_microbatches_below_and_above_the_stages(pp: int) -> None:
    cells = [
        ("gpt", {"micro_batch": micro_batch, "parallel": {"pipeline_schedule": schedule}})
        for schedule in ("1f1b", "gpipe")
        for micro_batch in (1, 2, 3, 6, 12)
    ]
    check(Layout(pp=pp), cells)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2, dp=2), Layout(tp=2, pp=2)], ids=str)
def test_recompute(layout: Layout) -> None:
    ways = [
        {"recompute_method": m, "recompute_num_layers": n} for m, n in (("uniform", None), ("uniform", 2), ("block", 1))
    ]
    cells = [("dropout", {"parallel": SHARDED, "training": {"recompute_granularity": "full", **way}}) for way in ways]
    check(layout, cells)


@pytest.mark.parametrize("layout", [Layout(dp=3), Layout(dp=4), Layout(dp=2, pp=2), Layout(tp=2, dp=2)], ids=str)
def test_deterministic_sums(layout: Layout) -> None:
    check(layout, [("llama", {"parallel": {"zero_stage": z}, "training": {"deterministic": True}}) for z in (0, 1)])


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, pp=2)], ids=str)
def test_bucket_sizes(layout: Layout) -> None:
    check(layout, [("gpt", {"parallel": {**SHARDED, "ddp_bucket_size": size}}) for size in (1, 500, 10**9)])


FOREIGN = [Layout(dp=3), Layout(pp=3), Layout(dp=2, pp=2), Layout(tp=2, pp=2), Layout(tp=4)]


@pytest.mark.parametrize("layout", FOREIGN, ids=str)
def test_foreign_models(layout: Layout) -> None:
    """Models of other people; ordinary layers where tp is 1 (elsewhere they are refused)."""
    keys = ["shared block", "parallel block", *(["plain linear"] if layout.tp == 1 else [])]
    check(layout, [(key, {"parallel": SHARDED}) for key in keys])


def test_a_wrong_layout_is_noticed() -> None:
    """The comparison itself: one changed element anywhere is a mismatch."""
    case, reference = MODELS["llama"], _reference("llama")
    other = run_case(replace(case, micro_batch=2))
    assert compare([other], reference) == 0.0
    name, shape, start, size, values = other.weights[3]
    changed = values.copy()
    changed.flat[0] += 1e-9
    other.weights[3] = (name, shape, start, size, changed)
    with pytest.raises(Mismatch, match=name.replace(".", r"\.")):
        compare([other], reference)
