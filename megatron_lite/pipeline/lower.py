"""From compute actions to a whole plan: who sends what to whom, and when gradients are summed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron_lite.pipeline.action import Action, Backward, Forward, Plan, Recv, Reduce, Send, Sync
from megatron_lite.pipeline.schedules import SCHEDULES


def lower(
    schedule: str,
    pp: int,
    microbatches: int,
    *,
    buckets: Sequence[int] = (),
    ties: Mapping[str, tuple[int, ...]] | None = None,
) -> Plan:
    """The plan of a schedule.

    Args:
        schedule: a name in :data:`megatron_lite.pipeline.schedules.SCHEDULES`.
        pp, microbatches: sizes, each at least 1.
        buckets: number of gradient buckets of each stage.
        ties: stages that hold each tied tensor.

    Hidden states come from the stage before and go to the stage after; their gradients the other way. A stage receives
    right before it computes and sends right after. Sums of gradients follow the last backward pass.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown pipeline schedule {schedule!r}: one of {', '.join(SCHEDULES)}")
    if microbatches < 1 or pp < 1:
        raise ValueError(f"a plan needs at least one stage and one microbatch, not {pp} and {microbatches}")
    stages = []
    for stage in range(pp):
        actions = list(_with_messages(schedule, stage, pp, microbatches))
        if any(isinstance(a, Backward) for a in actions):
            actions += [Reduce(b) for b in range(buckets[stage] if buckets else 0)]
            actions += [Sync(name, held) for name, held in sorted((ties or {}).items()) if stage in held and len(held) > 1]
        stages.append(tuple(actions))
    return Plan(schedule, microbatches, tuple(stages))


def _with_messages(schedule: str, stage: int, pp: int, microbatches: int) -> Iterator[Action]:
    for action in SCHEDULES[schedule](stage, pp, microbatches):
        m = action.microbatch
        if isinstance(action, Forward):
            if stage > 0:
                yield Recv("forward", m, stage - 1)
            yield action
            if stage < pp - 1:
                yield Send("forward", m, stage + 1)
        else:
            if stage < pp - 1:
                yield Recv("backward", m, stage + 1)
            yield action
            if stage > 0:
                yield Send("backward", m, stage - 1)
