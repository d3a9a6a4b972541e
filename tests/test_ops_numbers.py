"""The CPU kernels compute what their references define: every size, dtype and memory layout, forward and backward."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import (
    DTYPES,
    SIZES,
    assert_within_bound,
    exact_rms_norm,
    exact_swiglu,
    layouts,
    need_kernels,
    results,
)

from megatron_lite.ops import layer_norm, rms_norm, swiglu
from megatron_lite.ops.op import Problem, choose

EPS = 1e-5


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    need_kernels()


def rms_case(rows: int, hidden: int, dtype: torch.dtype, weight_dtype: torch.dtype | None = None):
    generator = torch.Generator().manual_seed(rows * 10007 + hidden)
    x = torch.randn(rows, hidden, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = 1 + torch.randn(hidden, generator=generator, dtype=torch.float64) / 4
    weight = weight.to(weight_dtype or dtype).requires_grad_()
    return x, weight, torch.randn(rows, hidden, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_at_every_size(dtype):
    """Hidden sizes around every vector width, and rows around every block size."""
    shapes = [(rows, hidden) for hidden in SIZES for rows in (1, 3, 7)]
    shapes += [(rows, hidden) for hidden in (1, 31, 33, 1025) for rows in (63, 64, 65, 1023, 1025)]
    for rows, hidden in shapes:
        x, weight, grad = rms_case(rows, hidden, dtype)
        ours = results(rms_norm.rms_norm(x, weight, EPS, kernel="compiled-cpu"), (x, weight), grad)
        again = results(rms_norm.rms_norm(x, weight, EPS, kernel="compiled-cpu"), (x, weight), grad)
        assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)), (rows, hidden)
        eager = results(rms_norm.reference(x, weight, EPS), (x, weight), grad)
        terms = exact_rms_norm(x, weight, EPS, grad, terms=True) if hidden < 32 else None
        assert_within_bound(ours, eager, exact_rms_norm(x, weight, EPS, grad), f"{rows} x {hidden}", terms)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_rms_norm_takes_a_wide_weight(dtype):
    """A weight in fp32 (1 + w) with a half-precision x; its gradient is fp32."""
    x, weight, grad = rms_case(9, 200, dtype, torch.float32)
    ours = results(rms_norm.rms_norm(x, weight, EPS, kernel="compiled-cpu"), (x, weight), grad)
    assert ours[2].dtype == torch.float32
    eager = results(rms_norm.reference(x, weight, EPS), (x, weight), grad)
    assert_within_bound(ours, eager, exact_rms_norm(x, weight, EPS, grad), "wide weight")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_at_every_size(dtype):
    """Lengths around every vector width and around the grain of the threads; large and infinite gates."""
    for n in (*SIZES, 16383, 16384, 16385, 40001):
        generator = torch.Generator().manual_seed(n)
        gate = (torch.randn(n, generator=generator, dtype=torch.float64) * 4).to(dtype).requires_grad_()
        up = torch.randn(n, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        grad = torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)
        ours = results(swiglu.swiglu(gate, up, kernel="compiled-cpu"), (gate, up), grad)
        eager = results(swiglu.reference(gate, up), (gate, up), grad)
        assert_within_bound(ours, eager, exact_swiglu(gate, up, grad), f"{n}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_far_from_zero(dtype):
    """Where e^-z overflows or vanishes, and at infinities and NaN, silu is what PyTorch says."""
    span = torch.cat((torch.linspace(-1000, 1000, 801), torch.linspace(-110, -80, 301))).to(dtype)
    gate, one = span.clone().requires_grad_(), torch.ones_like(span).requires_grad_()
    grad = torch.ones_like(span)
    ours = results(swiglu.swiglu(gate, one, kernel="compiled-cpu"), (gate, one), grad)
    eager = results(swiglu.reference(gate, one), (gate, one), grad)
    for a, b in zip(ours, eager, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, rtol=4 * torch.finfo(dtype).eps, atol=1e-34)
    odd = torch.tensor([float("nan"), float("inf")], dtype=dtype)
    got = swiglu.swiglu(odd, torch.ones_like(odd), kernel="compiled-cpu")
    assert got[0].isnan() and got[1].isinf()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_layouts(dtype):
    """Transposed, strided and misaligned inputs give the bits of contiguous ones."""
    x, weight, grad = rms_case(5, 67, dtype)
    want_norm = results(rms_norm.rms_norm(x, weight, EPS, kernel="compiled-cpu"), (x, weight), grad)
    want_glu = results(swiglu.swiglu(x, 2 * x, kernel="compiled-cpu"), (x,), grad)
    for name, laid_out in layouts(x.detach()).items():
        laid_out.requires_grad_()
        for other, g in layouts(grad).items():
            got = results(rms_norm.rms_norm(laid_out, weight, EPS, kernel="compiled-cpu"), (laid_out, weight), g)
            assert all(torch.equal(a, b) for a, b in zip(got, want_norm, strict=True)), (name, other)
            got = results(swiglu.swiglu(laid_out, 2 * laid_out, kernel="compiled-cpu"), (laid_out,), g)
            assert all(torch.equal(a, b) for a, b in zip(got, want_glu, strict=True)), (name, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty(dtype):
    """No rows: empty results, and a weight gradient of zeros."""
    x, weight = torch.empty(0, 33, dtype=dtype, requires_grad=True), torch.ones(33, dtype=dtype, requires_grad=True)
    y, dx, dw = results(rms_norm.rms_norm(x, weight, EPS, kernel="compiled-cpu"), (x, weight), torch.empty_like(x))
    assert y.shape == dx.shape == (0, 33) and dw.abs().sum() == 0
    assert swiglu.swiglu(x, x, kernel="compiled-cpu").shape == (0, 33)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_instruction_sets_and_threads_agree_in_every_bit(dtype):
    """Plain, AVX2 and AVX-512 code (those that this CPU has), and 1 and 2 threads."""
    x, weight, grad = rms_case(301, 1027, dtype)
    gate, up, d = (t.detach().view(-1).requires_grad_() for t in (4 * x, x + 1, grad))

    def everything(isa: int) -> list[torch.Tensor]:
        norm = results(rms_norm.compiled(x, weight, EPS, isa), (x, weight), grad)
        return norm + results(swiglu.compiled(gate, up, isa), (gate, up), d)

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = everything(0)
        for count, isa in ((1, 1), (1, 2), (2, 0), (2, -1)):
            torch.set_num_threads(count)
            got = everything(isa)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (count, isa)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_element_has_the_same_bits_anywhere(dtype):
    """Element-wise: moved by any offset, in a buffer of any length, alone or in a crowd. Row-wise: in any row."""
    x, weight, grad = rms_case(1, 203, dtype)
    gate, up = (4 * x).detach().view(-1), (x - 1).detach().view(-1)
    want = results(swiglu.swiglu(gate.requires_grad_(), up, kernel="compiled-cpu"), (gate,), grad.view(-1))
    for offset in range(1, 70):
        for rest in (0, 1, 17):
            buffers = [torch.zeros(offset + 203 + rest, dtype=dtype) for _ in range(3)]
            for buffer, t in zip(buffers, (gate, up, grad.view(-1)), strict=True):
                buffer[offset : offset + 203] = t.detach()
            buffers[0].requires_grad_()
            got = results(swiglu.swiglu(buffers[0], buffers[1], kernel="compiled-cpu"), (buffers[0],), buffers[2])
            assert all(torch.equal(a[offset : offset + 203], b) for a, b in zip(got, want, strict=True)), offset
    alone = results(rms_norm.rms_norm(x, weight, EPS, kernel="compiled-cpu"), (x,), grad)
    crowd, crowd_grad = x.detach().repeat(131, 1).requires_grad_(), grad.repeat(131, 1)
    together = results(rms_norm.rms_norm(crowd, weight, EPS, kernel="compiled-cpu"), (crowd,), crowd_grad)
    assert all(torch.equal(a, b.expand_as(a)) for a, b in zip(together, alone, strict=True))


def test_gradients_in_fp64():
    """Against finite differences, through autograd."""
    x, weight, _ = rms_case(3, 5, torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm.rms_norm(a, b, EPS, kernel="compiled-cpu"), (x, weight))
    assert torch.autograd.gradcheck(
        lambda a, b: swiglu.swiglu(a, b, kernel="compiled-cpu"), (x, (x + 1).detach().requires_grad_())
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm(dtype):
    """PyTorch's layer norm against our definition of it, and mixed dtypes through the definition."""
    for hidden in (3, 33, 768, 1025):
        x, weight, grad = rms_case(7, hidden, dtype)
        bias = weight.detach().flip(0).requires_grad_()
        ours = results(layer_norm.layer_norm(x, weight, bias, EPS), (x, weight, bias), grad)
        exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
        want = results(layer_norm.layer_norm(*exact, EPS, kernel="reference"), exact, grad.double())
        for a, b in zip(ours, want, strict=True):
            tolerance = 8 * torch.finfo(dtype).eps * float(b.abs().max() + 1)
            torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_memory_kept_for_backward(dtype):
    """What autograd keeps is what the table says, and less than what the reference keeps."""
    x, weight, _ = rms_case(40, 96, dtype)

    def kept(run) -> int:
        storages: dict[int, int] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = run()
        del out
        return sum(storages.values())

    choice = choose(rms_norm.RMS_NORM, Problem.of(x, weight))
    assert kept(lambda: rms_norm.rms_norm(x, weight, EPS)) == choice.bytes_saved + weight.nbytes
    assert kept(lambda: rms_norm.reference(x, weight, EPS)) > 1.9 * choice.bytes_saved
    choice = choose(swiglu.SWIGLU, Problem.of(x, x + 1))
    up = (x + 1).detach().requires_grad_()
    assert kept(lambda: swiglu.swiglu(x, up)) == choice.bytes_saved
    assert kept(lambda: swiglu.reference(x, up)) > 1.4 * choice.bytes_saved
