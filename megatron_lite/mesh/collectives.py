"""Talking to other ranks. Nothing outside this file (and ``queues``) calls a collective of torch.distributed.

An :class:`Axis` is one group of ranks under a name. It counts what it sends (:class:`Traffic`), so that tests and the
planner can compare bytes with a formula. An axis of one rank does nothing at all, which is what makes a program for
one process the same program. Messages between pipeline stages go through ``queues``.

Every operation gives a :class:`Handle`. Waiting for it *orders the current stream*: on a GPU the host runs on, on a
CPU it blocks. Operations are started in program order on every member and there are no tags.

Ring reductions add in an order that depends on where an element lies in the buffer. ``ordered_reduce_scatter`` and
``ordered_all_reduce`` add in rank order whatever the position: an all-to-all of the shards, then a local sum. They
move as many bytes as a reduce-scatter, and rearranging buckets does not change a bit of the result.

Objects cross ranks as JSON bytes (``gather_json``). torch's object collectives unpickle what a peer sent, and are
not used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renamed these two; the older names remain for older releases.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Below this, an ordered all-reduce gathers everything and adds locally (one collective instead of two; same bits).
_GATHER_ELEMENTS = 4096


class Handle:
    """An operation under way.

    ``wait`` orders the current stream after it (CPU: blocks until it is done). Calling it again does nothing.
    The tensors of the operation are kept alive at least until then.
    """

    __slots__ = ("_finish", "_keep", "_works")

    def __init__(self, works: Sequence[Any] = (), keep: tuple[Any, ...] = (), finish: Callable[[], None] | None = None):
        self._works = [w for w in works if w is not None]
        self._keep = keep
        self._finish = finish

    def wait(self) -> None:
        """Order the current stream (on a CPU: the host) after this operation."""
        works, finish = self._works, self._finish
        self._works, self._finish = [], None
        for work in works:
            work.wait()
        if finish is not None:
            finish()
        self._keep = ()


class Traffic:
    """Calls and bytes by (axis, kind).

    Bytes are this rank's input of the call: for ``all_gather`` its shard, for ``reduce_scatter``, ``all_to_all`` and
    ``all_reduce`` the whole tensor it gives, for ``broadcast`` the tensor, for ``send`` and ``recv`` the message.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], tuple[int, int]] = {}

    def add(self, axis: str, kind: str, num_bytes: int) -> None:
        """Count one call."""
        calls, total = self.counts.get((axis, kind), (0, 0))
        self.counts[(axis, kind)] = (calls + 1, total + num_bytes)

    def reset(self) -> None:
        """Back to nothing."""
        self.counts.clear()

    def bytes(self, axis: str | None = None, kind: str | None = None) -> int:
        """Sum of bytes of one axis, one kind, both or everything."""
        return sum(b for (a, k), (_, b) in self.counts.items() if axis in (None, a) and kind in (None, k))

    def as_dict(self) -> dict[str, dict[str, int]]:
        """For JSON: ``{"tp.all_reduce": {"calls": 2, "bytes": 64}}``, sorted by name."""
        return {f"{a}.{k}": {"calls": c, "bytes": b} for (a, k), (c, b) in sorted(self.counts.items())}


