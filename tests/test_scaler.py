"""The loss scale driven by scripted sequences, against a table; its state through JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.optim.scaler import MAX_SCALE, LossScaler


def script(scaler: LossScaler, steps: str) -> list[tuple[float, int, int]]:
    """(scale, good steps, hysteresis left) after each step; g is a good step, b a bad one."""
    out = []
    for step in steps:
        scaler.update(step == "g")
        out.append((scaler.scale, scaler.good_steps, scaler.hysteresis_left))
    return out


def test_table() -> None:
    scaler = LossScaler.dynamic(initial=2.0**16, minimum=1.0, window=4, hysteresis=2)
    k = 2.0**16
    assert script(scaler, "bbbgggbggggbbgggg") == [
        (k, 0, 1),  # the first bad step only uses up hysteresis
        (k / 2, 0, 0),
        (k / 4, 0, -1),  # without any left each bad step halves
        (k / 4, 1, -1),
        (k / 4, 2, -1),
        (k / 4, 3, -1),
        (k / 8, 0, -2),  # the count starts again
        (k / 8, 1, -2),
        (k / 8, 2, -2),
        (k / 8, 3, -2),
        (k / 4, 0, 2),  # the window is full: doubled, hysteresis refilled
        (k / 4, 0, 1),
        (k / 8, 0, 0),
        (k / 8, 1, 0),
        (k / 8, 2, 0),
        (k / 8, 3, 0),
        (k / 4, 0, 2),
    ]


def test_never_below_the_minimum_nor_inf() -> None:
    scaler = LossScaler.dynamic(initial=8.0, minimum=2.0, window=1, hysteresis=1)
    assert [s for s, _, _ in script(scaler, "bbbbb")] == [4.0, 2.0, 2.0, 2.0, 2.0]
    script(scaler, "g" * 200)
    assert scaler.scale == MAX_SCALE


@given(st.text("gb", max_size=80), st.integers(1, 5), st.integers(1, 3), st.integers(0, 79))
@settings(max_examples=150, deadline=None)
def test_state_continues_bit_for_bit(steps: str, window: int, hysteresis: int, cut: int) -> None:
    def fresh() -> LossScaler:
        return LossScaler.dynamic(initial=256.0, minimum=1.0, window=window, hysteresis=hysteresis)

    whole = script(fresh(), steps)
    first, second = fresh(), fresh()
    script(first, steps[:cut])
    assert second.load_state_dict(json.loads(json.dumps(first.state_dict()))) is None
    assert second == first
    assert script(second, steps[cut:]) == whole[cut:]
    assert all(1.0 <= scale < float("inf") for scale, _, _ in whole)


def test_stops_at_the_minimum_and_after_fifty() -> None:
    scaler = LossScaler.dynamic(initial=2.0, minimum=1.0, window=4, hysteresis=1)
    assert scaler.update(False) is None and scaler.scale == 1.0
    reason = scaler.update(False)
    assert reason is not None and "smallest loss scale, 1" in reason
    scaler = LossScaler.dynamic(initial=2.0**60, hysteresis=1)
    assert [scaler.update(False) is None for _ in range(49)] == [True] * 49
    reason = scaler.update(False)
    assert reason is not None and "50 steps in a row" in reason
    assert scaler.update(True) is None and scaler.skips_in_a_row == 0 and scaler.skips == 50


def test_start_up_overflows_are_harmless() -> None:
    scaler = LossScaler.dynamic(initial=2.0**16, window=1000)
    assert [scaler.update(i >= 3) for i in range(20)] == [None] * 20
    assert scaler.skips == 3 and scaler.scale == 2.0**14


def test_fixed_and_none() -> None:
    fixed = LossScaler.fixed(1024.0)
    assert [fixed.update(False) is None for _ in range(50)] == [True] * 49 + [False]
    assert fixed.scale == 1024.0
    assert LossScaler.none().scale == 1.0
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="loss-scale"):
            LossScaler.fixed(bad)
    for options in ({"initial": 0.5}, {"minimum": 0.0}, {"window": 0}, {"hysteresis": 0}, {"initial": float("inf")}):
        with pytest.raises(ValueError):
            LossScaler.dynamic(**options)


def test_another_kind_of_scale_starts_fresh_with_a_notice() -> None:
    scaler = LossScaler.dynamic(initial=512.0)
    notice = scaler.load_state_dict(LossScaler.none().state_dict())
    assert notice is not None and "starts fresh at 512" in notice and scaler.scale == 512.0
    plain = LossScaler.none()
    assert plain.load_state_dict(LossScaler.dynamic(initial=512.0).state_dict()) is not None and plain.scale == 1.0
