"""The two split matrix products and the lookup, with communication hidden behind their own arithmetic.

*Column*: y_i = x W_i^T + b_i, the rows of W_i split over tp, for several W_i that read the same x (query, key, value;
gate and up). x is gathered once under sequence parallelism. In backward the gather of x runs while dX = sum dY_i W_i
is computed, and the reduction of dX runs while the weight gradients dW_i = dY_i^T x are. Only the slice of x is kept.

*Row*: y = sum over ranks of x W^T, the columns of W split over tp, plus the bias, once, after the sum. Under sequence
parallelism each rank keeps its slice of tokens, so its bias gradient is a partial sum.

Weight gradients go straight into ``weight.main_grad`` where the weight has one, in its dtype (fp32 for half-precision
weights): the functions then return None for the weight. So a gradient is never made, added and freed.

Not here: splitting one product into chunks to hide a forward gather.

Sources: Shoeybi et al. 2019 (arXiv 1909.08053); Korthikanti et al. 2022 (arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron_lite.mesh.collectives import Axis, Handle
from megatron_lite.tensor.regions import start_all_reduce, start_gather, start_reduce_scatter

Weight = torch.Tensor
Bias = torch.Tensor | None


def column_product(
    x: torch.Tensor, axis: Axis, sequence_parallel: bool, weights: Sequence[Weight], biases: Sequence[Bias]
) -> tuple[torch.Tensor, ...]:
    """[x W_i^T + b_i for every i], each rank its own columns.

    Args:
        x: [T, in], the same on every rank, or this rank's [T / tp, in] under sequence parallelism.
        weights: [out_i / tp, in] each.
        biases: [out_i / tp] or None each.

    Returns:
        [T, out_i / tp] each.
    """
    return _Column.apply(x, axis, sequence_parallel and axis.size > 1, len(weights), *weights, *biases)


def row_product(x: torch.Tensor, axis: Axis, sequence_parallel: bool, weight: Weight, bias: Bias) -> torch.Tensor:
    """x W^T summed over the ranks, plus the bias.

    Args:
        x: [T, in / tp].
        weight: [out, in / tp].
        bias: [out], the same on every rank, or None.

    Returns:
        [T, out], the same on every rank, or this rank's [T / tp, out] under sequence parallelism.
    """
    return _Row.apply(x, axis, sequence_parallel and axis.size > 1, weight, bias)


def lookup(ids: torch.Tensor, axis: Axis, sequence_parallel: bool, weight: Weight, first_row: int) -> torch.Tensor:
    """Rows of a table split over the ranks.

    Args:
        ids: int64 [T], the same on every rank, each held by some rank.
        weight: [rows of this rank, H]; its first row is row ``first_row`` of the table.

    Returns:
        [T, H], or this rank's [T / tp, H] under sequence parallelism.
    """
    return _Lookup.apply(ids, axis, sequence_parallel and axis.size > 1, weight, first_row)


def matrix_gradient(weight: Weight, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """dY^T x: added to ``weight.main_grad`` (None is returned), or returned where there is none.

    Args:
        dy: [T, out].
        x: [T, in].
    """
    main = getattr(weight, "main_grad", None)
    if main is None:
        return dy.t() @ x
    if main.dtype == dy.dtype:
        main.addmm_(dy.t(), x)
    elif main.is_cuda and main.dtype == torch.float32 and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.addmm(main, dy.t(), x, out_dtype=torch.float32, out=main)  # tensor cores add in fp32 anyway
    else:
        main.addmm_(dy.t().to(main.dtype), x.to(main.dtype))
    return None


def vector_gradient(bias: torch.Tensor, dy: torch.Tensor) -> torch.Tensor | None:
    """Sum of dY over tokens: added to ``bias.main_grad`` (None is returned), or returned where there is none."""
    main = getattr(bias, "main_grad", None)
    if main is None:
        return dy.sum(0)
    main.add_(dy.sum(0, dtype=main.dtype))
    return None


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, axis: Axis, sequence_parallel: bool, n: int, *parameters: Any
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = parameters[:n], parameters[n:]
        ctx.axis, ctx.sequence_parallel = axis, sequence_parallel
        # Parameters by reference: their main_grad is wanted, which saved tensors of a recomputed region do not carry.
        ctx.weights, ctx.biases = weights, biases
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        if sequence_parallel:
            x, gathered = start_gather(x, axis)
            gathered.wait()
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: torch.Tensor | None) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        n, axis, sequence_parallel = len(ctx.weights), ctx.axis, ctx.sequence_parallel
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        gathered, reduced = Handle(), Handle()
        if sequence_parallel and any(needs[:n]):
            x, gathered = start_gather(x, axis)
        dx = None
        if needs_x:
            for weight, dy in zip(ctx.weights, dys, strict=True):
                if dy is not None:
                    dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
            if dx is not None and axis.size > 1:
                dx, reduced = start_reduce_scatter(dx, axis) if sequence_parallel else start_all_reduce(dx, axis)
        gathered.wait()
        pairs = list(zip(ctx.weights, dys, needs[:n], strict=True))
        dws = [matrix_gradient(w, dy, x) if need and dy is not None else None for w, dy, need in pairs]
        pairs = list(zip(ctx.biases, dys, needs[n:], strict=True))
        dbs = [vector_gradient(b, dy) if need and dy is not None else None for b, dy, need in pairs]
        reduced.wait()
        return dx, None, None, None, *dws, *dbs


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, axis: Axis, sequence_parallel: bool, weight: Weight, bias: Bias
    ) -> torch.Tensor:
        ctx.axis, ctx.sequence_parallel = axis, sequence_parallel
        ctx.weight, ctx.bias = weight, bias
        ctx.save_for_backward(x)
        if axis.size == 1:
            return F.linear(x, weight, bias)
        y = F.linear(x, weight)
        y, reduced = start_reduce_scatter(y, axis) if sequence_parallel else start_all_reduce(y, axis)
        reduced.wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        needs_x, _, _, needs_weight, needs_bias = ctx.needs_input_grad
        gathered, whole = Handle(), dy
        if ctx.sequence_parallel and (needs_x or needs_weight):
            whole, gathered = start_gather(dy, ctx.axis)
        db = vector_gradient(ctx.bias, dy) if needs_bias else None  # of the own tokens only
        gathered.wait()
        dx = whole @ ctx.weight if needs_x else None
        dw = matrix_gradient(ctx.weight, whole, x) if needs_weight else None
        return dx, None, None, dw, db


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, axis: Axis, sequence_parallel: bool, weight: Weight, first_row: int
    ) -> torch.Tensor:
        ctx.axis, ctx.sequence_parallel, ctx.weight = axis, sequence_parallel, weight
        if axis.size == 1:
            ctx.save_for_backward(ids, None)
            return F.embedding(ids, weight)
        local = ids - first_row
        elsewhere = (local < 0) | (local >= weight.shape[0])
        # Ids of other ranks are looked up anywhere and zeroed: no shape depends on data. The remainder spreads them
        # over all rows, so that their zeros do not all queue for one row in backward.
        local = local.remainder(weight.shape[0])
        ctx.save_for_backward(local, elsewhere)
        y = F.embedding(local, weight).masked_fill_(elsewhere[:, None], 0)
        y, reduced = start_reduce_scatter(y, axis) if sequence_parallel else start_all_reduce(y, axis)
        reduced.wait()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        if not ctx.needs_input_grad[3]:
            return None, None, None, None, None
        local, elsewhere = ctx.saved_tensors
        if ctx.sequence_parallel:
            dy, gathered = start_gather(dy, ctx.axis)
            gathered.wait()
        if elsewhere is not None:
            dy = dy.masked_fill(elsewhere[:, None], 0)
        main = getattr(ctx.weight, "main_grad", None)
        if main is not None:
            main.index_add_(0, local, dy.to(main.dtype))
            return None, None, None, None, None
        wide = torch.float64 if dy.dtype == torch.float64 else torch.float32  # many tokens may share a row
        dw = torch.zeros(ctx.weight.shape, dtype=wide, device=dy.device).index_add_(0, local, dy.to(wide))
        return None, None, None, dw.to(ctx.weight.dtype), None
