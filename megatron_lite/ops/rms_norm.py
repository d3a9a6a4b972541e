"""RMS norm: y = x / sqrt(mean(x^2) + eps) * weight, over the last dim.

The statistics and the product are computed in fp32 (fp64 for fp64) whatever the dtype of x, and rounded once. The
reference keeps several fp32 tensors of the size of x for its backward; the kernels keep x itself, which is alive
anyway, and one number per row.

Source: Zhang and Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

import torch

from megatron_lite.ops.op import Op, Problem, numel, wide


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The definition, in plain PyTorch."""
    x32 = x.to(wide(x.dtype))
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale * weight.to(x32.dtype)).to(x.dtype)


def _reference_saves(problem: Problem) -> int:
    elements, item = numel(problem.shapes[0]), wide(problem.dtypes[0]).itemsize
    return elements * item * 2  # x in fp32, and x times its scale


RMS_NORM = Op("rms_norm", reference, (), _reference_saves)


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
    return RMS_NORM.pick(x, weight, kernel=kernel)(x, weight, eps)
