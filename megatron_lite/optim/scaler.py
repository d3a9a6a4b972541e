"""The factor on the loss that keeps small fp16 gradients above zero.

The dynamic rule (Micikevicius et al., arXiv:1710.03740, with the hysteresis of Megatron-LM): a step whose gradients are
not finite resets the count of good steps and uses up one unit of hysteresis; when none is left the scale halves, down
to a minimum. ``window`` good steps in a row double it and refill the hysteresis. Scales are powers of two times the
initial one, so that unscaling is exact.

All state is on the host and in :meth:`LossScaler.state_dict`, plain JSON: the flag that says whether a step was finite
arrives with the one host read of the step. The scaler also knows when skipping has stopped to be harmless.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_SCALE = 2.0**127  # the largest power of two in fp32: the scale is never inf
MAX_SKIPS = 50  # skipped steps in a row after which a run stops


@dataclass
class LossScaler:
    """The loss scale and its state.

    Attributes:
        kind: ``dynamic``, ``fixed`` (fp16 with ``--loss-scale``) or ``none`` (1.0; every dtype but fp16).
        scale: current factor on the loss.
        minimum, window, hysteresis: the options of the dynamic rule.
        good_steps: good steps since the last growth or bad step.
        hysteresis_left: bad steps until the scale halves.
        skips_in_a_row: bad steps since the last good one.
        skips: bad steps of the whole run.
    """

    kind: str
    scale: float
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    good_steps: int = 0
    hysteresis_left: int = 2
    skips_in_a_row: int = 0
    skips: int = 0

    @classmethod
    def none(cls) -> LossScaler:
        """No scaling: 1."""
        return cls("none", 1.0)

    @classmethod
    def fixed(cls, scale: float) -> LossScaler:
        """A scale that never moves. Raises ValueError unless it is finite and positive."""
        if not 0 < scale < math.inf:
            raise ValueError(f"loss-scale is {scale}: it must be finite and above 0, e.g. 1024")
        return cls("fixed", scale)

    @classmethod
    def dynamic(
        cls, *, initial: float = 2.0**16, minimum: float = 1.0, window: int = 1000, hysteresis: int = 2
    ) -> LossScaler:
        """The dynamic rule. Raises ValueError for options that could not work."""
        if not 0 < minimum <= initial <= MAX_SCALE:
            raise ValueError(
                f"initial-loss-scale {initial} and min-loss-scale {minimum}: needed is 0 < minimum <= initial <= 2^127"
            )
        if window < 1 or hysteresis < 1:
            raise ValueError(f"loss-scale-window {window} and hysteresis {hysteresis} must be at least 1")
        return cls("dynamic", initial, minimum, window, hysteresis, 0, hysteresis)

    def update(self, finite: bool) -> str | None:
        """Take note of one step; returns None, or why a run should stop.

        A run should stop after 50 skipped steps in a row, and, under the dynamic rule, when a step at the minimum
        scale was not finite (a smaller scale cannot help: the numbers themselves are broken).
        """
        if finite:
            self.skips_in_a_row = 0
            if self.kind == "dynamic":
                self._good()
            return None
        self.skips += 1
        self.skips_in_a_row += 1
        used = self.scale
        if self.kind == "dynamic":
            self._bad()
            if used <= self.minimum:
                return f"gradients are not finite at the smallest loss scale, {used:g}: the scale is not the cause"
        if self.skips_in_a_row >= MAX_SKIPS:
            return f"{self.skips_in_a_row} steps in a row were not finite; the loss scale is {self.scale:g}"
        return None

    def _good(self) -> None:
        self.good_steps += 1
        if self.good_steps >= self.window:
            self.good_steps = 0
            self.hysteresis_left = self.hysteresis
            self.scale = min(self.scale * 2.0, MAX_SCALE)

    def _bad(self) -> None:
        self.good_steps = 0
        self.hysteresis_left -= 1
        if self.hysteresis_left <= 0:
            self.scale = max(self.scale / 2.0, self.minimum)

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON."""
        return {
            "kind": self.kind,
            "scale": self.scale,
            "good_steps": self.good_steps,
            "hysteresis_left": self.hysteresis_left,
            "skips_in_a_row": self.skips_in_a_row,
            "skips": self.skips,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Take over a checkpoint's state; returns a notice where that is not possible, and stays fresh then.

        Only a dynamic scale continues a dynamic one. A run that changed its dtype or its kind of scale starts fresh.
        """
        if state["kind"] != self.kind:
            kinds = f"the checkpoint's is {state['kind']}, this run's is {self.kind}"
            return f"loss scale: {kinds}: it starts fresh at {self.scale:g}"
        self.skips = int(state["skips"])
        self.skips_in_a_row = int(state["skips_in_a_row"])
        if self.kind == "dynamic":
            self.scale = max(float(state["scale"]), self.minimum)
            self.good_steps = int(state["good_steps"])
            self.hysteresis_left = min(int(state["hysteresis_left"]), self.hysteresis)
        elif float(state["scale"]) != self.scale:
            return f"loss scale: the checkpoint's is {state['scale']:g}; used is this run's --loss-scale {self.scale:g}"
        return None
