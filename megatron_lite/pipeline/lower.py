"""From compute actions to a whole plan: who sends what to whom, when receives are posted, when gradients are summed.

Hidden states come from the stage before and go to the stage after; their gradients go the other way. A result is sent
right after it was computed. A receive is posted one compute action ahead of the one that takes it: the message travels
while that one runs. Sums of gradients follow the last backward pass, tied tensors last, since they wait for other
stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron_lite.pipeline.action import Action, Backward, Forward, Plan, Recv, Reduce, Send, Sync
from megatron_lite.pipeline.schedules import SCHEDULES


def lower(
    schedule: str,
    pp: int,
    microbatches: int,
    *,
    buckets: Sequence[int] | None = None,
    ties: Mapping[str, tuple[int, ...]] | None = None,
) -> Plan:
    """The plan of a schedule.

    Args:
        schedule: a name in :data:`megatron_lite.pipeline.schedules.SCHEDULES`.
        pp, microbatches: sizes, each at least 1.
        buckets: number of gradient buckets of each stage; None: one each.
        ties: stages that hold each tied tensor; those of one holder need no sum.

    Raises:
        ValueError: no such schedule, or a size below 1.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown pipeline schedule {schedule!r}: one of {', '.join(SCHEDULES)}")
    if microbatches < 1 or pp < 1:
        raise ValueError(f"a plan needs at least one stage and one microbatch, not {pp} and {microbatches}")
    computes = [list(SCHEDULES[schedule](stage, pp, microbatches)) for stage in range(pp)]
    trains = any(isinstance(action, Backward) for action in computes[0])
    counts = tuple(buckets if buckets is not None else [1] * pp) if trains else (0,) * pp
    assert len(counts) == pp, (counts, pp)
    held = tuple((name, stages) for name, stages in sorted((ties or {}).items()) if trains and len(stages) > 1)
    stages = []
    for stage, own in enumerate(computes):
        actions = list(_with_messages(own, stage, pp))
        actions += [Reduce(b) for b in range(counts[stage])]
        actions += [Sync(name) for name, holders in held if stage in holders]
        stages.append(tuple(actions))
    return Plan(schedule, microbatches, tuple(stages), trains, counts, held)


def _with_messages(computes: Sequence[Forward | Backward], stage: int, pp: int) -> Iterator[Action]:
    """One stage's compute actions with its receives and sends."""
    yield from _receive(computes[0], stage, pp)
    for i, action in enumerate(computes):
        if i + 1 < len(computes):
            yield from _receive(computes[i + 1], stage, pp)
        yield action
        if isinstance(action, Forward) and stage < pp - 1:
            yield Send("forward", action.microbatch, stage + 1)
        if isinstance(action, Backward) and stage > 0:
            yield Send("backward", action.microbatch, stage - 1)


def _receive(action: Forward | Backward, stage: int, pp: int) -> Iterator[Recv]:
    """The receive that a compute action needs, if it needs one."""
    if isinstance(action, Forward) and stage > 0:
        yield Recv("forward", action.microbatch, stage - 1)
    if isinstance(action, Backward) and stage < pp - 1:
        yield Recv("backward", action.microbatch, stage + 1)
