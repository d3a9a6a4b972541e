"""Mixing datasets by weight: which member gives position i, and which of its samples.

The rule inside is greedy: a position goes to the member that lags furthest behind its share. In the *megatron* order it
runs over the whole blend, so position i depends on all before it, and counts stray from w * n by up to about 1.6. In
the *windows* order it runs inside blocks of 65,536 positions. How many each member has at a block's border is fixed
by largest remainder, so counts never stray from w * n by more than 1 there, and a block is computed by itself,
whatever the size of the blend, which has no end: members go on with their next epoch.

Weights are exact here (a float is a fraction), so every rank agrees on every quota. How many samples of each member lie
before a position is computed from the quotas and the rule, never counted along the way, so a resumed run knows it too. The
rule itself is compiled where it can be: the megatron order walks through it up to the last sample when a run starts. Of
what it finds the counts at every 65,536th position are kept in a cache directory, from which any position is soon computed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Context, Decimal
from fractions import Fraction
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_lite.data.order_cache import Arrays, cached_arrays
from megatron_lite.data.row import Dataset, Row
from megatron_lite.ops.library import index_module

_index = index_module()[0]

BLOCK = 65536
CHUNK = 4096  # positions of a block computed at a time, so that no row waits for a whole one
_CHUNKS_KEPT = 16  # a report of what was consumed looks back, behind what is built ahead
_KEEP_EVERY = 64  # blocks between states kept for going back, where quotas are found in sequence


def check_weights(weights: Sequence[float]) -> None:
    """ValueError unless there are weights, all finite, none negative, not all zero."""
    if not weights or not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights):
        raise ValueError(
            f"the weights of a blend must be numbers, none negative and not all zero: {', '.join(map(str, weights)) or 'none given'}"
        )


def normalised(weights: Sequence[float]) -> np.ndarray:
    """Weights that sum to 1, float64, divided as Megatron-LM divides them."""
    array = np.array(weights, dtype=np.float64)
    return array / np.sum(array)


def tempered(weights: Sequence[float], temperature: float) -> list[float]:
    """Weights to the power of 1 / temperature, the largest of them 1: above 1 small members are drawn more often.

    The exponent is the alpha of XLM-R (arXiv:1911.02116, 2.1) and mT5 (arXiv:2010.11934, 3.1), p proportional to
    tokens^alpha; the temperature is the T of arXiv:1907.05019. Decimal arithmetic, the same on every machine, where powers
    of floats are not. 1 gives the weights as they are.
    """
    check_weights(weights)
    if temperature == 1:
        return list(weights)
    context = Context(prec=40)
    largest, exponent = Decimal(max(weights)), context.divide(Decimal(1), Decimal(temperature))
    shares = [context.divide(Decimal(w), largest) for w in weights]
    return [float(context.power(share, exponent)) if share else 0.0 for share in shares]


class Blend(Protocol):
    """An order of members: what :class:`BlendedDataset` needs to know."""

    def locate(self, i: int) -> tuple[int, int]:
        """(member, sample of that member) at position i."""

    def consumed(self, size: int) -> list[int]:
        """Samples of each member in the first ``size`` positions."""


class _Greedy:
    """The greedy rule from a first position on, a chunk at a time: chunks follow from those before, whose counts are kept.

    Args:
        weights: float64 [members]; one with weight 0 is never drawn.
        size: positions.
        chunk: positions computed at a time.
        quotas: int64 [members], see :func:`greedy`.
    """

    def __init__(self, weights: np.ndarray, size: int, chunk: int, quotas: np.ndarray | None = None) -> None:
        self._used = np.flatnonzero(weights)
        self._weights, self._quotas = weights[self._used], None if quotas is None else quotas[self._used]
        self._size, self._chunk = size, chunk
        self.taken: list[np.ndarray] | np.ndarray = [np.zeros(len(weights), dtype=np.int64)]  # at the borders known so far

    def members(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(member at each position of a chunk, int64; samples of each member before the chunk, int64 [members])."""
        for n in range(min(number, len(self.taken) - 1), number + 1):
            first, taken = n * self._chunk, self.taken[n]
            length = min(self._chunk, self._size - first)
            members = self._used[greedy(self._weights, length, first, taken[self._used], self._quotas)]
            if isinstance(self.taken, list) and n + 1 == len(self.taken):
                self.taken.append(taken + np.bincount(members, minlength=len(taken)))
        return members, self.taken[number]

    def borders(self) -> Arrays:
        """The counts at all borders: int64 [chunks + 1, members]."""
        self.members(-(-self._size // self._chunk) - 1)
        return {"taken": np.array(self.taken)}


class _Blend:
    """Chunks of positions, computed when asked for by ``make`` (as :meth:`_Greedy.members`)."""

    def __init__(self, chunk: int, members: int, make: Callable[[int], tuple[np.ndarray, np.ndarray]]) -> None:
        self._chunk, self.num_members, self._make = chunk, members, make
        self._lock = threading.Lock()
        self._cache: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def locate(self, i: int) -> tuple[int, int]:
        """(member, sample of that member) at position i."""
        number, place = divmod(i, self._chunk)
        members, samples, _ = self._get(number)
        return int(members[place]), int(samples[place])

    def consumed(self, size: int) -> list[int]:
        """Samples of each member in the first ``size`` positions."""
        if size == 0:
            return [0] * self.num_members
        number, place = divmod(size - 1, self._chunk)
        members, _, before = self._get(number)
        counts: list[int] = (before + np.bincount(members[: place + 1], minlength=self.num_members)).tolist()
        return counts

    def _get(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(members, their samples, samples of each before) of a chunk."""
        found = self._cache.get(number)
        if found is None:
            with self._lock:
                found = self._cache.get(number)
                if found is None:
                    members, before = self._make(number)
                    found = members.astype(np.int32), _samples(members, before), before
                    self._cache = {**dict(list(self._cache.items())[1 - _CHUNKS_KEPT :]), number: found}
        return found


class WindowsBlend(_Blend):
    """The blend of the windows order: endless, exact at the borders of blocks.

    Args:
        weights: any non-negative numbers, not all zero; a member with weight 0 is never drawn.
        block: positions between borders.
    """

    def __init__(self, weights: Sequence[float], block: int = BLOCK) -> None:
        check_weights(weights)
        super().__init__(CHUNK if block % CHUNK == 0 else block, len(weights), self._members)
        self.block = block
        fractions = [Fraction(w) for w in weights]
        scale = math.lcm(*(f.denominator for f in fractions))
        self._units = [int(f * scale) for f in fractions]  # whole numbers in the proportion of the weights
        self._total = sum(self._units)
        # Below one position a block, largest remainders alone could take a position back at a later border.
        self._closed = min(u for u in self._units if u) * block >= self._total
        self._states: dict[int, list[int]] = {0: [0] * len(weights)}
        self._current: tuple[int, np.ndarray, _Greedy] | None = None  # block, counts before it, what is in it

    def counts(self, number: int) -> list[int]:
        """Samples of each member in the first ``number`` blocks."""
        if self._closed:
            return self._largest_remainder(number * self.block)
        start = max(n for n in self._states if n <= number)
        state = self._states[start]
        for n in range(start, number):
            state = self._advance(state, (n + 1) * self.block)
            if (n + 1) % _KEEP_EVERY == 0 or n + 1 == number:
                self._states[n + 1] = state
        if number % _KEEP_EVERY:  # of the states in between, the newest is enough
            self._states = {n: s for n, s in self._states.items() if n % _KEEP_EVERY == 0 or n == number}
        return state

    def _largest_remainder(self, n: int) -> list[int]:
        parts = [divmod(u * n, self._total) for u in self._units]
        counts = [whole for whole, _ in parts]
        by_remainder = sorted(range(len(parts)), key=lambda d: -parts[d][1])  # stable: ties to the lowest
        for d in by_remainder[: n - sum(counts)]:
            counts[d] += 1
        return counts

    def _advance(self, counts: list[int], n: int) -> list[int]:
        """Counts at the next border n: never fewer than before, each within 1 of its share.

        Each member gets what it must have to stay within 1; the rest goes to the units with the earliest deadline
        (unit k of member d must be there by position k / w). A sequence that stays within 1 exists for any weights (Tijdeman,
        *The chairman assignment problem*, 1980), and earliest deadline first finds one wherever one exists.
        """
        total = self._total
        least = [max(c, -((total - u * n) // total)) for c, u in zip(counts, self._units, strict=True)]
        free = [
            (k * total // u, d, k)
            for d, (c, u) in enumerate(zip(least, self._units, strict=True))
            if u
            for k in range(c + 1, (u * n + total) // total + 1)
        ]
        free.sort()
        rest = n - sum(least)
        assert 0 <= rest <= len(free), (rest, len(free))
        for _, d, k in free[:rest]:
            least[d] = k
        return least

    def _members(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        block, inside = divmod(number, self.block // self._chunk)
        if self._current is None or self._current[0] != block:
            before = np.array(self.counts(block))
            quotas = np.array(self.counts(block + 1)) - before
            assert quotas.min() >= 0 and quotas.sum() == self.block
            self._current = (block, before, _Greedy(quotas / self.block, self.block, self._chunk, quotas))
        members, taken = self._current[2].members(inside)
        return members, self._current[1] + taken


class MegatronBlend(_Blend):
    """The blend of the megatron order: ``size`` positions by the greedy rule from the first on.

    Args:
        weights: normalised; a member with weight 0 is never drawn.
        size: positions.
        chunk: positions computed at a time.
        cache: directory in which the counts at the borders of chunks are kept; None, or where few: they are found here.
        tell: gets what is worth knowing about the cache.

    Raises:
        OSError: the cache cannot be written.
    """

    def __init__(
        self,
        weights: Sequence[float] | np.ndarray,
        size: int,
        chunk: int = BLOCK,
        *,
        cache: Path | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        weights = np.asarray(weights, dtype=np.float64)
        check_weights(weights.tolist())
        rule = _Greedy(weights, size, chunk)
        super().__init__(chunk, len(weights), rule.members)
        self.size = size
        if cache is not None and size > _CHUNKS_KEPT * chunk:
            key = {"order": "megatron blend", "weights": [w.hex() for w in weights.tolist()], "size": size, "chunk": chunk}
            rule.taken = cached_arrays(cache / "orders" / "blend", key, rule.borders, tell)["taken"]


def greedy(
    weights: np.ndarray, length: int, first: int, counts: np.ndarray, quotas: np.ndarray | None = None
) -> np.ndarray:
    """Positions [first, first + length) of a blend.

    Position i takes the member with the largest ``weight * max(i, 1) - count``, ties to the lowest; a member that has
    reached its quota is out.

    Args:
        weights: float64 [D].
        counts: int64 [D] before ``first``.
        quotas: int64 [D], or None.

    Returns:
        int64 [length], members.
    """
    if _index is not None:
        found: np.ndarray = _index.greedy(weights, length, first, counts, quotas)
        return found
    members = np.empty(length, dtype=np.int64)
    taken = counts.astype(np.float64)
    left = (quotas - counts).tolist() if quotas is not None else [-1] * len(weights)
    if quotas is not None:
        taken[counts == quotas] = np.inf
    lag = np.empty(len(weights))
    multiply, subtract, argmax = np.multiply, np.subtract, lag.argmax
    for i in range(length):
        multiply(weights, max(first + i, 1), lag)
        subtract(lag, taken, lag)
        d = argmax()
        members[i] = d
        taken[d] += 1.0
        left[d] -= 1
        if left[d] == 0:
            taken[d] = np.inf
    return members


def _samples(members: np.ndarray, before: np.ndarray) -> np.ndarray:
    """The sample of its member at each place, int64, given the counts before the chunk."""
    order = np.argsort(members, kind="stable")
    counts = np.bincount(members, minlength=len(before))
    samples = np.empty(len(members), dtype=np.int64)
    samples[order] = np.arange(len(members)) + np.repeat(before - (np.cumsum(counts) - counts), counts)
    return samples


class BlendedDataset:
    """Rows of several datasets in the proportion of weights.

    A finite member that is asked for more than it has starts again (Megatron-LM would stop with an IndexError).

    Args:
        members: one dataset a weight; one that is never drawn may be None.
        blend: the order.
        names: of the members, for reports; of several with one name the second is ``NAME (2)``. Default: their numbers.
    """

    def __init__(self, members: Sequence[Dataset | None], blend: Blend, names: Sequence[str] = ()) -> None:
        self.members, self.blend = list(members), blend
        names = names or [str(number) for number in range(len(members))]
        earlier = [names[:n].count(name) for n, name in enumerate(names)]
        self.names = [f"{name} ({n + 1})" if n else name for name, n in zip(names, earlier, strict=True)]
        self.endless = not isinstance(blend, MegatronBlend)

    def __len__(self) -> int:
        if isinstance(self.blend, MegatronBlend):
            return self.blend.size
        return sum(len(member) for member in self.members if member is not None)

    def consumed(self, size: int) -> dict[str, int]:
        """How many of the first ``size`` samples are of which member."""
        return dict(zip(self.names, self.blend.consumed(size), strict=True))

    def row(self, j: int) -> Row:
        """The row at position j of the blend."""
        if isinstance(self.blend, MegatronBlend) and not 0 <= j < self.blend.size:
            raise IndexError(f"sample {j} of a blend of {self.blend.size}")
        number, sample = self.blend.locate(j)
        member = self.members[number]
        assert member is not None, number
        row = member.row(sample if member.endless else sample % len(member))
        return replace(row, index=j)
