"""Which blocks stand on which stage.

Depth that the stages divide is split evenly, as everybody expects. Otherwise, or where the first or last stage is given
by hand, blocks are placed so that the most expensive stage is as cheap as possible, counting the embedding with the first
stage and the head with the last. Every block is placed exactly once, in order, and no stage is left without one.
"""

from __future__ import annotations

from collections.abc import Sequence


def partition(
    costs: Sequence[float],
    pp: int,
    *,
    first: int | None = None,
    last: int | None = None,
    embed_cost: float = 0.0,
    head_cost: float = 0.0,
) -> list[range]:
    """Blocks of each stage.

    Args:
        costs: cost of each block, in any unit.
        pp: number of stages.
        first, last: blocks on the first and the last stage, where given by hand.
        embed_cost, head_cost: what the ends carry besides blocks, in the same unit.

    Returns pp ranges of block indices. Raises ValueError, with the numbers, where there are too few blocks.
    """
    if wrong := partition_problems(len(costs), pp, first=first, last=last):
        raise ValueError("; ".join(wrong))
    depth = len(costs)
    if first is None and last is None and depth % pp == 0:
        return [range(depth // pp * s, depth // pp * (s + 1)) for s in range(pp)]
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(stage: int, begin: int, end: int) -> float:
        return sums[end] - sums[begin] + (embed_cost if stage == 0 else 0.0) + (head_cost if stage == pp - 1 else 0.0)

    def legal(stage: int, begin: int, end: int) -> bool:
        size = end - begin
        return size >= 1 and not (stage == 0 and first not in (None, size)) and not (stage == pp - 1 and last not in (None, size))

    # Smallest possible maximum, then among those the evenest (least sum of squares), then the earliest cuts.
    limit = _best(depth, pp, legal, lambda s, b, e, rest: max(cost_of(s, b, e), rest))[0]
    bound = limit * (1 + 1e-12)

    def square(stage: int, begin: int, end: int, rest: float) -> float:
        cost = cost_of(stage, begin, end)
        return float("inf") if cost > bound else cost * cost + rest

    cuts = _best(depth, pp, legal, square)[1]
    return [range(b, e) for b, e in zip(cuts, cuts[1:], strict=False)]


def _best(depth, pp, legal, combine):  # type: ignore[no-untyped-def]
    """Dynamic program over (stage, first block): (value, cuts) that minimise ``combine`` folded over the stages."""
    infinite = float("inf")
    table = {(pp, depth): (0.0, [depth])}
    for stage in reversed(range(pp)):
        for begin in range(depth):
            best = (infinite, None)
            for end in range(begin + 1, depth + 1):
                rest = table.get((stage + 1, end))
                if rest is None or not legal(stage, begin, end):
                    continue
                value = combine(stage, begin, end, rest[0])
                if value < best[0]:
                    best = (value, [begin, *rest[1]])
            if best[1] is not None:
                table[stage, begin] = best
    return table[0, 0]


def partition_problems(depth: int, pp: int, *, first: int | None = None, last: int | None = None) -> list[str]:
    """Why ``depth`` blocks cannot be placed on ``pp`` stages, with the numbers and a way out; empty where they can."""
    if depth < pp:
        return [f"{depth} blocks cannot fill {pp} pipeline stages: every stage holds at least one block, so use pp {depth} or less"]
    if pp == 1:
        given = [n for n in (first, last) if n not in (None, depth)]
        return [f"one stage holds all {depth} blocks, not {given[0]}"] if given else []
    found = []
    fixed = sum(n for n in (first, last) if n is not None)
    free = pp - sum(n is not None for n in (first, last))
    for flag, n in (("--decoder-first-pipeline-num-layers", first), ("--decoder-last-pipeline-num-layers", last)):
        if n is not None and n < 1:
            found.append(f"{flag} {n}: a stage holds at least one block")
    if not found and depth - fixed < free:
        found.append(f"{fixed} of {depth} blocks are fixed on the ends: {depth - fixed} are left for {free} other stages, which need one each")
    if not found and free == 0 and fixed != depth:
        found.append(f"the first and the last stage hold {fixed} blocks together, the model has {depth}")
    return found
