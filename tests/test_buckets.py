"""Gradient buckets: where parameters lie, when sums start, and what they give."""

from __future__ import annotations

import time
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_toys import Imaginary, ImaginaryMesh, parameter, plain_spec, samples, toy, toy_loss
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.optim.buckets import Gradients
from megatron_lite.optim.flat import Entry, place
from megatron_lite.tensor.spec import ParamSpec
from megatron_lite.testing.ranks import run_ranks

# --- where parameters lie ---

KINDS = [(None, ()), ("tp", ()), ("kv_replica", ()), (None, (0,)), (None, (0, 3)), ("tp", (0, 3))]


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 5), st.sampled_from(KINDS), st.booleans()), min_size=0, max_size=20
    ),
    st.one_of(st.none(), st.integers(1, 300)),
    st.integers(1, 6),
    st.sampled_from([1, 4, 64]),
)
@settings(max_examples=200, deadline=None)
def test_places(raw: list[Any], bucket_size: int | None, shards: int, unit: int) -> None:
    entries = [
        Entry(plain_spec(f"p{i}", (n, m)), (n, m), torch.float32 if single else torch.bfloat16, *kind)
        for i, (n, m, kind, single) in enumerate(raw)
    ]
    p = place(entries, bucket_size=bucket_size, shards=shards, alignment=lambda _: unit)
    assert sorted(s.name for b in p.buckets for s in b.slots) == sorted(e.spec.name for e in entries)
    for buffer, size in enumerate(p.sizes):
        mine = [b for b in p.buckets if b.buffer == buffer]
        assert [b.begin for b in mine] == [0, *(b.end for b in mine)][:-1] and size == max([0, *(b.end for b in mine)])
    for b in p.buckets:
        assert (b.end - b.begin) % (shards * unit) == 0 and b.begin % unit == 0
        edges = [b.begin, *(x for s in b.slots for x in (s.begin, s.end)), b.end]
        assert all(x <= y for x, y in pairwise(edges)) and all(s.begin % unit == 0 for s in b.slots)
        assert {(s.entry.partial, s.entry.tie, s.entry.dtype) for s in b.slots} == {
            (b.partial, b.tie, p.dtypes[b.buffer])
        }
        parts = [b.shard(shards, i) for i in range(shards)]
        assert parts[0][0] == b.begin and parts[-1][1] == b.end and all(x[1] == y[0] for x, y in pairwise(parts))
        if not b.late and bucket_size is not None and len(b.slots) > 1:
            assert sum(s.entry.numel for s in b.slots) <= bucket_size
    assert [b.index for b in p.buckets] == list(range(len(p.buckets)))
    assert [b.late for b in p.buckets] == sorted(b.late for b in p.buckets)
    late = [(b.tie, b.partial, b.buffer) for b in p.buckets if b.late]
    assert len(set(late)) == len(late) and [k[0] for k in late] == sorted(k[0] for k in late)
    order = [int(s.name[1:]) for b in p.buckets for s in b.slots if not b.late and b.buffer == 0]
    assert order == sorted(order, reverse=True)  # backward's order


def test_alignment_in_bytes() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        g = Gradients(toy(dtype), ProcessMesh.open(Layout()), bucket_size=20)
        for param in g.parameters.values():
            offset = param.storage_offset() * param.element_size()
            main_offset = param.main_grad.storage_offset() * param.main_grad.element_size()
            assert offset % 256 == 0 and main_offset % 256 == 0
            assert param.untyped_storage().data_ptr() == g.weights[0].untyped_storage().data_ptr()


def test_bad_parameters_are_refused() -> None:
    mesh, spec = ProcessMesh.open(Layout()), plain_spec("a", (2,))
    frozen = parameter(torch.zeros(2), spec).requires_grad_(False)
    with pytest.raises(ValueError, match="without a spec: x"):
        Gradients({"x": nn.Parameter(torch.zeros(2))}, mesh)
    with pytest.raises(ValueError, match=r"take no gradient .*: a"):
        Gradients({"a": frozen}, mesh)
    with pytest.raises(ValueError, match="same name: a"):
        Gradients({"a": parameter(torch.zeros(2), spec), "b": parameter(torch.zeros(2), spec)}, mesh)
    with pytest.raises(ValueError, match="zero-stage 3"):
        Gradients({}, mesh, zero_stage=3)


# --- gradients of one rank ---


