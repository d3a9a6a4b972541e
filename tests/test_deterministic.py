"""``--deterministic``: at one tp and dp, losses and weights are the same bits in fp32, however else the run is laid out.

What may change is the pipeline (stages, schedule), what data-parallel ranks shard (ZeRO 0 and 1), recompute, overlap and
the size of the buckets, as long as no parameter is tied and the clip is not active; an active clip moves a run by the
rounding of its factor. A second run of anything is the first, bit by bit. Without the flag a sum's order depends on the
place of an element in its bucket, which one test here sees.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.mesh.layout import Layout
from megatron_lite.testing.equal import full_tensors
from megatron_lite.testing.layouts import Case, RankResult, run_cases, tiny_gpt, tiny_llama
from megatron_lite.testing.ranks import run_ranks

MODELS = {
    "llama": Case(model=tiny_llama(qk_layernorm=True), micro_batch=2),
    "gpt": Case(model=tiny_gpt(untie_embeddings_and_output_weights=True), architecture="gpt"),
    "dropout": Case(
        model=tiny_gpt(untie_embeddings_and_output_weights=True, hidden_dropout=0.2, attention_dropout=0.1),
        architecture="gpt",
    ),
}
NO_CLIP = {"clip_grad": 0.0}
EXACT = {"deterministic": True, "fp64": False}
FULL = {"recompute_granularity": "full"}
ZERO, OVERLAP = {"zero_stage": 1}, {"overlap_grad_reduce": True}

# What is held against the first line, at one tp and dp: pipeline stages, parallel options, training options.
VARIANTS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {}, {}),
    (1, {}, {}),  # again
    (1, OVERLAP, {}),
    (1, ZERO, FULL),
    (1, {**ZERO, **OVERLAP, "ddp_bucket_size": 1}, {}),
    (1, {"ddp_bucket_size": 777}, {**FULL, "recompute_method": "block", "recompute_num_layers": 2}),
    (1, {**ZERO, "ddp_bucket_size": 10**9}, {}),
    (2, {}, {}),
    (2, {**ZERO, **OVERLAP, "pipeline_schedule": "gpipe", "ddp_bucket_size": 500}, FULL),
    (2, {"decoder_first_pipeline_num_layers": 3}, {}),
]


FEW = [VARIANTS[i] for i in (0, 4, 5, 8)]  # one of each kind


def bits(results: list[RankResult]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and weights of a run."""
    assert all(r.losses == results[0].losses for r in results)
    return results[0].losses, full_tensors([r.weights for r in results], "weight", once=False)


def by_stages(base: Case, wanted: list[tuple[int, dict[str, Any], dict[str, Any]]]) -> dict[int, list[Case]]:
    """Cases by the number of pipeline stages."""
    found: dict[int, list[Case]] = {}
    for pp, parallel, training in wanted:
        layout = replace(base.layout, pp=pp)
        case = replace(base, layout=layout, parallel={**base.parallel, **parallel}, training={**EXACT, **training})
        found.setdefault(pp, []).append(case)
    return found


def runs(base: Case, wanted: list[tuple[int, dict[str, Any], dict[str, Any]]]) -> list[tuple[str, Any]]:
    """(name, bits) of every variant, the first first."""
    found = []
    for cases in by_stages(base, wanted).values():
        by_rank = run_ranks(cases[0].layout.world_size, run_cases, cases, timeout=120)
        found += [(case.name, bits([r[i] for r in by_rank])) for i, case in enumerate(cases)]
    return found


def assert_same_bits(found: list[tuple[str, Any]]) -> None:
    _, (losses, weights) = found[0]
    for name, (its_losses, its_weights) in found[1:]:
        assert its_losses == losses, f"losses of {name}"
        differs = [n for n in weights if not np.array_equal(its_weights[n], weights[n])]
        assert its_weights.keys() == weights.keys() and not differs, f"{name}: {differs}"


@pytest.mark.parametrize(
    ("model", "layout", "variants"),
    [
        ("gpt", Layout(dp=3), VARIANTS),
        ("dropout", Layout(dp=2), FEW),
        ("llama", Layout(tp=2), FEW),
    ],
    ids=["gpt", "dropout", "llama"],
)
def test_same_bits(model: str, layout: Layout, variants: list[tuple[int, dict[str, Any], dict[str, Any]]]) -> None:
    base = replace(MODELS[model], layout=layout, optimizer=NO_CLIP)
    if layout.tp > 1:
        base = replace(base, parallel={"sequence_parallel": True})
    assert_same_bits(runs(base, variants))


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(dp=2), Layout(dp=3), Layout(dp=4), Layout(tp=2), Layout(tp=2, dp=2)], ids=str
)
def test_same_bits_everywhere(model: str, layout: Layout) -> None:
    """Up to four stages and eight ranks."""
    base = replace(MODELS[model], layout=layout, optimizer=NO_CLIP, parallel={"sequence_parallel": layout.tp > 1})
    more = [(4, {}, {}), (3, {**ZERO, "pipeline_schedule": "gpipe"}, FULL)]
    assert_same_bits(runs(base, [*VARIANTS, *(v for v in more if v[0] * layout.world_size <= 8)]))


def test_a_clip_that_is_not_active_changes_no_bit() -> None:
    base = replace(MODELS["llama"], layout=Layout(dp=2))
    off, high = (runs(replace(base, optimizer={"clip_grad": clip}), VARIANTS[:1])[0] for clip in (0.0, 1e9))
    assert_same_bits([off, high])


def test_an_active_clip_is_equal_to_the_rounding_of_its_factor() -> None:
    """The norm's order of addition follows the layout; the factor, rounded to fp32, differs in its last bit at most."""
    base = replace(MODELS["gpt"], layout=Layout(dp=3), optimizer={"clip_grad": 0.01})
    first, *others = runs(base, [VARIANTS[i] for i in (0, 1, 4, 5, 8)])
    assert_same_bits([first, others[0]])  # a rerun
    eps = float(torch.finfo(torch.float32).eps)
    for name, (losses, weights) in others:
        np.testing.assert_allclose(losses, first[1][0], rtol=4 * eps, err_msg=name)
        for tensor, value in weights.items():
            # Adam divides by the root of the second moment, so a factor on all gradients all but cancels.
            limit = 4 * eps * max(1.0, float(np.abs(first[1][1][tensor]).max()))
            assert float(np.abs(value - first[1][1][tensor]).max()) <= limit, (name, tensor)


@functools.cache
def _ring() -> list[tuple[str, Any]]:
    """The same variants at dp 3 without the flag."""
    base = replace(MODELS["gpt"], layout=Layout(dp=3), optimizer=NO_CLIP)
    wanted = [(pp, parallel, {"deterministic": False}) for pp, parallel, _ in VARIANTS if pp == 1]
    return runs(base, wanted)


def test_without_the_flag_the_place_in_a_bucket_shows() -> None:
    """Otherwise the tests above would not see what the flag is for."""
    _, (losses, weights) = _ring()[0]
    assert any(
        its_losses != losses or any(not np.array_equal(w[n], weights[n]) for n in weights)
        for _, (its_losses, w) in _ring()[1:]
    )
