"""Blends: exact counts at block borders, indices inside members, weights refused or never drawn."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data import blend as blend_module
from megatron_lite.data.blend import BlendedDataset, MegatronBlend, WindowsBlend, check_weights, normalised, tempered
from megatron_lite.data.row import Row
from megatron_lite.ops.library import index_module

CASES = [(0.001, 0.999), (1e-9, 1), (0, 1), (3, 7), (0.5, 0.5), (0.3333, 0.3333, 0.3334), (1,)]


class Member:
    """A finite or endless dataset whose rows name it and their number."""

    def __init__(self, name: int, length: int, endless: bool) -> None:
        self.name, self.length, self.endless = name, length, endless

    def __len__(self):
        return self.length

    def row(self, j):
        assert j >= 0 and (self.endless or j < self.length), (self.name, j)
        return Row(np.array([self.name, j, 0]), np.zeros(1, np.int64), j)


def plain_greedy(weights, size):
    counts = [0] * len(weights)
    result = []
    for i in range(size):
        lags = [w * max(i, 1) - c if w else float("-inf") for w, c in zip(weights, counts, strict=True)]
        d = lags.index(max(lags))
        result.append((d, counts[d]))
        counts[d] += 1
    return result


def check_borders(weights, block, blocks):
    blend = WindowsBlend(weights, block)
    total = sum(map(Fraction, weights))
    counts = Counter()
    for i in range(block * blocks):
        if i % block == 0:
            assert [counts[d] for d in range(len(weights))] == blend.counts(i // block)
            assert all(abs(counts[d] - i * Fraction(w) / total) <= 1 for d, w in enumerate(weights)), (i, counts)
        member, sample = blend.locate(i)
        assert weights[member] > 0 and sample == counts[member]
        counts[member] += 1


@pytest.mark.parametrize("weights", CASES)
@pytest.mark.parametrize("block", [16, 7])
def test_windows_borders(weights, block):
    check_borders(weights, block, 70)


@given(
    st.lists(
        st.one_of(st.floats(0, 1), st.floats(0, 1e-3), st.sampled_from([0.0, 1.0, 0.1])), min_size=1, max_size=12
    ).filter(any),
    st.integers(1, 20),
)
@settings(max_examples=60, deadline=None)
def test_windows_borders_of_any_weights(weights, block):
    check_borders(weights, block, 40)


def test_windows_largest_remainder():
    """Where every member has a position a block, counts are those of the largest remainders."""
    blend = WindowsBlend([5, 3, 2], 16)
    assert [blend.counts(b) for b in range(4)] == [[0, 0, 0], [8, 5, 3], [16, 10, 6], [24, 14, 10]]


def test_windows_random_access():
    weights = [0.3, 0.0, 0.5, 1e-7, 0.2]
    forward = WindowsBlend(weights, 16)
    seen = [forward.locate(i) for i in range(16 * 200)]
    backward = WindowsBlend(weights, 16)
    assert [backward.locate(i) for i in reversed(range(16 * 200))] == seen[::-1]
    far = WindowsBlend([1, 2, 3])
    member, sample = far.locate(10**15)  # no walk from the beginning
    assert abs(sample - 10**15 * (member + 1) / 6) < 65536


def test_a_full_block_of_twenty():
    weights = [1 / (k + 1) for k in range(20)]
    blend = WindowsBlend(weights)
    counts = Counter(blend.locate(i)[0] for i in range(65536))
    assert all(abs(counts[d] - 65536 * w / sum(weights)) <= 1 for d, w in enumerate(weights))


@pytest.mark.parametrize("weights", CASES)
@pytest.mark.parametrize("size", [1, 2, 7, 10, 1000])
def test_megatron_is_the_greedy_rule(weights, size):
    normal = normalised(weights)
    blend = MegatronBlend(normal, size, chunk=64)
    expected = plain_greedy(normal.tolist(), size)
    assert [blend.locate(i) for i in range(size)] == expected
    again = MegatronBlend(normal, size, chunk=64)
    assert [again.locate(i) for i in reversed(range(size))] == expected[::-1]
    counts = Counter(d for d, _ in expected)
    assert all(abs(counts[d] - w * size) < 1.7 for d, w in enumerate(normal))
    assert all(weights[d] > 0 for d in counts)


def test_megatron_counts():
    """Weights 0.001 and 0.999, ten positions: the first member gives one of them."""
    blend = MegatronBlend([0.001, 0.999], 10)
    assert [blend.locate(i)[0] for i in range(10)] == [1, 0, 1, 1, 1, 1, 1, 1, 1, 1]


def test_compiled_helper_equals_numpy(monkeypatch):
    helper = index_module()[0] or pytest.skip("the data helper has not been built")
    for weights in ([0.2, 0.0, 0.5, 0.3], [0.3333, 0.3333, 0.3334], list(normalised(range(1, 30)))):
        monkeypatch.setattr(blend_module, "_index", helper)
        fast = MegatronBlend(weights, 5000, chunk=512)
        monkeypatch.setattr(blend_module, "_index", None)
        plain = MegatronBlend(weights, 5000, chunk=512)
        assert [fast.locate(i) for i in range(5000)] == [plain.locate(i) for i in range(5000)]


@pytest.mark.parametrize("weights", [[], [0, 0], [-1, 2], [float("nan"), 1], [float("inf"), 1]])
def test_weights_refused(weights):
    with pytest.raises(ValueError, match="none negative and not all zero"):
        check_weights(weights)
    with pytest.raises(ValueError, match="none negative and not all zero"):
        WindowsBlend(weights)
    with pytest.raises(ValueError, match="none negative and not all zero"):
        MegatronBlend(weights, 10)


@pytest.mark.parametrize("weights", CASES)
@pytest.mark.parametrize("size", [1, 2, 7, 10, 1000])
def test_rows_stay_inside_members(weights, size):
    members = [Member(d, 10, endless=False) for d in range(len(weights))]
    for data in (
        BlendedDataset(members, WindowsBlend(weights, 16)),
        BlendedDataset(members, MegatronBlend(normalised(weights), size)),
    ):
        for j in range(size):
            assert data.row(j).index == j
    with pytest.raises(IndexError, match=f"sample {size} of a blend of {size}"):
        data.row(size)
    endless = BlendedDataset([Member(d, 10, endless=True) for d in range(len(weights))], WindowsBlend(weights, 16))
    counts = Counter()
    for j in range(500):
        name, sample, _ = endless.row(j).tokens
        assert sample == counts[name]
        counts[name] += 1
    assert endless.endless and len(endless) == 10 * len(weights) and len(data) == size


def test_first_samples_do_not_depend_on_the_size():
    small, large = MegatronBlend([0.3, 0.7], 100), MegatronBlend([0.3, 0.7], 10_000)
    assert [small.locate(i) for i in range(100)] == [large.locate(i) for i in range(100)]


# ---- temperature


def test_temperature_is_the_power_of_its_inverse():
    weights = [7e12, 3e9, 0, 1]
    for temperature in (0.5, 1.7, 2, 1 / 0.3, 100):
        found = tempered(weights, temperature)
        assert found == pytest.approx([(w / 7e12) ** (1 / temperature) for w in weights], rel=1e-12)
        assert found[2] == 0 and max(found) == found[0] == 1
    assert tempered(weights, 1) == weights  # to the bit
    assert tempered([4, 1], 2) == [1, 0.5]
    # mT5's alpha 0.3: of 100 to 1 tokens, 4 to 1 samples
    assert 1 / tempered([100, 1], 1 / 0.3)[1] == pytest.approx(100**0.3, rel=1e-12)
    with pytest.raises(ValueError, match="none negative"):
        tempered([-1, 2], 2)


def test_temperature_makes_sources_alike():
    shares = [tempered([90, 9, 1], t)[2] / sum(tempered([90, 9, 1], t)) for t in (0.5, 1, 2, 5, 1000)]
    assert shares == sorted(shares) and shares[0] < 1e-3 and shares[-1] == pytest.approx(1 / 3, rel=1e-2)


# ---- counts


@given(st.lists(st.sampled_from([0.0, 1e-9, 0.001, 0.3333, 0.3334, 1.0]), min_size=1, max_size=6).filter(any), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_consumed_is_what_was_drawn(weights, block):
    """At every position, in any order of asking, for both blends."""
    for blend in (WindowsBlend(weights, block), MegatronBlend(normalised(weights), 130, chunk=block)):
        counts, expected = [0] * len(weights), []
        for i in range(130):
            expected.append(list(counts))
            counts[blend.locate(i)[0]] += 1
        expected.append(counts)
        for n in [*reversed(range(131)), *range(131)]:
            assert blend.consumed(n) == expected[n]


def test_consumed_far_away():
    counts = WindowsBlend([1, 2, 3]).consumed(10**15 + 12345)
    assert sum(counts) == 10**15 + 12345 and all(abs(c - (10**15 + 12345) * w / 6) <= 2 for c, w in zip(counts, (1, 2, 3), strict=True))


def test_names_of_members():
    members = [Member(d, 10, endless=True) for d in range(4)]
    blended = BlendedDataset(members, WindowsBlend([1, 1, 1, 1], 16), ["a", "b", "a", "a"])
    assert blended.consumed(8) == {"a": 2, "b": 2, "a (2)": 2, "a (3)": 2}


def test_a_megatron_blend_is_walked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache directory, later starts compute the chunks that are asked for; other weights or sizes are others."""
    weights, size, told = [0.2, 0.0, 0.5, 0.3], 3000, []
    plain = MegatronBlend(weights, size, chunk=64)
    made = MegatronBlend(weights, size, chunk=64, cache=tmp_path)
    assert len(list((tmp_path / "orders").glob("blend-*.order"))) == 1
    calls: list[int] = []
    greedy = blend_module.greedy
    monkeypatch.setattr(blend_module, "greedy", lambda *args: calls.append(args[2]) or greedy(*args))
    found = MegatronBlend(weights, size, chunk=64, cache=tmp_path, tell=told.append)
    assert found.locate(size - 1) == plain.locate(size - 1) and len(calls) == 47 + 1  # of plain, and of found
    for blend in (made, found):
        assert [blend.locate(i) for i in range(size)] == plain_greedy(weights, size)
        for n in (0, 1, 63, 64, 65, 1000, size):
            assert blend.consumed(n) == plain.consumed(n)
    (file,) = (tmp_path / "orders").glob("blend-*.order")
    file.write_bytes(file.read_bytes()[:-9])
    assert MegatronBlend(weights, size, chunk=64, cache=tmp_path, tell=told.append).locate(2999) == plain.locate(2999)
    assert len(told) == 1 and "cut off" in told[0]
    for other, length in (([0.2, 0.0, 0.3, 0.5], size), (weights, size + 1)):
        blend = MegatronBlend(other, length, chunk=64, cache=tmp_path)
        assert [blend.locate(i) for i in range(length)] == plain_greedy(other, length)
