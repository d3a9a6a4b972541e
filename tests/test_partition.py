"""Which blocks stand on which stage: against every possible placement, and in words where there is none."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.pipeline.partition import partition, partition_problems


def all_placements(depth: int, pp: int, first: int | None, last: int | None) -> list[list[range]]:
    """Every way to cut ``depth`` blocks into ``pp`` runs of at least one, by brute force."""
    found = []
    for cuts in combinations(range(1, depth), pp - 1):
        edges = [0, *cuts, depth]
        ranges = [range(a, b) for a, b in pairwise(edges)]
        if first in (None, len(ranges[0])) and last in (None, len(ranges[-1])):
            found.append(ranges)
    return found


def stage_costs(ranges: list[range], costs: list[int], embed: int, head: int) -> list[int]:
    found = [sum(costs[i] for i in r) for r in ranges]
    found[0] += embed
    found[-1] += head
    return found


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
    st.integers(1, 5),
    st.integers(0, 20),
    st.integers(0, 20),
    st.one_of(st.none(), st.integers(0, 5)),
    st.one_of(st.none(), st.integers(0, 5)),
)
@settings(max_examples=400, deadline=None)
def test_the_slowest_stage_is_as_fast_as_possible(
    costs: list[int], pp: int, embed: int, head: int, first: int | None, last: int | None
) -> None:
    choices = all_placements(len(costs), pp, first, last)
    if not choices:
        assert partition_problems(len(costs), pp, first=first, last=last)
        with pytest.raises(ValueError, match="block"):
            partition(costs, pp, first=first, last=last)
        return
    got = partition(costs, pp, first=first, last=last, embed_cost=embed, head_cost=head)

    def key(ranges: list[range]) -> tuple[int, int, list[int]]:
        load = stage_costs(ranges, costs, embed, head)
        return max(load), sum(x * x for x in load), [len(r) for r in ranges]

    assert got == min(choices, key=key)
    scaled = partition(
        [c * 0.1 for c in costs], pp, first=first, last=last, embed_cost=embed * 0.1, head_cost=head * 0.1
    )
    assert max(stage_costs(scaled, costs, embed, head)) == key(got)[0]  # fractions: rounding moves no maximum


def test_every_block_once_in_order_and_no_stage_empty() -> None:
    """Depth 1 to 12, up to 4 stages, with and without given ends; what cannot be placed is told with its numbers."""
    ends = (None, 0, 1, 2, 3, 5)
    for depth, pp, first, last in product(range(1, 13), range(1, 5), ends, ends):
        try:
            ranges = partition([1.0] * depth, pp, first=first, last=last, head_cost=0.7)
        except ValueError as error:
            assert str(depth) in str(error) or "0" in str(error)
            assert not all_placements(depth, pp, first, last)
            continue
        assert len(ranges) == pp and all(len(r) >= 1 for r in ranges)
        assert [i for r in ranges for i in r] == list(range(depth))
        assert first in (None, len(ranges[0])) and last in (None, len(ranges[-1]))


def test_equal_blocks_are_spread_evenly() -> None:
    def sizes(depth: int, pp: int, head: float = 0.0) -> list[int]:
        return [len(r) for r in partition([1.0] * depth, pp, head_cost=head)]

    assert sizes(8, 4) == [2, 2, 2, 2]
    assert sizes(5, 2) == [2, 3]  # earlier stages keep more microbatches, so they get the smaller share
    assert sizes(7, 3) == [2, 2, 3]
    assert sizes(32, 8, head=2.4) == [4, 4, 4, 4, 4, 5, 5, 2]  # a large vocabulary: the slowest stage does 5, not 6.4
    assert sizes(126, 16, head=2.0) == [8] * 15 + [6]


@pytest.mark.parametrize(
    ("depth", "pp", "first", "last", "text"),
    [
        (3, 4, None, None, "3 blocks cannot fill 4 pipeline stages: .* use pipeline-model-parallel-size 3 or less"),
        (8, 2, 0, None, "--decoder-first-pipeline-num-layers 0: every stage holds at least one block; use 1 or more"),
        (8, 2, 3, 3, "3 of 8 blocks leave 2, .* no other stage: .* --decoder-first-pipeline-num-layers 5"),
        (8, 4, 7, None, "7 of 8 blocks leave 1 for 3 other stages, .* at most 5 blocks"),
        (
            8,
            3,
            4,
            5,
            "--decoder-last-pipeline-num-layers 5 of 8 blocks leave -1 for 1 other stages, .* at most 7 blocks",
        ),
        (5, 1, 3, None, "--decoder-first-pipeline-num-layers 3: the one stage holds all 5 blocks; leave it out"),
    ],
)
def test_what_does_not_fit_is_told(depth: int, pp: int, first: int | None, last: int | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        partition([1.0] * depth, pp, first=first, last=last)
