"""Sharded AdamW against torch's, clipping, skipping, precision, and what counts, is kept and is saved."""

from __future__ import annotations

import math
import zlib
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from optim_toys import NEVER, ONE, parameter, plain_spec, reference_run, samples, single, toy, toy_loss, train_step
from torch import nn

from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.optim.buckets import Gradients
from megatron_lite.optim.clip import clip_factor
from megatron_lite.optim.replicas import replica_differences
from megatron_lite.optim.scaler import LossScaler
from megatron_lite.optim.schedule import LrSchedule
from megatron_lite.optim.sharded import Optimizer
from megatron_lite.tensor.spec import ParamSpec, Rectangle, TensorParallel
from megatron_lite.testing.ranks import run_ranks

# --- the same training as one process ---


def worst(params: dict[str, nn.Parameter], expected: dict[str, torch.Tensor]) -> float:
    """max|a - b| / max(max|ref|, 1e-3 rms of all weights), the worst parameter."""
    rms = torch.cat([e.flatten() for e in expected.values()]).square().mean().sqrt()
    return max(
        float((params[n].detach() - e).abs().max() / max(float(e.abs().max()), 1e-3 * float(rms)))
        for n, e in expected.items()
    )


def train_everywhere(n: int) -> None:
    mesh, rows, steps = ProcessMesh.open(Layout(dp=n)), 10 * n, 5
    for clip in (0.0, 0.05, 100.0):
        expected, norms = reference_run(torch.float64, steps, rows, clip)
        for zero_stage, bucket_size, deterministic, microbatches in product((0, 1), (1, 40), (False, True), (1, 5)):
            g = Gradients(
                toy(torch.float64),
                mesh,
                zero_stage=zero_stage,
                bucket_size=bucket_size,
                deterministic=deterministic,
                overlap=microbatches == 5,
            )
            optimizer = Optimizer(g, single(), overlap_gather=bucket_size == 1)
            for step in range(steps):
                norm = train_step(g, optimizer, step, microbatches, rows, clip)
                assert norm == pytest.approx(norms[step], rel=1e-12)
                optimizer.wait_weights()
                assert replica_differences(g) == []
            assert worst(g.parameters, expected) <= 1e-12
            g.close()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_equals_one_process(n: int) -> None:
    """All combinations of ZeRO, bucket size, microbatches, overlap and clip, in fp64."""
    run_ranks(n, train_everywhere, n, timeout=120)


def deterministic_weights(n: int) -> list[str]:
    mesh, out = ProcessMesh.open(Layout(dp=n)), []
    for zero_stage, overlap, bucket_size in product((0, 1), (True, False), (1, 20, None)):
        g = Gradients(
            toy(torch.bfloat16),
            mesh,
            zero_stage=zero_stage,
            bucket_size=bucket_size,
            overlap=overlap,
            deterministic=True,
        )
        optimizer = Optimizer(g, single())
        for step in range(4):
            train_step(g, optimizer, step, 2, 6 * n, clip=1e6)
        out.append(str([(name, p.flatten().tolist()) for name, p in sorted(g.parameters.items())]))
        g.close()
    return out


def test_deterministic_training_has_the_same_bits() -> None:
    results = run_ranks(3, deterministic_weights, 3)
    assert len({bits for of_rank in results for bits in of_rank}) == 1


def drift(n: int) -> list[str]:
    g = Gradients(toy(torch.float32), ProcessMesh.open(Layout(dp=n)))
    if g.axis.index == 2:
        g.parameters["layers.1.bias"].data[0] += 1e-6
    return replica_differences(g)


def test_drift_is_named() -> None:
    assert run_ranks(3, drift, 3)[0] == ["layers.1.bias: ranks [2] of dp_cp differ from rank 0"]


# --- clipping, skipping ---


