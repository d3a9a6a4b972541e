"""A text as a set of shingles, the MinHash signature of the set, and the Jaccard similarity of two sets.

*Tokens* are what is compared: a run of letters, digits and marks is one, in lower case; so is each single character of
the scripts that put no spaces between words (Chinese, Japanese, Thai, Lao, Khmer, Burmese). Everything else separates.
A text of mixed languages needs no decision, and its language need not be known.

*Shingles* are the runs of ``ngram`` tokens (Broder 1997, "On the resemblance and containment of documents"), each
reduced to 32 bits of hash; a shorter text is one shingle. The *similarity* of two texts is the Jaccard similarity of their
sets, |A and B| / |A or B|; two different shingles have the same hash with the probability 2^-32, so that for texts of
10,000 tokens the expected number of shingles which are wrongly shared is 0.02.

A *signature* is, for each of k permutations h of the 32-bit numbers, the least h(x) of the set. Two sets have the same
least number with the probability of their similarity, so the share of equal places estimates it, with the variance
J (1 - J) / k. The permutations are x -> (a x + b) mod 2^32 with odd a; since each x is a hash already, any of them by
itself is as good as a random permutation (linear ones: Bohman, Cooper and Frieze 2000; that they suit each other, a test measures).

csrc/minhash.cpp has the same, 50 times as fast and with identical results.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_lite.ops.library import index_module

SEPARATOR, WORD, ALONE = 0, 1, 2
CODES = 0x33480  # no letter that is assigned lies beyond
# Scripts without spaces between words: Thai and Lao, Burmese, Khmer, kana and Chinese characters of all blocks.
ALONE_RANGES = (
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF)),
    *((0x3040, 0x30FF), (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF)),
    *((0xFF66, 0xFF9F), (0x1B000, 0x1B16F), (0x20000, 0x3347F)),
)
CHARACTER = np.uint64(0x9E3779B97F4A7C15)  # powers of it weigh the characters of a token
TOKEN = np.uint64(0xD1342543DE82EF95)  # and of it the tokens of a shingle
CHUNK = 1 << 20  # products of shingles and permutations that NumPy has in memory

Hasher = Callable[[str], tuple[np.ndarray, np.ndarray]]


@functools.cache
def character_classes() -> np.ndarray:
    """SEPARATOR, WORD or ALONE for each code point below ``CODES``: uint8 [CODES]."""
    classes = np.zeros(CODES, np.uint8)
    for code in range(CODES):
        if unicodedata.category(chr(code))[0] in "LNM":
            classes[code] = WORD
    for first, last in ALONE_RANGES:
        block = classes[first : last + 1]
        block[block == WORD] = ALONE
    classes.flags.writeable = False
    return classes


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer: a bijection of 64 bits in which every bit of the result depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def powers(base: np.uint64, count: int) -> np.ndarray:
    """base^0 ... base^(count - 1) mod 2^64."""
    factors = np.full(max(count, 1), base)
    factors[0] = 1
    return np.multiply.accumulate(factors)[:count]


def permutations(count: int) -> tuple[np.ndarray, np.ndarray]:
    """(a, b) of the permutations, always the same: uint32 [count] each."""
    random = mix(np.arange(1, 2 * count + 1, dtype=np.uint64) * CHARACTER) >> np.uint64(32)
    return random[0::2].astype(np.uint32) | np.uint32(1), random[1::2].astype(np.uint32)


def hasher(ngram: int, count: int, helper: Any = None) -> Hasher:
    """What turns a text into (signature uint32 [count], shingles uint32 [n], sorted, each once).

    Args:
        ngram: tokens of a shingle.
        count: permutations.
        helper: the compiled module; None: it is looked for, False: NumPy does the work.
    """
    helper = index_module()[0] if helper is None else helper
    a, b = permutations(count)
    if helper:
        compiled = helper.MinHasher(character_classes(), ngram, a, b)
        return lambda text: compiled.hash(text.lower())

    def in_numpy(text: str) -> tuple[np.ndarray, np.ndarray]:
        shingles = np.unique(shingle_hashes(token_hashes(text.lower()), ngram))
        return signature(shingles, a, b), shingles

    return in_numpy


def token_hashes(text: str) -> np.ndarray:
    """A hash of each token of a text in lower case: uint64 [tokens]."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.int64)
    kind = np.where(codes < CODES, character_classes()[np.minimum(codes, CODES - 1)], SEPARATOR)
    before = np.concatenate([[SEPARATOR], kind[:-1]])
    starts = (kind == ALONE) | (kind == WORD) & (before != WORD)
    kept = kind != SEPARATOR
    starts, characters = starts[kept], codes[kept].astype(np.uint64) + np.uint64(1)
    if not len(characters):
        return np.empty(0, np.uint64)
    first = np.flatnonzero(starts)
    lengths = np.diff(np.append(first, len(characters)))
    place = np.arange(len(characters)) - np.repeat(first, lengths)
    weights = powers(CHARACTER, int(lengths.max()))[place]
    return mix(np.add.reduceat(characters * weights, first))


def shingle_hashes(tokens: np.ndarray, ngram: int) -> np.ndarray:
    """A hash of each run of ``ngram`` tokens, or of all when there are fewer: uint32 [max(1, tokens - ngram + 1)] or [0]."""
    ngram = min(ngram, len(tokens))
    if ngram == 0:
        return np.empty(0, np.uint32)
    weights = powers(TOKEN, ngram)[::-1]
    count = len(tokens) - ngram + 1
    sums = np.zeros(count, np.uint64)
    for place in range(ngram):
        sums += tokens[place : place + count] * weights[place]
    return (mix(sums) >> np.uint64(32)).astype(np.uint32)


def signature(shingles: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The least number of a set under each permutation: uint32 [permutations]; 2^32 - 1 for an empty set."""
    least = np.full(len(a), 0xFFFFFFFF, np.uint32)
    step = max(1, CHUNK // len(a))
    for at in range(0, len(shingles), step):
        least = np.minimum(least, (shingles[at : at + step, None] * a + b).min(axis=0))
    return least


def shared_by_numpy(left: np.ndarray, right: np.ndarray) -> int:
    """How many numbers two sorted arrays without repetitions share."""
    return len(np.intersect1d(left, right, assume_unique=True))


def similarity(left: np.ndarray, right: np.ndarray, shared: Callable[[np.ndarray, np.ndarray], int]) -> float:
    """The Jaccard similarity of two sets (sorted, not empty); ``shared`` counts what they have in common."""
    both = shared(left, right)
    return both / (len(left) + len(right) - both)
