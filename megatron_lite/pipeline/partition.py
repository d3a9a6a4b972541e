"""Which blocks stand on which stage.

The slowest stage sets the pace of a pipeline, so blocks are placed such that the most expensive stage is as cheap as
possible, counting the embedding with the first stage and the head with the last. Among the placements that reach this,
the most even one is taken (least sum of squared costs), and of those the one with fewer blocks on earlier stages, which
keep the activations of more microbatches. Every block is placed exactly once, in order, and every stage holds at least
one, whether or not the depth divides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"


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
        costs: cost of each block, in any unit; not negative.
        pp: number of stages.
        first, last: blocks on the first and the last stage, where given by hand.
        embed_cost, head_cost: what the ends carry besides blocks, in the same unit.

    Returns:
        pp ranges of block indices.

    Raises:
        ValueError: the blocks do not fit the stages, with the numbers and the nearest valid choices.
    """
    if wrong := partition_problems(len(costs), pp, first=first, last=last):
        raise ValueError("; ".join(wrong))
    assert all(cost >= 0 for cost in (*costs, embed_cost, head_cost)), costs
    depth, sums = len(costs), list(accumulate(costs, initial=0.0))

    def cost(stage: int, begin: int, end: int) -> float:
        return sums[end] - sums[begin] + (embed_cost if stage == 0 else 0.0) + (head_cost if stage == pp - 1 else 0.0)

    def ends(stage: int, begin: int) -> range:
        """Where a stage that begins with this block may end, the stages behind it keeping one block each."""
        given = first if stage == 0 else last if stage == pp - 1 else None
        if given is not None:
            return range(begin + given, begin + given + 1)
        return range(begin + 1, depth - (pp - 1 - stage) + 1)

    least, _ = _best(depth, pp, ends, lambda s, b, e, rest: max(cost(s, b, e), rest))
    limit = least * (1 + 1e-12)  # sums of the same costs in another order may differ in their last bits

    def even(stage: int, begin: int, end: int, rest: float) -> float | None:
        here = cost(stage, begin, end)
        return here * here + rest if here <= limit else None

    _, cuts = _best(depth, pp, ends, even)
    return [range(begin, end) for begin, end in pairwise(cuts)]


def _best(
    depth: int,
    pp: int,
    ends: Callable[[int, int], range],
    combine: Callable[[int, int, int, float], float | None],
) -> tuple[float, tuple[int, ...]]:
    """The cuts that minimise ``combine(stage, begin, end, value of the stages behind)``, earliest cuts first.

    A dynamic program over (stage, its first block), from the last stage to the first: O(pp depth^2).
    """
    behind: dict[int, tuple[float, tuple[int, ...]]] = {depth: (0.0, (depth,))}  # first block -> value, cuts
    for stage in reversed(range(pp)):
        here: dict[int, tuple[float, tuple[int, ...]]] = {}
        for begin in [0] if stage == 0 else range(stage, depth):
            for end in ends(stage, begin):
                if end not in behind:
                    continue
                value = combine(stage, begin, end, behind[end][0])
                if value is not None and (begin not in here or value < here[begin][0]):
                    here[begin] = (value, (begin, *behind[end][1]))
        behind = here
    return behind[0]


def partition_problems(depth: int, pp: int, *, first: int | None = None, last: int | None = None) -> list[str]:
    """Why ``depth`` blocks cannot be placed on ``pp`` stages, with the numbers and a way out; empty where they can."""
    if depth < pp:
        ways = f"use pipeline-model-parallel-size {depth} or less" if depth else "the model needs blocks"
        return [f"{depth} blocks cannot fill {pp} pipeline stages: every stage holds at least one block; {ways}"]
    given = {flag: n for flag, n in ((FIRST, first), (LAST, last)) if n is not None}
    if pp == 1:
        wrong = [f"{flag} {n}" for flag, n in given.items() if n != depth]
        return [f"{' and '.join(wrong)}: the one stage holds all {depth} blocks; leave it out"] if wrong else []
    others, rest = pp - len(given), depth - sum(given.values())
    found = [f"{flag} {n}: every stage holds at least one block; use 1 or more" for flag, n in given.items() if n < 1]
    if found:
        return found
    numbers = f"{' and '.join(f'{flag} {n}' for flag, n in given.items())} of {depth} blocks leave {rest}"
    if others == 0 and rest != 0:
        ways = f"{FIRST} {depth - last}" if last is not None and last < depth else f"{FIRST} {depth - 1} {LAST} 1"
        return [f"{numbers}, and there is no other stage: both together hold all {depth}, as with {ways}"]
    if rest < others:
        ways = f"give at most {depth - others} blocks to the stages that are named"
        return [f"{numbers} for {others} other stages, which hold at least one each: {ways}"]
    return []
