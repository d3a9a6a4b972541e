"""One sample, and the protocol of everything that gives samples by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Row:
    """One sample: S + 1 tokens and where its documents start.

    Attributes:
        tokens: int64 [S + 1]; inputs are the first S, targets the last S.
        starts: int64 [documents], positions in [0, S] at which a document starts, ascending, the first is 0
            (a row that starts inside a document starts a document here: what it cannot see does not exist).
            A start at S means that the last *target* is the first token of another document.
        index: the sample's number, as reported in logs and digests.
        loss_mask: uint8 [S], 1 where the target counts, else 0; None: every target counts (but those across borders).
        cuts: int64, positions in (0, S) at which attention and positions begin anew though no document does (a shorter
            sequence length); the target across a cut counts, as that at the end of a row does. None: there are none.
    """

    tokens: np.ndarray
    starts: np.ndarray
    index: int
    loss_mask: np.ndarray | None = None
    cuts: np.ndarray | None = None


class Dataset(Protocol):
    """Numbered samples.

    ``row(j)`` is a pure function of j. Where ``endless``, it is defined for every j >= 0 and ``len`` is the number of
    samples in the first epoch; otherwise for j < len.
    """

    endless: bool

    def __len__(self) -> int: ...

    def row(self, j: int) -> Row:
        """Sample j; IndexError behind the end of a dataset that has one."""
        ...
