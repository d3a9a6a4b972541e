"""Layer norm: y = (x - mean) / sqrt(var + eps) * weight + bias, over the last dim.

The statistics and the product are computed in fp32 (fp64 for fp64) whatever the dtype of x. PyTorch's own fused layer
norm does that too, on every device, and keeps two numbers per row; it wants x, weight and bias of one dtype.

Source: Ba, Kiros and Hinton 2016 (arXiv 1607.06450).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_lite.ops.op import Kernel, Op, Problem, Reason, dtype_reason, numel, short, wide


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The definition, in plain PyTorch."""
    x32 = x.to(wide(x.dtype))
    centered = x32 - x32.mean(-1, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps) * weight.to(x32.dtype)
    if bias is not None:
        y = y + bias.to(x32.dtype)
    return y.to(x.dtype)


def fused(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """PyTorch's layer norm."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _applies(problem: Problem) -> Reason:
    if (reason := dtype_reason(problem)) is not None:
        return reason
    if len(set(problem.dtypes)) > 1:
        return "takes x, weight and bias of one dtype, not " + ", ".join(short(d) for d in problem.dtypes)
    return None


def _rows(problem: Problem) -> int:
    return numel(problem.shapes[0][:-1])


LAYER_NORM = Op(
    "layer_norm",
    reference,
    (
        Kernel(
            "torch",
            ("cpu", "cuda", "meta"),
            fused,
            _applies,
            saves=lambda p: numel(p.shapes[0]) * p.dtypes[0].itemsize + 2 * _rows(p) * wide(p.dtypes[0]).itemsize,
        ),
    ),
    saves=lambda p: 3 * numel(p.shapes[0]) * wide(p.dtypes[0]).itemsize,
)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, kernel: str | None = None
) -> torch.Tensor:
    """Layer norm over the last dim.

    Args:
        x: [..., H], any floating dtype.
        weight: [H] (1 + w, computed by the caller, for instance).
        bias: [H] or None.
        eps: added to the variance.
        kernel: the implementation to use, None for the best that applies.

    Returns:
        [..., H] in the dtype of x.
    """
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return LAYER_NORM.pick(*tensors, kernel=kernel)(x, weight, bias, eps)
