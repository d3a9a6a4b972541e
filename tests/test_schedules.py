"""Schedules as data: what they cost, and that the verifier lets nothing through that would hang or compute nonsense."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import combinations, product

import pytest

from megatron_lite.pipeline.action import Action, Backward, Forward, Plan, PlanError, Recv, Reduce, Send, Sync
from megatron_lite.pipeline.lower import lower
from megatron_lite.pipeline.verify import draw, verify

SWEEP = list(product(range(1, 9), range(1, 17)))  # stages, microbatches


def full_plan(schedule: str, pp: int, microbatches: int) -> Plan:
    """A plan with several buckets and, where there are stages enough, two ties."""
    ties = {"a": (0, pp - 1), "b": tuple(range(pp))} if pp > 1 else {"a": (0,)}
    return lower(schedule, pp, microbatches, buckets=[s % 3 for s in range(pp)], ties=ties)


def corrupted(plan: Plan, stage: int, actions: list[Action]) -> Plan:
    stages = list(plan.stages)
    stages[stage] = tuple(actions)
    return replace(plan, stages=tuple(stages))


def run_at_random(plan: Plan, rng: random.Random) -> list[list[str]] | None:
    """An executor that shares nothing with the verifier: stages take turns at random, messages meet in their queues.

    The passes each stage computed, or None if nobody can go on or a pass had no input.
    """
    at, done = [0] * len(plan.stages), [[] for _ in plan.stages]
    sent, got, holders = defaultdict(list), defaultdict(list), dict(plan.ties)
    here: dict[str, set[int]] = defaultdict(set)
    while True:
        live = [s for s, actions in enumerate(plan.stages) if at[s] < len(actions)]
        if not live:
            return done if all(len(got[q]) == len(sent[q]) for q in sent) else None
        rng.shuffle(live)
        for s in live:
            action = plan.stages[s][at[s]]
            if isinstance(action, Forward | Backward):
                forward = isinstance(action, Forward)
                source = s - 1 if forward else s + 1
                if 0 <= source < len(plan.stages):
                    queue = (source, s, "forward" if forward else "backward")
                    if action.microbatch not in got[queue]:
                        return None
                    if action.microbatch not in sent[queue][: len(got[queue])]:
                        continue
                if not forward and f"F{action.microbatch}" not in done[s]:
                    return None
                done[s].append(str(action))
            elif isinstance(action, Send):
                queue = (s, action.peer, action.direction)
                if f"{action.direction[0].upper()}{action.microbatch}" not in done[s]:
                    return None
                if len(sent[queue]) > len(got[queue]):
                    continue
                sent[queue].append(action.microbatch)
            elif isinstance(action, Recv):
                got[action.peer, s, action.direction].append(action.microbatch)
            elif isinstance(action, Sync):
                here[action.tie].add(s)
                if here[action.tie] != set(holders[action.tie]):
                    continue
            at[s] += 1
            break
        else:
            return None
        if any(a != b for q in sent for a, b in zip(sent[q], got[q], strict=False)):
            return None


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_size_verifies_and_costs_what_theory_says(schedule: str) -> None:
    for pp, m in SWEEP:
        report = verify(full_plan(schedule, pp, m))
        assert report.makespan == 3 * (m + pp - 1)
        assert report.bubble == pytest.approx((pp - 1) / (m + pp - 1), abs=1e-12)
        kept = [min(m, pp - s) for s in range(pp)] if schedule == "1f1b" else [m] * pp
        assert list(report.peak_microbatches) == kept
        for forward, backward in ((1, 1), (2, 3), (3, 1)):  # the bubble does not depend on how long passes take
            other = verify(full_plan(schedule, pp, m), forward=forward, backward=backward)
            assert other.makespan == (forward + backward) * (m + pp - 1)


def test_evaluation_keeps_nothing_and_sums_nothing() -> None:
    for pp, m in SWEEP:
        plan = lower("forward", pp, m, ties={"a": (0, pp - 1)})
        report = verify(plan)
        assert report.makespan == m + pp - 1 and set(report.peak_microbatches) == {0}
        assert not any(isinstance(a, Backward | Reduce | Sync) for actions in plan.stages for a in actions)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "forward"])
def test_any_timing_runs_to_the_end(schedule: str) -> None:
    rng = random.Random(1)
    for pp, m in product((1, 2, 3, 5, 8), (1, 2, 3, 7)):
        plan = full_plan(schedule, pp, m)
        wanted = [[str(a) for a in actions if isinstance(a, Forward | Backward)] for actions in plan.stages]
        assert all(run_at_random(plan, rng) == wanted for _ in range(3))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_at_most_one_receive_waits_ahead(schedule: str) -> None:
    for pp, m in SWEEP:
        for actions in lower(schedule, pp, m).stages:
            posted: dict[str, int] = defaultdict(int)
            for action in actions:
                if isinstance(action, Recv):
                    posted[action.direction] += 1
                elif isinstance(action, Forward | Backward):
                    kind = "forward" if isinstance(action, Forward) else "backward"
                    if posted[kind]:
                        assert posted[kind] <= 2  # the one that is taken now, and one ahead
                        posted[kind] -= 1


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "forward"])
def test_a_dropped_or_doubled_action_is_refused(schedule: str) -> None:
    for pp, m in product((1, 2, 3, 5), (1, 2, 4)):
        plan = full_plan(schedule, pp, m)
        for stage, actions in enumerate(plan.stages):
            for i, action in enumerate(actions):
                for bad in ([*actions[:i], *actions[i + 1 :]], [*actions[:i], action, *actions[i:]]):
                    with pytest.raises(PlanError) as error:
                        verify(corrupted(plan, stage, bad))
                    found = error.value
                    assert 0 <= found.stage < pp and 0 <= found.position <= len(bad)
                    assert f"stage {found.stage}" in str(found)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_swapped_actions_are_refused_unless_nothing_depends_on_their_order(schedule: str) -> None:
    rng, refused, harmless = random.Random(2), 0, 0
    for pp, m in product((2, 3, 4), (1, 2, 4)):
        plan = full_plan(schedule, pp, m)
        for stage, actions in enumerate(plan.stages):
            for i, j in combinations(range(len(actions)), 2):
                bad = list(actions)
                bad[i], bad[j] = bad[j], bad[i]
                try:
                    verify(corrupted(plan, stage, bad))
                except PlanError:
                    refused += 1
                    continue
                harmless += 1
                # What got through runs to the end in any order, each stage computing every pass, none twice.
                for _ in range(2):
                    done = run_at_random(corrupted(plan, stage, bad), rng)
                    assert done is not None
                    wanted = sorted(str(a) for a in actions if isinstance(a, Forward | Backward))
                    assert sorted(done[stage]) == wanted
                assert type(bad[i]) is not type(bad[j]) or getattr(bad[i], "direction", 0) != getattr(
                    bad[j], "direction", 0
                )
    assert refused > 10 * harmless > 0


def test_what_is_wrong_is_named() -> None:
    plan = lower("1f1b", 3, 4, ties={"embed": (0, 2)})

    def why(stage: int, change: list[Action]) -> str:
        with pytest.raises(PlanError) as error:
            verify(corrupted(plan, stage, change))
        return str(error.value)

    first, middle, last = (list(actions) for actions in plan.stages)
    swapped = [Forward(1) if a == Forward(0) else Forward(0) if a == Forward(1) else a for a in first]
    assert "stage 0 of 3, F1 (position 0): the next forward pass is that of microbatch 0" in why(0, swapped)
    assert "Send forward 0 to stage 2 (position 2): what it sends has not been computed" in why(
        1, [middle[0], middle[1], middle[3], middle[2], *middle[4:]]
    )
    assert "Recv forward 1 from stage 0 (position 0): the next to be received forward is microbatch 0" in why(
        1, middle[1:]
    )
    ahead = [a for a in last if isinstance(a, Recv)] + [a for a in last if not isinstance(a, Recv)]
    assert "1 receive may be posted ahead of microbatch 0" in why(2, ahead)
    assert "Reduce 0" in why(0, [Reduce(0), *first]) and "0 of 4 backward passes" in why(0, [Reduce(0), *first])
    assert "the end: 0 of 1 ties are summed" in why(0, first[:-1])
    assert "0 of 1 buckets are reduced" in why(0, [*first[:-2], first[-1], first[-2]])
    assert "microbatches are 0 to 3" in why(0, [*first[:-2], Forward(4), *first[-2:]])


def test_a_deadlock_is_found_and_its_waits_are_told() -> None:
    """Two stages of two schedules: each obeys every rule, and with enough microbatches each waits for the other."""
    for m in range(1, 9):
        both = replace(lower("gpipe", 2, m), stages=(lower("gpipe", 2, m).stages[0], lower("1f1b", 2, m).stages[1]))
        if m <= 5:
            verify(both)
            continue
        assert run_at_random(both, random.Random(3)) is None
        with pytest.raises(PlanError) as error:
            verify(both)
        assert (
            "deadlock: stage 0 at Send forward 4 to stage 1 waits for stage 1 to receive forward 3; "
            "stage 1 at Send backward 1 to stage 0 waits for stage 0 to receive backward 0"
        ) in str(error.value)


def test_messages_go_to_neighbours_only() -> None:
    plan = lower("forward", 3, 2)
    for stage, extra, text in (
        (2, Send("forward", 0, 0), "stage 2 sends nothing forward to stage 0"),
        (1, Send("forward", 2, 2), "microbatches are 0 to 1"),
        (0, Recv("forward", 0, 1), "stage 0 gets nothing forward from stage 1"),
        (0, Recv("backward", 0, 2), "stage 0 gets nothing backward from stage 2"),
    ):
        with pytest.raises(PlanError, match=text):
            verify(corrupted(plan, stage, [*plan.stages[stage], extra]))


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown pipeline schedule 'zigzag': one of gpipe, 1f1b, forward"):
        lower("zigzag", 2, 2)
    for pp, m in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one stage and one microbatch"):
            lower("gpipe", pp, m)


def test_drawing() -> None:
    assert draw(lower("1f1b", 2, 3)).splitlines() == [
        "stage 0   F0 F1 .  .  B0 -- F2 B1 -- .  B2 --",
        "stage 1   .  F0 B0 -- F1 B1 -- F2 B2 -- .  .",
    ]
    rows = draw(lower("gpipe", 3, 11)).splitlines()
    assert len(rows) == 3 and all(f"B{m}" in row for row in rows for m in range(11))
    assert len({len(row.split()) for row in rows}) == 1  # every row is as long as the step
    assert draw(lower("gpipe", 1, 2), forward=2, backward=1) == "stage 0   F0 -- F1 -- B0 B1"
