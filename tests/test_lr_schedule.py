"""Learning rate, weight decay and batch ramp against written-out formulas, tables and brute force."""

from __future__ import annotations

import json
import math
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.optim.batch_size import BatchSchedule, lr_scaling_factor, lr_scaling_table, parse_steps
from megatron_lite.optim.schedule import DECAY_STYLES, WSD_STYLES, LrSchedule, Rates, WeightDecaySchedule, on_resume


def table(schedule: LrSchedule, points: list[int]) -> list[float]:
    return [schedule.at(s) for s in points]


def test_values_by_hand() -> None:
    kwargs = {"max_lr": 1.0, "min_lr": 0.1, "init_lr": 0.2, "warmup_samples": 10, "decay_samples": 110}
    points = [0, 5, 10, 35, 60, 110, 111, 10**9]
    root = math.sqrt
    expected = {
        "constant": [0.2, 0.6, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        "linear": [0.2, 0.6, 1.0, 0.775, 0.55, 0.1, 0.1, 0.1],
        "cosine": [0.2, 0.6, 1.0, 0.1 + 0.9 * (1 + root(0.5)) / 2, 0.55, 0.1, 0.1, 0.1],
        "inverse-square-root": [0.2, 0.6, 1.0, root(10 / 35), root(10 / 60), root(10 / 110), 0.1, 0.1],
    }
    for style, values in expected.items():
        values = [max(v, 0.1) for v in values]
        assert table(LrSchedule(style=style, **kwargs), points) == pytest.approx(values, abs=1e-15)


def test_wsd_by_hand() -> None:
    points = [10, 70, 80, 90, 100, 101]
    coefficients = {
        "linear": [1, 1, 1 - 1 / 3, 1 - 2 / 3, 0, 0],
        "cosine": [1, 1, 0.75, 0.25, 0, 0],
        "exponential": [1, 1, 2 * 0.5 ** (1 / 3) - 1, 2 * 0.5 ** (2 / 3) - 1, 0, 0],
        "minus_sqrt": [1, 1, 1 - math.sqrt(1 / 3), 1 - math.sqrt(2 / 3), 0, 0],
    }
    for style, values in coefficients.items():
        schedule = LrSchedule(2.0, 100, 0.5, style="WSD", warmup_samples=10, wsd_decay_samples=30, wsd_style=style)
        assert table(schedule, points) == pytest.approx([0.5 + 1.5 * c for c in values], abs=1e-15)


def test_the_first_update_uses_sample_zero() -> None:
    assert LrSchedule(1.0, 100, warmup_samples=10).at(0) == 0.0
    assert LrSchedule(1.0, 100, warmup_samples=10, init_lr=0.3).at(0) == 0.3
    for style in DECAY_STYLES:
        assert LrSchedule(1.0, 100, style=style, wsd_decay_samples=50).at(0) == 1.0


def test_every_small_case_is_finite_bounded_continuous_or_refused() -> None:
    seen = refused = 0
    for style, wsd_style, total in product(DECAY_STYLES, WSD_STYLES, (1, 2, 10)):
        for warmup, low, wsd in product((0, 1, 2, total, total + 1), (0.0, 0.5), (1, total)):
            try:
                s = LrSchedule(0.5, total, low, 0.0, style, warmup, wsd, wsd_style)
            except ValueError as e:
                illegal = warmup >= total or (style == "WSD" and wsd > total - warmup)
                assert illegal and "give" in str(e), (style, warmup, total, wsd)
                refused += 1
                continue
            assert warmup < total
            values = [s.at(i) for i in range(3 * total + 3)]
            assert all(math.isfinite(v) and v <= 0.5 for v in values)
            assert all(low <= v for v in values[warmup:])
            assert all(a <= b for a, b in pairwise(values[: warmup + 1]))  # warm-up rises
            assert values[warmup] == 0.5  # its end is the start of the decay
            assert all(a >= b for a, b in pairwise(values[warmup:]))  # then it falls
            assert len(set(values[total + 1 :])) == 1  # and is constant after the end
            assert values[-1] == (0.5 if style == "constant" else low)
            seen += 1
    assert seen > 200 and refused > 200


@given(
    st.sampled_from(DECAY_STYLES),
    st.integers(1, 10**13),
    st.floats(0, 0.999),
    st.floats(0, 1),
    st.floats(0, 1),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_always_within_bounds(
    style: str, total: int, warmup: float, low: float, init: float, data: st.DataObject
) -> None:
    w = int(warmup * total)
    s = LrSchedule(1.0, total, low, init, style, w, total - w)
    at = data.draw(st.integers(0, 2 * total))
    assert min(low, init) <= s.at(at) <= 1.0
    if w:
        steepest = 1 / (2 * w) if style == "inverse-square-root" else 2 / (total - w) ** 0.5
        assert s.at(w) == pytest.approx(s.at(w + 1), abs=steepest + 1e-9)


def test_illegal_numbers_are_listed_together() -> None:
    with pytest.raises(ValueError) as e:
        LrSchedule(-1.0, 0, 2.0, style="cosin", wsd_style="quadratic")
    for part in ("max_lr is -1.0", "min_lr 2.0", "'cosin'", "'quadratic'", "decay length is 0"):
        assert part in str(e.value)


def test_weight_decay_ramp() -> None:
    assert [WeightDecaySchedule(0.1, 0.1).at(s) for s in (0, 1, 99)] == [0.1, 0.1, 0.1]
    linear = WeightDecaySchedule(0.1, 0.5, "linear", 100)
    assert [linear.at(s) for s in (0, 25, 100, 101)] == pytest.approx([0.1, 0.2, 0.5, 0.5])
    cosine = WeightDecaySchedule(0.0, 1.0, "cosine", 100)
    assert [cosine.at(s) for s in (0, 25, 50, 100, 1000)] == pytest.approx(
        [0, 0.5 * (1 - math.sqrt(0.5)), 0.5, 1, 1], abs=1e-15
    )
    for bad in ((0.5, 0.1, "linear"), (0.1, 0.2, "constant"), (0.1, 0.2, "square"), (-0.1, 0.1, "linear")):
        with pytest.raises(ValueError):
            WeightDecaySchedule(*bad, 10)


# --- batch size ---


def test_ramp_of_the_reference_case() -> None:
    batch = BatchSchedule.rampup(8, 8, 160, 16)
    assert [batch.size(s) for s in (0, 8, 159, 160, 161)] == [8, 8, 8, 16, 16]
    assert batch.samples_after(20) == 160 and batch.samples_after(100) == 1440
    lr = LrSchedule(1.0, batch.samples_after(100), 0.1, style="cosine", warmup_samples=batch.samples_after(10))
    consumed, values = 0, []
    for _ in range(102):
        values.append(lr.at(consumed))
        consumed += batch.size(consumed)
    assert values[10] == 1.0 and max(values[:10]) < 1.0 and values[11] < 1.0  # highest at iteration 10
    assert values[100] == pytest.approx(0.1, abs=1e-15) and values[99] > 0.1  # lowest at 100


def ramp_by_rule(start: int, increment: int, samples: int, size: int, consumed: int) -> int:
    k = (size - start) // increment
    return start + increment * (consumed * k // samples) if consumed <= samples else size


@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 12), st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_ramp_against_brute_force(start: int, increment: int, k: int, samples: int) -> None:
    size = start + increment * k
    batch = BatchSchedule.rampup(start, increment, samples, size)
    for consumed in range(samples + 30):
        assert batch.size(consumed) == ramp_by_rule(start, increment, samples, size, consumed)
    consumed, after = 0, [0]
    for _ in range(60):
        consumed += batch.size(consumed)
        after.append(consumed)
    assert [batch.samples_after(n) for n in range(61)] == after
    for limit in range(after[40]):
        assert batch.iterations_within(limit) == sum(a <= limit for a in after) - 1


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 40)), min_size=0, max_size=5),
    st.integers(1, 40),
    st.integers(1, 9),
)
@settings(max_examples=100, deadline=None)
def test_steps_against_brute_force(later: list[tuple[int, int]], first: int, seq: int) -> None:
    at, parts = 0, [f"0:{first}"]
    for gap, size in later:
        at += gap
        parts.append(f"{at}:{size}")
    batch, steps = BatchSchedule.steps(" ".join(parts), seq), parse_steps(" ".join(parts))
    consumed, after = 0, [0]
    for _ in range(50):
        expected = [size for tokens, size in steps if tokens <= consumed * seq][-1]
        assert batch.size(consumed) == expected
        consumed += expected
        after.append(consumed)
    assert [batch.samples_after(n) for n in range(51)] == after
    for limit in range(0, after[-1], max(1, after[-1] // 200)):
        assert batch.iterations_within(limit) == sum(a <= limit for a in after) - 1


def test_steps_in_tokens() -> None:
    batch = BatchSchedule.steps("0:768 250B:1536 0.5T:3072", seq_length=4096)
    first = -(-250 * 10**9 // 4096)
    assert [batch.size(s) for s in (0, first - 1, first, 10**9)] == [768, 768, 1536, 3072]
    for bad in ("", "1:8", "0:8 5", "0:8 5X:9", "0:8 10:9 10:12", "0:0", "0.5:3"):
        with pytest.raises(ValueError, match="step-batch-size-schedule"):
            BatchSchedule.steps(bad, 16)


def test_ramp_refuses_what_does_not_divide() -> None:
    with pytest.raises(ValueError, match="is not whole: use INCREMENT 4 or 6"):
        BatchSchedule.rampup(4, 5, 100, 16)
    with pytest.raises(ValueError, match="above the global batch size"):
        BatchSchedule.rampup(32, 8, 100, 16)
    found = BatchSchedule.rampup(4, 2, 100, 16).problems(micro_batch_size=2, dp=2)
    assert len(found) == 3 and "6 (from sample" in found[0] and "use 4 or 8" in found[0]
    assert BatchSchedule.rampup(4, 4, 100, 16).problems(2, 2) == []


def test_a_ramp_resumes_in_its_middle_at_another_dp() -> None:
    batch = BatchSchedule.rampup(8, 8, 96, 32)
    consumed, whole = 0, []
    for _ in range(12):
        whole.append((consumed, batch.size(consumed)))
        consumed += batch.size(consumed)
    again = BatchSchedule.rampup(8, 8, 96, 32)  # a new process; only the counter was kept
    consumed = whole[5][0]
    for expected in whole[5:]:
        assert (consumed, again.size(consumed)) == expected
        consumed += again.size(consumed)


def test_scaling_rules() -> None:
    assert lr_scaling_table(1e-3, 1024, 256) == pytest.approx(
        {"none": 1e-3, "linear": 4e-3, "sqrt": 2e-3, "auto": 4e-3}
    )
    assert lr_scaling_factor("auto", 16384, 256) == pytest.approx(16 * 2)  # linear to 4096, then sqrt(4)
    assert lr_scaling_factor("auto", 16384, 8192) == pytest.approx(math.sqrt(2))
    assert lr_scaling_factor("auto", 128, 256) == 0.5
    scaled = LrSchedule(1.0, 100, 0.1, 0.05).scaled(4)
    assert (scaled.max_lr, scaled.min_lr, scaled.init_lr) == (4.0, 0.4, 0.2)
    with pytest.raises(ValueError, match="lr-scaling-base-batch"):
        lr_scaling_factor("linear", 1024, None)
    with pytest.raises(ValueError, match="unknown lr-scaling-rule"):
        lr_scaling_factor("cubic", 1024, 256)


# --- resume ---


def rates(max_lr: float = 1e-3, style: str = "cosine", warmup: int = 2, head: float = 5e-3) -> Rates:
    main = LrSchedule(max_lr, 20, 1e-4, 0.0, style, warmup)
    return Rates({"": main, "head": LrSchedule(head, 20, 1e-4, 0.0, style, warmup)}, WeightDecaySchedule(0.1, 0.1))


def test_resume_takes_one_schedule_whole() -> None:
    saved = json.loads(json.dumps(rates().as_dict()))
    same = on_resume(saved, rates())
    assert same == rates() and same.learning_rates(10) == rates().learning_rates(10)
    new = rates(5e-4, "constant", 0)
    assert [on_resume(saved, new, override=True).lr[""].at(s) for s in range(10, 20)] == [5e-4] * 10
    kept = on_resume(saved, new, use_checkpoint=True)
    assert [kept.lr[""].at(s) for s in range(10, 21)] == [rates().lr[""].at(s) for s in range(10, 21)]
    assert kept.learning_rates(10)["head"] == rates().lr["head"].at(10)  # a group's own rate is kept
    with pytest.raises(ValueError) as e:
        on_resume(saved, new)
    for part in (
        "max_lr: 0.001 in the checkpoint, 0.0005 asked for",
        "style: cosine",
        "--override-opt-param-scheduler",
    ):
        assert part in str(e.value)
    with pytest.raises(ValueError, match="exclude each other"):
        on_resume(saved, new, override=True, use_checkpoint=True)
