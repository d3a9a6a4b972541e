"""The CUDA kernels: they compile for the cards we name, and their logic is right.

No GPU is needed. nvcc compiles the sources as a build does, and an ordinary C++ compiler compiles the same sources against
cuda_on_cpu.h, which runs a grid thread by thread. Element-wise kernels must give the bits of the CPU kernels, norms the
project's bound. What runs on a real card is tested by the same functions through the op table, where there is one.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kernel_cases import DTYPES, assert_within_bound, exact_rms_norm, need_kernels, results

from megatron_lite.ops import adamw, build, rms_norm, swiglu, toolchain
from megatron_lite.ops.op import wide
from megatron_lite.tensor.random import name_key, normal_rows, normal_table, uniform_bits

CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
SOURCES = build.source_directory()
EPS = 1e-5


class Coefficients(ctypes.Structure):
    """MegatronLiteAdamw of launch.h."""

    names = (
        "decay",
        "beta1",
        "one_minus_beta1",
        "beta2",
        "one_minus_beta2",
        "step_size",
        "inverse_root",
        "eps",
        "factor",
    )
    _fields_ = tuple((name, ctypes.c_double) for name in names)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    """The CUDA sources compiled for the CPU."""
    need_kernels()
    assert SOURCES is not None
    work = tmp_path_factory.mktemp("cuda on cpu")
    compiler = toolchain.find_compiler(os.environ)
    flags = ["-std=c++20", "-O1", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-I", str(Path(__file__).parent)]

    def compile_one(name: str) -> Path:
        out = work / f"{name}.o"
        toolchain.run([*compiler, *flags, "-x", "c++", "-c", SOURCES / name, "-o", out])
        return out

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, build.CUDA_SOURCES))
    toolchain.run([*compiler, "-shared", *objects, "-o", work / "kernels.so"])
    yield ctypes.CDLL(str(work / "kernels.so"))


def call(function: Callable[..., int], *args: object) -> None:
    """Call a launch function: tensors by address, integers as int64 unless they are ctypes already."""
    converted: list[object] = []
    for a in args:
        if isinstance(a, torch.Tensor):
            converted.append(ctypes.c_void_p(a.data_ptr()))
        elif isinstance(a, float):
            converted.append(ctypes.c_double(a))
        elif isinstance(a, int):
            converted.append(ctypes.c_int64(a))
        else:
            converted.append(a)
    assert function(*converted) == 0


def code(t: torch.Tensor) -> ctypes.c_int:
    return ctypes.c_int(CODES[t.dtype])


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int, offset: int = 0) -> torch.Tensor:
    """Normal numbers at an address that is ``offset`` elements past a multiple of 64 bytes."""
    n = int(torch.tensor(shape).prod())
    buffer = torch.empty(n + 64, dtype=dtype)
    first = -(buffer.data_ptr() // dtype.itemsize) % (64 // dtype.itemsize) + offset
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)
    return buffer[first : first + n].copy_(numbers).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_has_the_bits_of_the_cpu(emulated, dtype):
    """With and without 16-byte loads, with every kind of rest."""
    for n in (1, 7, 8, 9, 255, 2048, 4099):
        for offset in (0, 1):
            gate, up, grad = (values((n,), dtype, seed, offset) for seed in (1, 2, 3))
            out, dgate, dup = (torch.empty_like(values((n,), dtype, 0, offset)) for _ in range(3))
            call(emulated.megatron_lite_swiglu_forward, code(gate), gate, up, out, n, None)
            call(emulated.megatron_lite_swiglu_backward, code(gate), grad, gate, up, dgate, dup, n, None)
            a, b = gate.clone().requires_grad_(), up.clone().requires_grad_()
            want = results(swiglu.compiled(a, b), (a, b), grad)
            assert all(torch.equal(x, y) for x, y in zip((out, dgate, dup), want, strict=True)), (n, offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide_weight", (False, True))
def test_rms_norm_is_within_the_bound(emulated, dtype, wide_weight):
    """Rows of a warp and of a block, both kinds of load, fewer and more rows than a block of threads has room for."""
    shapes = ((1, 1), (3, 33), (19, 64), (5, 1024), (3, 1025), (7, 2048), (2, 4104), (0, 64))
    for rows, hidden in shapes:
        for offset in (0, 1):
            x, grad = values((rows, hidden), dtype, 1, offset), values((rows, hidden), dtype, 2, offset)
            weight = values((hidden,), wide(dtype) if wide_weight else dtype, 3, offset)
            y, dx = torch.empty_like(x), torch.empty_like(x)
            scale = torch.empty(rows, dtype=wide(dtype))
            blocks = min(rows, 3)
            partial, dw = torch.empty(blocks, hidden, dtype=wide(dtype)), torch.empty_like(weight)
            call(
                emulated.megatron_lite_rms_norm_forward,
                code(x),
                code(weight),
                x,
                weight,
                EPS,
                y,
                scale,
                rows,
                hidden,
                None,
            )
            call(
                emulated.megatron_lite_rms_norm_backward,
                *(code(x), code(weight), grad, x, weight, scale, dx, dw, partial, blocks, rows, hidden, None),
            )
            a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
            eager = results(rms_norm.reference(a, b, EPS), (a, b), grad)
            if rows == 0:
                assert torch.equal(dw, torch.zeros_like(dw))
                continue
            terms = exact_rms_norm(a, b, EPS, grad, terms=True) if hidden < 32 else None
            assert_within_bound((y, dx, dw), eager, exact_rms_norm(a, b, EPS, grad), f"{rows} x {hidden}", terms)


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "out_dtype"),
    [
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, None),
        (torch.float32, torch.bfloat16, torch.float16),
        (torch.float32, torch.float16, torch.float32),
        (torch.float64, torch.float64, None),
        (torch.float64, torch.float64, torch.float64),
    ],
    ids=str,
)
def test_adamw_has_the_bits_of_the_cpu(emulated, dtype, grad_dtype, out_dtype):
    """Factor on the host and on the device, skip, aligned and not."""
    c = adamw.coefficients(1e-3, 0.9, 0.95, 1e-8, 0.1, 3)
    settings = [getattr(c, name) for name in Coefficients.names[:-1]]
    for n, offset in ((1, 0), (1023, 0), (1024, 1), (2051, 0), (2051, 3)):
        for factor in (0.25, torch.tensor(0.37), torch.tensor(0.37, dtype=torch.float64)):
            for skip in (None, torch.tensor(False), torch.tensor(True)):
                grad = values((n,), grad_dtype, 4, offset)
                ends = []
                for where in ("cpu", "cuda"):
                    w, m, v = (values((n,), dtype, seed, offset) for seed in (1, 2, 3))
                    v.abs_()
                    out = w if out_dtype is None else values((n,), out_dtype, 5, offset)
                    if where == "cpu":
                        adamw.compiled(out, w, grad, m, v, c, factor, skip)
                    else:
                        on_device = isinstance(factor, torch.Tensor)
                        call(
                            emulated.megatron_lite_adamw,
                            *(code(w), code(grad), code(out), None if out_dtype is None else out, w, grad, m, v),
                            Coefficients(*settings, 1.0 if on_device else factor),
                            *((code(factor), factor) if on_device else (ctypes.c_int(0), None)),
                            *(skip, ctypes.c_int(1 if skip is not None else 0), n, None),
                        )
                    ends.append((out, w, m, v))
                assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True)), (n, offset, factor, skip)


def test_random_numbers_have_the_bits_of_their_definition(emulated):
    """Initial weights and dropout decisions, from any address on."""
    k0, k1 = name_key(5, "weight")
    table = normal_table()
    for length, starts in ((1, (0, 1, 2, 3)), (1023, (7, 2**33 + 2)), (5, (2**34 - 2,)), (0, (1,))):
        start = torch.tensor(starts)
        out, want = torch.empty(len(starts), length), torch.empty(len(starts), length)
        key = (ctypes.c_uint32(k0), ctypes.c_uint32(k1))
        call(emulated.megatron_lite_philox_normal, out, table, start, len(starts), length, *key, 0.02, None)
        if length:
            normal_rows(want, table, start, k0, k1, 0.02)
        assert torch.equal(out, want)
        start = start % 1000
        above = tuple(torch.arange(len(starts)) + shift for shift in (1, 1000, 77))
        for p in (0.0, 0.1, 1.0):
            threshold = round(p * 2**32)
            keep = torch.empty(len(starts), length, dtype=torch.bool)
            call(
                emulated.megatron_lite_philox_keep,
                *(keep, start, *above, len(starts), length, *key, ctypes.c_uint64(threshold), None),
            )
            assert torch.equal(keep, uniform_bits((k0, k1), start, length, above) >= threshold)


@pytest.mark.parametrize("name", build.CUDA_SOURCES)
def test_compiles_for_the_cards_we_name(tmp_path, name):
    """sm_80 (A100) and sm_90 (H100), with the command of a build; no header of torch on the path."""
    nvcc = toolchain.find_nvcc(os.environ)
    if nvcc is None:
        pytest.skip("no nvcc")
    assert SOURCES is not None
    out = tmp_path / "with space" / "kernel.o"
    out.parent.mkdir()
    toolchain.run(build.nvcc_command(nvcc, SOURCES / name, out, ("80", "90")))
    assert out.stat().st_size > 0
    cuobjdump = shutil.which("cuobjdump") or nvcc.with_name("cuobjdump")
    if Path(cuobjdump).is_file():
        listing = toolchain.run([cuobjdump, "--list-elf", out])
        assert "sm_80" in listing and "sm_90" in listing


def test_host_file_compiles_against_the_stable_abi(tmp_path):
    """The one CUDA file that includes torch: no CUDA header is needed for it."""
    assert SOURCES is not None
    torch_ = toolchain.find_torch()
    compiler = toolchain.find_compiler(os.environ)
    for name in build.CUDA_HOST_SOURCES:
        out = tmp_path / "host.o"
        toolchain.run(
            [*build.cxx_command(compiler, [torch_.root / "include"], SOURCES / name, out), "-Wall", "-Werror"]
        )
        assert out.stat().st_size > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_card(dtype):
    """The compiled kernels on a GPU, through the op table: bits of the CPU where element-wise, the bound for norms."""
    card = torch.device("cuda")
    for rows, hidden in ((1, 1), (19, 64), (3, 1025), (300, 4096)):
        x, grad = values((rows, hidden), dtype, 1).requires_grad_(), values((rows, hidden), dtype, 2)
        weight = values((hidden,), dtype, 3).requires_grad_()
        a, b = (t.detach().to(card).requires_grad_() for t in (x, weight))
        ours = results(rms_norm.rms_norm(a, b, EPS, kernel="compiled-cuda"), (a, b), grad.to(card))
        eager = results(rms_norm.reference(x, weight, EPS), (x, weight), grad)
        terms = exact_rms_norm(x, weight, EPS, grad, terms=True) if hidden < 32 else None
        assert_within_bound(
            [t.cpu() for t in ours], eager, exact_rms_norm(x, weight, EPS, grad), f"{rows} x {hidden}", terms
        )
        up = (x + 1).detach().requires_grad_()
        c = up.detach().to(card).requires_grad_()
        want = results(swiglu.compiled(x, up), (x, up), grad)
        got = results(swiglu.swiglu(a, c, kernel="compiled-cuda"), (a, c), grad.to(card))
        assert all(torch.equal(u.cpu(), v) for u, v in zip(got, want, strict=True))
    state_dtype = wide(dtype)
    ends = []
    for where in (torch.device("cpu"), card):
        w, m, v = (values((5001,), state_dtype, seed).to(where) for seed in (1, 2, 3))
        out = w if dtype == state_dtype else w.to(dtype)
        grad = values((5001,), dtype, 4).to(where)
        for skip in (False, True):
            adamw.adamw_(
                *(out, w, grad, m, v.abs_()),
                lr=1e-3,
                beta1=0.9,
                beta2=0.95,
                eps=1e-8,
                weight_decay=0.1,
                step=3,
                factor=torch.tensor(0.3, device=where),
                skip=torch.tensor(skip, device=where),
                kernel=f"compiled-{where.type}",
            )
        ends.append([t.cpu() for t in (out, w, m, v)])
    assert all(torch.equal(u, v) for u, v in zip(*ends, strict=True))
