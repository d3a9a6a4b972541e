"""Proof, without running anything, that a plan computes everything once and ends.

Two steps. *Rules* of one stage: every forward and backward pass once and in order, each after its message was posted,
every result sent once and in order after it was computed, at most one receive posted ahead of the message that is taken
next, sums of gradients after the last backward pass and ties after them, nothing missing at the end. *Simulation* of all
stages together (``simulate``): every message meets its receive and nobody waits for ever. Both at once are a proof for
any timing, since queues deliver in order and a stage's program order is fixed: what happens does not depend on when.

The same walk gives what a plan costs: the bubble, and how many microbatches' activations each stage keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_lite.pipeline.action import (
    Action,
    Backward,
    Direction,
    Forward,
    Plan,
    PlanError,
    Recv,
    Reduce,
    Send,
    Sync,
)
from megatron_lite.pipeline.simulate import Span, simulate

_AHEAD = 1  # receives of one queue that may be posted ahead of the message that is taken next


@dataclass(frozen=True)
class Report:
    """What a verified plan costs.

    Attributes:
        peak_microbatches: for each stage, the largest number of microbatches whose activations it keeps at a time (0
            where there is no backward pass).
        makespan: time from the first to the last pass, in the unit of the passes' costs.
        bubble: share of the stages' time in which they compute nothing.
        timeline: every pass of each stage in time.
    """

    peak_microbatches: tuple[int, ...]
    makespan: float
    bubble: float
    timeline: tuple[tuple[Span, ...], ...]


def verify(plan: Plan, *, forward: float = 1.0, backward: float = 2.0) -> Report:
    """Check a plan and return its costs.

    Args:
        forward, backward: time that one pass of a stage takes.

    Raises:
        PlanError: it would hang or compute something wrong; names stage, position and action.
    """
    peaks = tuple(_check_stage(plan, stage) for stage in range(len(plan.stages)))
    timeline = simulate(plan, forward=forward, backward=backward)
    makespan = max(spans[-1].end for spans in timeline)
    work = sum(span.end - span.start for spans in timeline for span in spans)
    return Report(peaks, makespan, 1.0 - work / (makespan * len(timeline)), timeline)


@dataclass
class _Seen:
    """What a stage has done so far. Counts are enough, since everything is done in the order of microbatches."""

    stage: int
    last_stage: int
    computed: dict[Direction, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    posted: dict[Direction, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    sent: dict[Direction, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    buckets: int = 0
    ties: list[str] = field(default_factory=list)

    def source(self, direction: Direction) -> int | None:
        """The stage that messages of this direction come from, None where this stage makes them."""
        source = self.stage - 1 if direction == "forward" else self.stage + 1
        return source if 0 <= source <= self.last_stage else None

    def destination(self, direction: Direction) -> int | None:
        """The stage that this stage's results of this direction go to."""
        return self.source("backward" if direction == "forward" else "forward")


def _check_stage(plan: Plan, stage: int) -> int:
    """The rules of one stage; returns the largest number of microbatches between their forward and backward pass."""
    seen, peak = _Seen(stage, len(plan.stages) - 1), 0
    for position, action in enumerate(plan.stages[stage]):
        for why in _violations(plan, seen, action):
            raise PlanError(plan, stage, position, why)
        _note(seen, action)
        if plan.trains:
            peak = max(peak, seen.computed["forward"] - seen.computed["backward"])
    for why in _missing(plan, seen):
        raise PlanError(plan, stage, len(plan.stages[stage]), why)
    return peak


def _note(seen: _Seen, action: Action) -> None:
    if isinstance(action, Forward | Backward):
        seen.computed["forward" if isinstance(action, Forward) else "backward"] += 1
    elif isinstance(action, Recv):
        seen.posted[action.direction] += 1
    elif isinstance(action, Send):
        seen.sent[action.direction] += 1
    elif isinstance(action, Reduce):
        seen.buckets += 1
    else:
        seen.ties.append(action.tie)


