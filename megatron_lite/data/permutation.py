"""A permutation of [0, n) that is computed, not stored.

An epoch's order is a keyed bijection evaluated one index at a time, so that start-up needs no array of the corpus'
size, a resume costs nothing and any rank can ask for any sample. It is a generalised Feistel network (Black and
Rogaway, *Ciphers with arbitrary finite domains*, 2002): write x = l + a * r with a * b >= n, add a keyed hash of one
half to the other, modulo its size, in eight rounds or more, and repeat the whole ("cycle walking") while the result lies
outside [0, n). a and b are about sqrt(n), so a * b - n < 2 * sqrt(n) and walks are rare. The hash of a round is two
multiplications of 64 bits with the multipliers of Philox 4x64.

Everything is Python integers: the order is the same on every machine and for every n up to any size. A compiled helper
gives the same numbers where it has been built. It is made to look random to a training run, not to an adversary.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from megatron_lite.ops.library import index_module

_index = index_module()[0]
_MASK = (1 << 64) - 1
_M0 = 0xD2E7470EE14C6C93
_M1 = 0xCA5A826395121157
_ROUNDS, _ROUNDS_SMALL, _SMALL = 8, 24, 256  # a small domain needs more rounds to come near all n! permutations alike


def key64(*words: int | str) -> int:
    """A 64-bit key for a purpose, e.g. ``key64("order", seed, epoch)``; the same on every machine."""
    text = "\0".join(f"{type(word).__name__}:{word}" for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix64(value: int, key: int) -> int:
    """A keyed hash of 64 bits to 64 bits."""
    h = ((value ^ key) * _M0) & _MASK
    h ^= h >> 32
    h = (h * _M1) & _MASK
    return h ^ (h >> 29)


def mix64_array(values: np.ndarray, key: int) -> np.ndarray:
    """:func:`mix64` of a uint64 array."""
    h = (values.astype(np.uint64) ^ np.uint64(key)) * np.uint64(_M0)  # array arithmetic wraps
    h ^= h >> np.uint64(32)
    h *= np.uint64(_M1)
    return h ^ (h >> np.uint64(29))


def below(value: int, bound: int) -> int:
    """A 64-bit hash as a number in [0, bound), uniform up to bound / 2^64."""
    return (value * bound) >> 64


class Permutation:
    """A keyed bijection of [0, n).

    Args:
        n: size of the domain, at least 1.
        key: 64-bit key, e.g. from :func:`key64`.
    """

    __slots__ = ("_a", "_b", "_compiled", "_keys", "n")

    def __init__(self, n: int, key: int) -> None:
        assert n >= 1, n
        self.n = n
        self._a = math.isqrt(n - 1) + 1  # ceil(sqrt(n))
        self._b = -(-n // self._a)
        rounds = _ROUNDS if n >= _SMALL else _ROUNDS_SMALL
        self._keys = tuple((mix64(r, key), mix64(r + 1, key)) for r in range(1, rounds + 1, 2))
        self._compiled = None if _index is None or n > 1 << 62 else _index.Permutation(n, self._a, self._b, self._keys)

    def __call__(self, index: int) -> int:
        """Where ``index`` goes."""
        assert 0 <= index < self.n, (index, self.n)
        if self._compiled is not None:
            return self._compiled(index)
        a, b = self._a, self._b
        while True:
            right, left = divmod(index, a)
            for even, odd in self._keys:
                left = (left + below(mix64(right, even), a)) % a
                right = (right + below(mix64(left, odd), b)) % b
            index = left + a * right
            if index < self.n:
                return index
