"""What a part is given, and what it gives back."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_lite.mesh.local import die_with_parent

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Settings:
    """Where a part runs.

    Attributes:
        device: ``cuda`` or ``cpu``. On the CPU sizes are small: what is shown is that the part itself works.
        seconds: its time; a part that can end early does when three quarters of it are over.
        began: ``time.monotonic()`` at its start.
    """

    device: str
    seconds: float = 60.0
    began: float = field(default_factory=time.monotonic)

    @property
    def on_gpu(self) -> bool:
        """Whether this is the real thing."""
        return self.device == "cuda"

    @property
    def where(self) -> torch.device:
        """The device that tensors of this process lie on."""
        import torch

        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")

    @property
    def patience(self) -> float:
        """Seconds after which ranks are taken to hang."""
        return max(20.0, self.seconds / 3)

    def time_is_short(self) -> bool:
        """Whether no further long piece of work should begin."""
        return time.monotonic() - self.began > 0.75 * self.seconds


def prepare_process() -> None:
    """For the process of a part: it ends with the check, and ops that fall back say so in the report only."""
    die_with_parent()
    for text in (".*is passed over", "plain PyTorch runs in place of kernels"):
        warnings.filterwarnings("ignore", message=text)


class Skipped(Exception):
    """A part that cannot run here; the text is why."""


@dataclass
class Outcome:
    """What a part found; it is filled as the part goes on, so that a failure leaves what came before it.

    Attributes:
        lines: for people, one sentence each.
        failures: what is not as it should be.
        skipped: pieces that were left out, and why.
        numbers: for machines.
        changed: called after every line, so that what was found is kept if the part has to be ended.
    """

    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    changed: Callable[[], None] = lambda: None

    def found(self) -> dict[str, Any]:
        """Everything but the callback."""
        return {name: getattr(self, name) for name in ("lines", "failures", "skipped", "numbers")}

    def say(self, line: str) -> None:
        """Add a line; it is printed too."""
        self.lines.append(line)
        print(f"  {line}", flush=True)
        self.changed()

    def check(self, holds: bool, line: str) -> None:
        """Add a line that says whether something holds."""
        if not holds:
            self.failures.append(line)
        self.say(f"{'ok' if holds else 'FAILED'}: {line}")

    def skip(self, line: str) -> None:
        """Leave out a piece of the part."""
        self.skipped.append(line)
        self.say(f"skipped: {line}")
