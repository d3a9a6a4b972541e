"""Learning rate and weight decay as pure functions of a counter.

The counter is s, the samples of *successful* steps: a skipped step consumes data but does not move the schedule. There
is no scheduler object that is stepped, so nothing can be stepped twice, be one step ahead after an overflow, or come
back different from a checkpoint; a run stores the counter, and the shape as plain numbers so that a resumed run can be
compared with what it was asked to do (:func:`on_resume`). Iterations were turned into samples before this
(:mod:`megatron_lite.optim.batch_size`), so a batch ramp does not bend the curve.

Shapes: linear warm-up, then constant, linear, cosine (Loshchilov and Hutter, arXiv:1608.03983), inverse square root
(Vaswani et al., arXiv:1706.03762) or warm-up-stable-decay (Hu et al., arXiv:2404.06395).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
RAMP_STYLES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class LrSchedule:
    """The learning rate of one group of parameters.

    Attributes:
        max_lr: at the end of warm-up.
        min_lr: at and after the end of the decay.
        init_lr: at the start of warm-up.
        style: one of :data:`DECAY_STYLES`.
        warmup_samples: W; a fraction of a sample is legal (it came from ``--lr-warmup-fraction``).
        decay_samples: D, counted from the start of training; W < D.
        wsd_decay_samples: length of the last part of WSD; W + it <= D.
        wsd_style: one of :data:`WSD_STYLES`.
    """

    max_lr: float
    decay_samples: int
    min_lr: float = 0.0
    init_lr: float = 0.0
    style: str = "linear"
    warmup_samples: float = 0
    wsd_decay_samples: int = 0
    wsd_style: str = "exponential"

    def __post_init__(self) -> None:
        if found := self.problems():
            raise ValueError("; ".join(found))

    def problems(self) -> list[str]:
        """What is wrong with these numbers; empty when nothing is."""
        found = []
        for name in ("max_lr", "min_lr", "init_lr"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                found.append(f"{name} is {value}: learning rates are finite and not negative")
        if self.min_lr > self.max_lr:
            found.append(f"min_lr {self.min_lr} is above max_lr {self.max_lr}: lower min_lr to at most {self.max_lr}")
        if self.init_lr > self.max_lr:
            found.append(
                f"init_lr {self.init_lr} is above max_lr {self.max_lr}: warm-up rises, so give at most {self.max_lr}"
            )
        if self.style not in DECAY_STYLES:
            found.append(f"unknown decay style {self.style!r}: one of {', '.join(DECAY_STYLES)}")
        if self.wsd_style not in WSD_STYLES:
            found.append(f"unknown WSD decay style {self.wsd_style!r}: one of {', '.join(WSD_STYLES)}")
        if self.decay_samples < 1:
            found.append(f"the decay length is {self.decay_samples} samples: it must be at least 1")
        elif not 0 <= self.warmup_samples < self.decay_samples:
            found.append(
                f"warm-up of {self.warmup_samples:g} samples does not end before the decay of {self.decay_samples} "
                f"samples does: give a warm-up of at most {self.decay_samples - 1} samples, or a longer decay"
            )
        elif self.style == "WSD" and not 0 < self.wsd_decay_samples <= self.decay_samples - self.warmup_samples:
            found.append(
                f"the last decay of WSD has {self.wsd_decay_samples} samples, but between the end of warm-up "
                f"({self.warmup_samples:g}) and the end of the decay ({self.decay_samples}) lie "
                f"{self.decay_samples - self.warmup_samples:g}: give --lr-wsd-decay-iters (or -samples) from 1 to that"
            )
        return found

    def at(self, samples: int) -> float:
        """The learning rate of an update before which ``samples`` samples were in successful steps (0 at the first)."""
        warmup, span = self.warmup_samples, self.max_lr - self.min_lr
        if warmup > 0 and samples <= warmup:
            return min(self.max_lr, self.init_lr + (self.max_lr - self.init_lr) * (samples / warmup))
        if self.style == "constant":
            return self.max_lr
        if samples > self.decay_samples:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(samples, 1)))
        return min(self.max_lr, self.min_lr + span * self._coefficient(samples))

    def _coefficient(self, samples: int) -> float:
        if self.style == "WSD":
            stable = self.decay_samples - self.wsd_decay_samples
            if samples <= stable:
                return 1.0
            q = (samples - stable) / self.wsd_decay_samples
            return _wsd_coefficient(self.wsd_style, q)
        r = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        return 1.0 - r if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * r))

    def scaled(self, factor: float) -> LrSchedule:
        """The same shape with max, min and start of warm-up multiplied by ``factor`` (batch-size scaling rules)."""
        return replace(self, max_lr=self.max_lr * factor, min_lr=self.min_lr * factor, init_lr=self.init_lr * factor)


def _wsd_coefficient(style: str, q: float) -> float:
    """From 1 at q = 0 to 0 at q = 1."""
    if style == "linear":
        return 1.0 - q
    if style == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * q))
    if style == "exponential":
        return float(2.0 * 0.5**q - 1.0)
    return 1.0 - math.sqrt(q)


@dataclass(frozen=True)
class WeightDecaySchedule:
    """Weight decay that may ramp from ``start`` to ``end`` over the training.

    Attributes:
        style: ``constant`` (start = end), ``linear`` or ``cosine``.
        total_samples: N, the samples of the whole training.
    """

    start: float
    end: float
    style: str = "constant"
    total_samples: int = 1

    def __post_init__(self) -> None:
        if found := self.problems():
            raise ValueError("; ".join(found))

    def problems(self) -> list[str]:
        """What is wrong with these numbers; empty when nothing is."""
        found = []
        if not (0 <= self.start < math.inf and 0 <= self.end < math.inf):
            found.append(f"weight decay from {self.start} to {self.end}: both must be finite and not negative")
        if self.start > self.end:
            found.append(
                f"start-weight-decay {self.start} is above end-weight-decay {self.end}: the ramp rises; swap them"
            )
        if self.style not in RAMP_STYLES:
            found.append(f"unknown weight-decay-incr-style {self.style!r}: one of {', '.join(RAMP_STYLES)}")
        if self.style == "constant" and self.start != self.end:
            found.append(
                f"weight-decay-incr-style constant with start {self.start} and end {self.end}: "
                "give linear or cosine for a ramp, or equal values"
            )
        if self.total_samples < 1:
            found.append(f"the ramp of weight decay lasts {self.total_samples} samples: it must be at least 1")
        return found

    def at(self, samples: int) -> float:
        """The weight decay of an update before which ``samples`` samples were in successful steps."""
        if samples > self.total_samples or self.style == "constant":
            return self.end
        x = samples / self.total_samples
        c = x if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * (1.0 - x)))
        return min(self.end, self.start + c * (self.end - self.start))


@dataclass(frozen=True)
class Rates:
    """Every schedule of a run: the learning rate by tag of a parameter (``ParamSpec.tag``), and the weight decay."""

    lr: Mapping[str, LrSchedule]
    weight_decay: WeightDecaySchedule

    def learning_rates(self, samples: int) -> dict[str, float]:
        """Learning rate by tag; ``""`` is the one that is logged."""
        return {tag: schedule.at(samples) for tag, schedule in self.lr.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON, for the checkpoint."""
        return {"lr": {tag: asdict(s) for tag, s in self.lr.items()}, "weight_decay": asdict(self.weight_decay)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Rates:
        """Back from :meth:`as_dict`."""
        schedules = {tag: LrSchedule(**values) for tag, values in stored["lr"].items()}
        return cls(schedules, WeightDecaySchedule(**stored["weight_decay"]))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        label = f"{prefix}.{key}" if prefix and key else prefix or key
        out.update(_leaves(value, label) if isinstance(value, Mapping) else {label: value})
    return out


def _without_effect(tree: Mapping[str, Any]) -> set[str]:
    """Names, as :func:`_leaves` has them, of numbers that change no value of the schedule that they stand in."""
    found = set()
    for tag, values in tree["lr"].items():
        unused = [] if values["style"] == "WSD" else ["wsd_decay_samples", "wsd_style"]
        unused += ["decay_samples", "min_lr"] if values["style"] == "constant" else []
        unused += [] if values["warmup_samples"] else ["init_lr"]
        found |= {f"lr.{tag}.{name}" if tag else f"lr.{name}" for name in unused}
    return found | ({"weight_decay.total_samples"} if tree["weight_decay"]["style"] == "constant" else set())


def on_resume(
    stored: Mapping[str, Any], asked: Rates, *, override: bool = False, use_checkpoint: bool = False
) -> Rates:
    """The schedules of a resumed run.

    Args:
        stored: :meth:`Rates.as_dict` of the checkpoint.
        asked: what the configuration says now.
        override: ``--override-opt-param-scheduler``: the configuration wins, whole.
        use_checkpoint: ``--use-checkpoint-opt-param-scheduler``: the checkpoint wins, whole.

    Never a mixture of the two. Raises ValueError, with both values of everything that differs, where they differ and
    neither flag was given. What changes no value (the end of a decay that a constant rate does not have) may differ.
    """
    if override and use_checkpoint:
        raise ValueError(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other: the first "
            "takes the schedule of the command line, the second that of the checkpoint; give one"
        )
    if override:
        return asked
    if use_checkpoint:
        return Rates.from_dict(stored)
    before, now = _leaves(stored), _leaves(asked.as_dict())
    unused = _without_effect(stored) & _without_effect(asked.as_dict())
    differs = [
        f"{name}: {before.get(name, 'absent')} in the checkpoint, {now.get(name, 'absent')} asked for"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name) and name not in unused
    ]
    if differs:
        raise ValueError(
            "the learning-rate schedule differs from the checkpoint's: " + "; ".join(differs) + ". Give "
            "--override-opt-param-scheduler to take the command line's, or --use-checkpoint-opt-param-scheduler "
            "to keep the checkpoint's"
        )
    return asked
