"""Which samples a step reads: a pure function of the number of consumed samples.

The global batch of a step is the next ``global_batch_size`` samples after ``consumed``. Microbatch m of data-parallel
rank d, row b, is sample ``consumed + m * (micro_batch_size * dp) + d * micro_batch_size + b``. So the set of samples of
a step depends neither on dp nor on the microbatch size nor on how often the run was resumed, and the stream of a rank's
microbatches does not depend on where steps end (a batch-size ramp changes how many a step takes, not which).

Samples in ``skipped`` ranges (a rollback after numbers that are not finite) do not exist: they are consumed, but the
sample after the one before a range is the one behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sampler:
    """The samples of one data-parallel rank.

    Attributes:
        micro_batch_size: rows of a microbatch.
        dp_size, dp_index: data-parallel size, and this rank's index in it.
        skipped: ranges [start, stop) of samples that are not read.
    """

    micro_batch_size: int
    dp_size: int = 1
    dp_index: int = 0
    skipped: tuple[tuple[int, int], ...] = field(default=())

    def __post_init__(self) -> None:
        assert self.micro_batch_size >= 1 and 0 <= self.dp_index < self.dp_size, self
        object.__setattr__(self, "skipped", merge_ranges(self.skipped))

    @property
    def stride(self) -> int:
        """Samples that all data-parallel ranks read for one microbatch."""
        return self.micro_batch_size * self.dp_size

    def microbatches(self, global_batch_size: int) -> int:
        """Microbatches of a step; ValueError unless microbatch size times dp divides the global batch."""
        if global_batch_size < 1 or global_batch_size % self.stride:
            below = global_batch_size // self.stride * self.stride
            nearest = f"{below} or {below + self.stride}" if below > 0 else f"{self.stride}"
            raise ValueError(
                f"a global batch of {global_batch_size} samples cannot be divided: micro batch size {self.micro_batch_size} * "
                f"data-parallel size {self.dp_size} = {self.stride} must divide it; nearest: {nearest}"
            )
        return global_batch_size // self.stride

    def nth(self, consumed: int, i: int) -> int:
        """The i-th sample (from 0) after ``consumed``."""
        for start, stop in self.skipped:
            if stop <= consumed:
                continue
            if start > consumed + i:
                break
            consumed = stop if start <= consumed else consumed + stop - start
        return consumed + i

    def after(self, consumed: int, samples: int) -> int:
        """``consumed`` after reading ``samples`` samples."""
        return self.nth(consumed, samples - 1) + 1 if samples else consumed

    def rows(self, consumed: int, microbatch: int) -> list[int]:
        """Samples of this rank's microbatch of the step that starts at ``consumed``."""
        first = self.first_row(microbatch)
        return [self.nth(consumed, first + b) for b in range(self.micro_batch_size)]

    def first_row(self, microbatch: int) -> int:
        """Index in the global batch of a microbatch's first row."""
        return microbatch * self.stride + self.dp_index * self.micro_batch_size


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges in order, those that touch or overlap joined, empty ones left out."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((int(a), int(b)) for a, b in ranges if b > a):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)