class Accumulating(torch.autograd.Function):
    """x W^T that adds the gradient of W into main_grad itself and returns None for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.w = w
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        ctx.w.main_grad.addmm_(g.t().to(ctx.w.main_grad.dtype), x.to(ctx.w.main_grad.dtype))
        return g @ ctx.w, None


def once(x: torch.Tensor, w: nn.Parameter) -> torch.Tensor:
    return Accumulating.apply(x, w)


def twice(x: torch.Tensor, w: nn.Parameter) -> torch.Tensor:
    return Accumulating.apply(Accumulating.apply(x, w), w)


def mixed(x: torch.Tensor, w: nn.Parameter) -> torch.Tensor:
    return Accumulating.apply(x @ w.t(), w)


@pytest.mark.parametrize("use", [once, twice, mixed])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ready_once_and_complete(use: Any, recompute: bool, dtype: torch.dtype) -> None:
    """Also when the layer adds by itself, is computed again, or uses the parameter twice."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(3, 3, generator=generator).to(dtype)
    axis = Imaginary()
    g = Gradients({"w": parameter(value, plain_spec("w", (3, 3)))}, ImaginaryMesh(axis))
    w = g.parameters["w"]
    x = torch.randn(4, 3, generator=generator).to(dtype).requires_grad_()
    plain = value.clone().requires_grad_()
    h = x @ plain.t()
    (h if use is once else h @ plain.t()).square().sum().backward()
    seen: list[torch.Tensor] = []
    start = axis.all_reduce
    axis.all_reduce = lambda t, *a, **k: (seen.append(t.clone()), start(t))[1]  # type: ignore[method-assign]
    g.zero()
    for m in range(3):
        if m == 2:
            g.last_microbatch()
        assert not seen
        y = checkpoint(use, x, w, use_reentrant=False) if recompute else use(x, w)
        y.square().sum().backward()
    assert len(seen) == 1  # during the last backward, once
    g.finish()
    assert len(seen) == 1
    expected = 3 * plain.grad.to(w.main_grad.dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert (w.main_grad - expected).abs().max() <= tolerance * expected.abs().max()
    assert torch.equal(seen[0][:9].view(3, 3), w.main_grad)  # complete when the sum started
    assert (w.grad is w.main_grad) == (dtype != torch.bfloat16)


def test_many_small_gradients_are_not_lost() -> None:
    g = Gradients(
        {"p": parameter(torch.ones(1, dtype=torch.bfloat16), plain_spec("p", (1,)))}, ProcessMesh.open(Layout())
    )
    p = g.parameters["p"]
    g.zero()
    (p * 1.0).sum().backward()
    for _ in range(256):
        (p * (1 / 512)).sum().backward()
    g.finish()
    assert p.main_grad.dtype == torch.float32 and p.main_grad.item() == 1.5 and p.grad is None


def run_backward(g: Gradients, names: list[str], start: bool = True) -> None:
    if start:
        g.zero()
        g.last_microbatch()
    for name in names:
        g.parameters[name].sum().backward()


def test_sums_start_in_one_order_whatever_order_gradients_come_in() -> None:
    axis = Imaginary()
    params = {n: parameter(torch.zeros(100 * (i + 1)), plain_spec(n, (100 * (i + 1),))) for i, n in enumerate("abcd")}
    g = Gradients(params, ImaginaryMesh(axis), bucket_size=1)
    sizes = [b.end - b.begin for b in g.buckets]
    for order in (["d", "c", "b", "a"], ["a", "b", "c", "d"], ["c", "a", "d", "b"], ["d"], ["c", "a"], []):
        axis.started.clear()
        run_backward(g, order)
        before = len(axis.started)
        ready = {"d": 0, "c": 1, "b": 2, "a": 3}
        have = {ready[n] for n in order}
        assert before == next(i for i in range(5) if i not in have)  # all up to the first that is missing
        g.finish()
        assert [n for _, n, _ in axis.started] == sizes


def test_nothing_starts_before_the_last_microbatch_nor_without_overlap() -> None:
    for overlap in (True, False):
        axis = Imaginary()
        g = Gradients(toy(torch.float32), ImaginaryMesh(axis), bucket_size=20, overlap=overlap)
        for microbatches in (1, 2, 5):
            axis.started.clear()
            g.zero()
            for m in range(microbatches):
                if m == microbatches - 1:
                    g.last_microbatch()
                assert not axis.started
                toy_loss(g.parameters, samples(m, 2)).backward()
            assert len(axis.started) == (len(g.buckets) if overlap else 0)
            g.finish()
            assert len(axis.started) == len(g.buckets)


def test_chunks_of_a_stage_end_at_different_times() -> None:
    axis = Imaginary()
    params = {n: parameter(torch.zeros(4), plain_spec(n, (4,))) for n in "ab"}
    g = Gradients(params, ImaginaryMesh(axis), bucket_size=1)
    g.zero()
    g.last_microbatch(["b"])
    run_backward(g, ["a", "b"], start=False)
    assert len(axis.started) == 1  # b's; a has one more microbatch
    g.last_microbatch(["a"])
    run_backward(g, ["a"], start=False)
    assert len(axis.started) == 2
    g.finish()
    assert g.parameters["a"].grad.tolist() == [2.0] * 4 and g.parameters["b"].grad.tolist() == [1.0] * 4


def test_a_gradient_after_its_sum_is_an_error_and_zero_recovers() -> None:
    axis = Imaginary()
    g = Gradients(toy(torch.float32), ImaginaryMesh(axis), bucket_size=20)
    g.zero()
    g.last_microbatch()
    toy_loss(g.parameters, samples(0, 2)).backward()
    with pytest.raises(RuntimeError, match="came after its bucket was reduced"):
        toy_loss(g.parameters, samples(0, 2)).backward()
    g.zero()
    toy_loss(g.parameters, samples(0, 2)).backward()  # not armed any more
    axis.started.clear()
    assert not axis.started
    g.finish()
    with pytest.raises(RuntimeError, match="came after"):
        toy_loss(g.parameters, samples(0, 2)).backward()


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise KeyError("in backward")


def test_an_exception_in_backward_leaves_nothing_behind() -> None:
    expected = toy(torch.float32)
    toy_loss(expected, samples(1, 4)).backward()
    axis = Imaginary()
    g = Gradients(toy(torch.float32), ImaginaryMesh(axis), bucket_size=20)
    g.zero()
    g.last_microbatch()
    p = g.parameters
    h = torch.tanh(samples(0, 2).float() @ p["layers.0.weight"].t() + p["layers.0.bias"])
    h = torch.tanh(Breaks.apply(h) @ p["layers.1.weight"].t() + p["layers.1.bias"])
    with pytest.raises(KeyError):
        (h @ p["layers.2.weight"].t() + p["layers.2.bias"]).sum().backward()
    assert axis.started  # the last layer's bucket was on its way
    g.zero()
    axis.started.clear()
    toy_loss(p, samples(1, 2)).backward()
    assert not axis.started  # the flag did not survive
    g.zero()
    g.last_microbatch()
    toy_loss(p, samples(1, 4)).backward()
    g.finish()
    assert len(axis.started) == len(g.buckets)
    for name, q in expected.items():
        assert torch.equal(p[name].main_grad, q.grad)


class Slow(torch.autograd.Function):
    """A layer whose backward takes 15 ms."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        time.sleep(0.015)
        return g * ctx.saved_tensors[0], g


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_overlap_hides_time(zero_stage: int) -> None:
    layers, delay = 8, 0.020
    times = {}
    for overlap in (False, True):
        axis = Imaginary(delay=delay)
        params = {f"w{i}": parameter(torch.ones(64), plain_spec(f"w{i}", (64,))) for i in range(layers)}
        g = Gradients(params, ImaginaryMesh(axis), bucket_size=1, overlap=overlap, zero_stage=zero_stage)
        assert len(g.buckets) == layers
        g.zero()
        g.last_microbatch()
        x = torch.ones(64, requires_grad=True)
        for w in g.parameters.values():
            x = Slow.apply(x, w)
        loss = x.sum()
        begin = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        g.finish()
        times[overlap] = time.perf_counter() - begin
        if overlap:
            hidden = min(delay * (layers - 1), end - axis.started[0][2])
    assert times[False] - times[True] >= 0.8 * hidden, (times, hidden)


# --- sums over ranks ---


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def sums_over_ranks(n: int) -> None:
    mesh = ProcessMesh.open(Layout(dp=n))
    dtype, rows = torch.float64, 10 * n
    for zero_stage, overlap, bucket_size, deterministic in product((0, 1), (True, False), (1, 20, None), (False, True)):
        g = Gradients(
            toy(dtype),
            mesh,
            zero_stage=zero_stage,
            bucket_size=bucket_size,
            overlap=overlap,
            deterministic=deterministic,
        )
        for step, microbatches in enumerate((1, 2, 5)):
            expected = toy(dtype)
            toy_loss(expected, samples(step, rows)).backward()
            mesh.traffic.reset()
            g.zero()
            mine = samples(step, rows).view(microbatches, n, -1, 5)[:, g.axis.index]
            for m in range(microbatches):
                if m == microbatches - 1:
                    g.last_microbatch()
                toy_loss(g.parameters, mine[m]).backward()
            g.finish()
            for bucket in g.buckets:
                lo, hi = g.own(bucket) if zero_stage else (bucket.begin, bucket.end)
                for slot in bucket.slots:
                    a, b = max(lo, slot.begin), min(hi, slot.end)
                    if a < b:
                        want = expected[slot.name].grad.flatten()[a - slot.begin : b - slot.begin]
                        assert torch.allclose(g.gradients[0][a:b], want, rtol=1e-11, atol=1e-12)
            sent = sum(b.end - b.begin for b in g.buckets) * 8
            kind = "all_to_all" if deterministic else ("reduce_scatter" if zero_stage else "all_reduce")
            counts = {("dp_cp", kind): (len(g.buckets), sent)}  # exactly one reduction for each bucket in a step
            if deterministic and not zero_stage:
                counts["dp_cp", "all_gather"] = (len(g.buckets), sent // n)
            assert mesh.traffic.counts == counts, (mesh.traffic.counts, counts)
        g.close()


@pytest.mark.parametrize("n", [2, 3])
def test_sums_over_ranks(n: int) -> None:
    run_ranks(n, sums_over_ranks, n)


def deterministic_bits(n: int) -> list[str]:
    """Checksums of all gradients, gathered, under several arrangements."""
    mesh = ProcessMesh.open(Layout(dp=n))
    out = []
    for zero_stage, overlap, bucket_size in product((0, 1), (True, False), (1, 20, None)):
        g = Gradients(
            toy(torch.float32),
            mesh,
            zero_stage=zero_stage,
            bucket_size=bucket_size,
            overlap=overlap,
            deterministic=True,
        )
        g.zero()
        g.last_microbatch()
        toy_loss(g.parameters, samples(g.axis.index, 7)).backward()
        g.finish()
        whole = {}
        for bucket in g.buckets:
            flat = g.gradient(bucket)
            if zero_stage:
                lo, hi = g.own(bucket)
                own = flat[lo - bucket.begin : hi - bucket.begin].clone()
                g.axis.all_gather(flat, own)
            for slot in bucket.slots:
                whole[slot.name] = g.parameters[slot.name].main_grad.flatten().tolist()
        out.append(str(sorted(whole.items())))
        g.close()
    return out


def test_deterministic_sums_have_the_same_bits_everywhere() -> None:
    results = run_ranks(4, deterministic_bits, 4)
    assert len({bits for of_rank in results for bits in of_rank}) == 1


def low_precision(n: int) -> tuple[float, float, dict[str, Any]]:
    mesh = ProcessMesh.open(Layout(dp=n))
    sums = []
    for reduce_dtype in (None, torch.bfloat16):
        for zero_stage in (0, 1):
            p = parameter(torch.ones(1, dtype=torch.bfloat16), plain_spec("p", (1,)))
            g = Gradients({"p": p}, mesh, reduce_dtype=reduce_dtype, zero_stage=zero_stage)
            mesh.traffic.reset()
            g.zero()
            (p * (1.0 if g.axis.index == 0 else 1 / 512)).sum().backward()
            g.finish()
            value = p.main_grad.clone()
            g.axis.broadcast(value)  # rank 0 owns the element
            sums.append(value.item())
    return sums[0], sums[2], {"zero0": sums[0:4:2], "zero1": sums[1:4:2], "traffic": mesh.traffic.as_dict()}


def test_sums_are_in_fp32_unless_asked() -> None:
    exact, rounded, more = run_ranks(2, low_precision, 2)[0]
    assert exact == 1 + 1 / 512 and rounded == 1.0
    assert more["zero0"] == more["zero1"] == [exact, rounded]
    # 128 elements for each of 2 ranks (256 bytes of bf16 weights), 2 bytes each
    assert more["traffic"]["dp_cp.reduce_scatter"] == {"calls": 1, "bytes": 2 * 128 * 2}


# --- partial and tied parameters ---


def late_params(mesh: ProcessMesh, dtype: torch.dtype, kv_shards: int) -> dict[str, nn.Parameter]:
    """Shapes differ by stage, so that the tied tensor lies elsewhere on each."""
    stage = mesh.coords.pp
    tied = ParamSpec("embed", (8, 4), ("vocab", "embed"), None, tie="embed")
    tied_too = ParamSpec("also", (100,), (None,), None, tie="also")
    key = ParamSpec("key", (8, 4), ("kv_heads", "embed"), None, partial_over=("kv_replica",))
    norm = ParamSpec(f"norm{stage}", (5,), ("embed",), None, partial_over=("tp",), decay=False)
    plain = plain_spec(f"plain{stage}", (3 + 50 * stage,))
    shapes = {s.name: s.full_shape for s in (tied, tied_too, key, norm, plain)}
    shapes |= {"embed": (8 // mesh.axis("tp").size, 4), "key": (8 // kv_shards, 4)}
    specs = [plain, norm, tied_too, tied] if stage else [tied_too, norm, key, plain, tied]
    if stage:
        specs.reverse()
    return {s.name: parameter(torch.full(shapes[s.name], 0.5, dtype=dtype), s) for s in specs}


def late_sums(layout: Layout, kv_heads: int) -> list[dict[str, Any]]:
    """Every rank's gradient of every element is a power of two that names the rank; returns what was summed."""
    mesh = ProcessMesh.open(layout, kv_heads=kv_heads)
    results = []
    for zero_stage, deterministic, overlap in product((0, 1), (False, True), (False, True)):
        params = late_params(mesh, torch.float64, layout.tp // layout.kv_replicas(kv_heads))
        holders = {"embed": (0, layout.pp - 1), "also": (0, layout.pp - 1)}
        g = Gradients(
            params, mesh, zero_stage=zero_stage, deterministic=deterministic, overlap=overlap, tie_holders=holders
        )
        mesh.traffic.reset()
        g.zero()
        g.last_microbatch()
        for name, p in params.items():
            (p * (3 if name == "also" else 1) * 2.0**mesh.rank).sum().backward()
        g.finish()
        out = {}
        calls = {
            name: count[0] for name, count in mesh.traffic.counts.items() if name[0] in ("tp", "tie", "kv_replica")
        }
        for bucket in g.buckets:
            if zero_stage:
                lo, hi = g.own(bucket)
                flat = g.gradient(bucket)
                g.axis.all_gather(flat, flat[lo - bucket.begin : hi - bucket.begin].clone())
            for slot in bucket.slots:
                values = set(g.parameters[slot.name].main_grad.flatten().tolist())
                assert len(values) == 1, (slot.name, values)
                out[slot.name] = int(values.pop())
        results.append({"sums": out, "calls": calls})
        g.close()
    return results


@pytest.mark.parametrize(("layout", "kv_heads"), [(Layout(tp=4), 2), (Layout(tp=2, dp=2, pp=2), 1)], ids=str)
def test_partial_and_tied(layout: Layout, kv_heads: int) -> None:
    """Partial over tp or the replicas of a head, and tied over two stages: the sum of exactly the right ranks, once."""
    replicas = layout.kv_replicas(kv_heads)
    where = [(r, layout.coords(r)) for r in range(layout.world_size)]

    def total(same: Any) -> int:
        return sum(1 << r for r, c in where if same(c))

    for rank, results in enumerate(run_ranks(layout.world_size, late_sums, layout, kv_heads)):
        me = layout.coords(rank)
        expected = {
            f"plain{me.pp}": total(lambda c, me=me: (c.tp, c.pp) == (me.tp, me.pp)),
            f"norm{me.pp}": total(lambda c, me=me: c.pp == me.pp),
            "embed": total(lambda c, me=me: c.tp == me.tp),
            "also": 3 * total(lambda c, me=me: c.tp == me.tp),
        }
        if me.pp == 0:
            expected["key"] = total(lambda c, me=me: c.tp // replicas == me.tp // replicas and c.pp == me.pp)
        axes = {"tp": layout.tp > 1, "kv_replica": replicas > 1 and me.pp == 0, "tie": layout.pp > 1}
        for result in results:
            assert result["sums"] == expected
            # one flat sum for each late bucket: traffic by (axis, kind) is one call on each axis that has one
            assert sorted(axis for axis, _ in result["calls"]) == sorted(axis for axis, used in axes.items() if used)
            assert set(result["calls"].values()) == {1}
