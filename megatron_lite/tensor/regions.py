"""Where hidden states pass between tensor-parallel regions: five functions and their gradients.

Outside a tensor-parallel region every rank of the axis holds the same hidden states, or, under sequence parallelism,
its slice of the row of tokens. Inside, every rank holds its part of the features. Each function here is one crossing,
and its backward is the crossing back:

=========================  ==========================  =========================
function                   forward                     backward
=========================  ==========================  =========================
copy_to_tp                 the same                    sum over the ranks
reduce_from_tp             sum over the ranks          the same
gather_sequence            gather the slices           sum, keep the own slice
reduce_scatter_sequence    sum, keep the own slice     gather the slices
split_sequence             keep the own slice          gather the slices
=========================  ==========================  =========================

The linear layers (linear.py) do the same inside their own functions, where communication can hide behind their
products; these are for everything else. On an axis of one rank all of them return their input.

Sources: Shoeybi et al. 2019 (arXiv 1909.08053), the f and g operators; Korthikanti et al. 2022 (arXiv 2205.05198) for
sequence parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_lite.mesh.collectives import Axis, Handle


def copy_to_tp(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Enter a region with the same ``x`` on every rank; its gradient is summed over the ranks."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from_tp(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Leave a region: the sum of ``x`` over the ranks, the same on each."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def gather_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Enter a region from slices: [T / size, ...] to [T, ...]; gradients are summed and each rank keeps its slice."""
    return x if axis.size == 1 else _Gather.apply(x, axis)


def reduce_scatter_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Leave a region into slices: [T, ...] summed over the ranks, of which each keeps [T / size, ...]."""
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis)


def split_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Keep the own slice of an ``x`` that is the same on every rank: [T, ...] to [T / size, ...]."""
    return x if axis.size == 1 else _Split.apply(x, axis)


# ---- without autograd; also used by the layers


def start_gather(x: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, Handle]:
    """Start to gather slices along dim 0; the result is valid after the handle was waited for."""
    if axis.size == 1:
        return x, Handle()
    out = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    return out, axis.all_gather(out, x.contiguous(), async_op=True)


def start_reduce_scatter(x: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, Handle]:
    """Start to sum over the ranks and keep the own slice of dim 0."""
    if axis.size == 1:
        return x, Handle()
    out = x.new_empty((slice_length(x.shape[0], axis.size), *x.shape[1:]))
    return out, axis.reduce_scatter(out, x.contiguous(), async_op=True)


def start_all_reduce(x: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, Handle]:
    """Start to sum over the ranks, in place."""
    return x, axis.all_reduce(x, async_op=True)


def slice_length(tokens: int, ranks: int) -> int:
    """Tokens of one rank under sequence parallelism.

    Raises:
        ValueError: the row cannot be cut into equal slices.
    """
    if tokens % ranks:
        raise ValueError(
            f"sequence-parallel: {tokens} tokens (micro-batch-size x seq-length) cannot be cut into {ranks} equal "
            f"slices; choose a seq-length that tensor-model-parallel-size {ranks} divides"
        )
    return tokens // ranks


def _own_slice(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    n = slice_length(x.shape[0], axis.size)
    return x[axis.index * n : (axis.index + 1) * n]


def _done(started: tuple[torch.Tensor, Handle]) -> torch.Tensor:
    out, handle = started
    handle.wait()
    return out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _done(start_all_reduce(_fresh(dy), ctx.axis)), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return _done(start_all_reduce(_fresh(x), axis))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return _done(start_gather(x, axis))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _done(start_reduce_scatter(dy, ctx.axis)), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return _done(start_reduce_scatter(x, axis))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _done(start_gather(dy, ctx.axis)), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return _own_slice(x, axis).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _done(start_gather(dy, ctx.axis)), None


def _fresh(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy: an all-reduce works in place, and the argument belongs to somebody else."""
    return x.clone(memory_format=torch.contiguous_format)
