"""What the tests of the kernels share: exact results, the error bound, inputs of awkward layout.

The exact results are the formulas in NumPy's long double (fp64 at least, more on x86), independent of any op of ours.
The bound is the project's: err <= 2 * (error of eager PyTorch in that dtype) + eps(dtype) * max|exact|.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from megatron_lite.ops import build, library

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (*range(1, 71), 127, 128, 129, 768, 1000, 1023, 1024, 1025, 2047, 2048, 2049)
Exact = Sequence[np.ndarray]


def need_kernels() -> None:
    """Build the CPU kernels if they are not there; skip the test where that is not possible."""
    if library.find("cpu")[0] is None:
        build.build(build.default_root(), only=("cpu", "index"))
    if (reason := library.missing("cpu")) is not None:
        pytest.skip(f"the CPU kernels cannot be built here: {reason}")


def exact(t: torch.Tensor) -> np.ndarray:
    """The values of a tensor, without rounding."""
    return t.detach().to(torch.float64).numpy().astype(np.longdouble)


def exact_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, grad: torch.Tensor, *, terms: bool = False
) -> Exact:
    """(y, gradient of x, gradient of weight); with ``terms`` the sums of their terms' absolute values."""
    x_, w, g = exact(x), exact(weight), exact(grad)
    scale = 1 / np.sqrt((x_**2).mean(-1, keepdims=True) + np.longdouble(eps))
    xhat, d = x_ * scale, g * w
    if terms:
        d, xhat, g = np.abs(d), -np.abs(xhat), -np.abs(g)
    dx = scale * (d - xhat * (d * np.abs(xhat) if terms else d * xhat).mean(-1, keepdims=True))
    return x_ * scale * w, dx, (g * xhat).reshape(-1, x_.shape[-1]).sum(0)


def exact_swiglu(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> Exact:
    """(output, gradient of gate, gradient of up)."""
    z, u, g = exact(gate), exact(up), exact(grad)
    s = 1 / (1 + np.exp(-z))
    return z * s * u, g * u * s * (1 + z * (1 - s)), g * z * s


def assert_within_bound(
    ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], true: Exact, what: str, sizes: Exact | None = None
) -> None:
    """Hold every result against the project's bound.

    Args:
        sizes: what takes the place of ``true`` in its last term. A maximum over a handful of sums says little when they
            happen to cancel; they are judged by the size of their terms then.
    """
    for i, (a, b, t, size) in enumerate(zip(ours, eager, true, sizes or true, strict=True)):
        assert a.dtype == b.dtype and tuple(a.shape) == tuple(b.shape) == t.shape, (what, i, a.shape, b.shape, t.shape)
        if t.size == 0:
            continue
        error, allowed = np.abs(exact(a) - t).max(), 2 * np.abs(exact(b) - t).max()
        allowed += torch.finfo(a.dtype).eps * np.abs(size).max()
        assert error <= allowed, f"{what}, result {i}: error {error:.3e}, allowed {allowed:.3e}"


def layouts(t: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same 2-D values, laid out in memory in awkward ways."""
    rows, columns = t.shape
    offset = torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(rows, columns)  # misaligned for any vector load
    strided = torch.empty(rows, 2 * columns + 1, dtype=t.dtype)[:, 1 : columns + 1]
    return {
        "contiguous": t.clone(),
        "offset": offset.copy_(t),
        "strided": strided.copy_(t),
        "transposed": torch.empty(columns, rows, dtype=t.dtype).t().copy_(t),
        "every second": torch.empty(rows, 2 * columns, dtype=t.dtype)[:, ::2].copy_(t),
    }


def results(outputs: torch.Tensor, inputs: Sequence[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of the inputs."""
    return [outputs.detach(), *torch.autograd.grad(outputs, inputs, grad)]
