"""What a stage does, as data.

A plan holds, for each pipeline rank, the list of its actions in program order. Compute actions come from a schedule
(:mod:`megatron_lite.pipeline.schedules`); everything that communicates is added by
:func:`megatron_lite.pipeline.lower.lower`. The runtime, the verifier, the planner and the drawing read the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Forward:
    """Compute a microbatch's forward pass of this stage."""

    microbatch: int

    def __str__(self) -> str:
        return f"F{self.microbatch}"


@dataclass(frozen=True)
class Backward:
    """Compute the gradients of input and weights of a microbatch on this stage."""

    microbatch: int

    def __str__(self) -> str:
        return f"B{self.microbatch}"


@dataclass(frozen=True)
class Send:
    """Start to send a microbatch's hidden states (forward) or their gradient (backward) to a neighbour.

    It begins when the send before it on the same edge and direction has met its receive.
    """

    direction: Direction
    microbatch: int
    peer: int

    def __str__(self) -> str:
        return f"Send {self.direction} {self.microbatch} to stage {self.peer}"


@dataclass(frozen=True)
class Recv:
    """Wait for a microbatch's hidden states or their gradient from a neighbour."""

    direction: Direction
    microbatch: int
    peer: int

    def __str__(self) -> str:
        return f"Recv {self.direction} {self.microbatch} from stage {self.peer}"


@dataclass(frozen=True)
class Reduce:
    """The sum of one gradient bucket over the data-parallel ranks has been started at the latest here."""

    bucket: int

    def __str__(self) -> str:
        return f"Reduce {self.bucket}"


@dataclass(frozen=True)
class Sync:
    """Sum the gradient of a tied tensor over the stages that hold it."""

    tie: str
    stages: tuple[int, ...]

    def __str__(self) -> str:
        return f"Sync {self.tie}"


Action = Forward | Backward | Send | Recv | Reduce | Sync


@dataclass(frozen=True)
class Plan:
    """The actions of every stage for a number of microbatches."""

    schedule: str
    microbatches: int
    stages: tuple[tuple[Action, ...], ...]

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return any(isinstance(a, Backward) for a in self.stages[0])