def one_step(
    values: list[float], dtype: torch.dtype, scale: float, clip: float, zero_stage: int
) -> tuple[float, list[float]]:
    """The norm that is logged and the gradient after clipping (the first moment where beta1 is 0)."""
    mesh = ProcessMesh.open(Layout(dp=2))
    g = Gradients({"p": parameter(torch.zeros(4, dtype=dtype), plain_spec("p", (4,)))}, mesh, zero_stage=zero_stage)
    optimizer = Optimizer(g, single(), beta1=0.0)
    g.zero()
    g.last_microbatch()
    # half of the gradient from each of the two ranks
    (g.parameters["p"] * torch.tensor(values, dtype=dtype) * (scale / 2)).sum().backward()
    g.finish()
    total = optimizer.norm_squared()
    mesh.axis("world").all_reduce(total)
    norm = total.sqrt() / scale
    flag = optimizer.non_finite()
    mesh.axis("world").all_reduce(flag)
    optimizer.step(0.0, 0.0, clip_factor(norm, clip) / scale, flag > 0, update=1)
    share = [s for s in optimizer.shares() if s.kind == "exp_avg"]
    mine = torch.zeros(4)
    for s in share:
        mine[s.rectangle.start[0] : s.rectangle.start[0] + s.rectangle.size[0]] = s.tensor
    mesh.axis("world").all_reduce(mine)
    assert float(flag > 0) == (not math.isfinite(float(norm)))
    g.close()
    return float(norm), mine.tolist()


def clip_cases() -> None:
    big, small = [6.0, 0.0, 8.0, 0.0], [0.3, 0.0, 0.0, 0.4]
    cases = [(torch.float32, 1.0), (torch.float64, 1.0), (torch.bfloat16, 1.0), (torch.float16, 1024.0)]
    for (dtype, scale), zero_stage in product(cases, (0, 1)):
        tolerance = 4e-3 if dtype in (torch.bfloat16, torch.float16) else 1e-6
        norm, g = one_step(big, dtype, scale, 1.0, zero_stage)
        assert norm == pytest.approx(10.0, rel=tolerance) and g == pytest.approx([0.6, 0, 0.8, 0], rel=tolerance)
        norm, g = one_step(small, dtype, scale, 1.0, zero_stage)
        assert norm == pytest.approx(0.5, rel=tolerance) and g == pytest.approx(small, rel=tolerance)
        norm, g = one_step(big, dtype, scale, 0.0, zero_stage)
        assert norm == pytest.approx(10.0, rel=tolerance) and g == pytest.approx(big, rel=tolerance)
        assert one_step([0.0] * 4, dtype, scale, 1.0, zero_stage) == (0.0, [0.0] * 4)
        for bad in (math.inf, math.nan):
            norm, g = one_step([bad, 1.0, 1.0, 1.0], dtype, scale, 1.0, zero_stage)
            assert not math.isfinite(norm) and g == [0.0] * 4  # the step was skipped


def test_clipping() -> None:
    run_ranks(2, clip_cases)


def test_an_inactive_clip_changes_no_bit() -> None:
    assert float(clip_factor(torch.tensor(0.5, dtype=torch.float64), 0.6)) == 1.0
    assert float(clip_factor(torch.tensor(7.0, dtype=torch.float64), 0.0)) == 1.0
    with pytest.raises(ValueError, match="clip-grad is -1"):
        clip_factor(ONE, -1.0)


def solo(params: dict[str, nn.Parameter], **kwargs: Any) -> tuple[Gradients, Optimizer]:
    g = Gradients(params, ProcessMesh.open(Layout()))
    return g, Optimizer(g, single(), **kwargs)


def test_value_clipping() -> None:
    g, optimizer = solo({"p": parameter(torch.zeros(4), plain_spec("p", (4,)))}, beta1=0.0)
    g.zero()
    g.parameters["p"].main_grad.copy_(torch.tensor([-6.0, 0.5, 3.0, math.inf]) * 8)
    optimizer.clip_values(2.0, ONE / 8)
    optimizer.step(0.0, 0.0, ONE / 8, NEVER, update=1)
    assert [s.tensor.tolist() for s in optimizer.shares() if s.kind == "exp_avg"] == [[-2.0, 0.5, 2.0, 2.0]]


