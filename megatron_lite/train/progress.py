"""Where a run stands: a few counters, stored in every checkpoint, from which all else follows.

The position in the data is ``consumed_samples`` and the ranges that are left out, nothing else; the position in the
schedules is ``scheduled_samples``, which a skipped step does not move; Adam's bias correction is ``updates``. Keeping
them apart, and each in one place, is what makes a resumed run the run that was not interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_lite.data.sampler import merge_ranges


@dataclass
class Progress:
    """Counters of a run.

    Attributes:
        step: finished steps, skipped ones too.
        updates: updates made.
        consumed_samples: samples passed in the data, those of skipped steps and of skipped ranges that lie behind too.
        scheduled_samples: samples of the steps whose update was made.
        skipped_ranges: [first, end) of samples that are not read, because a rollback jumped over them.
        rollbacks: how often that happened.
    """

    step: int = 0
    updates: int = 0
    consumed_samples: int = 0
    scheduled_samples: int = 0
    skipped_ranges: list[list[int]] = field(default_factory=list)
    rollbacks: int = 0

    def count(self, samples: int, next_consumed: int, skipped: bool) -> None:
        """Take note of one step of ``samples`` samples, after which the data stand at ``next_consumed``."""
        self.step += 1
        self.consumed_samples = next_consumed
        if not skipped:
            self.updates += 1
            self.scheduled_samples += samples

    def leave_out(self, failed: Progress, end: int) -> tuple[int, int]:
        """After a rollback to here: the samples up to ``end``, where the batch that ``failed`` ends, are not read.

        Returns the range.
        """
        found = (self.consumed_samples, end)
        self.skipped_ranges = [list(r) for r in merge_ranges([*((a, b) for a, b in failed.skipped_ranges), found])]
        self.rollbacks = failed.rollbacks + 1
        return found

    def state_dict(self) -> dict[str, Any]:
        """The counters as JSON."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        """Back from :meth:`state_dict`."""
        return cls(**state)
