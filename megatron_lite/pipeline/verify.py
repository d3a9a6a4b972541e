"""Proof, without running anything, that a plan computes everything once and ends.

The model of communication holds for gloo and NCCL alike. Each (edge, direction) is one in-order queue. A receive ends
when the message at its place in the queue has been sent; a send starts at once, but not before the one before it in its
queue has met its receive (the runtime waits for it there), so at most one send of a queue is under way. The host runs
its actions in program order. Nothing is tagged: the n-th receive of a queue gets the n-th send, and the verifier checks
that the two name the same microbatch. Sums over stages (ties) are rendezvous of all holders.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megatron_lite.pipeline.action import Action, Backward, Direction, Forward, Plan, Recv, Reduce, Send, Sync

Edge = tuple[int, int, Direction]


class PlanError(AssertionError):
    """A plan that would hang or compute something wrong; the text names stage, position and action."""


@dataclass(frozen=True)
class Report:
    """What a verified plan costs.

    Attributes:
        peak_microbatches: for each stage, the largest number of microbatches whose activations it keeps at a time.
        makespan: time from first to last action, with a forward pass taking ``forward`` and a backward ``backward``.
        bubble: share of the stages' time in which they compute nothing.
    """

    peak_microbatches: tuple[int, ...]
    makespan: float
    bubble: float


def verify(plan: Plan, *, forward: float = 1.0, backward: float = 2.0) -> Report:
    """Check a plan and return its costs. Raises PlanError."""
    for stage, actions in enumerate(plan.stages):
        _check_stage(plan, stage, actions)
    makespan = _simulate(plan, forward, backward)
    work = sum(plan.microbatches * (forward + (backward if plan.trains else 0.0)) for _ in plan.stages)
    peaks = tuple(_peak(actions) for actions in plan.stages)
    return Report(peaks, makespan, 1.0 - work / (makespan * len(plan.stages)))


def _fail(stage: int, position: int, action: Action | None, why: str) -> PlanError:
    what = "the end" if action is None else f"{action} (position {position})"
    return PlanError(f"stage {stage}, {what}: {why}")


def _check_stage(plan: Plan, stage: int, actions: tuple[Action, ...]) -> None:
    """Each pass exactly once and in order, inputs received before, outputs sent after, sums at the end."""
    pp, done_f, done_b = len(plan.stages), 0, 0
    received: set[tuple[Direction, int]] = set()
    sent: set[tuple[Direction, int]] = set()
    summed: list[Action] = []
    for position, action in enumerate(actions):
        if summed and not isinstance(action, Reduce | Sync):
            raise _fail(stage, position, action, f"it comes after {summed[-1]}, which sums finished gradients")
        if isinstance(action, Forward):
            if action.microbatch != done_f:
                raise _fail(stage, position, action, f"the next forward pass is F{done_f}")
            if stage > 0 and ("forward", action.microbatch) not in received:
                raise _fail(stage, position, action, "its input has not been received")
            done_f += 1
        elif isinstance(action, Backward):
            if action.microbatch != done_b or done_b >= done_f:
                raise _fail(stage, position, action, f"the next backward pass is B{done_b}, after F{done_b}")
            if stage < pp - 1 and ("backward", action.microbatch) not in received:
                raise _fail(stage, position, action, "the gradient of its output has not been received")
            done_b += 1
        elif isinstance(action, Recv):
            _check_peer(stage, position, action, pp, action.peer, before=action.direction == "forward")
            received.add((action.direction, action.microbatch))
        elif isinstance(action, Send):
            _check_peer(stage, position, action, pp, action.peer, before=action.direction == "backward")
            done = done_f if action.direction == "forward" else done_b
            if action.microbatch >= done:
                raise _fail(stage, position, action, "what it sends has not been computed")
            if (action.direction, action.microbatch) in sent:
                raise _fail(stage, position, action, "it has been sent already")
            sent.add((action.direction, action.microbatch))
        else:
            if action in summed:
                raise _fail(stage, position, action, "it stands there twice")
            if isinstance(action, Reduce) and any(isinstance(a, Sync) for a in summed):
                raise _fail(stage, position, action, "buckets are launched before ties are summed")
            if not plan.trains or done_b != plan.microbatches:
                raise _fail(stage, position, action, f"only {done_b} of {plan.microbatches} backward passes are done")
            summed.append(action)
    if done_f != plan.microbatches or (plan.trains and done_b != plan.microbatches):
        raise _fail(stage, len(actions), None, f"{done_f} forward and {done_b} backward passes of {plan.microbatches}")


def _check_peer(stage: int, position: int, action: Action, pp: int, peer: int, *, before: bool) -> None:
    wanted = stage - 1 if before else stage + 1
    if peer != wanted or not 0 <= peer < pp:
        raise _fail(stage, position, action, f"its peer is no neighbour on that side (stages 0 to {pp - 1})")


def _simulate(plan: Plan, forward: float, backward: float) -> float:
    """Run the model; returns the makespan. Raises PlanError where nothing moves any more or messages do not match."""
    pp = len(plan.stages)
    at, clock = [0] * pp, [0.0] * pp
    sends: dict[Edge, list[tuple[int, float]]] = defaultdict(list)  # (microbatch, time at which it was sent)
    receives: dict[Edge, list[float]] = defaultdict(list)  # times at which receives ended
    waiting: dict[str, dict[int, float]] = defaultdict(dict)  # tie -> stage -> time of arrival
    released: dict[str, float] = {}

    def step(stage: int, action: Action) -> bool:
        """Do the action if it can be done now."""
        if isinstance(action, Forward | Backward):
            clock[stage] += forward if isinstance(action, Forward) else backward
        elif isinstance(action, Send):
            edge: Edge = (stage, action.peer, action.direction)
            under_way = len(sends[edge])
            if under_way > 0:
                if len(receives[edge]) < under_way:  # the send before has not met its receive
                    return False
                clock[stage] = max(clock[stage], receives[edge][under_way - 1])
            sends[edge].append((action.microbatch, clock[stage]))
        elif isinstance(action, Recv):
            edge = (action.peer, stage, action.direction)
            number = len(receives[edge])
            if len(sends[edge]) <= number:
                return False
            microbatch, when = sends[edge][number]
            if microbatch != action.microbatch:
                raise _fail(stage, at[stage], action, f"the message at this place of the queue is microbatch {microbatch}")
            clock[stage] = max(clock[stage], when)
            receives[edge].append(clock[stage])
        elif isinstance(action, Sync):
            waiting[action.tie][stage] = clock[stage]
            if set(waiting[action.tie]) >= set(action.stages):
                released[action.tie] = max(waiting[action.tie].values())
            if action.tie not in released:
                return False
            clock[stage] = max(clock[stage], released[action.tie])
        return True

    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(plan.stages):
            while at[stage] < len(actions) and step(stage, actions[at[stage]]):
                at[stage] += 1
                moved = True
    stuck = [(s, at[s], actions[at[s]]) for s, actions in enumerate(plan.stages) if at[s] < len(actions)]
    if stuck:
        raise PlanError("deadlock: " + "; ".join(f"stage {s} waits at {a} (position {p})" for s, p, a in stuck))
    for (src, dst, direction), queue in sends.items():
        got = len(receives[src, dst, direction])
        if got != len(queue):
            raise PlanError(f"stage {src} sends {len(queue)} {direction} messages to stage {dst}, which receives {got}")
    return max(clock)


def _peak(actions: tuple[Action, ...]) -> int:
    """Largest number of microbatches between their forward and backward pass (1 where there is no backward)."""
    if not any(isinstance(a, Backward) for a in actions):
        return 1
    kept = peak = 0
    for action in actions:
        kept += isinstance(action, Forward)
        kept -= isinstance(action, Backward)
        peak = max(peak, kept)
    return peak


def draw(plan: Plan, *, forward: int = 1, backward: int = 2) -> str:
    """The plan as text: a row per stage, a column per unit of time."""
    width = len(str(max(0, plan.microbatches - 1))) + 2
    rows = []
    times = _times(plan, forward, backward)
    end = max((start + length for row in times for _, start, length in row), default=0)
    for stage, row in enumerate(times):
        cells = ["." + " " * (width - 1)] * end
        for label, start, length in row:
            cells[start] = label.ljust(width)
            for i in range(start + 1, start + length):
                cells[i] = "-" * (width - 1) + " "
        rows.append(f"stage {stage:<3} " + "".join(cells).rstrip())
    return "\n".join(rows)


def _times(plan: Plan, forward: int, backward: int) -> list[list[tuple[str, int, int]]]:
    """(label, start, length) of every pass, each as early as its inputs allow."""
    ready: dict[tuple[str, int, int], int] = {}  # (kind, stage, microbatch) -> end
    rows: list[list[tuple[str, int, int]]] = [[] for _ in plan.stages]
    todo = [[a for a in actions if isinstance(a, Forward | Backward)] for actions in plan.stages]
    at, clock, pp = [0] * len(todo), [0] * len(todo), len(todo)
    while any(i < len(t) for i, t in zip(at, todo, strict=True)):
        for s in range(pp):
            while at[s] < len(todo[s]):
                action = todo[s][at[s]]
                kind, before = ("F", s - 1) if isinstance(action, Forward) else ("B", s + 1)
                needs = (kind, before, action.microbatch)
                if 0 <= before < pp and needs not in ready:
                    break
                start = max(clock[s], ready.get(needs, 0))
                length = forward if kind == "F" else backward
                rows[s].append((str(action), start, length))
                clock[s] = ready[kind, s, action.microbatch] = start + length
                at[s] += 1
    return rows
