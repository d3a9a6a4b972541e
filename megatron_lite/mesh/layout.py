"""Which rank does what: pure arithmetic.

The ranks of a job form a box with four axes. Fastest first they are ``tp`` (tensor), ``cp`` (context), ``dp`` (data)
and ``pp`` (pipeline): rank = tp + TP * (cp + CP * (dp + DP * pp)). Ranks that talk most are therefore neighbours, on
one machine where possible, and the stages of a pipeline, which talk least, are furthest apart. A *group* of some axes
is the set of ranks that agree in every other coordinate.

Nothing here needs torch or a process group, so layouts of thousands of ranks are tested by brute force, and the
planner and the dry run use the same numbers as a real start.

When a model has fewer key/value heads than tp ranks, tp splits into ``kv_shard`` (slow) times ``kv_replica`` (fast):
``tp = shard * replicas + replica``; the replicas of one shard hold the same key/value head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_lite.config.problem import ConfigError, Problem, either, nearest_multiples

AXES = ("tp", "cp", "dp", "pp")  # fastest first


@dataclass(frozen=True)
class Coords:
    """Where one rank stands on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Layout:
    """The size of each axis; ``virtual`` is the number of model chunks on each pipeline rank.

    Raises:
        ConfigError (a ValueError): if a size is not a whole number of at least 1.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    virtual: int = 1

    def __post_init__(self) -> None:
        bad = [(n, getattr(self, n)) for n in (*AXES, "virtual")]
        bad = [(n, v) for n, v in bad if isinstance(v, bool) or not isinstance(v, int) or v < 1]
        if bad:
            raise ConfigError(
                [Problem(f"{n} is not a size", f"{n} = {v!r}", "a whole number, 1 or more") for n, v in bad]
            )

    @property
    def world_size(self) -> int:
        """Number of ranks: tp * cp * dp * pp."""
        return self.tp * self.cp * self.dp * self.pp

    def size(self, axes: Sequence[str]) -> int:
        """Number of ranks in a group of these axes."""
        n = 1
        for axis in _checked(axes):
            n *= getattr(self, axis)
        return n

    def coords(self, rank: int) -> Coords:
        """Coordinates of a rank."""
        assert 0 <= rank < self.world_size, (rank, self)
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coords(tp, cp, dp, pp)

    def rank(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Rank at these coordinates."""
        assert 0 <= tp < self.tp and 0 <= cp < self.cp and 0 <= dp < self.dp and 0 <= pp < self.pp, (
            tp,
            cp,
            dp,
            pp,
            self,
        )
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that share every coordinate of ``rank`` except those of ``axes``, in rank order."""
        free = _checked(axes)
        ranks = [rank - self._offset(rank, free)]
        stride = 1
        for axis in AXES:  # fastest first, so that each pass appends whole, later blocks
            size = getattr(self, axis)
            if axis in free:
                ranks = [r + stride * i for i in range(size) for r in ranks]
            stride *= size
        return tuple(ranks)

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Every group of these axes, ordered by first rank; together they hold each rank once."""
        free = _checked(axes)
        return [self.group(r, free) for r in range(self.world_size) if self._offset(r, free) == 0]

    def kv_replicas(self, kv_heads: int) -> int:
        """tp ranks that hold a copy of one key/value head: max(1, tp // kv_heads)."""
        assert kv_heads >= 1, kv_heads
        return max(1, self.tp // kv_heads)

    def kv_replica_groups(self, kv_heads: int) -> list[tuple[int, ...]]:
        """Groups of neighbouring tp ranks that hold the same key/value head (each of one rank if kv_heads >= tp)."""
        n = self.kv_replicas(kv_heads)
        assert n == 1 or self.tp % kv_heads == 0, (self.tp, kv_heads)
        return [tuple(range(first, first + n)) for first in range(0, self.world_size, n)]

    def stage_groups(self, stages: Sequence[int]) -> list[tuple[int, ...]]:
        """For each (tp, cp, dp), the ranks of these pipeline ranks, ascending."""
        assert len(set(stages)) == len(stages) and all(0 <= s < self.pp for s in stages), (stages, self)
        block = self.world_size // self.pp
        return [tuple(block * s + i for s in sorted(stages)) for i in range(block)]

    def describe(self) -> str:
        """One line for people: ``tp 2 x cp 1 x dp 4 x pp 2 = 16 ranks``."""
        text = f"tp {self.tp} x cp {self.cp} x dp {self.dp} x pp {self.pp} = {self.world_size} ranks"
        return text + (f", {self.virtual} virtual stages each" if self.virtual > 1 else "")

    def _offset(self, rank: int, free: frozenset[str]) -> int:
        """What the free coordinates add to a rank."""
        offset, stride = 0, 1
        for axis in AXES:
            size = getattr(self, axis)
            if axis in free:
                offset += rank // stride % size * stride
            stride *= size
        return offset


def _checked(axes: Iterable[str]) -> frozenset[str]:
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    assert len(set(names)) == len(names) and set(names) <= set(AXES), f"axes are a choice of {AXES}, not {axes}"
    return frozenset(names)


def layout_for(world_size: int, *, tp: int = 1, cp: int = 1, pp: int = 1, virtual: int = 1) -> Layout:
    """The layout of a job: dp is what is left of the ranks.

    Raises:
        ConfigError: if the ranks do not divide, with the numbers and the nearest valid choices.
    """
    problems = world_problems(world_size, tp=tp, cp=cp, pp=pp, virtual=virtual)
    if problems:
        raise ConfigError(problems)
    return Layout(tp=tp, cp=cp, dp=world_size // (tp * cp * pp), pp=pp, virtual=virtual)


def world_problems(world_size: int, *, tp: int = 1, cp: int = 1, pp: int = 1, virtual: int = 1) -> list[Problem]:
    """What is wrong with spreading a model of these axes over ``world_size`` ranks (each problem with a way out)."""
    sizes = {"tp": tp, "cp": cp, "pp": pp, "virtual": virtual}
    found = [
        Problem(f"{name} must be at least 1", f"{name} {value}", "a whole number, 1 or more", "1")
        for name, value in sizes.items()
        if value < 1
    ]
    if world_size < 1:
        found.append(
            Problem("there are no ranks", f"{world_size} processes", "at least one process", "start 1 process")
        )
    if found:
        return found
    if virtual > 1 and pp == 1:
        found.append(
            Problem(
                "virtual pipeline stages need a pipeline",
                f"pp 1, {virtual} virtual stages",
                "with one pipeline rank there is nothing to interleave",
                "pp of 2 or more, or no virtual stages",
            )
        )
    unit = tp * cp * pp
    if world_size % unit:
        found.append(_indivisible(world_size, tp, cp, pp))
    return found


def _indivisible(world_size: int, tp: int, cp: int, pp: int) -> Problem:
    unit = tp * cp * pp
    counts = f"{either(nearest_multiples(world_size, unit))} processes"
    choices = []
    for name, value, rest in (("tp", tp, cp * pp), ("pp", pp, tp * cp), ("cp", cp, tp * pp)):
        if value > 1 and world_size % rest == 0:
            fits = [d for d in range(1, world_size // rest + 1) if world_size // rest % d == 0]
            nearest = sorted([d for d in fits if d < value][-1:] + [d for d in fits if d > value][:1])
            choices.append(f"{name} {either(nearest)}")
    if not choices:  # no single change helps: keep tp as near as it goes and give up the rest
        largest = max(d for d in range(1, tp + 1) if world_size % d == 0)
        choices.append(f"tp {largest}, cp 1, pp 1")
    return Problem(
        "the processes do not divide over the axes",
        f"{world_size} processes; tp {tp} x cp {cp} x pp {pp} = {unit}",
        "the number of processes is a multiple of tp * cp * pp (the quotient is dp)",
        f"{counts}; or with {world_size}: {', or '.join(choices)}",
    )


def layout_problems(layout: Layout, world_size: int) -> list[Problem]:
    """What is wrong with starting this exact layout on ``world_size`` processes."""
    found = world_problems(world_size, tp=layout.tp, cp=layout.cp, pp=layout.pp, virtual=layout.virtual)
    if not found and layout.world_size != world_size:
        dp = world_size // (layout.tp * layout.cp * layout.pp)
        found.append(
            Problem(
                "the layout is not the size of the job",
                f"{layout.describe()}; {world_size} processes",
                "tp * cp * dp * pp is the number of processes",
                f"dp {dp}, or {layout.world_size} processes",
            )
        )
    return found
