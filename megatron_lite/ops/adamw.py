"""One AdamW step on a flat slice of the model, in place.

For every element, with g = grad * factor in fp32 (fp64 for an fp64 model), t the number of this step (from 1):

    w <- w * (1 - lr * weight_decay)                       (decoupled decay)
    m <- beta1 * m + (1 - beta1) * g
    v <- beta2 * v + (1 - beta2) * g * g
    w <- w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

and the copy in the model's dtype is w rounded. ``factor`` (unscaling times clipping) and ``skip`` may be tensors on the
device, so that a step needs no read by the host; with skip true nothing changes.

Every operation is one IEEE operation, rounded by itself (no fused multiply-add, no vector form with another tail):
an element gets the same bits wherever it lies in a buffer, which is what lets sharded and whole states agree.
The compiled kernels do the same operations in the same order; only the square root can differ from the reference's in
the last bit on a CPU, where PyTorch takes MKL's, which is not always rounded correctly.

Source: Loshchilov and Hutter 2019 (arXiv 1711.05101), in the form of torch.optim.AdamW.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron_lite.ops.op import Kernel, Op, Problem, Reason, capability_reason, dtype_reason, short


@dataclass(frozen=True)
class Coefficients:
    """The numbers of one step that do not depend on the element, computed in fp64 on the host."""

    decay: float  # 1 - lr * weight_decay
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float  # lr / (1 - beta1^t)
    inverse_root: float  # 1 / sqrt(1 - beta2^t)
    eps: float


def coefficients(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int) -> Coefficients:
    """The coefficients of step ``step`` (the first is 1)."""
    return Coefficients(
        decay=1 - lr * weight_decay,
        beta1=beta1,
        one_minus_beta1=1 - beta1,
        beta2=beta2,
        one_minus_beta2=1 - beta2,
        step_size=lr / (1 - beta1**step),
        inverse_root=1 / math.sqrt(1 - beta2**step),
        eps=eps,
    )


def reference(
    param_out: torch.Tensor,
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    c: Coefficients,
    factor: torch.Tensor | float,
    skip: torch.Tensor | None,
) -> None:
    """The definition, in plain PyTorch."""
    if isinstance(factor, torch.Tensor):
        factor = factor.to(master.dtype)
    g = grad.to(master.dtype) * factor
    m = exp_avg * c.beta1 + g * c.one_minus_beta1
    v = exp_avg_sq * c.beta2 + g * g * c.one_minus_beta2
    denominator = v.sqrt() * c.inverse_root + c.eps
    w = master * c.decay - m / denominator * c.step_size
    if skip is not None:
        m, v, w = (torch.where(skip, old, new) for old, new in ((exp_avg, m), (exp_avg_sq, v), (master, w)))
        if param_out is not master:
            param_out.copy_(torch.where(skip, param_out, w.to(param_out.dtype)))
    elif param_out is not master:
        param_out.copy_(w)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    master.copy_(w)


def compiled(
    param_out: torch.Tensor,
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    c: Coefficients,
    factor: torch.Tensor | float,
    skip: torch.Tensor | None,
    isa: int = -1,
) -> None:
    """The compiled kernel; ``isa`` is -1 for the CPU's best instruction set, 0 plain, 1 AVX2, 2 AVX-512."""
    on_device = isinstance(factor, torch.Tensor)
    torch.ops.megatron_lite.adamw_(
        param_out, master, grad, exp_avg, exp_avg_sq,
        c.decay, c.beta1, c.one_minus_beta1, c.beta2, c.one_minus_beta2, c.step_size, c.inverse_root, c.eps,
        1.0 if on_device else factor, factor if on_device else None, skip, isa,
    )  # fmt: skip


def _applies(problem: Problem) -> Reason:
    if (reason := dtype_reason(problem)) is not None:
        return reason
    param_out, master, grad, exp_avg, exp_avg_sq = problem.dtypes
    if master not in (torch.float32, torch.float64) or not master == exp_avg == exp_avg_sq:
        return "takes a master and moments of one dtype, float32 or float64, not " + ", ".join(
            short(d) for d in (master, exp_avg, exp_avg_sq)
        )
    if master == torch.float64 and not (param_out == grad == master):
        return f"takes a float64 master with float64 only, not {short(param_out)} and {short(grad)}"
    if master == torch.float32 and torch.float64 in (param_out, grad):
        return "takes no float64 beside a float32 master"
    if not problem.contiguous:
        return "takes contiguous slices"
    return capability_reason(problem, (8, 0))


ADAMW = Op(
    "adamw",
    reference,
    (
        Kernel("compiled-cuda", ("cuda",), compiled, _applies, "cuda", lambda _: 0),
        Kernel("compiled-cpu", ("cpu",), compiled, _applies, "cpu", lambda _: 0),
    ),
    lambda _: 0,
)


def adamw_(
    param_out: torch.Tensor,
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: torch.Tensor | float = 1.0,
    skip: torch.Tensor | None = None,
    kernel: str | None = None,
) -> None:
    """One AdamW step in place on flat, contiguous slices of one length.

    Args:
        param_out: the weights in the model's dtype, written only; the same tensor as ``master`` in fp32 and fp64 models.
        master, exp_avg, exp_avg_sq: fp32 (fp64 for an fp64 model) weights and moments, updated.
        grad: any floating dtype, read only.
        lr, beta1, beta2, eps, weight_decay: as in torch.optim.AdamW.
        step: number of this step, the first is 1.
        factor: every gradient is multiplied by it first; a number, or a 0-d tensor on the device.
        skip: 0-d tensor; where true, nothing changes.
        kernel: the implementation to use, None for the best that applies.
    """
    assert step >= 1 and param_out.shape == master.shape == grad.shape == exp_avg.shape == exp_avg_sq.shape
    assert master.dim() == 1
    c = coefficients(lr, beta1, beta2, eps, weight_decay, step)
    with torch.no_grad():
        run = ADAMW.pick(param_out, master, grad, exp_avg, exp_avg_sq, kernel=kernel)
        run(param_out, master, grad, exp_avg, exp_avg_sq, c, factor, skip)
