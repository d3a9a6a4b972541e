"""What a stage does, as data.

A plan holds, for each stage, the list of its actions in program order. Compute actions come from a schedule
(``schedules``); everything that communicates is added by ``lower``. The runtime, the verifier, the planner and the
drawing read the same plan, so what is proved is what runs.

Messages go through queues. A queue is one edge of the pipeline in one direction, has a communicator of its own, and
delivers in order; nothing is tagged. A receive is an action of its own because *when* it is posted matters: one ahead of
its use, so that the message travels while the stage computes, and no earlier, so that a stage never holds more than one
buffer that waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward"]
QueueName = tuple[int, int, Direction]
"""Source stage, destination stage, direction."""


@dataclass(frozen=True)
class Forward:
    """Compute a microbatch's forward pass of this stage; waits for its input, which was posted before."""

    microbatch: int

    def __str__(self) -> str:
        return f"F{self.microbatch}"


@dataclass(frozen=True)
class Backward:
    """Compute the gradients of input and weights of a microbatch; waits for the gradient of its output."""

    microbatch: int

    def __str__(self) -> str:
        return f"B{self.microbatch}"


@dataclass(frozen=True)
class Send:
    """Start to send a microbatch's hidden states (forward) or their gradient (backward) to a neighbour.

    Waits until the message before it in its queue has been received.
    """

    direction: Direction
    microbatch: int
    peer: int

    def queue(self, stage: int) -> QueueName:
        """The queue, when ``stage`` does this."""
        return stage, self.peer, self.direction

    def __str__(self) -> str:
        return f"Send {self.direction} {self.microbatch} to stage {self.peer}"


@dataclass(frozen=True)
class Recv:
    """Post the receive of a microbatch's hidden states or their gradient from a neighbour; does not wait for it."""

    direction: Direction
    microbatch: int
    peer: int

    def queue(self, stage: int) -> QueueName:
        """The queue, when ``stage`` does this."""
        return self.peer, stage, self.direction

    def __str__(self) -> str:
        return f"Recv {self.direction} {self.microbatch} from stage {self.peer}"


@dataclass(frozen=True)
class Reduce:
    """The sum of one gradient bucket over the data-parallel ranks has been started at the latest here.

    With overlap it starts during the last backward pass.
    """

    bucket: int

    def __str__(self) -> str:
        return f"Reduce {self.bucket}"


@dataclass(frozen=True)
class Sync:
    """Sum the gradient of a tied tensor over the stages that hold it, then over the data-parallel ranks."""

    tie: str

    def __str__(self) -> str:
        return f"Sync {self.tie}"


Action = Forward | Backward | Send | Recv | Reduce | Sync


@dataclass(frozen=True)
class Plan:
    """The actions of every stage.

    Attributes:
        schedule: its name.
        microbatches: of one step.
        stages: the actions of each stage.
        trains: whether there is a backward pass (evaluation has none).
        buckets: gradient buckets of each stage that are reduced.
        ties: (name, stages that hold it) of each tied tensor, in the order of the sums.
    """

    schedule: str
    microbatches: int
    stages: tuple[tuple[Action, ...], ...]
    trains: bool
    buckets: tuple[int, ...]
    ties: tuple[tuple[str, tuple[int, ...]], ...] = ()


class PlanError(ValueError):
    """A plan that would hang or compute something wrong.

    Attributes:
        stage, position: where; ``position`` is the number of the stage's actions when something is missing at its end.
        action: what stands there, None at the end.
    """

    def __init__(self, plan: Plan, stage: int, position: int, why: str) -> None:
        actions = plan.stages[stage]
        self.stage, self.position = stage, position
        self.action: Action | None = actions[position] if position < len(actions) else None
        what = "the end" if self.action is None else f"{self.action} (position {position})"
        super().__init__(f"{plan.schedule} plan, stage {stage} of {len(plan.stages)}, {what}: {why}")
