"""SwiGLU: silu(gate) * up, the activation of gated MLPs, where silu(z) = z / (1 + exp(-z)).

Computed in fp32 (fp64 for fp64) and rounded once. The reference keeps what autograd keeps; the compiled kernels
(csrc/swiglu_*) keep gate and up, and compute the sigmoid again in backward.

Source: Shazeer 2020 (arXiv 2002.05202).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron_lite.ops.op import Kernel, Op, Problem, Reason, capability_reason, dtype_reason, numel, short, wide


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The definition, in plain PyTorch."""
    compute = wide(gate.dtype)
    return (F.silu(gate.to(compute)) * up.to(compute)).to(gate.dtype)


class _Compiled(torch.autograd.Function):
    """The kernels of csrc/, forward and backward."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, isa: int) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        torch.ops.megatron_lite.swiglu_forward(gate, up, out, isa)
        ctx.save_for_backward(gate, up)
        ctx.isa = isa
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        torch.ops.megatron_lite.swiglu_backward(grad.contiguous(), gate, up, grad_gate, grad_up, ctx.isa)
        return grad_gate, grad_up, None


def compiled(gate: torch.Tensor, up: torch.Tensor, isa: int = -1) -> torch.Tensor:
    """The compiled kernel; ``isa`` is -1 for the CPU's best instruction set, 0 plain, 1 AVX2, 2 AVX-512."""
    return _Compiled.apply(gate, up, isa)


def _applies(problem: Problem) -> Reason:
    if (reason := dtype_reason(problem)) is not None:
        return reason
    if problem.dtypes[0] != problem.dtypes[1]:
        return f"takes gate and up of one dtype, not {short(problem.dtypes[0])} and {short(problem.dtypes[1])}"
    return capability_reason(problem, (8, 0))


def _saves(problem: Problem) -> int:
    return 2 * numel(problem.shapes[0]) * problem.dtypes[0].itemsize


def _reference_saves(problem: Problem) -> int:
    return 3 * numel(problem.shapes[0]) * wide(problem.dtypes[0]).itemsize  # gate, silu(gate) and up in fp32


SWIGLU = Op(
    "swiglu",
    reference,
    (
        Kernel("compiled-cuda", ("cuda",), compiled, _applies, "cuda", _saves),
        Kernel("compiled-cpu", ("cpu",), compiled, _applies, "cpu", _saves),
    ),
    _reference_saves,
)


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, kernel: str | None = None) -> torch.Tensor:
    """silu(gate) * up.

    Args:
        gate, up: of one shape and dtype.
        kernel: the implementation to use, None for the best that applies.

    Returns:
        a tensor of their shape and dtype.
    """
    assert gate.shape == up.shape
    return SWIGLU.pick(gate, up, kernel=kernel)(gate, up)
