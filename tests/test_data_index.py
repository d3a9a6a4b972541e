"""The compiled index helpers against their definitions; the NumPy forms are tested where they are used."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from kernel_cases import need_kernels

from megatron_lite.ops import library


@pytest.fixture(scope="module")
def module() -> ModuleType:
    """The compiled module, or a skip."""
    need_kernels()
    found, reason = library.index_module()
    if found is None:
        pytest.skip(reason)
    return found


def walk(sizes: list[int], order: list[int], seq_length: int, samples: int, extra: int) -> list[tuple[int, int]]:
    """The sample index token by token."""
    stream = [(place, offset) for place, document in enumerate(order) for offset in range(sizes[document])]
    result = [(0, 0)]
    for i in range(1, samples + 1):
        place, offset = stream[i * seq_length + extra - 1]
        result.append((place, offset + 1 - extra))
    return result


def test_index_helpers_are_their_definitions(module):
    """Random documents, empty ones among them, token by token; blends position by position; wrong input refused."""
    random = np.random.default_rng(3)
    for case in range(300):
        sizes = random.integers(0, 9, random.integers(1, 12)).astype(np.int32)
        order = random.integers(0, len(sizes), random.integers(1, 20)).astype((np.int32, np.int64)[case % 2])
        seq_length, extra = int(random.integers(1, 7)), case % 2
        samples = (int(sizes[order].sum()) - extra) // seq_length
        if samples < 0:
            continue
        got = module.build_sample_index(sizes, order, seq_length, samples, extra)
        assert got.dtype == np.int64
        assert got.tolist() == [list(p) for p in walk(sizes.tolist(), order.tolist(), seq_length, samples, extra)]
        with pytest.raises(ValueError, match="too few tokens"):
            module.build_sample_index(sizes, order, seq_length, samples + 1, extra)
    with pytest.raises(ValueError, match=r"doc_idx\[1\]"):
        module.build_sample_index(np.ones(3, np.int32), np.array([0, 3]), 1, 1, 0)


def test_the_greedy_rule_is_its_definition(module):
    """Position by position, from the middle too; members that have reached their quota are out; far positions."""
    random = np.random.default_rng(4)
    for case in range(60):
        members, first = int(random.integers(1, 9)), (0, 1, 7, 10**15)[case % 4]
        weights = random.choice([0.1, 0.2, 0.3, 0.5, 1e-9], members)
        start = np.floor(weights / weights.sum() * first).astype(np.int64)
        quotas = start + random.multinomial(40, weights / weights.sum()) if case % 2 else None
        length = 40 if quotas is not None else 100
        found, counts = module.greedy(weights, length, first, start, quotas), start.copy()
        assert found.dtype == np.int64 and len(found) == length
        for i in range(length):
            lag = weights * float(max(first + i, 1)) - counts
            if quotas is not None:
                lag[counts >= quotas] = -np.inf
            assert found[i] == int(np.argmax(lag)), (case, i)
            counts[found[i]] += 1
        if quotas is not None:
            with pytest.raises(ValueError, match="quotas are less"):
                module.greedy(weights, 41, first, start, quotas)
    with pytest.raises(ValueError, match="a count and a quota for each"):
        module.greedy(np.ones(2), 3, 0, np.zeros(3, np.int64), None)


def test_index_helper_is_64_bits_wide(module):
    """A corpus of 2^33 tokens: offsets past 2^31 and 2^32 come out right."""
    sizes = np.full(5, 2**31 - 1, np.int32)
    got = module.build_sample_index(sizes, np.arange(5), 2**31, 4, 1)
    assert got.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3], [4, 4]]
