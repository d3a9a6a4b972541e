"""Which implementation of an op runs: decided by conditions alone, for devices that need not be here."""

from __future__ import annotations

import warnings

import pytest
import torch
from kernel_cases import need_kernels

from megatron_lite.ops.layer_norm import LAYER_NORM
from megatron_lite.ops.op import FallbackNotice, Kernel, Op, Problem, Target, choose, target
from megatron_lite.ops.report import report
from megatron_lite.ops.rms_norm import RMS_NORM, reference, rms_norm
from megatron_lite.ops.swiglu import SWIGLU, swiglu

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def norm_problem(where: Target, hidden: int, dtype: torch.dtype = BF16, rows: int = 4096) -> Problem:
    return Problem(where, (dtype, dtype), ((rows, hidden), (hidden,)))


def test_targets():
    """A card by name needs no card; an unknown one is an error that lists the known ones."""
    assert target("cuda:a100").capability == (8, 0) and not target("cuda:A100").present
    assert target("cuda:h200").capability == (9, 0)
    assert target("cpu").present and target(torch.device("cpu")) == target("cpu")
    assert target("meta").kind == "meta"
    with pytest.raises(ValueError, match=r"cuda:rtx1080.*cuda:a100"):
        target("cuda:rtx1080")


@pytest.mark.parametrize("rows", (1, 4096))
@pytest.mark.parametrize("hidden", (16, 2048, 4096, 16384, 32768, 32769, 65537))
def test_limit_of_the_cuda_norm(hidden, rows):
    """Up to the limit the kernel, beyond it the reference; the limit is in the reason, and in the error when forced."""
    problem = norm_problem(target("cuda:a100"), hidden, rows=rows)
    choice = choose(RMS_NORM, problem)
    if hidden <= 32768:
        assert choice.name == "compiled-cuda"
        assert choose(RMS_NORM, problem, "compiled-cuda").name == "compiled-cuda"
    else:
        assert choice.name == "reference"
        assert dict(choice.passed_over)["compiled-cuda"] == f"takes at most 32768 features in float32, not {hidden}"
        with pytest.raises(ValueError, match=f"compiled-cuda.*at most 32768 features.*not {hidden}"):
            choose(RMS_NORM, problem, "compiled-cuda")
    assert choose(RMS_NORM, norm_problem(target("cuda:h100"), 16384, FP64)).name == "compiled-cuda"
    assert choose(RMS_NORM, norm_problem(target("cuda:h100"), 16385, FP64)).name == "reference"


def test_old_cards_fall_back():
    """Compute capability below 8.0: the reference, with the reason."""
    choice = choose(SWIGLU, Problem(target("cuda:v100"), (FP32, FP32), ((8, 8), (8, 8))))
    assert choice.name == "reference"
    assert dict(choice.passed_over)["compiled-cuda"] == "needs compute capability 8.0, cuda:v100 has 7.0"


def test_dtypes():
    """Integers and mixed dtypes are nobody's but the reference's; layer norm wants one dtype."""
    where = target("cuda:a100")
    mixed = Problem(where, (BF16, FP64), ((4, 8), (8,)))
    assert choose(RMS_NORM, mixed).name == "reference"
    assert "weight of bfloat16 or float32" in dict(choose(RMS_NORM, mixed).passed_over)["compiled-cuda"]
    assert choose(RMS_NORM, Problem(where, (BF16, FP32), ((4, 8), (8,)))).name == "compiled-cuda"
    assert choose(LAYER_NORM, Problem(where, (BF16, FP32, FP32), ((4, 8), (8,), (8,)))).name == "reference"
    assert choose(LAYER_NORM, Problem(where, (BF16,) * 3, ((4, 8), (8,), (8,)))).name == "torch"
    assert choose(SWIGLU, Problem(where, (torch.int32,) * 2, ((4,), (4,)))).name == "reference"


def test_missing_library_falls_back():
    """Not built: the reference, with the reason; a device that is only asked about is taken to have it."""
    missing = {"cpu": "not built", "cuda": "not built"}.get
    here = norm_problem(Target("cuda", (8, 0)), 64)
    with pytest.warns(FallbackNotice, match="not built"):
        choice = choose(RMS_NORM, here, None, missing)
    assert choice.name == "reference" and "not built" in dict(choice.passed_over)["compiled-cuda"]
    with pytest.raises(ValueError, match="not built"):
        choose(RMS_NORM, here, "compiled-cuda", missing)
    assert choose(RMS_NORM, norm_problem(target("cuda:a100"), 64), None, missing).name == "compiled-cuda"


