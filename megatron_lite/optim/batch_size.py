"""The global batch size as a pure function of consumed samples, and what it does to units and learning rates.

A ramp (``--rampup-batch-size``) and a list of steps (``--step-batch-size-schedule``) are the same thing: phases, each
with the number of consumed samples at which it begins and its size. Everything else follows by arithmetic: how many
samples n iterations consume (so that warm-up and decay given in iterations stay exact while the batch grows), and how
many iterations a number of samples makes. There is no state: a resumed run asks the same function.

The scaling rules for the learning rate depend on the batch only, never on the number of ranks: what a run computes
must not depend on its layout. Linear: Goyal et al., arXiv:1706.02677; square root: Krizhevsky, arXiv:1404.5997.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise

from megatron_lite.config.values import whole_amount

LR_SCALING_RULES = ("none", "linear", "sqrt", "auto")
AUTO_LINEAR_UP_TO = 4096  # samples; the rule of thumb holds linear scaling up to here


@dataclass(frozen=True)
class BatchSchedule:
    """Global batch size by consumed samples.

    Attributes:
        phases: (first consumed sample, global batch size), ascending, the first at 0. The size of a step is that of
            the last phase that has begun when the step starts.
    """

    phases: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.phases]
        if not starts or starts[0] != 0 or any(b <= a for a, b in pairwise(starts)):
            raise ValueError(f"phases of the batch size must begin at 0 and ascend, not {starts}")
        if any(size < 1 for _, size in self.phases):
            raise ValueError(f"a global batch has at least 1 sample, not {[size for _, size in self.phases]}")

    @classmethod
    def constant(cls, size: int) -> BatchSchedule:
        """One size for the whole training."""
        return cls(((0, size),))

    @classmethod
    def rampup(cls, start: int, increment: int, samples: int, size: int) -> BatchSchedule:
        """``start + increment * floor(consumed / (samples / k))`` while consumed <= samples, then ``size``.

        k = (size - start) / increment must be whole. Raises ValueError otherwise.
        """
        if found := rampup_problems(start, increment, samples, size):
            raise ValueError("; ".join(found))
        k = (size - start) // increment
        # step j begins at the first whole number of samples that is not below j * samples / k
        return cls(_merged([(-(-j * samples // k) if k else 0, start + increment * j) for j in range(k + 1)]))

    @classmethod
    def steps(cls, text: str, seq_length: int) -> BatchSchedule:
        """From ``"0:768 250B:1536"``: global batch by consumed tokens; K, M, B, T are powers of 1,000."""
        phases = []
        for tokens, size in parse_steps(text):
            phases.append((-(-tokens // seq_length), size))
        return cls(_merged(phases))

    @property
    def final(self) -> int:
        """The size at the end of the ramp."""
        return self.phases[-1][1]

    def size(self, consumed: int) -> int:
        """Global batch size of the step that starts after ``consumed`` samples (of all steps, skipped ones too)."""
        return next(size for start, size in reversed(self.phases) if start <= consumed)

    def samples_after(self, iterations: int) -> int:
        """Samples consumed by the first ``iterations`` steps."""
        consumed = done = 0
        for i, (_, size) in enumerate(self.phases):
            if i + 1 < len(self.phases):
                here = min(iterations - done, max(0, -(-(self.phases[i + 1][0] - consumed) // size)))
            else:
                here = iterations - done
            consumed, done = consumed + here * size, done + here
        return consumed

    def iterations_within(self, samples: int) -> int:
        """The largest number of steps that consume at most ``samples`` samples."""
        consumed = done = 0
        for i, (_, size) in enumerate(self.phases):
            fit = max(0, (samples - consumed) // size)
            if i + 1 < len(self.phases):
                fit = min(fit, max(0, -(-(self.phases[i + 1][0] - consumed) // size)))
            consumed, done = consumed + fit * size, done + fit
            if consumed + self.size(consumed) > samples:
                break
        return done

    def problems(self, micro_batch_size: int, dp: int) -> list[str]:
        """Sizes that dp ranks cannot share in microbatches; every one of them, each with the nearest that can."""
        unit = micro_batch_size * dp
        found = []
        for start, size in self.phases:
            if size % unit:
                near = [n for n in (size // unit * unit, (size // unit + 1) * unit) if n]
                found.append(
                    f"the global batch of {size} (from sample {start} on) is not divisible by micro-batch-size "
                    f"{micro_batch_size} * dp {dp} = {unit}: use {' or '.join(map(str, near))}"
                )
        return found


def _merged(phases: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Phases without those that end where they begin (a later one with the same start wins) or change nothing."""
    by_start: dict[int, int] = {}
    for start, size in phases:
        by_start[start] = size
    out: list[tuple[int, int]] = []
    for start, size in by_start.items():
        if not out or out[-1][1] != size:
            out.append((start, size))
    return tuple(out)