def everything(optimizer: Optimizer) -> list[torch.Tensor]:
    return [*(w.clone() for w in optimizer.gradients.weights), *(s.tensor.clone() for s in optimizer.targets())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_changes_nothing(dtype: torch.dtype) -> None:
    g, optimizer = solo(toy(dtype))
    train_step(g, optimizer, 0, 1, 4, 1.0)
    before = everything(optimizer)
    g.zero()
    toy_loss(g.parameters, samples(1, 4)).backward()
    g.finish()
    g.parameters["layers.1.weight"].main_grad[2, 3] = math.nan
    g.parameters["layers.2.bias"].main_grad[0] = math.inf
    norm = optimizer.norm_squared()
    assert float(optimizer.non_finite()) == 1.0 and optimizer.non_finite(norm).dtype == torch.float64
    assert sorted(optimizer.non_finite_parameters()) == ["layers.1.weight", "layers.2.bias"]
    optimizer.step(0.1, 0.1, clip_factor(norm.sqrt(), 1.0), ~torch.isfinite(norm), update=2)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(optimizer), strict=True))
    g.zero()
    assert float(optimizer.non_finite()) == 0.0 and all(not flat.any() for flat in g.gradients)


def scaled_run(bad: set[int], resume_after: int | None) -> tuple[list[tuple[float, int, int]], list[float]]:
    """fp16 with overflow at some steps: what each step used, and the weights at the end."""
    lr = LrSchedule(0.1, 64, style="linear", warmup_samples=16)
    g, optimizer = solo(toy(torch.float16))
    scaler, done, good, log = LossScaler.dynamic(initial=2.0**10, window=3), 0, 0, []
    for step in range(8):
        if step == resume_after:
            state = scaler.state_dict()
            stored = [s.tensor.clone() for s in optimizer.targets()]
            g, optimizer = solo(toy(torch.float16, seed=9))
            for target, tensor in zip(optimizer.targets(), stored, strict=True):
                target.tensor.copy_(tensor)
            optimizer.refresh_weights()
            scaler = LossScaler.dynamic(initial=2.0**10, window=3)
            scaler.load_state_dict(state)
        g.zero()
        (toy_loss(g.parameters, samples(step, 8)) * scaler.scale / 8).backward()
        if step in bad:
            g.parameters["layers.0.bias"].main_grad[0] = math.inf
        g.finish()
        norm = optimizer.norm_squared().sqrt() / scaler.scale
        optimizer.step(
            lr.at(good * 8), 0.1, clip_factor(norm, 1.0) / scaler.scale, ~torch.isfinite(norm), update=good + 1
        )
        done += 8
        log.append((lr.at(good * 8), good + 1, done))
        finite = bool(torch.isfinite(norm))
        good += finite
        scaler.update(finite)
    return log, [w for p in g.parameters.values() for w in p.flatten().tolist()]


def test_schedule_and_bias_correction_follow_successful_steps() -> None:
    log, weights = scaled_run({1, 2, 5}, None)
    lr = LrSchedule(0.1, 64, style="linear", warmup_samples=16)
    updates = [1, 2, 2, 2, 3, 4, 4, 5]
    assert log == [(lr.at(8 * (u - 1)), u, 8 * (i + 1)) for i, u in enumerate(updates)]
    for after in (1, 2, 3, 5, 6):
        assert scaled_run({1, 2, 5}, after) == (log, weights)  # also when a checkpoint lies in between


# --- precision ---


def test_small_updates_reach_the_master() -> None:
    g, optimizer = solo(
        {"p": parameter(torch.ones(1, dtype=torch.bfloat16), plain_spec("p", (1,)))}, beta1=0.0, beta2=0.0
    )
    p = g.parameters["p"]
    for step in range(100):
        g.zero()
        p.main_grad.fill_(1.0)
        optimizer.step(1e-3, 0.0, ONE, NEVER, update=step + 1)
        (master,) = [s.tensor for s in optimizer.shares() if s.kind == "weight"]
        assert master.dtype == torch.float32 and torch.equal(p.detach(), master.to(torch.bfloat16))
    assert master.item() == pytest.approx(0.9, abs=1e-5) and p.item() == 0.8984375