def test_meta_runs_the_reference_without_a_word():
    """A rehearsal has no data: shapes and dtypes come out right, and nothing is told."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.empty(5, 64, dtype=BF16, device="meta")
        assert rms_norm(x, torch.empty(64, device="meta"), 1e-5).dtype == BF16
        assert swiglu(x, x).shape == (5, 64)


def test_first_that_applies_wins_and_the_rest_say_why():
    """Order is preference; what was passed over is in the choice."""

    def never(_: Problem) -> str:
        return "takes nothing"

    kernels = (
        Kernel("a", ("cpu",), max, never),
        Kernel("b", ("cuda",), max, lambda _: None),
        Kernel("c", ("cpu",), sum, lambda _: None, saves=lambda _: 12),
    )
    op = Op("toy", min, kernels)
    with pytest.warns(FallbackNotice, match="toy: kernel 'a' is passed over: takes nothing"):
        choice = choose(op, Problem(target("cpu"), (), ()))
    assert (choice.name, choice.run, choice.bytes_saved) == ("c", sum, 12)
    assert choice.passed_over == (("a", "takes nothing"), ("b", "runs on cuda, this is cpu"))
    assert choose(op, Problem(target("cpu"), (), ()), "reference").run is min
    with pytest.raises(ValueError, match="toy has no kernel 'd'; it has: a, b, c, reference"):
        choose(op, Problem(target("cpu"), (), ()), "d")


def test_told_once_for_all_ops():
    """Without the compiled library there is one notice in a process, not one for each op or shape."""

    def missing(_: str) -> str:
        return "not built, in this test"

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for hidden in (8, 16, 24):
            for op in (RMS_NORM, SWIGLU):
                shapes = ((2, hidden), (hidden,)) if op is RMS_NORM else ((2, hidden),) * 2
                assert choose(op, Problem(target("cpu"), (FP32, FP32), shapes), None, missing).name == "reference"
    told = [str(w.message) for w in caught if issubclass(w.category, FallbackNotice)]
    assert told == [
        "plain PyTorch runs in place of kernels: the compiled cpu kernels are not loaded: not built, in this test"
    ]


def test_alignment_and_contiguity_of_a_problem():
    """What a kernel may ask about where tensors lie."""
    base = torch.empty(100)
    shift = (-base.data_ptr() // 4) % 16  # elements up to the next multiple of 64 bytes
    assert Problem.of(base[shift:]).alignment == 64
    assert Problem.of(base[shift + 1 :]).alignment == 4
    assert Problem.of(base[shift:], base[shift + 2 :]).alignment == 8
    assert not Problem.of(base[::2]).contiguous
    assert Problem.of(base, b=1, a=2).options == (("a", 2), ("b", 1)) and Problem.of(base, a=2).option("a") == 2


def test_mixed_dtypes_run_anyway():
    """A weight that no kernel takes is no error: the reference computes it."""
    x, weight = torch.randn(3, 8), torch.randn(8, dtype=FP64)
    with pytest.warns(FallbackNotice, match="takes a weight of float32"):
        y = rms_norm(x, weight, 1e-5)
    assert torch.equal(y, reference(x, weight, 1e-5))


@pytest.mark.parametrize("device", ("cpu", "cuda:a100", "cuda:v100"))
def test_report_has_one_selected_kernel_for_each_op(device):
    """And a reason for every other."""
    rows = report(device)
    for op in {row.op for row in rows}:
        mine = [row for row in rows if row.op == op]
        assert sum(row.selected for row in mine) == 1 and mine[-1].kernel == "reference"
        assert all(bool(row.reason) != row.selected for row in mine)
    selected = {row.op: row.kernel for row in rows if row.selected}
    if device == "cuda:a100":
        assert selected["rms_norm"] == selected["swiglu"] == selected["adamw"] == "compiled-cuda"
    if device == "cuda:v100":
        assert selected["rms_norm"] == selected["swiglu"] == selected["adamw"] == "reference"


def test_the_cpu_kernels_are_what_runs():
    """Where they can be built, nothing has to be asked for."""
    need_kernels()
    choose.cache_clear()
    assert choose(RMS_NORM, Problem.of(torch.ones(2, 8), torch.ones(8))).name == "compiled-cpu"
    selected = {row.op: row for row in report("cpu") if row.selected}
    assert selected["swiglu"].kernel == "compiled-cpu" and selected["swiglu"].built and selected["swiglu"].loadable
