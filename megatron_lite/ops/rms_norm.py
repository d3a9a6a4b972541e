"""RMS norm: y = x / sqrt(mean(x^2) + eps) * weight, over the last dim.

The statistics and the product are computed in fp32 (fp64 for fp64) whatever the dtype of x, and rounded once. The
reference keeps several fp32 tensors of the size of x for its backward; the compiled kernels (csrc/rms_norm_*) keep x
itself, which is alive anyway, and one number per row.

Source: Zhang and Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_lite.ops.op import Kernel, Op, Problem, Reason, capability_reason, dtype_reason, numel, short, wide

CUDA_SHARED_BYTES = 128 << 10  # of column sums, one number in the compute dtype per feature
CPU_ROWS = 64  # rows per partial column sum
CUDA_BLOCKS = 512  # partial column sums on a GPU, whatever the GPU: the order of addition does not depend on it


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The definition, in plain PyTorch."""
    x32 = x.to(wide(x.dtype))
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale * weight.to(x32.dtype)).to(x.dtype)


class _Compiled(torch.autograd.Function):
    """The kernels of csrc/, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, isa: int) -> torch.Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        y = torch.empty_like(x)
        scale = torch.empty(x.shape[:-1], dtype=wide(x.dtype), device=x.device)
        torch.ops.megatron_lite.rms_norm_forward(x, weight, eps, y, scale, isa)
        ctx.save_for_backward(x, weight, scale)
        ctx.isa = isa
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        rows = scale.numel()
        blocks = min(rows, CUDA_BLOCKS) if x.is_cuda else -(-rows // CPU_ROWS)
        partial = torch.empty(blocks, weight.numel(), dtype=scale.dtype, device=x.device)
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        torch.ops.megatron_lite.rms_norm_backward(
            grad.contiguous(), x, weight, scale, grad_x, grad_weight, partial, ctx.isa
        )
        return grad_x, grad_weight, None, None


def compiled(x: torch.Tensor, weight: torch.Tensor, eps: float, isa: int = -1) -> torch.Tensor:
    """The compiled kernel; ``isa`` is -1 for the CPU's best instruction set, 0 plain, 1 AVX2, 2 AVX-512."""
    return _Compiled.apply(x, weight, eps, isa)


def _applies(problem: Problem) -> Reason:
    if (reason := dtype_reason(problem)) is not None:
        return reason
    x, weight = problem.dtypes
    if weight not in (x, wide(x)):
        return f"takes a weight of {short(x)} or {short(wide(x))} with x of {short(x)}, not {short(weight)}"
    return None


def _applies_cuda(problem: Problem) -> Reason:
    hidden, limit = problem.shapes[0][-1], CUDA_SHARED_BYTES // wide(problem.dtypes[0]).itemsize
    if hidden > limit:
        return f"takes at most {limit} features in {short(wide(problem.dtypes[0]))}, not {hidden}"
    return _applies(problem) or capability_reason(problem, (8, 0))


def _saves(problem: Problem) -> int:
    x, dtype = problem.shapes[0], problem.dtypes[0]
    return numel(x) * dtype.itemsize + numel(x[:-1]) * wide(dtype).itemsize


def _reference_saves(problem: Problem) -> int:
    return 3 * numel(problem.shapes[0]) * wide(problem.dtypes[0]).itemsize  # x, and two products of its size


RMS_NORM = Op(
    "rms_norm",
    reference,
    (
        Kernel("compiled-cuda", ("cuda",), compiled, _applies_cuda, "cuda", _saves),
        Kernel("compiled-cpu", ("cpu",), compiled, _applies, "cpu", _saves),
    ),
    _reference_saves,
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, kernel: str | None = None) -> torch.Tensor:
    """RMS norm over the last dim.

    Args:
        x: [..., H], any floating dtype.
        weight: [H]; its dtype may differ from x's (1 + w, computed by the caller, for instance).
        eps: added to the mean square.
        kernel: the implementation to use, None for the best that applies.

    Returns:
        [..., H] in the dtype of x.
    """
    assert weight.shape == x.shape[-1:]
    return RMS_NORM.pick(x, weight, kernel=kernel)(x, weight, eps)
