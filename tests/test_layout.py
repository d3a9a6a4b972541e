"""Rank arithmetic, by brute force: against the definition, for many layouts and for thousands of ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.config.problem import ConfigError
from megatron_lite.mesh.layout import AXES, Layout, layout_for, layout_problems, world_problems

sizes = st.integers(1, 5)
layouts = st.builds(Layout, tp=sizes, cp=sizes, dp=sizes, pp=sizes)
some_axes = st.sets(st.sampled_from(AXES)).map(tuple)


def as_tuple(layout: Layout, rank: int) -> tuple[int, ...]:
    c = layout.coords(rank)
    return (c.tp, c.cp, c.dp, c.pp)


def group_by_definition(layout: Layout, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    fixed = [i for i, a in enumerate(AXES) if a not in axes]
    mine = as_tuple(layout, rank)
    return tuple(
        r for r in range(layout.world_size) if all(as_tuple(layout, r)[i] == mine[i] for i in fixed)
    )  # range: in rank order


@given(layouts)
def test_coords_and_rank_are_inverse_and_tp_is_fastest(layout: Layout) -> None:
    # itertools.product varies its last factor fastest: pp, dp, cp, tp is the order of ranks.
    box = itertools.product(range(layout.pp), range(layout.dp), range(layout.cp), range(layout.tp))
    for rank, (pp, dp, cp, tp) in enumerate(box):
        assert as_tuple(layout, rank) == (tp, cp, dp, pp)
        assert layout.rank(tp, cp, dp, pp) == rank
    assert rank + 1 == layout.world_size


@settings(max_examples=60, deadline=None)
@given(layouts, some_axes, st.data())
def test_a_group_is_the_ranks_that_share_the_other_coordinates(layout: Layout, axes: tuple[str, ...], data) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    assert layout.group(rank, axes) == group_by_definition(layout, rank, axes)
    assert len(layout.group(rank, axes)) == layout.size(axes)


@settings(max_examples=60, deadline=None)
@given(layouts, some_axes)
def test_groups_hold_each_rank_once_and_agree_with_group(layout: Layout, axes: tuple[str, ...]) -> None:
    groups = layout.groups(axes)
    assert sorted(r for g in groups for r in g) == list(range(layout.world_size))
    assert [g[0] for g in groups] == sorted(g[0] for g in groups)
    for g in groups:
        assert all(layout.group(r, axes) == g for r in g)


def test_four_thousand_ranks() -> None:
    layout = Layout(tp=8, cp=2, dp=16, pp=16)
    assert layout.world_size == 4096
    for rank in range(4096):
        c = layout.coords(rank)
        assert layout.rank(c.tp, c.cp, c.dp, c.pp) == rank
        assert rank == c.tp + 8 * c.cp + 16 * c.dp + 256 * c.pp
    for n in range(len(AXES) + 1):
        for axes in itertools.combinations(AXES, n):
            groups = layout.groups(axes)
            assert len(groups) * layout.size(axes) == 4096
            assert sorted(r for g in groups for r in g) == list(range(4096))
            for g in groups[:: max(1, len(groups) // 7)]:
                assert g == group_by_definition(layout, g[-1], axes)


@pytest.mark.parametrize(
    ("tp", "kv_heads", "replicas"), [(1, 1, 1), (2, 8, 1), (8, 8, 1), (8, 4, 2), (8, 2, 4), (4, 1, 4)]
)
def test_kv_replicas_are_neighbours_that_hold_one_head(tp: int, kv_heads: int, replicas: int) -> None:
    layout = Layout(tp=tp, dp=2, pp=2)
    assert layout.kv_replicas(kv_heads) == replicas
    groups = layout.kv_replica_groups(kv_heads)
    assert sorted(r for g in groups for r in g) == list(range(layout.world_size))
    for group in groups:
        assert len(group) == replicas
        coords = [layout.coords(r) for r in group]
        assert len({(c.cp, c.dp, c.pp, c.tp // replicas) for c in coords}) == 1  # the same shard of the same tp group
        assert [c.tp % replicas for c in coords] == list(range(replicas))


def test_stage_groups_are_the_holders_with_one_tp_cp_dp() -> None:
    layout = Layout(tp=2, cp=2, dp=3, pp=4)
    groups = layout.stage_groups((3, 0))
    assert len(groups) == 12
    for group in groups:
        a, b = (layout.coords(r) for r in group)
        assert (a.pp, b.pp) == (0, 3)
        assert (a.tp, a.cp, a.dp) == (b.tp, b.cp, b.dp)


@pytest.mark.parametrize("bad", [{"tp": 0}, {"dp": -1}, {"pp": 2.0}, {"virtual": True}])
def test_a_size_is_a_positive_whole_number(bad: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Layout(**bad)


def test_dp_is_what_is_left() -> None:
    assert layout_for(24, tp=2, cp=3, pp=2) == Layout(tp=2, cp=3, dp=2, pp=2)
    assert layout_for(1) == Layout()


def test_three_processes_with_tp_2() -> None:
    (problem,) = world_problems(3, tp=2)
    text = str(problem)
    assert "3 processes" in text and "tp 2" in text
    assert "2 or 4 processes" in text  # the nearest counts
    assert "tp 1 or 3" in text  # the nearest tp


def test_four_processes_with_tp_2_and_pp_3() -> None:
    (problem,) = world_problems(4, tp=2, pp=3)
    text = str(problem)
    assert "4 processes" in text and "= 6" in text
    assert "6 processes" in text
    assert "pp 2" in text  # with tp 2 kept
    assert "tp" not in problem.nearest.split("with 4:")[1]  # no tp goes with pp 3


@given(st.integers(1, 64), st.integers(1, 9), st.integers(1, 4), st.integers(1, 9))
def test_every_nearest_choice_is_valid(world: int, tp: int, cp: int, pp: int) -> None:
    found = world_problems(world, tp=tp, cp=cp, pp=pp)
    assert bool(found) == (world % (tp * cp * pp) != 0)
    if not found:
        return
    counts, choices = found[0].nearest.split(f"; or with {world}: ")
    for count in counts.removesuffix(" processes").split(" or "):
        assert int(count) % (tp * cp * pp) == 0
    for choice in choices.split(", or "):
        for parts in itertools.product(*[p.replace(" or ", " ").split()[1:] for p in choice.split(", ")]):
            names = [p.split()[0] for p in choice.split(", ")]
            changed = {"tp": tp, "cp": cp, "pp": pp} | {n: int(v) for n, v in zip(names, parts, strict=True)}
            assert not world_problems(world, **changed), (world, tp, cp, pp, changed)


def test_a_layout_of_another_size_than_the_job() -> None:
    (problem,) = layout_problems(Layout(tp=2, dp=4), 4)
    assert "8 ranks" in problem.numbers and "4 processes" in problem.numbers
    assert "dp 2" in problem.nearest
    assert not layout_problems(Layout(tp=2, dp=2), 4)
    (problem,) = layout_problems(Layout(virtual=2), 1)
    assert "virtual" in problem.what
