"""Splits cover every sequence once and follow Megatron-LM's rounding."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.data.sources import parse_split, split_ranges


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100,0,0", [3, 0, 0]),
        ("98,1,1", [3, 0, 0]),
        ("1,1,1", [1, 1, 1]),
        ("0,1,0", [0, 3, 0]),
        ("0.9,0.1", [3, 0, 0]),
        ("969,30,1", [3, 0, 0]),
        ("0,0,1", [0, 0, 3]),
        ("1", [3, 0, 0]),
        ("8/1/1", [2, 1, 0]),
    ],
)
def test_three_sequences(text, expected):
    ranges = split_ranges(parse_split(text), 3)
    assert [len(r) for r in ranges] == expected
    assert [i for r in ranges for i in r] == [0, 1, 2]


def test_round_half_to_even():
    assert [len(r) for r in split_ranges(parse_split("1,1"), 5)] == [2, 3, 0]  # 2.5 -> 2
    assert [len(r) for r in split_ranges(parse_split("1,1"), 7)] == [4, 3, 0]  # 3.5 -> 4


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1", "inf", "1,,2"])
def test_refused(text):
    with pytest.raises(ValueError, match="is not a split"):
        parse_split(text)


@given(
    st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=3).filter(lambda s: sum(s) > 1e-6),
    st.integers(0, 10**12),
)
def test_cover_all_once(shares, n):
    ranges = split_ranges(parse_split(",".join(map(repr, shares))), n)
    assert ranges[0].start == 0 and ranges[2].stop == n
    assert ranges[0].stop == ranges[1].start and ranges[1].stop == ranges[2].start
    total = sum(map(Fraction, shares))
    for r, share in zip(ranges, shares, strict=False):
        assert len(r) == 0 or share > 0
        assert abs(len(r) - n * Fraction(share) / total) <= 1 + n * 1e-15