def rampup_problems(start: int, increment: int, samples: int, size: int) -> list[str]:
    """What is wrong with ``--rampup-batch-size START INCREMENT SAMPLES`` towards a global batch of ``size``."""
    label = f"rampup-batch-size {start} {increment} {samples}"
    found = []
    if start < 1 or increment < 1 or samples < 0:
        found.append(f"{label}: START and INCREMENT must be at least 1, SAMPLES not negative")
    elif start > size:
        found.append(f"{label}: START is above the global batch size {size}: give at most {size}")
    elif (size - start) % increment:
        near = [d for d in range(1, size - start + 1) if (size - start) % d == 0]
        near = [d for d in near if d < increment][-1:] + [d for d in near if d > increment][:1]
        found.append(
            f"{label}: (global batch {size} - START {start}) / INCREMENT {increment} is not whole: "
            f"use INCREMENT {' or '.join(map(str, near))}"
        )
    return found


def parse_steps(text: str) -> list[tuple[int, int]]:
    """``"0:768 250B:1536"`` as [(tokens, global batch size)]. Raises ValueError naming the part that is wrong."""
    steps: list[tuple[int, int]] = []
    for part in text.split():
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?):(\d+)", part, flags=re.IGNORECASE)
        if match is None:
            raise ValueError(
                f"step-batch-size-schedule: {part!r} is not TOKENS:SIZE, e.g. 250B:1536 (K, M, B, T are powers of 1000)"
            )
        try:
            tokens = whole_amount(match[1] + match[2])
        except ValueError:
            raise ValueError(f"step-batch-size-schedule: {part!r} does not begin at a whole number of tokens") from None
        if int(match[3]) < 1:
            raise ValueError(f"step-batch-size-schedule: {part!r} has a global batch below 1")
        steps.append((tokens, int(match[3])))
    if not steps or steps[0][0] != 0:
        raise ValueError(f"step-batch-size-schedule {text!r} must begin with 0:SIZE")
    for (a, _), (b, _) in pairwise(steps):
        if b <= a:
            raise ValueError(f"step-batch-size-schedule {text!r}: thresholds must ascend, but {b} follows {a}")
    return steps


def lr_scaling_factor(rule: str, global_batch_size: int, base: int | None) -> float:
    """Factor on every learning rate: 1, gbs/base, sqrt(gbs/base), or ``auto``.

    ``auto`` is linear up to a global batch of 4,096 samples and the square root of the further factor.
    ``global_batch_size`` is the final one, not the ramp's; ``base`` is the batch for which the rates were tuned.
    """
    if rule not in LR_SCALING_RULES:
        raise ValueError(f"unknown lr-scaling-rule {rule!r}: one of {', '.join(LR_SCALING_RULES)}")
    if rule == "none":
        return 1.0
    if base is None or base < 1:
        raise ValueError(
            f"lr-scaling-rule {rule} needs --lr-scaling-base-batch, the batch for which the given lr is right"
        )
    if rule == "linear":
        return global_batch_size / base
    if rule == "sqrt":
        return math.sqrt(global_batch_size / base)

    def worth(size: int) -> float:
        return size if size <= AUTO_LINEAR_UP_TO else AUTO_LINEAR_UP_TO * math.sqrt(size / AUTO_LINEAR_UP_TO)

    return worth(global_batch_size) / worth(base)


def lr_scaling_table(lr: float, global_batch_size: int, base: int) -> dict[str, float]:
    """The learning rate under each rule, for the start-up summary."""
    return {rule: lr * lr_scaling_factor(rule, global_batch_size, base) for rule in LR_SCALING_RULES}
