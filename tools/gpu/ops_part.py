"""Every kernel that could run on this device, against exact results: outputs and gradients, over shapes and dtypes.

The bound is the project's: err <= 2 * (error of eager PyTorch in that dtype) + eps(dtype) * max|exact|, maxima over the
tensor. Exact is the formula in fp64, or for fp64 inputs in NumPy's long double. Random numbers are compared bit by bit
with their definition on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gpu.exact import (
    ADAM_EPS,
    BETA1,
    BETA2,
    DECAY,
    EPS,
    LR,
    Exact,
    attention_terms,
    exact_adamw,
    exact_cross_entropy,
    exact_layer_norm,
    exact_rms_norm,
    numbers,
    plain_attention,
    plain_cross_entropy,
)
from gpu.part import Outcome, Settings
from megatron_lite.mesh.collectives import Axis
from megatron_lite.ops.adamw import ADAMW, adamw_
from megatron_lite.ops.attention import ATTENTION, Documents, attention
from megatron_lite.ops.layer_norm import LAYER_NORM, layer_norm
from megatron_lite.ops.library import missing
from megatron_lite.ops.op import Op, Problem, reason_against, wide
from megatron_lite.ops.rms_norm import RMS_NORM, rms_norm
from megatron_lite.ops.swiglu import SWIGLU, swiglu
from megatron_lite.tensor.linear import matrix_gradient
from megatron_lite.tensor.loss import vocab_parallel_cross_entropy
from megatron_lite.tensor.random import compiled, keep_rows, name_key, normal_rows, normal_table
from megatron_lite.tensor.spec import TensorParallel

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((1, 1), (19, 64), (3, 1025), (300, 4096), (33, 8192))
SHORT_SHAPES = ((1, 1), (19, 64), (3, 1025))
Tensors = Sequence[torch.Tensor]


def run(settings: Settings, outcome: Outcome) -> None:
    """Every op in turn; one that raises does not stop the others."""
    pieces: tuple[Callable[[Ops], None], ...] = (
        Ops.rms_norm, Ops.swiglu, Ops.layer_norm, Ops.adamw, Ops.attention, Ops.weight_gradient, Ops.cross_entropy, Ops.random_numbers,
    )  # fmt: skip
    ops = Ops(settings, outcome)
    for piece in pieces:
        try:
            piece(ops)
        except Exception as error:
            outcome.check(False, f"{piece.__name__}: {type(error).__name__}: {str(error).splitlines()[0]}")


class Ops:
    """The comparisons; each method is one op."""

    def __init__(self, settings: Settings, outcome: Outcome) -> None:
        self.device, self.outcome = settings.where, outcome
        self.shapes = SHAPES if settings.on_gpu else SHORT_SHAPES
        self.worst: dict[str, float] = {}
        self.generator = torch.Generator().manual_seed(1)

    def values(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """Normal numbers on the device; ``offset`` elements past an aligned address."""
        n = int(np.prod(shape))
        buffer = torch.empty(n + offset, dtype=dtype, device=self.device)
        numbers = torch.randn(n, generator=self.generator, dtype=torch.float64)
        return buffer[offset:].copy_(numbers).view(shape)

    def kernels(self, op: Op, *tensors: torch.Tensor, **options: Any) -> list[str]:
        """Names of the kernels of ``op`` that can solve this."""
        problem = Problem.of(*tensors, **options)
        return [kernel.name for kernel in op.kernels if reason_against(kernel, problem, missing) is None]

    def hold(
        self, name: str, what: str, ours: Tensors, eager: Tensors, exact: Exact, sizes: Exact | None = None
    ) -> bool:
        """The bound for each result. ``sizes`` stand for ``exact`` in its last term: a few sums may happen to cancel."""
        for i, (a, b, t, size) in enumerate(zip(ours, eager, exact, sizes or exact, strict=True)):
            error, allowed = largest(a, t), 2 * largest(b, t)
            allowed += torch.finfo(a.dtype).eps * float(np.abs(size).max(initial=0.0))
            self.worst[name] = max(self.worst.get(name, 0.0), error / max(allowed, 1e-300))
            if not error <= allowed:
                self.outcome.check(False, f"{name} {what}, result {i}: error {error:.3e}, allowed {allowed:.3e}")
                return False
        return True

    def tell(self, op: str, count: dict[str, int]) -> None:
        """One line for each kernel of an op."""
        if not count:
            self.outcome.skip(f"{op}: no kernel but the reference can run here ({missing(self.device.type)})")
        for kernel, n in count.items():
            worst = self.worst.get(f"{op} {kernel}", 0.0)
            self.outcome.numbers[f"{op} {kernel}"] = {"comparisons": n, "largest share of the bound": worst}
            self.outcome.check(
                worst <= 1, f"{op}, kernel {kernel}: {n} comparisons, at most {worst:.2f} of what is allowed"
            )

    def rms_norm(self) -> None:
        """Forward, gradient of the input and of the weight; weights of the input's dtype and wider; any address."""
        count: dict[str, int] = {}
        for dtype in DTYPES:
            for rows, hidden in self.shapes:
                for offset, weight_dtype in ((0, dtype), (1, wide(dtype))):
                    x, weight = self.values((rows, hidden), dtype, offset), self.values((hidden,), weight_dtype)
                    grad = self.values((rows, hidden), dtype)
                    leaves = [x.requires_grad_(), weight.requires_grad_()]
                    eager = results(rms_norm(x, weight, EPS, kernel="reference"), leaves, grad)
                    exact = exact_rms_norm(x, weight, grad)
                    sizes = exact_rms_norm(x, weight, grad, terms=True) if hidden < 64 else None
                    for kernel in self.kernels(RMS_NORM, x, weight):
                        ours = results(rms_norm(x, weight, EPS, kernel=kernel), leaves, grad)
                        self.hold(f"rms_norm {kernel}", f"{dtype} {rows}x{hidden}", ours, eager, exact, sizes)
                        count[kernel] = count.get(kernel, 0) + 1
        self.tell("rms_norm", count)

    def swiglu(self) -> None:
        """Forward and both gradients."""
        count: dict[str, int] = {}
        for dtype in DTYPES:
            for shape in self.shapes:
                for offset in (0, 1):
                    gate, up, grad = (self.values(shape, dtype, offset) for _ in range(3))
                    leaves = [gate.requires_grad_(), up.requires_grad_()]
                    eager = results(swiglu(gate, up, kernel="reference"), leaves, grad)
                    z, u, g = numbers(gate), numbers(up), numbers(grad)
                    s = 1 / (1 + np.exp(-z))
                    exact = z * s * u, g * u * s * (1 + z * (1 - s)), g * z * s
                    for kernel in self.kernels(SWIGLU, gate, up):
                        ours = results(swiglu(gate, up, kernel=kernel), leaves, grad)
                        self.hold(f"swiglu {kernel}", f"{dtype} {shape}", ours, eager, exact)
                        count[kernel] = count.get(kernel, 0) + 1
        self.tell("swiglu", count)

    def layer_norm(self) -> None:
        """Forward and three gradients of PyTorch's own, which is what runs."""
        count: dict[str, int] = {}
        for dtype in DTYPES:
            for rows, hidden in self.shapes[1:]:
                x, grad = self.values((rows, hidden), dtype), self.values((rows, hidden), dtype)
                leaves = [x, self.values((hidden,), dtype), self.values((hidden,), dtype)]
                leaves = [t.requires_grad_() for t in leaves]
                eager = results(layer_norm(*leaves, EPS, kernel="reference"), leaves, grad)
                exact = exact_layer_norm(*leaves, grad)
                sizes = exact_layer_norm(*leaves, grad, terms=True)
                for kernel in self.kernels(LAYER_NORM, *leaves):
                    ours = results(layer_norm(*leaves, EPS, kernel=kernel), leaves, grad)
                    self.hold(f"layer_norm {kernel}", f"{dtype} {rows}x{hidden}", ours, eager, exact, sizes)
                    count[kernel] = count.get(kernel, 0) + 1
        self.tell("layer_norm", count)

    def adamw(self) -> None:
        """Weights and moments, the model's copy in half precision, factor and skip on the device."""
        count: dict[str, int] = {}
        kinds = (
            (torch.float32, torch.float32),
            (torch.float32, torch.bfloat16),
            (torch.float32, torch.float16),
            (torch.float64, torch.float64),
        )
        for state, low in kinds:
            for n in (1, 1023, 5001) if self.device.type == "cpu" else (1, 1023, 5001, 1_000_003):
                for offset in (0, 1):
                    start = [self.values((n,), state, offset) for _ in range(3)]
                    start[2].abs_()
                    grad = self.values((n,), low, offset)
                    factor = torch.tensor(0.37, dtype=torch.float64, device=self.device)
                    exact = exact_adamw(*start, grad, 0.37)
                    ends = {
                        name: self.stepped(name, start, grad, low, factor, False)
                        for name in ("reference", *self.kernels(ADAMW, start[0], *start[:1], grad, *start[1:]))
                    }
                    for kernel in list(ends)[1:]:
                        self.hold(
                            f"adamw {kernel}", f"{state} {low} {n}", ends[kernel][1:], ends["reference"][1:], exact
                        )
                        self.hold(
                            f"adamw {kernel}",
                            f"{state} {low} {n} copy",
                            ends[kernel][:1],
                            ends["reference"][:1],
                            exact[:1],
                        )
                        kept = self.stepped(kernel, start, grad, low, factor, True)
                        if not all(torch.equal(a, b) for a, b in zip(kept[1:], start, strict=True)):
                            self.outcome.check(False, f"adamw {kernel}: a skipped step changes something")
                        count[kernel] = count.get(kernel, 0) + 2
        self.tell("adamw", count)

    def stepped(
        self, kernel: str, start: Tensors, grad: torch.Tensor, low: torch.dtype, factor: torch.Tensor, skip: bool
    ) -> list[torch.Tensor]:
        """(model's copy, weight, first moment, second moment) after a step."""
        w, m, v = (t.clone() for t in start)
        out = w if low == w.dtype else w.to(low)
        adamw_(
            *(out, w, grad, m, v), lr=LR, beta1=BETA1, beta2=BETA2, eps=ADAM_EPS, weight_decay=DECAY, step=3, factor=factor,
            skip=torch.tensor(skip, device=self.device), kernel=kernel,
        )  # fmt: skip
        return [out, w, m, v]

    def attention(self) -> None:
        """Documents of several lengths, grouped heads; eager is the formula in the same dtype, document by document."""
        count: dict[str, int] = {}
        for dtype in DTYPES:
            for lengths in (
                ((64,) * 4, (100, 1, 37, 250, 124)) if self.device.type == "cuda" else ((16,) * 3, (20, 1, 7, 33))
            ):
                for heads, groups, size in ((4, 4, 64), (8, 2, 128)) if self.device.type == "cuda" else ((4, 2, 16),):
                    tokens = sum(lengths)
                    q, grad = (self.values((tokens, heads, size), dtype) for _ in range(2))
                    k, v = (self.values((tokens, groups, size), dtype) for _ in range(2))
                    leaves = [t.requires_grad_() for t in (q, k, v)]
                    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=self.device)
                    documents = Documents(offsets, len(lengths), max(lengths), lengths)
                    eager = results(plain_attention(*leaves, lengths), leaves, grad)
                    wider = [t.detach().double().requires_grad_() for t in leaves]
                    exact = [numbers(t) for t in results(plain_attention(*wider, lengths), wider, grad.double())]
                    # Exact is fp64 itself here; a sum of n terms in fp64 is off by n * eps times their size at most.
                    n = max(lengths) if dtype == torch.float64 else 1
                    sizes = [n * numbers(t) for t in attention_terms(*wider, grad.double(), lengths)]
                    for kernel in ("reference", *self.kernels(ATTENTION, *leaves, dropout=False)):
                        ours = results(attention(*leaves, documents, kernel=kernel), leaves, grad)
                        self.hold(
                            f"attention {kernel}",
                            f"{dtype} {lengths} {heads}/{groups}x{size}",
                            ours,
                            eager,
                            exact,
                            sizes,
                        )
                        count[kernel] = count.get(kernel, 0) + 1
        self.tell("attention", count)

    def weight_gradient(self) -> None:
        """main_grad += dY^T X for half-precision factors and an fp32 sum: every partial sum is in fp32.

        A sum of T products in fp32 is off by T * eps / 2 times the sum of their absolute values at most.
        """
        tokens, out, width = (512, 384, 256) if self.device.type == "cuda" else (512, 33, 65)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            dy, x = self.values((tokens, out), dtype), self.values((tokens, width), dtype)
            start = self.values((out, width), torch.float32)
            weight = torch.empty(out, width, dtype=dtype, device=self.device)
            weight.main_grad = start.clone()  # type: ignore[attr-defined]
            assert matrix_gradient(weight, dy, x) is None
            exact = start.double() + dy.double().t() @ x.double()
            terms = start.double().abs() + dy.double().abs().t() @ x.double().abs()
            error = float((weight.main_grad.double() - exact).abs().max())  # type: ignore[attr-defined]
            allowed = tokens * torch.finfo(torch.float32).eps / 2 * float(terms.max())
            self.outcome.check(
                error <= allowed,
                f"weight gradient of {short(dtype)} into fp32: error {error:.2e}, allowed {allowed:.2e}",
            )

    def cross_entropy(self) -> None:
        """Loss and gradient, padded columns, ignored targets; eager is PyTorch's on the true columns."""
        parallel = TensorParallel(
            axis=Axis.single(), kv_heads=None, sequence_parallel=False, dtype=torch.float32, device=self.device
        )
        vocab, padded, tokens = (1000, 1024, 300)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            logits = self.values((tokens, padded), dtype).mul_(4).requires_grad_()
            targets = torch.randint(0, vocab, (tokens,), generator=self.generator).to(self.device)
            mask = (torch.arange(tokens, device=self.device) % 5 != 0).float()
            grad = torch.ones((), dtype=wide(dtype), device=self.device)
            ours = results(vocab_parallel_cross_entropy(logits, targets, parallel, vocab, mask), [logits], grad)
            plain = logits.detach().to(wide(dtype)).requires_grad_()
            eager = results(plain_cross_entropy(plain, targets, mask, vocab), [plain], grad)
            eager[1] = eager[1].to(dtype)
            self.hold("cross entropy", str(dtype), ours, eager, exact_cross_entropy(logits, targets, mask, vocab))
        worst = self.worst.get("cross entropy", 0.0)
        self.outcome.check(worst <= 1, f"cross entropy: at most {worst:.2f} of what is allowed")

    def random_numbers(self) -> None:
        """Initial weights and dropout decisions have the bits of their definition, on any device."""
        key0, key1 = name_key(5, "weight")
        for name in ("philox_normal", "philox_keep"):
            kernel = compiled(name, self.device)
            if kernel is None:
                self.outcome.skip(f"{name}: no compiled kernel; its definition in torch runs on the device")
            equal = True
            for length, starts in ((1, (0, 1, 2, 3)), (1023, (7, 2**33 + 2)), (4096, (0, 4096, 12288))):
                start = torch.tensor(starts)
                above = [torch.arange(len(starts)) + shift for shift in (1, 1000, 77)]
                if name == "philox_normal":
                    want = torch.empty(len(starts), length)
                    normal_rows(want, normal_table(), start, key0, key1, 0.02)
                    got = torch.empty_like(want, device=self.device)
                    (kernel or normal_rows)(got, normal_table(self.device), start.to(self.device), key0, key1, 0.02)
                else:
                    start = start % 1000
                    want = torch.empty(len(starts), length, dtype=torch.bool)
                    keep_rows(want, start, *above, key0, key1, 1 << 30)
                    got = torch.empty_like(want, device=self.device)
                    (kernel or keep_rows)(got, *(t.to(self.device) for t in (start, *above)), key0, key1, 1 << 30)
                equal = equal and torch.equal(got.cpu(), want)
            self.outcome.check(equal, f"{name}{'' if kernel else ' (definition)'}: bits of the CPU")


def results(outputs: torch.Tensor, inputs: Tensors, grad: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of the inputs."""
    return [outputs.detach(), *torch.autograd.grad(outputs, inputs, grad)]


def largest(t: torch.Tensor, exact: np.ndarray) -> float:
    """max|t - exact|; inf where a number is not finite."""
    error = float(np.abs(numbers(t) - exact).max(initial=0.0))
    return error if np.isfinite(error) else float("inf")


def short(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
