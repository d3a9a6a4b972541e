"""AdamW on flat slices: the formula, the device-side factor and skip, every dtype, any place in a buffer."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_cases import SIZES, need_kernels

from megatron_lite.ops.adamw import adamw_, coefficients, compiled, reference

SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
KERNELS = ("reference", "compiled-cpu")


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    need_kernels()


def state(n: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(master, exp_avg, exp_avg_sq) of a run under way, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    w, m, g = (torch.randn(n, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    v = torch.rand(n, generator=generator, dtype=torch.float64).to(dtype)
    return w, m, v, g


@pytest.mark.parametrize("kernel", KERNELS)
def test_is_torch_adamw(kernel):
    """Ten steps of torch.optim.AdamW in fp64."""
    w, _, _, _ = state(1001, torch.float64)
    theirs = torch.nn.Parameter(w.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for step in range(1, 11):
        grad = torch.randn(1001, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        theirs.grad = 4 * grad
        optimizer.step()
        adamw_(w, w, grad, m, v, **SETTINGS, step=step, factor=4.0, kernel=kernel)
    assert (w - theirs.detach()).abs().max() <= 1e-14


@pytest.mark.parametrize("grad_dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("out_dtype", (None, torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_kernel_is_the_reference(grad_dtype, out_dtype):
    """Moments in every bit; weights but for the last bit of a square root. At every length."""
    for n in SIZES:
        ends = []
        for run in (reference, compiled):
            w, m, v, g = state(n, torch.float32)
            out = w if out_dtype is None else torch.full((n,), 7.0, dtype=out_dtype)
            factor, skip = torch.tensor(0.37, dtype=torch.float64), torch.tensor(False)
            run(out, w, g.to(grad_dtype), m, v, coefficients(**SETTINGS, step=3), factor, skip)
            assert torch.equal(out, w.to(out.dtype))
            ends.append((w, m, v))
        assert torch.equal(ends[0][1], ends[1][1]) and torch.equal(ends[0][2], ends[1][2])
        # a unit in the last place of the step, which is the difference of new and old weight
        allowed = torch.finfo(torch.float32).eps * (state(n, torch.float32)[0].abs() + ends[0][0].abs())
        assert ((ends[0][0] - ends[1][0]).abs() <= allowed).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_skip_changes_nothing(kernel, dtype):
    """With skip true nothing changes, not even from a gradient that is not finite; with skip false everything does."""
    for skip in (torch.tensor(True), torch.tensor(1.0), torch.tensor(3)):
        w, m, v, g = state(100, dtype)
        g[3], g[4] = float("nan"), float("inf")
        out = torch.full((100,), 7.0, dtype=torch.bfloat16) if dtype == torch.float32 else w
        before = [t.clone() for t in (out, w, m, v)]
        adamw_(out, w, g, m, v, **SETTINGS, step=1, factor=torch.tensor(float("nan")), skip=skip.bool(), kernel=kernel)
        assert all(torch.equal(a, b) for a, b in zip(before, (out, w, m, v), strict=True))
    g = torch.ones_like(g)
    adamw_(out, w, g, m, v, **SETTINGS, step=1, skip=torch.tensor(False), kernel=kernel)
    assert all((a != b).all() for a, b in zip(before[1:], (w, m, v), strict=True))


def test_factor_on_the_device_is_factor_on_the_host():
    """A number, an fp32 tensor and an fp64 tensor mean the same."""
    ends = []
    for factor in (0.125, torch.tensor(0.125), torch.tensor(0.125, dtype=torch.float64)):
        for kernel in KERNELS:
            w, m, v, g = state(333, torch.float32)
            adamw_(w, w, g, m, v, **SETTINGS, step=7, factor=factor, kernel=kernel)
            ends.append(torch.cat((m, v)))
    assert all(torch.equal(a, ends[0]) for a in ends)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_the_same_bits_anywhere(dtype):
    """Any offset, any neighbours, any instruction set, any number of threads: sharding an update does not change it."""
    n, c = 100, coefficients(**SETTINGS, step=5)
    w, m, v, g = state(n, dtype)
    want = [t.clone() for t in (w, m, v)]
    compiled(want[0], want[0], g, want[1], want[2], c, 0.5, None)
    threads = torch.get_num_threads()
    try:
        for offset, isa, count in itertools.product((1, 3, 16, 31, 64, 40000), (0, 1, 2), (1, 2)):
            torch.set_num_threads(count)
            big = [torch.zeros(offset + n + 5, dtype=dtype) for _ in range(4)]
            for buffer, t in zip(big, (w, m, v, g), strict=True):
                buffer[offset : offset + n] = t
            compiled(big[0], big[0], big[3], big[1], big[2], c, 0.5, None, isa)
            assert all(torch.equal(b[offset : offset + n], t) for b, t in zip(big[:3], want, strict=True)), offset
            parts = [t.clone() for t in (w, m, v)]
            for begin in range(0, n, 33):  # and in slices
                a, b, d, e = (t[begin : begin + 33] for t in (*parts, g))
                compiled(a, a, e, b, d, c, 0.5, None, isa)
            assert all(torch.equal(a, b) for a, b in zip(parts, want, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_dtypes_outside_the_kernel_fall_back():
    """A float64 gradient beside a float32 master is not the kernel's: the reference runs, with the same meaning."""
    w, m, v, g = state(50, torch.float32)
    same = [t.clone() for t in (w, m, v)]
    with pytest.warns(UserWarning, match="float64"):
        adamw_(w, w, g.double(), m, v, **SETTINGS, step=1)
    adamw_(same[0], same[0], g, same[1], same[2], **SETTINGS, step=1)
    torch.testing.assert_close(w, same[0])
    with pytest.raises(ValueError, match="cannot run.*float64"):
        adamw_(w, w, g.double(), m, v, **SETTINGS, step=1, kernel="compiled-cpu")


def test_empty_slice():
    """A rank may hold nothing of a bucket."""
    w, m, v, g = state(0, torch.float32)
    adamw_(w, w, g, m, v, **SETTINGS, step=1)
