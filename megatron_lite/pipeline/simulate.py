"""A plan walked through on paper: who waits for whom, and when everything happens.

The model of communication holds for gloo and NCCL alike, and is pessimistic. Each (edge, direction) is one in-order
queue. A message gets through when its send has been started, its receive has been posted and the message before it in
the queue has got through; no back end is trusted to buffer. A stage does its actions in program order: a compute
action waits for its message, a send waits until the one before it in its queue has got through (so one output at most
is waiting to leave), a receive and a bucket's sum wait for nothing on another stage, and the sum of a tied tensor is a
meeting of all its holders. On a GPU it is the compute stream that waits in these places, not the host; the order is the
same.

Messages take no time: what is shown is the schedule's own bubble. Sums over data-parallel ranks are not simulated;
ranks of one stage have the same plan and so start them in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from megatron_lite.pipeline.action import Action, Backward, Forward, Plan, PlanError, QueueName, Recv, Send, Sync


@dataclass(frozen=True)
class Span:
    """One compute action in time."""

    action: Forward | Backward
    start: float
    end: float


@dataclass
class _Queue:
    """Messages of one queue: what was sent and posted, by microbatch and time, and when each got through."""

    sent: list[tuple[int, float]] = field(default_factory=list)
    posted: list[tuple[int, float]] = field(default_factory=list)
    through: list[float] = field(default_factory=list)

    def match(self) -> tuple[int, int] | None:
        """Let through what can be; (sent, expected) microbatches where they differ."""
        while len(self.through) < min(len(self.sent), len(self.posted)):
            i = len(self.through)
            if self.sent[i][0] != self.posted[i][0]:
                return self.sent[i][0], self.posted[i][0]
            self.through.append(max(self.sent[i][1], self.posted[i][1], self.through[-1] if i else 0.0))
        return None


class Simulation:
    """One walk; :func:`simulate` makes and runs it."""

    def __init__(self, plan: Plan, forward: float, backward: float) -> None:
        self.plan, self.costs = plan, {Forward: forward, Backward: backward}
        self.at = [0] * len(plan.stages)
        self.clock = [0.0] * len(plan.stages)
        self.queues: dict[QueueName, _Queue] = defaultdict(_Queue)
        self.number: dict[tuple[int, str, int], tuple[QueueName, int]] = {}  # (stage, direction, microbatch): message
        self.arrived: dict[str, dict[int, float]] = defaultdict(dict)  # tie -> stage -> time
        self.holders = dict(plan.ties)
        self.timeline: list[list[Span]] = [[] for _ in plan.stages]

    def run(self) -> tuple[tuple[Span, ...], ...]:
        """Do everything that can be done, until all is done or nothing moves."""
        moved = True
        while moved:
            moved = False
            for stage, actions in enumerate(self.plan.stages):
                while self.at[stage] < len(actions) and self._blocked(stage, actions[self.at[stage]]) is None:
                    self._do(stage, actions[self.at[stage]])
                    self.at[stage] += 1
                    moved = True
        self._check_end()
        return tuple(tuple(spans) for spans in self.timeline)

    def _blocked(self, stage: int, action: Action) -> str | None:
        """What the action waits for, if it has to wait now."""
        if isinstance(action, Forward | Backward):
            message = self._message(stage, action)
            if message is not None and len(self.queues[message[0]].through) <= message[1]:
                return f"its message from stage {message[0][0]}"
        elif isinstance(action, Send):
            queue = self.queues[action.queue(stage)]
            if len(queue.through) < len(queue.sent):
                return f"stage {action.peer} to receive {action.direction} {queue.sent[-1][0]}"
        elif isinstance(action, Sync):
            self.arrived[action.tie].setdefault(stage, self.clock[stage])
            absent = sorted(set(self.holders[action.tie]) - set(self.arrived[action.tie]))
            if absent:
                return f"stage {absent[0]} to come to the sum"
        return None

    def _do(self, stage: int, action: Action) -> None:
        if isinstance(action, Forward | Backward):
            message = self._message(stage, action)
            ready = self.queues[message[0]].through[message[1]] if message is not None else 0.0
            start = max(self.clock[stage], ready)
            self.clock[stage] = start + self.costs[type(action)]
            self.timeline[stage].append(Span(action, start, self.clock[stage]))
        elif isinstance(action, Send):
            queue = self.queues[action.queue(stage)]
            self.clock[stage] = max(self.clock[stage], queue.through[-1] if queue.through else 0.0)
            queue.sent.append((action.microbatch, self.clock[stage]))
            self._match(stage, queue)
        elif isinstance(action, Recv):
            name = action.queue(stage)
            queue = self.queues[name]
            self.number[stage, action.direction, action.microbatch] = (name, len(queue.posted))
            queue.posted.append((action.microbatch, self.clock[stage]))
            self._match(stage, queue)
        elif isinstance(action, Sync):
            self.clock[stage] = max(self.arrived[action.tie].values())

    def _message(self, stage: int, action: Forward | Backward) -> tuple[QueueName, int] | None:
        direction = "forward" if isinstance(action, Forward) else "backward"
        return self.number.get((stage, direction, action.microbatch))

    def _match(self, stage: int, queue: _Queue) -> None:
        if (differ := queue.match()) is not None:
            why = f"the message at this place of the queue is microbatch {differ[0]}, its receiver expects {differ[1]}"
            raise PlanError(self.plan, stage, self.at[stage], why)

    def _check_end(self) -> None:
        waits = []
        for stage, actions in enumerate(self.plan.stages):
            if self.at[stage] < len(actions):
                action = actions[self.at[stage]]
                waits.append((stage, f"stage {stage} at {action} waits for {self._blocked(stage, action)}"))
        if waits:
            first = waits[0][0]
            raise PlanError(self.plan, first, self.at[first], "deadlock: " + "; ".join(text for _, text in waits))
        for (source, destination, direction), queue in self.queues.items():
            if len(queue.sent) != len(queue.posted):
                stage = source if len(queue.sent) > len(queue.posted) else destination
                why = f"{len(queue.sent)} {direction} messages are sent to stage {destination}, it expects {len(queue.posted)}"
                raise PlanError(self.plan, stage, self.at[stage], why)


def simulate(plan: Plan, *, forward: float = 1.0, backward: float = 2.0) -> tuple[tuple[Span, ...], ...]:
    """Start and end of every compute action, by stage.

    Args:
        forward, backward: time that one pass of a stage takes.

    Raises:
        PlanError: the plan deadlocks, or a message does not match its receive.
    """
    return Simulation(plan, forward, backward).run()