def dtypes_of_state(dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {s.kind: s.tensor.dtype for s in solo(toy(dtype))[1].shares()}


def test_state_is_fp32_or_fp64() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert set(dtypes_of_state(dtype).values()) == {torch.float32}
    assert set(dtypes_of_state(torch.float64).values()) == {torch.float64}


# --- groups ---


def shrink(layout: Layout) -> None:
    mesh = ProcessMesh.open(layout)
    for zero_stage, bucket_size in product((0, 1), (10, None)):
        specs = {
            "matrix": ParamSpec("matrix", (8, 4), ("ffn", "embed"), None),
            "embedding": ParamSpec("embedding", (8, 4), ("vocab", "embed"), None, tag="embedding"),
            "norm": ParamSpec("norm", (4,), ("embed",), None, partial_over=("tp",), decay=False),
            "bias": ParamSpec("bias", (8,), ("ffn",), None, decay=False),
            "head": ParamSpec("head", (8, 4), ("vocab", "embed"), None, tag="head"),
        }
        parallel = TensorParallel(mesh.axis("tp"), vocab_multiple=4)
        params = {
            name: parameter(torch.ones(parallel.local_shape(s.axes, s.full_shape), dtype=torch.float64), s)
            for name, s in specs.items()
        }
        g = Gradients(params, mesh, zero_stage=zero_stage, bucket_size=bucket_size)
        optimizer = Optimizer(g, parallel)
        rates = {"": 0.1, "head": 0.5}
        for step in range(3):
            g.zero()
            g.finish()
            optimizer.step(rates, 0.1, ONE, NEVER, update=step + 1)
        expected = {"matrix": 0.99**3, "embedding": 0.99**3, "norm": 1.0, "bias": 1.0, "head": 0.95**3}
        for name, p in params.items():
            assert torch.allclose(p.detach(), torch.full_like(p, expected[name]), rtol=1e-14), name
        g.close()


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(dp=2), Layout(tp=2, dp=2)], ids=str)
def test_decay_and_rates_by_record(layout: Layout) -> None:
    """1-D parameters do not decay; a 1-D shard of a flattened matrix does; a tag has its own rate."""
    run_ranks(layout.world_size, shrink, layout)


# --- each element of the model once ---

VOCAB, HEADS = 10, 2  # key/value heads of 4


def model_specs(layout: Layout) -> dict[int, list[ParamSpec]]:
    """Every kind of parameter there is, by pipeline rank."""
    tied = ParamSpec("embed", (VOCAB, 4), ("vocab", "embed"), None, tie="embed", tag="embedding")
    out: dict[int, list[ParamSpec]] = {}
    for stage in range(layout.pp):
        blocks = range(4 * stage // layout.pp, 4 * (stage + 1) // layout.pp)  # 4 blocks in every layout
        out[stage] = [tied] if stage == 0 else []
        for b in blocks:
            out[stage] += [
                ParamSpec(f"{b}.query", (8, 4), ("heads", "embed"), None),
                ParamSpec(f"{b}.key", (8, 4), ("kv_heads", "embed"), None, partial_over=("kv_replica",)),
                ParamSpec(f"{b}.key_bias", (8,), ("kv_heads",), None, partial_over=("kv_replica",), decay=False),
                ParamSpec(f"{b}.norm", (4,), ("embed",), None, partial_over=("tp",), decay=False),
                ParamSpec(f"{b}.up", (12, 4), ("ffn", "embed"), None),
                ParamSpec(f"{b}.down", (4, 12), ("embed", "ffn"), None),
                ParamSpec(f"{b}.scale", (), (), None, decay=False),
            ]
        if stage == layout.pp - 1 and stage:
            out[stage].append(tied)
    return out


def full(name: str, what: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Values of a full tensor, and some exact zeros."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{what}".encode()))
    t = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.where(t.abs() < 0.1, 0.0, t)