class Axis:
    """One named group of ranks, of which this process is one.

    Tensors are contiguous; inputs are not changed, except by the operations that say "in place". A size-1 axis copies
    inputs to outputs and counts nothing, and so does every axis with an empty tensor. A shard may lie at its own place
    in the whole (``t`` of ``all_gather`` inside ``out``, ``out`` of ``reduce_scatter`` inside ``t``).

    Attributes:
        name: ``tp``, ``dp_cp``, ``world``, ...
        size: number of members.
        index: this rank's place among them.
        ranks: the members as global ranks, in order of index.
        traffic: where calls are counted.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        index: int,
        group: Any = None,
        *,
        traffic: Traffic | None = None,
        device: torch.device | str = "cpu",
        imaginary: bool = False,
    ):
        assert len(ranks) == 1 or group is not None, f"axis {name} of {len(ranks)} ranks without a group"
        self.name = name
        self.ranks = tuple(ranks)
        self.size = len(ranks)
        self.index = index
        self.traffic = traffic if traffic is not None else Traffic()
        self.device = torch.device(device)  # where this axis makes tensors of its own
        self._group = group
        self._imaginary = imaginary  # the fake back end: the other members do not exist

    @classmethod
    def single(cls, name: str = "tp", rank: int = 0, traffic: Traffic | None = None) -> Axis:
        """An axis of one rank: every collective is the identity."""
        return cls(name, (rank,), 0, traffic=traffic)

    def __repr__(self) -> str:
        return f"Axis({self.name}, index {self.index} of {self.size})"

    # ---- reductions

    def all_reduce(self, t: torch.Tensor, op: str = "sum", async_op: bool = False) -> Handle:
        """In place: ``t`` becomes the sum (max, min) over the members."""
        if self.size == 1 or t.numel() == 0:
            return Handle()
        assert t.is_contiguous(), t.shape
        self._count("all_reduce", t)
        work = dist.all_reduce(t, op=_OPS[op], group=self._group, async_op=async_op)
        return Handle([work], (t,))

    def reduce_scatter(self, out: torch.Tensor, t: torch.Tensor, async_op: bool = False) -> Handle:
        """``out`` = this member's 1/size of the sum of ``t`` ([size * n] or [size * d0, ...], split along dim 0)."""
        self._check(whole=t, part=out)
        if self.size == 1 or t.numel() == 0:
            return _copy(out, t)
        self._count("reduce_scatter", t)
        work = _reduce_scatter_single(out.view(-1), t.view(-1), group=self._group, async_op=async_op)
        return Handle([work], (out, t))

    def ordered_reduce_scatter(self, out: torch.Tensor, t: torch.Tensor, async_op: bool = False) -> Handle:
        """``reduce_scatter`` that adds in rank order, whatever an element's place: the same bits in any bucket.

        Half-precision inputs are added in fp32 and rounded once. Takes ``t.numel()`` elements of scratch. The sum is
        done in ``wait``.
        """
        self._check(whole=t, part=out)
        if self.size == 1 or t.numel() == 0:
            return _copy(out, t)
        self._count("all_to_all", t)
        received = torch.empty_like(t).view(-1)
        work = dist.all_to_all_single(received, t.view(-1), group=self._group, async_op=async_op)

        def add() -> None:
            if received.is_cuda:  # it may be waited for on another stream than the one it was made on
                received.record_stream(torch.cuda.current_stream())
            sum_in_order(out.view(-1), received.view(self.size, -1))

        handle = Handle([work], (t, received), finish=add)
        if not async_op:
            handle.wait()
        return handle

    def ordered_all_reduce(self, t: torch.Tensor) -> None:
        """In place sum over the members, added in rank order (see ``ordered_reduce_scatter``)."""
        if self.size == 1 or t.numel() == 0:
            return
        n = t.numel()
        if n <= _GATHER_ELEMENTS:
            gathered = t.new_empty(self.size * n)
            self.all_gather(gathered, t.view(-1))
            sum_in_order(t.view(-1), gathered.view(self.size, n))
            return
        shard = -(-n // self.size)
        padded = t.new_zeros(shard * self.size)
        padded[:n].copy_(t.view(-1))
        mine = t.new_empty(shard)
        self.ordered_reduce_scatter(mine, padded)
        self.all_gather(padded, mine)
        t.view(-1).copy_(padded[:n])

    # ---- moving without adding

    def all_gather(self, out: torch.Tensor, t: torch.Tensor, async_op: bool = False) -> Handle:
        """``out`` ([size * n] or [size * d0, ...]) = every member's ``t``, in order of index."""
        self._check(whole=out, part=t)
        if self.size == 1 or t.numel() == 0:
            return _copy(out, t)
        self._count("all_gather", t)
        work = _all_gather_single(out.view(-1), t.view(-1), group=self._group, async_op=async_op)
        return Handle([work], (out, t))

    def all_to_all(self, out: torch.Tensor, t: torch.Tensor, async_op: bool = False) -> Handle:
        """Block i of ``t`` (dim 0 in ``size`` equal blocks) goes to member i; block j of ``out`` is member j's."""
        assert out.is_contiguous() and t.is_contiguous() and out.numel() == t.numel() and out.dtype == t.dtype
        assert t.numel() % self.size == 0, (t.shape, self.size)
        if self.size == 1 or t.numel() == 0:
            return _copy(out, t)
        self._count("all_to_all", t)
        work = dist.all_to_all_single(out.view(-1), t.view(-1), group=self._group, async_op=async_op)
        return Handle([work], (out, t))

    def broadcast(self, t: torch.Tensor, src_index: int = 0) -> None:
        """In place: ``t`` becomes the member ``src_index``'s."""
        if self.size == 1 or t.numel() == 0:
            return
        assert t.is_contiguous(), t.shape
        self._count("broadcast", t)
        dist.broadcast(t, src=self.ranks[src_index], group=self._group)

    def barrier(self) -> None:
        """Return when every member has come here. Blocks the host, also on a GPU."""
        if self.size == 1:
            return
        self.traffic.add(self.name, "barrier", 0)
        if self._imaginary:
            return
        token = torch.zeros(1, dtype=torch.int32, device=self.device)
        dist.all_reduce(token, group=self._group)
        token.item()

    def gather_json(self, obj: Any) -> list[Any]:
        """Every member's ``obj`` as JSON reads it back (tuples become lists, keys strings), in order of index."""
        if self.size == 1 or self._imaginary:
            return [json.loads(json.dumps(obj)) for _ in range(self.size)]
        data = json.dumps(obj, separators=(",", ":")).encode()
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        mine = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        _all_gather_single(lengths, mine, group=self._group)
        longest = max(lengths.tolist())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = torch.empty(self.size * longest, dtype=torch.uint8, device=self.device)
        self.traffic.add(self.name, "gather_json", longest)
        _all_gather_single(gathered, padded.to(self.device), group=self._group)
        rows = gathered.cpu().view(self.size, longest)
        return [json.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, lengths.tolist(), strict=True)]

    # ---- internal

    def _count(self, kind: str, t: torch.Tensor) -> None:
        self.traffic.add(self.name, kind, t.numel() * t.element_size())

    def _check(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        assert whole.is_contiguous() and part.is_contiguous(), f"{self}: tensors must be contiguous"
        assert whole.dtype == part.dtype, f"{self}: {whole.dtype} and {part.dtype}"
        assert whole.numel() == self.size * part.numel(), f"{self}: {tuple(whole.shape)} and {tuple(part.shape)}"


def sum_in_order(out: torch.Tensor, parts: torch.Tensor) -> None:
    """``out`` [n] = parts[0] + parts[1] + ..., strictly in this order; half precision is added in fp32."""
    wide = torch.float32 if parts.dtype in (torch.bfloat16, torch.float16) else parts.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total.add_(part)
    out.copy_(total)


def _copy(out: torch.Tensor, t: torch.Tensor) -> Handle:
    if out.data_ptr() != t.data_ptr():
        out.view(-1).copy_(t.view(-1))
    return Handle()
