"""GELU: x * Phi(x), Phi the normal distribution function, or its tanh form.

tanh form: x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))). PyTorch's own kernels compute half-precision inputs in fp32
and keep x alone, so the reference is what runs.

Source: Hendrycks and Gimpel 2016 (arXiv 1606.08415).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_lite.ops.op import Op, numel


def reference(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """PyTorch's GELU."""
    return F.gelu(x, approximate=approximate)


GELU = Op("gelu", reference, (), lambda p: numel(p.shapes[0]) * p.dtypes[0].itemsize)


def gelu(x: torch.Tensor, *, approximate: str = "tanh", kernel: str | None = None) -> torch.Tensor:
    """GELU of every element; ``approximate`` is "tanh" (what Megatron-LM's fused kernel computes) or "none"."""
    return GELU.pick(x, kernel=kernel)(x, approximate)