def cut(t: torch.Tensor, box: Rectangle, shape: tuple[int, ...]) -> torch.Tensor:
    """A rank's shard; rows of padding are zero."""
    inside = t[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
    if inside.shape == shape:
        return inside
    out = t.new_zeros(shape)
    out[: box.size[0]] = inside
    return out


def build(
    layout: Layout,
    zero_stage: int,
    dtype: torch.dtype,
    weights: bool = True,
    bucket_size: int | None = 40,
    **kwargs: Any,
) -> tuple[Gradients, Optimizer]:
    mesh = ProcessMesh.open(layout, kv_heads=HEADS)
    parallel = TensorParallel(mesh.axis("tp"), kv_heads=HEADS, dtype=dtype, vocab_multiple=4, **kwargs)
    params = {}
    for spec in model_specs(layout)[mesh.coords.pp]:
        shape = parallel.local_shape(spec.axes, spec.full_shape)
        value = (
            full(spec.name, "weight", spec.full_shape) if weights else torch.zeros(spec.full_shape, dtype=torch.float64)
        )
        local = cut(value, parallel.rectangle(spec), shape)
        if not weights and shape:
            local.fill_(math.nan)  # parameters that nothing has filled, padding included
        params[spec.name] = parameter(local.to(dtype), spec)
    holders = {"embed": (0, layout.pp - 1)}
    g = Gradients(params, mesh, zero_stage=zero_stage, bucket_size=bucket_size, tie_holders=holders)
    return g, Optimizer(g, parallel)


def set_gradients(g: Gradients, optimizer: Optimizer, what: str) -> None:
    """Gradients as they are after all sums."""
    g.zero()
    for name, p in g.parameters.items():
        box = optimizer.parallel.rectangle(p.spec)
        p.main_grad.copy_(cut(full(name, what, p.spec.full_shape), box, tuple(p.shape)))


Stored = list[tuple[str, str, tuple[int, ...], tuple[int, ...], np.ndarray]]


def save_from(layout: Layout, zero_stage: int, dtype: torch.dtype) -> tuple[Stored, dict[str, float]]:
    """Two steps with known gradients, then this rank's shares and its part of the numbers about the model."""
    # large buckets under ZeRO 1, so that what this rank counts and what it does not lie side by side
    g, optimizer = build(layout, zero_stage, dtype, bucket_size=None if zero_stage else 40)
    set_gradients(g, optimizer, "gradient 0")
    numbers = {
        "norm": float(optimizer.norm_squared()),
        "zeros": float(optimizer.count_zeros()),
        "weights": float(optimizer.weight_norm_squared()),
    }
    for step in range(2):
        set_gradients(g, optimizer, f"gradient {step}")
        optimizer.step({"": 0.1, "embedding": 0.02}, 0.1, ONE, NEVER, update=step + 1)
    assert replica_differences(g) == []
    shares = optimizer.shares()
    return [(s.kind, s.name, s.rectangle.start, s.rectangle.size, s.tensor.clone().numpy()) for s in shares], numbers


Tensors = dict[tuple[str, str], np.ndarray]


def assemble(results: list[tuple[Stored, dict[str, float]]]) -> Tensors:
    """Full tensors from every rank's shares; each element must come exactly once."""
    shapes = {s.name: s.full_shape for s in model_specs(Layout())[0]}
    whole: Tensors = {}
    seen: Tensors = {}
    for stored, _ in results:
        for kind, name, start, size, data in stored:
            key = (kind, name)
            whole.setdefault(key, np.zeros(shapes[name], data.dtype))
            seen.setdefault(key, np.zeros(shapes[name], int))
            box = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            whole[key][box] = data.reshape(size)
            seen[key][box] += 1
    assert len(whole) == 3 * len(shapes) and all((n == 1).all() for n in seen.values())
    return whole


def load_into(layout: Layout, zero_stage: int, dtype: torch.dtype, whole: Tensors) -> None:
    """Fill a fresh model from full tensors; its weights must be the masters rounded, everywhere."""
    g, optimizer = build(layout, zero_stage, dtype, weights=False)
    for s in optimizer.targets():
        box = tuple(slice(a, a + n) for a, n in zip(s.rectangle.start, s.rectangle.size, strict=True))
        assert s.tensor.numel() == s.rectangle.numel and s.full_shape == whole[s.kind, s.name].shape
        s.tensor.copy_(torch.from_numpy(np.ascontiguousarray(whole[s.kind, s.name][box]).reshape(-1)))
    optimizer.refresh_weights()
    for name, p in g.parameters.items():
        box = optimizer.parallel.rectangle(p.spec)
        assert torch.equal(p.detach(), cut(torch.from_numpy(whole["weight", name]), box, tuple(p.shape)).to(dtype)), (
            name
        )


LAYOUTS = [
    (Layout(tp=2, dp=2), 1),
    (Layout(dp=3), 0),
    (Layout(dp=3), 1),
    (Layout(tp=4), 1),
    (Layout(dp=2, pp=2), 1),
    (Layout(tp=2, cp=2), 1),
]


@pytest.fixture(scope="module")
def saved_by_one() -> tuple[Tensors, dict[str, float]]:
    result = save_from(Layout(), 0, torch.bfloat16)
    return assemble([result]), result[1]


@pytest.mark.parametrize(("layout", "zero_stage"), LAYOUTS, ids=str)
def test_each_element_once_and_any_layout_to_any(layout: Layout, zero_stage: int, saved_by_one: Any) -> None:
    expected, numbers = saved_by_one
    results = run_ranks(layout.world_size, save_from, layout, zero_stage, torch.bfloat16)
    whole = assemble(results)
    for key, tensor in expected.items():
        assert np.array_equal(whole[key], tensor), key  # the same bits as on one process
    for what, value in numbers.items():
        assert math.fsum(r[1][what] for r in results) == pytest.approx(value, rel=1e-13), what
    run_ranks(layout.world_size, load_into, layout, zero_stage, torch.bfloat16, expected)


def test_numbers_about_the_model_by_brute_force(saved_by_one: Any) -> None:
    specs = {s.name: s.full_shape for s in model_specs(Layout())[0]}
    gradients = torch.cat([full(n, "gradient 0", shape).flatten() for n, shape in specs.items()])
    weights = torch.cat([full(n, "weight", shape).flatten() for n, shape in specs.items()]).to(torch.bfloat16)
    _, numbers = saved_by_one
    assert numbers["norm"] == pytest.approx(float(gradients.float().double().square().sum()), rel=1e-13)
    assert numbers["weights"] == pytest.approx(float(weights.double().square().sum()), rel=1e-13)
    assert numbers["zeros"] == int((gradients == 0).sum()) > 0


def trained_padding(tp: int) -> list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], list[float]]]:
    g, optimizer = build(Layout(tp=tp), 0, torch.float64, mask_padded_vocab=False)
    table = g.parameters["embed"]
    rows = torch.arange(table.shape[0], dtype=torch.float64) + table.shape[0] * optimizer.parallel.axis.index
    table.data.copy_(rows[:, None].expand(table.shape))
    shares = [s for s in optimizer.shares() if s.kind == "weight" and s.name.startswith("embed")]
    return [(s.name, s.full_shape, s.rectangle.start, s.rectangle.size, s.tensor.tolist()) for s in shares]


