"""SwiGLU: silu(gate) * up, the activation of gated MLPs, where silu(z) = z / (1 + exp(-z)).

Computed in fp32 (fp64 for fp64) and rounded once. The reference keeps what autograd keeps; the kernels keep gate and up,
and compute the sigmoid again in backward.

Source: Shazeer 2020 (arXiv 2002.05202).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_lite.ops.op import Op, Problem, numel, wide


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The definition, in plain PyTorch."""
    compute = wide(gate.dtype)
    return (F.silu(gate.to(compute)) * up.to(compute)).to(gate.dtype)


def _reference_saves(problem: Problem) -> int:
    return 3 * numel(problem.shapes[0]) * wide(problem.dtypes[0]).itemsize  # gate, silu(gate), up in fp32


SWIGLU = Op("swiglu", reference, (), _reference_saves)


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, kernel: str | None = None) -> torch.Tensor:
    """silu(gate) * up.

    Args:
        gate, up: of one shape and dtype.
        kernel: the implementation to use, None for the best that applies.

    Returns:
        a tensor of their shape and dtype.
    """
    return SWIGLU.pick(gate, up, kernel=kernel)(gate, up)