def _violations(plan: Plan, seen: _Seen, action: Action) -> Iterator[str]:
    """What is wrong with this action after what was seen."""
    if isinstance(action, Reduce | Sync):
        yield from _tail_violations(plan, seen, action)
        return
    if seen.buckets or seen.ties:
        yield "it comes after the sum of gradients"
    m = action.microbatch
    if not 0 <= m < plan.microbatches:
        yield f"microbatches are 0 to {plan.microbatches - 1}"
    if isinstance(action, Forward | Backward):
        direction: Direction = "forward" if isinstance(action, Forward) else "backward"
        if m != seen.computed[direction]:
            yield f"the next {direction} pass is that of microbatch {seen.computed[direction]}"
        if seen.source(direction) is not None and m >= seen.posted[direction]:
            yield f"the receive of its {'input' if direction == 'forward' else 'gradient'} has not been posted"
        if direction == "backward" and m >= seen.computed["forward"]:
            yield "its forward pass has not been computed"
    elif isinstance(action, Send):
        if action.peer != seen.destination(action.direction):
            yield f"stage {seen.stage} sends nothing {action.direction} to stage {action.peer}"
        if m != seen.sent[action.direction]:
            yield f"the next to be sent {action.direction} is microbatch {seen.sent[action.direction]}"
        if m >= seen.computed[action.direction]:
            yield "what it sends has not been computed"
    else:
        if action.peer != seen.source(action.direction):
            yield f"stage {seen.stage} gets nothing {action.direction} from stage {action.peer}"
        if m != seen.posted[action.direction]:
            yield f"the next to be received {action.direction} is microbatch {seen.posted[action.direction]}"
        if m - seen.computed[action.direction] > _AHEAD:
            yield f"{_AHEAD} receive may be posted ahead of microbatch {seen.computed[action.direction]}, which is next"


def _tail_violations(plan: Plan, seen: _Seen, action: Reduce | Sync) -> Iterator[str]:
    """What is wrong with a sum of gradients here."""
    if not plan.trains or seen.computed["backward"] != plan.microbatches:
        yield f"{seen.computed['backward']} of {plan.microbatches} backward passes are done"
    if isinstance(action, Reduce):
        if seen.ties:
            yield "buckets are reduced before ties are summed"
        if action.bucket != seen.buckets or action.bucket >= plan.buckets[seen.stage]:
            yield f"of {plan.buckets[seen.stage]} buckets, {seen.buckets} were reduced so far, in order"
        return
    left = [tie for tie in _ties(plan, seen.stage) if tie not in seen.ties]
    if seen.buckets != plan.buckets[seen.stage]:
        yield f"{seen.buckets} of {plan.buckets[seen.stage]} buckets are reduced"
    if action.tie not in left[:1]:
        yield f"the next tie to be summed is {left[0]}" if left else "no tie is left to be summed"


def _missing(plan: Plan, seen: _Seen) -> Iterator[str]:
    """What a stage has not done at its end."""
    wanted = {"forward": plan.microbatches, "backward": plan.microbatches if plan.trains else 0}
    for direction, n in seen.computed.items():
        if n != wanted[direction]:
            yield f"{n} of {wanted[direction]} {direction} passes are there"
        if seen.destination(direction) is not None and seen.sent[direction] != n:
            yield f"{seen.sent[direction]} of {n} results are sent {direction}"
    if seen.buckets != plan.buckets[seen.stage]:
        yield f"{seen.buckets} of {plan.buckets[seen.stage]} buckets are reduced"
    if seen.ties != _ties(plan, seen.stage):
        yield f"{len(seen.ties)} of {len(_ties(plan, seen.stage))} ties are summed"


def _ties(plan: Plan, stage: int) -> list[str]:
    return [name for name, stages in plan.ties if stage in stages]


def draw(plan: Plan, *, forward: int = 1, backward: int = 2) -> str:
    """The plan as text: a row for each stage, a column for each unit of time, ``.`` where a stage waits.

    Args:
        forward, backward: units of time that one pass of a stage takes.

    Raises:
        PlanError: the plan does not verify.
    """
    report = verify(plan, forward=forward, backward=backward)
    width = len(str(plan.microbatches - 1)) + 2
    rows = []
    for stage, spans in enumerate(report.timeline):
        cells = ["."] * int(report.makespan)
        for span in spans:
            start, end = int(span.start), int(span.end)
            cells[start:end] = [str(span.action)] + ["-" * (width - 1)] * (end - start - 1)
        rows.append(f"stage {stage:<3} " + "".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(rows)