@pytest.mark.parametrize("tp", [1, 4])
def test_trained_padding_is_a_tensor_of_its_own(tp: int) -> None:
    padded = -(-VOCAB // (4 * tp)) * 4 * tp
    rows: dict[str, dict[int, float]] = {"embed": {}, "embed.padding": {}}
    for shares in run_ranks(tp, trained_padding, tp):
        for name, shape, start, size, values in shares:
            assert shape == ((VOCAB, 4) if name == "embed" else (padded - VOCAB, 4))
            for i in range(size[0]):
                assert start[0] + i not in rows[name]
                rows[name][start[0] + i] = values[4 * i]
    assert rows["embed"] == {i: i for i in range(VOCAB)}
    assert rows["embed.padding"] == {i: VOCAB + i for i in range(padded - VOCAB)}


# --- bytes ---


def kept_and_sent(n: int, dtype: torch.dtype, zero_stage: int) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """What a model of 2^16 elements keeps, and sends in one step."""
    mesh = ProcessMesh.open(Layout(dp=n))
    params = {f"p{i}": parameter(torch.zeros(128, 128, dtype=dtype), plain_spec(f"p{i}", (128, 128))) for i in range(4)}
    g = Gradients(params, mesh, zero_stage=zero_stage, bucket_size=20000)
    optimizer = Optimizer(g, single())
    mesh.traffic.reset()
    g.zero()
    g.last_microbatch()
    sum(p.sum() for p in params.values()).backward()
    g.finish()
    optimizer.step(0.1, 0.0, ONE, NEVER, update=1)
    return optimizer.memory(), mesh.traffic.as_dict()


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_bytes_kept_and_sent(dtype: torch.dtype, zero_stage: int) -> None:
    """bf16: 18 bytes a parameter, 6 + 12/dp with ZeRO 1. fp32: 16, 8 + 8/dp. fp64: twice that."""
    n, elements, buckets = 2, 2**16, 4
    memory, traffic = run_ranks(n, kept_and_sent, n, dtype, zero_stage)[0]
    size, wide = dtype.itemsize, max(4, dtype.itemsize)
    shards = n if zero_stage else 1
    master = 0 if size >= 4 else 4
    assert {k: v / elements for k, v in memory.items()} == {
        "weights": size,
        "gradients": wide,
        "masters": master / shards,
        "moments": 2 * wide / shards,
    }
    sent = elements * wide
    if zero_stage:
        assert traffic == {
            "dp_cp.reduce_scatter": {"calls": buckets, "bytes": sent},
            "dp_cp.all_gather": {"calls": buckets, "bytes": elements * size // n},
        }
    else:
        assert traffic == {"dp_cp.all_reduce": {"calls": buckets, "bytes": sent}}


# --- nothing is read from the device ---


def test_a_whole_step_on_tensors_without_values() -> None:
    """A read by the host (item, bool, float) of a meta tensor raises."""
    layout = Layout(tp=2, dp=4, pp=2)
    with ProcessMesh.open(layout, backend="fake", rank=0, kv_heads=1) as mesh:
        parallel = TensorParallel(mesh.axis("tp"), kv_heads=1, device=torch.device("meta"))
        for zero_stage, deterministic, dtype in product((0, 1), (False, True), (torch.bfloat16, torch.float32)):
            specs = [
                ParamSpec("embed", (300, 8), ("vocab", "embed"), None, tie="embed"),
                ParamSpec("norm", (8,), ("embed",), None, partial_over=("tp",), decay=False),
                ParamSpec("up", (16, 8), ("ffn", "embed"), None),
            ]
            params = {
                s.name: parameter(
                    torch.empty(parallel.local_shape(s.axes, s.full_shape), dtype=dtype, device="meta"), s
                )
                for s in specs
            }
            g = Gradients(
                params,
                mesh,
                zero_stage=zero_stage,
                deterministic=deterministic,
                tie_holders={"embed": (0, 1)},
                reduce_dtype=torch.bfloat16,
            )
            optimizer = Optimizer(g, parallel)
            g.zero()
            g.last_microbatch()
            sum(p.sum() for p in params.values()).backward()
            g.finish()
            total = optimizer.norm_squared()
            optimizer.non_finite(total)
            optimizer.count_zeros()
            optimizer.weight_norm_squared()
            optimizer.clip_values(1.0, total)
            optimizer.step(0.1, 0.1, clip_factor(total.sqrt(), 1.0), ~torch.isfinite(total), update=1)
            assert {s.tensor.device.type for s in optimizer.shares()} == {"meta"}
            g.close()


def test_weights_are_waited_for_by_module() -> None:
    class Block(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.w = parameter(torch.ones(2, 2), plain_spec(name, (2, 2)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w

    from optim_toys import Imaginary, ImaginaryMesh

    blocks = [Block("a"), Block("b"), Block("c")]
    axis = Imaginary()
    g = Gradients({b.w.spec.name: b.w for b in blocks}, ImaginaryMesh(axis), bucket_size=1, zero_stage=1)
    optimizer = Optimizer(g, single(), overlap_gather=True)
    optimizer.wait_before(blocks)
    g.zero()
    g.finish()
    axis.started.clear()
    optimizer.step(0.1, 0.0, ONE, NEVER, update=1)
    assert [kind for kind, _, _ in axis.started] == ["all_gather"] * 3
    assert sorted(optimizer._gathers) == [0, 1, 2]
    blocks[0](torch.ones(1, 2))
    assert sorted(optimizer._gathers) == [0, 1]  # a is in the last bucket
    blocks[2](torch.ones(1, 2))
    assert sorted(optimizer._gathers) == [1]
    optimizer.shares()
    assert not optimizer._gathers
