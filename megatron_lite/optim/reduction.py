"""The sum of one bucket over the data-parallel ranks.

Four cases from two choices. *Scatter* (ZeRO 1): each rank gets the sum of its own share of the bucket, in place; the
rest of the bucket is left without meaning. Otherwise everyone gets the whole sum. *Ordered* (deterministic mode): added
in rank order, so that the bits do not depend on an element's place; without scatter the shares are gathered afterwards,
and so ZeRO 0 has the bits of ZeRO 1. With a reduce dtype of lower precision a copy of the bucket travels.
"""

from __future__ import annotations

import torch

from megatron_lite.mesh.collectives import Axis, Handle


class Reduction:
    """The sum of ``flat`` over ``axis``, started when this is made.

    Two phases, so that many reductions can be under way: :meth:`advance` every one, then :meth:`wait` for every one, in
    the same order on all ranks.

    Args:
        axis: the ranks to sum over.
        flat: contiguous bucket; its length is a multiple of axis.size.
        scatter: only this rank's share needs the sum.
        ordered: add in rank order.
        dtype: dtype of what travels.
    """

    def __init__(self, axis: Axis, flat: torch.Tensor, *, scatter: bool, ordered: bool, dtype: torch.dtype) -> None:
        self._axis, self._flat, self._scatter = axis, flat, scatter
        self._second: Handle | None = None
        n = flat.numel() // axis.size
        self._share = slice(axis.index * n, (axis.index + 1) * n)
        self._gathers = ordered and not scatter
        if axis.size == 1:
            self._travels, self._first = flat, Handle()
            return
        self._travels = flat if flat.dtype == dtype else flat.to(dtype)
        own = self._travels[self._share]
        if ordered:
            self._first = axis.ordered_reduce_scatter(own, self._travels, async_op=True)
        elif scatter:
            self._first = axis.reduce_scatter(own, self._travels, async_op=True)
        else:
            self._first = axis.all_reduce(self._travels, async_op=True)

    def advance(self) -> None:
        """Finish the sum and, in the ordered case without scatter, start the gather."""
        self._first.wait()
        if self._gathers and self._axis.size > 1:
            self._second = self._axis.all_gather(self._travels, self._travels[self._share], async_op=True)

    def wait(self) -> None:
        """The sum is in ``flat`` after this (CPU) or for what the current stream does next (GPU)."""
        if self._second is not None:
            self._second.wait()
        if self._travels is not self._flat:
            part = self._share if self._scatter else slice(None)
            self._flat[part].copy_(self._travels[part])


def sum_in_place(axis: Axis, flat: torch.Tensor, *, ordered: bool) -> Handle:
    """Sum ``flat`` over a part of tp or the holders of a tie; a started operation (ordered: already done)."""
    if ordered:
        axis.ordered_all_reduce(flat)
        return Handle()
    return axis.all_reduce(flat, async_op=True)
