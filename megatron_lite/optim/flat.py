"""Where each parameter lies in the flat buffers: pure arithmetic.

Parameters are laid out in the reverse of their definition, which is about the order in which backward finishes their
gradients, and cut into *buckets*, contiguous stretches that are reduced as one. A parameter starts at a multiple of
256 bytes, and a bucket is padded so that each data-parallel rank's share of it does too. Weights, gradients and (where
they are not sharded) optimizer state use the same offsets.

*Late* buckets are for parameters whose gradient is not complete when backward has computed it: it is partial over tp or
over the replicas of a key/value head, or the parameter is tied. They are summed over those ranks after backward, each
bucket flat, in one call. A bucket of tied parameters holds nothing else and is ordered by name, so that it has the same
layout on every stage that holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron_lite.tensor.spec import ParamSpec

ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class Entry:
    """One parameter before it has a place.

    Attributes:
        spec: its record; ``spec.name`` is its name.
        shape, dtype: of this rank's shard (vocabulary padding included).
        partial: the part of the mesh (of more than one rank) over which its gradient is a partial sum, or None.
        tie: pipeline ranks that hold it if it is tied (maybe only one), else ().
    """

    spec: ParamSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    partial: str | None = None
    tie: tuple[int, ...] = ()

    @property
    def late(self) -> bool:
        """Whether its gradient is incomplete when backward has computed it."""
        return self.partial is not None or bool(self.tie)

    @property
    def numel(self) -> int:
        """Elements of the shard."""
        n = 1
        for s in self.shape:
            n *= s
        return n


@dataclass(frozen=True)
class Slot:
    """A parameter's place: elements [begin, end) of its flat buffer."""

    entry: Entry
    begin: int

    @property
    def name(self) -> str:
        """Global name."""
        return self.entry.spec.name

    @property
    def spec(self) -> ParamSpec:
        """The parameter's record."""
        return self.entry.spec

    @property
    def end(self) -> int:
        """One past its last element."""
        return self.begin + self.entry.numel


@dataclass(frozen=True)
class Bucket:
    """Elements [begin, end) of a flat buffer, reduced as one.

    Attributes:
        index: its place in the order of reductions.
        buffer: which flat buffer (one for each dtype of weights).
        slots: the parameters in it, ascending.
        partial, tie: as in :class:`Entry`; the same for all its parameters.
    """

    index: int
    buffer: int
    begin: int
    end: int
    slots: tuple[Slot, ...]
    partial: str | None = None
    tie: tuple[int, ...] = ()

    @property
    def late(self) -> bool:
        """Whether it waits for the end of backward."""
        return self.partial is not None or bool(self.tie)

    def shard(self, count: int, index: int) -> tuple[int, int]:
        """[begin, end) in the buffer of the ``index``-th of ``count`` equal, contiguous shares."""
        n, rest = divmod(self.end - self.begin, count)
        assert rest == 0, (self.begin, self.end, count)
        return self.begin + index * n, self.begin + (index + 1) * n


@dataclass(frozen=True)
class Placement:
    """All buckets in the order of their reductions (early ones, then late ones), and the size of each flat buffer."""

    buckets: tuple[Bucket, ...]
    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[int, ...]


def place(
    entries: Sequence[Entry], *, bucket_size: int | None, shards: int, alignment: Callable[[torch.dtype], int]
) -> Placement:
    """Give every parameter a place.

    Args:
        entries: parameters in order of definition.
        bucket_size: elements after which the next bucket begins; a parameter is never cut, so one that is larger has a
            bucket to itself. None: one bucket. Late parameters of one kind always share one bucket.
        shards: number of equal shares each bucket must have (data-parallel ranks).
        alignment: elements, by dtype of the weights, to whose multiples parameters and shares are aligned.
    """
    dtypes = tuple(dict.fromkeys(e.dtype for e in entries))
    sizes = [0] * len(dtypes)
    buckets: list[Bucket] = []

    def close(group: list[Entry]) -> None:
        buffer = dtypes.index(group[0].dtype)
        unit = alignment(group[0].dtype)
        at = begin = sizes[buffer]
        slots = []
        for e in group:
            slots.append(Slot(e, at))
            at += -(-e.numel // unit) * unit
        whole = unit * shards
        end = begin + -(-(at - begin) // whole) * whole
        sizes[buffer] = end
        buckets.append(Bucket(len(buckets), buffer, begin, end, tuple(slots), group[0].partial, group[0].tie))

    for group in _early_groups(entries, bucket_size):
        close(group)
    for group in _late_groups(entries):
        close(group)
    return Placement(tuple(buckets), dtypes, tuple(sizes))


def _early_groups(entries: Sequence[Entry], bucket_size: int | None) -> Iterable[list[Entry]]:
    """Buckets in the order in which backward completes them."""
    open_: dict[torch.dtype, list[Entry]] = {}
    filled: dict[torch.dtype, int] = {}
    done = []
    for e in reversed(entries):
        if e.late:
            continue
        group = open_.setdefault(e.dtype, [])
        if group and bucket_size is not None and filled[e.dtype] + e.numel > bucket_size:
            done.append(group)
            group = open_[e.dtype] = []
            filled[e.dtype] = 0
        group.append(e)
        filled[e.dtype] = filled.get(e.dtype, 0) + e.numel
    return [*done, *(g for g in open_.values() if g)]


def _late_groups(entries: Sequence[Entry]) -> Iterable[list[Entry]]:
    """One bucket for each kind of late parameter, in an order that is the same on all ranks."""
    groups: dict[tuple[tuple[int, ...], str, str], list[Entry]] = {}
    for e in reversed(entries):
        if e.late:
            groups.setdefault((e.tie, e.partial or "", str(e.dtype)), []).append(e)
    for key in sorted(groups):
        tied = bool(key[0])
        yield sorted(groups[key], key=lambda e: e.spec.name) if tied else groups[key]
