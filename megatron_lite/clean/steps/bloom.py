"""De-duplication with Bloom filters (Bloom 1970, Communications of the ACM 13(7)): two bytes of memory for each document.

A filter never forgets, so no duplicate survives; but it takes some new units for old ones. With m bits, k hash functions
and n units in it, that happens to a new unit with the probability ``p(n) = (1 - exp(-k n / m))^k``. The filter is sized
so that p is ``error_rate`` when ``expected`` different units are in it. While it fills, p is lower: of all units the share
is dropped wrongly is about a seventh of 0.001, a fifth of 0.01, and the report has their expected number. A unit that is dropped
wrongly finds all its bits set, so bits are set as if it had been added: n counts all new units that were shown, and what is
known is how many were taken, n less the integral of p.

Each bucket has a filter of its own (package ``rbloom``), larger than its share of ``expected`` by four standard
deviations of the number of units that fall into it. A saved filter can be used by a run with the same settings only.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_lite.clean.bucket_file import against_problems, open_bucket_file, write_bucket_file
from megatron_lite.clean.step import Facts, missing_packages
from megatron_lite.clean.steps.seen import Seen, SeenOptions

if TYPE_CHECKING:
    import rbloom


@dataclass(frozen=True)
class BloomOptions(SeenOptions):
    """Options of the Bloom filter."""

    expected: int = 10_000_000
    """Different units (documents, lines, paragraphs) to make room for, those of ``against`` included."""
    error_rate: float = 0.001
    """Probability that a new unit is taken for an old one, and dropped, once ``expected`` are in the filter."""


@dataclass
class _Filter:
    """The filter of a bucket: how many units it held at the start, and holds."""

    bits: rbloom.Bloom
    before: int = 0
    held: int = 0


class Bloom(Seen):
    """Remembers hashes in Bloom filters."""

    name = "bloom"
    Options = BloomOptions

    def __init__(self, options: BloomOptions) -> None:
        super().__init__(options)
        self._filters: dict[int, _Filter] = {}

    def _filter(self, bucket: int) -> _Filter:
        found = self._filters.get(bucket)
        if found is None:
            units = capacity(self.options.expected, self.buckets)
            found = self._filters[bucket] = _Filter(new_filter(units, self.options.error_rate))
        return found

    def seen(self, bucket: int, hashes: Iterable[int]) -> list[bool]:
        found = self._filter(bucket)
        bits, add = found.bits, found.bits.add
        result = [value in bits or add(value) is not None for value in hashes]  # what is added gives None: not seen
        found.held += len(result) - sum(result)
        return result

    def bucket_facts(self, bucket: int) -> dict[str, float]:
        found = self._filter(bucket)
        bits = found.bits.size_in_bits
        wrong = wrong_drops(found.before, found.held, bits, functions(self.options.error_rate))
        return {
            f"{self.options.unit}s held": found.held,
            "expected wrong drops": wrong,
            "bytes of filter": bits // 8,
        }

    @staticmethod
    def facts(options: Any, sums: dict[str, float]) -> Facts:
        held, warnings = int(sums.get(f"{options.unit}s held", 0)), []
        if held > options.expected:
            bits, k = int(8 * sums["bytes of filter"]), functions(options.error_rate)
            rate = error_rate(shown(held, bits, k), bits, k)
            warnings.append(
                f"the Bloom filter is sized for expected: {options.expected:,} different {options.unit}s and holds {held:,}: a new one "
                f"is now dropped wrongly with the probability {rate:.2g} instead of {options.error_rate:g}; set expected: {held:,} or more"
            )
        return Facts(Seen.facts(options, sums).numbers, warnings=warnings)

    def settings(self) -> dict[str, Any]:
        own = {
            "expected": self.options.expected,
            "error_rate": self.options.error_rate,
            "filter arithmetic": arithmetic(),
        }
        return super().settings() | own

    def save(self, bucket: int, path: str) -> None:
        found = self._filter(bucket)
        data = np.frombuffer(found.bits.save_bytes(), np.uint8)
        about = {"settings": self.settings(), "held": found.held}
        write_bucket_file(path, about, {"filter": [data]})

    def load(self, bucket: int, path: str) -> None:
        import rbloom

        file = open_bucket_file(path, self.settings(), bucket)
        bits = rbloom.Bloom.load_bytes(file.read("filter").tobytes(), index)
        self._filters[bucket] = _Filter(bits, file.about["held"], file.about["held"])

    def close(self, bucket: int) -> None:
        self._filters.pop(bucket, None)

    @staticmethod
    def problems(options: Any) -> list[str]:
        found = Seen.problems(options)
        if options.expected < 1:
            found.append(f"expected: {options.expected} must be at least 1")
        if not 0 < options.error_rate <= 0.1:
            found.append(f"error_rate: {options.error_rate} must be above 0 and at most 0.1")
        elif options.expected > 0:
            size, memory = filter_bytes(options), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            if size > memory * Bloom.buckets:  # parts hold one bucket at a time
                told = f"{size / 1e9:,.0f} GB, a bucket more than this machine's {memory / 1e9:,.0f} GB"
                found.append(f"expected: {options.expected:,} takes {told}")
        found += missing_packages("rbloom")
        return found or against_problems(options.against, Bloom(options).settings())


def new_filter(units: int, rate: float) -> rbloom.Bloom:
    """An empty filter for hashes that are signed integers of 128 bits."""
    import rbloom

    return rbloom.Bloom(units, rate, index)


def capacity(expected: int, buckets: int) -> int:
    """Units that the filter of one bucket is made for: its share, and four standard deviations of a binomial share."""
    share = expected / buckets
    return math.ceil(share + 4 * math.sqrt(share))


def filter_bytes(options: BloomOptions) -> float:
    """About how many bytes the filters of all buckets take: n ln(1 / p) / (8 ln(2)^2)."""
    return -options.expected * math.log(options.error_rate) / (8 * math.log(2) ** 2)


def functions(rate: float) -> int:
    """k, the number of hash functions of a filter with an error rate."""
    return int.from_bytes(new_filter(64, rate).save_bytes()[:8], "little")


def error_rate(n: float, bits: int, k: int) -> float:
    """Probability that a filter takes a new unit for an old one after n were shown: (1 - exp(-k n / m))^k."""
    return float((1 - math.exp(-k * n / bits)) ** k)


def shown(held: float, bits: int, k: int) -> float:
    """How many new units a filter was shown when it holds ``held``: dn / dh = 1 / (1 - p(n)), by the midpoint rule.

    A filter that takes all but one in 1,000 new units for old ones may have been shown any number; it is told for that p.
    """
    n, step = 0.0, held / 256
    for _ in range(256):
        middle = n + step / 2 / max(1e-3, 1 - error_rate(n, bits, k))
        n += step / max(1e-3, 1 - error_rate(middle, bits, k))
    return n


def wrong_drops(before: float, held: float, bits: int, k: int) -> float:
    """Expected number of units that were dropped wrongly while a filter grew."""
    return (shown(held, bits, k) - held) - (shown(before, bits, k) - before)


def arithmetic() -> int:
    """A number that changes when the package finds the bits of a hash in another way: old filters are no use then."""
    probe = new_filter(64, 0.01)
    for value in range(64):
        probe.add((value * 0x9E3779B97F4A7C15F39CC0605CEDC835) % (1 << 127))
    return zlib.crc32(probe.save_bytes())
