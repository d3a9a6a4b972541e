"""Where a run stands: a few counters, stored in every checkpoint, from which all else follows.

The position in the data is ``consumed_samples`` and nothing else; the position in the schedules is
``scheduled_samples``, which a skipped step does not move; Adam's bias correction is ``updates``. Keeping them apart, and
each in one place, is what makes a resumed run the run that was not interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Progress:
    """Counters of a run.

    Attributes:
        step: finished steps, skipped ones too.
        updates: updates made.
        consumed_samples: samples read, those of skipped steps and skipped ranges too.
        scheduled_samples: samples of the steps whose update was made.
        skipped_ranges: [first, end) of samples that a rollback jumped over.
        rollbacks: how often that happened.
    """

    step: int = 0
    updates: int = 0
    consumed_samples: int = 0
    scheduled_samples: int = 0
    skipped_ranges: list[list[int]] = field(default_factory=list)
    rollbacks: int = 0

    def count(self, samples: int, skipped: bool) -> None:
        """Take note of one step."""
        self.step += 1
        self.consumed_samples += samples
        if not skipped:
            self.updates += 1
            self.scheduled_samples += samples

    def jump(self, failed: Progress, samples: int) -> None:
        """After a rollback to here: pass over everything up to and with the batch at which ``failed`` stood."""
        end = failed.consumed_samples + samples
        self.skipped_ranges = [*failed.skipped_ranges, [self.consumed_samples, end]]
        self.consumed_samples = end
        self.rollbacks = failed.rollbacks + 1

    def state_dict(self) -> dict[str, Any]:
        """The counters as JSON."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        """Back from :meth:`state_dict`."""
        return cls(**state)
