"""Split layers against plain torch, on 1, 2 and 4 ranks, with and without sequence parallelism; bytes and order."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron_lite.data.batch import Row, make_batch
from megatron_lite.mesh.collectives import Axis, Handle
from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.tensor import regions
from megatron_lite.tensor.init import initialise
from megatron_lite.tensor.layers import (
    ColumnParallelLinear,
    LayerNorm,
    LearnedPositions,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    check_token_ids,
    column_parallel,
)
from megatron_lite.tensor.loss import gather_vocab, vocab_parallel_cross_entropy
from megatron_lite.tensor.random import normal_slice
from megatron_lite.tensor.spec import Init, Rectangle, TensorParallel
from megatron_lite.testing.ranks import run_ranks

T, H, V, FFN, HEADS, KV, DIM = 24, 12, 61, 16, 4, 2, 6  # tokens, hidden, vocabulary, MLP, heads, kv heads, head dim
LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]

# ---- one small network that uses every layer


class Network(nn.Module):
    """Embeddings, a norm, query/key/value with qk-norm, mixed over heads, a norm, a gated MLP, a norm, a head."""

    def __init__(self, parallel: TensorParallel) -> None:
        super().__init__()

        def column(size: int, axis: str, bias: bool = True) -> ColumnParallelLinear:
            return ColumnParallelLinear(parallel, H, size, axes=(axis, "embed"), bias=bias, init_std=0.3)

        self.parallel = parallel
        self.tokens = VocabParallelEmbedding(parallel, V, H, 1.0)
        self.positions = LearnedPositions(parallel, T, H, 1.0)
        self.norm_a = LayerNorm(parallel, H, 1e-5)
        self.query, self.key, self.value = (
            column(HEADS * DIM, "heads"),
            column(KV * DIM, "kv_heads"),
            column(KV * DIM, "kv_heads"),
        )
        self.query_norm = RMSNorm(parallel, DIM, 1e-5, always_partial=True)
        self.key_norm = RMSNorm(parallel, DIM, 1e-5, one_plus=True, always_partial=True)
        self.output = RowParallelLinear(parallel, HEADS * DIM, H, axes=("embed", "heads"), bias=True, init_std=0.3)
        self.norm_b = RMSNorm(parallel, H, 1e-5)
        self.gate, self.up = column(FFN, "ffn", bias=False), column(FFN, "ffn")
        self.down = RowParallelLinear(parallel, FFN, H, bias=True, init_std=0.3)
        self.norm_c = LayerNorm(parallel, H, 1e-5, one_plus=True)
        self.head = column(V, "vocab", bias=False)
        for name, parameter in self.named_parameters():
            parameter.spec = replace(parameter.spec, name=name)  # type: ignore[attr-defined]
        initialise(dict(self.named_parameters()), 3)
        for name, parameter in self.named_parameters():  # no zeros and ones, which hide mistakes
            if parameter.spec.init.kind == "constant":  # type: ignore[attr-defined]
                noise = torch.empty_like(parameter)
                spec, box = parameter.spec, parameter.rectangle  # type: ignore[attr-defined]
                normal_slice(4, name, spec.full_shape, box, 0.3, noise[: box.size[0]])
                parameter.data.add_(noise)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.tokens(ids) + self.positions(torch.arange(T))
        q, k, v = column_parallel(self.norm_a(hidden), [self.query, self.key, self.value])
        q, k = self.query_norm(q.view(T, -1, DIM)), self.key_norm(k.view(T, -1, DIM))
        hidden = hidden + self.output(mix(q, k, v.view(T, -1, DIM)).flatten(1))
        gate, up = column_parallel(self.norm_b(hidden), [self.gate, self.up])
        hidden = hidden + self.down(F.silu(gate) * up)
        logits = self.head(self.norm_c(hidden))
        loss = vocab_parallel_cross_entropy(logits, targets, self.parallel, V, label_smoothing=0.1)
        return loss, gather_vocab(logits, self.parallel, V)


def mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Something like attention: [T, heads, DIM] with key/value heads shared by runs of query heads."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return torch.einsum("tnd,snd,sne->tne", q, k, v).tanh() + v


def plain(p: dict[str, torch.Tensor], ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same network in plain torch with full weights."""

    def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], w, 1e-5)

    hidden = F.embedding(ids, p["tokens.weight"]) + p["positions.weight"]
    x = F.layer_norm(hidden, (H,), p["norm_a.weight"], p["norm_a.bias"], 1e-5)
    q, k, v = (F.linear(x, p[f"{n}.weight"], p[f"{n}.bias"]).view(T, -1, DIM) for n in ("query", "key", "value"))
    mixed = mix(rms(q, p["query_norm.weight"]), rms(k, 1 + p["key_norm.weight"]), v)
    hidden = hidden + F.linear(mixed.flatten(1), p["output.weight"], p["output.bias"])
    x = rms(hidden, p["norm_b.weight"])
    wide = F.silu(F.linear(x, p["gate.weight"])) * F.linear(x, p["up.weight"], p["up.bias"])
    hidden = hidden + F.linear(wide, p["down.weight"], p["down.bias"])
    x = F.layer_norm(hidden, (H,), 1 + p["norm_c.weight"], p["norm_c.bias"], 1e-5)
    logits = F.linear(x, p["head.weight"])
    return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1), logits


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(0, V, (2, T), generator=generator)
    ids[:2], targets[3] = torch.tensor([0, V - 1]), -100
    return ids, targets


def parallel_on(mesh: ProcessMesh, sequence_parallel: bool, **options: Any) -> TensorParallel:
    options = {"dtype": torch.float64, "vocab_multiple": 8, **options}
    return TensorParallel(mesh.axis("tp"), kv_heads=KV, sequence_parallel=sequence_parallel, **options)


def network_on_ranks(tp: int, sequence_parallel: bool, main_grad: bool, multiple: int = 8) -> dict[str, Any]:
    """One forward and backward; what this rank holds of every weight and gradient, partial sums completed."""
    with ProcessMesh.open(Layout(tp=tp), kv_heads=KV) as mesh:
        network = Network(parallel_on(mesh, sequence_parallel, vocab_multiple=multiple))
        if main_grad:
            for parameter in network.parameters():
                parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
        mesh.traffic.reset()
        loss, logits = network(*inputs())
        loss.backward()
        traffic = mesh.traffic.as_dict()
        held = {}
        for name, p in network.named_parameters():
            grad = p.main_grad if main_grad else torch.zeros_like(p)
            if p.grad is not None:
                grad = grad + p.grad
            for part in p.spec.partial_over:
                mesh.axis(part).all_reduce(grad)
            box = p.rectangle
            inside = tuple(slice(0, n) for n in box.size)
            assert not grad[box.size[0] :].any(), "padded rows have no gradient"
            held[name] = (box, p.detach()[inside].clone(), grad[inside].clone(), p.spec.partial_over)
        return {"loss": loss.detach(), "logits": logits, "held": held, "traffic": traffic}


def assemble(results: list[dict[str, Any]], what: int) -> dict[str, torch.Tensor]:
    """Full tensors from what ranks hold; ranks that hold the same elements must agree."""
    full: dict[str, torch.Tensor] = {}
    specs = {n: p.spec for n, p in Network(TensorParallel(Axis.single(), dtype=torch.float64)).named_parameters()}  # type: ignore[attr-defined]
    for result in results:
        for name, held in result["held"].items():
            tensor = full.setdefault(name, torch.full(specs[name].full_shape, torch.nan, dtype=torch.float64))
            box: Rectangle = held[0]
            view = tensor[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
            known = ~view.isnan()
            assert torch.equal(view[known], held[what][known]), name
            view.copy_(held[what])
    assert not any(t.isnan().any() for t in full.values())
    return full


def assert_close(got: torch.Tensor, expected: torch.Tensor, floor: float, what: str) -> None:
    """Equal in fp64, as this project means it: max|a - b| <= 1e-12 max(max|ref|, floor)."""
    error, limit = float((got - expected).abs().max()), 1e-12 * max(float(expected.abs().max()), floor)
    assert error <= limit, f"{what}: {error:.2e} > {limit:.2e}"


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
@pytest.mark.parametrize("main_grad", [False, True])
def test_values_and_gradients_are_those_of_plain_torch(tp: int, sequence_parallel: bool, main_grad: bool) -> None:
    results = run_ranks(tp, network_on_ranks, tp, sequence_parallel, main_grad)
    full = {n: t.requires_grad_() for n, t in assemble(results, 1).items()}
    loss, logits = plain(full, *inputs())
    loss.backward()
    for result in results:
        assert torch.equal(result["loss"], results[0]["loss"])  # the same bits on every rank
        assert_close(result["loss"], loss.detach(), 0.0, "loss")
        assert_close(result["logits"], logits.detach(), 0.0, "logits")
    floor = 1e-3 * float(torch.cat([t.grad.flatten() for t in full.values()]).square().mean().sqrt())  # type: ignore[union-attr]
    for name, grad in assemble(results, 2).items():
        assert full[name].grad is not None
        assert_close(grad, full[name].grad, floor, name)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tp", "multiple"), [(1, 1), (2, 1), (4, 1), (4, 128)])
def test_a_padded_vocabulary_changes_nothing(tp: int, multiple: int) -> None:
    """61 columns over 2 and 4 ranks; with 128 only the first rank has true columns."""
    results = run_ranks(tp, network_on_ranks, tp, False, False, multiple)
    full = {n: t.requires_grad_() for n, t in assemble(results, 1).items()}
    loss, _ = plain(full, *inputs())
    loss.backward()
    assert_close(results[0]["loss"], loss.detach(), 0.0, "loss")
    for name in ("head.weight", "tokens.weight"):
        assert_close(assemble(results, 2)[name], full[name].grad, 0.0, name)  # type: ignore[arg-type]


def test_which_gradients_are_partial_sums() -> None:
    for tp, sequence_parallel in LAYOUTS:
        parallel = TensorParallel(Axis("tp", tuple(range(tp)), 0, group=object()), KV, sequence_parallel, torch.float64)
        partial = {n: p.spec.partial_over for n, p in Network(parallel).named_parameters()}  # type: ignore[attr-defined]
        expected = dict.fromkeys(partial, ())
        if tp > 1:
            expected |= {"query_norm.weight": ("tp",), "key_norm.weight": ("tp",)}
        if tp > KV:
            expected |= {f"{n}.{k}": ("kv_replica",) for n in ("key", "value") for k in ("weight", "bias")}
        if sequence_parallel and tp > 1:
            norms = [f"norm_{i}.weight" for i in "abc"] + ["norm_a.bias", "norm_c.bias"]
            expected |= dict.fromkeys([*norms, "positions.weight", "output.bias", "down.bias"], ("tp",))
        assert partial == expected, (tp, sequence_parallel)


def test_specs_of_layers() -> None:
    parallel = TensorParallel(Axis.single())
    specs = {n: p.spec for n, p in Network(parallel).named_parameters()}  # type: ignore[attr-defined]
    assert {n for n, s in specs.items() if s.decay} == {n for n, s in specs.items() if len(s.full_shape) == 2}
    assert specs["head.weight"].tag == "head" and specs["tokens.weight"].tag == "embedding"
    assert specs["down.weight"].axes == ("embed", "ffn") and specs["down.bias"].axes == ("embed",)
    assert specs["norm_c.weight"].init == Init("constant", 0.0) and specs["norm_b.weight"].init == Init("constant", 1.0)
    assert specs["key_norm.weight"].axes == ("head_dim",)


# ---- effects: bytes, order, memory


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_bytes_moved_are_the_formula(tp: int, sequence_parallel: bool) -> None:
    (traffic, *others) = (r["traffic"] for r in run_ranks(tp, network_on_ranks, tp, sequence_parallel, False))
    assert all(o == traffic for o in others)
    row, tokens = T * H * 8, T * 8
    loss = {"tp.all_reduce": [tokens, 3 * tokens]}  # largest logit; sum of exponentials, target's logit, sum of logits
    logits = [T * 64 // tp * 8]  # gather_vocab
    if tp == 1:
        expected = {}
    elif sequence_parallel:
        # forward: 3 gathers of slices for column layers, embedding and 2 row layers scatter;
        # backward: 3 gathers again for column layers, 3 for what scattered; 3 column layers scatter
        expected = {"tp.all_gather": 9 * [row // tp] + logits, "tp.reduce_scatter": 6 * [row], **loss}
    else:
        expected = {"tp.all_reduce": 3 * [row] + 3 * [row] + loss["tp.all_reduce"], "tp.all_gather": logits}
    assert traffic == {k: {"calls": len(v), "bytes": sum(v)} for k, v in expected.items()}


class Recorder(TorchDispatchMode):
    """Writes down products and collectives in the order in which they are started and waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            self.events.append(
                "product " + ("dW" if a.shape[-1] == T and a.shape[0] != T else "dX" if b.shape[1] == H else "y")
            )
        return func(*args, **(kwargs or {}))


class PretendAxis(Axis):
    """Two ranks of which the other one is this one again; events go to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__("tp", (0, 1), 0, group=object())
        self.recorder = recorder

    def _start(self, kind: str) -> Handle:
        self.recorder.events.append(f"start {kind}")
        return Handle(finish=lambda: self.recorder.events.append(f"wait {kind}"))

    def all_gather(self, out: torch.Tensor, t: torch.Tensor, async_op: bool = False) -> Handle:
        out.view(2, -1).copy_(t.reshape(1, -1).expand(2, -1))
        return self._start("gather")

    def reduce_scatter(self, out: torch.Tensor, t: torch.Tensor, async_op: bool = False) -> Handle:
        out.copy_(t.chunk(2)[0])
        return self._start("scatter")

    def all_reduce(self, t: torch.Tensor, op: str = "sum", async_op: bool = False) -> Handle:
        return self._start("reduce")


@pytest.mark.parametrize(
    ("sequence_parallel", "expected"),
    [
        (
            True,
            "start gather, product dX, product dX, start scatter, wait gather, product dW, product dW, wait scatter",
        ),
        (False, "product dX, product dX, start reduce, product dW, product dW, wait reduce"),
    ],
)
def test_backward_hides_communication_behind_products(sequence_parallel: bool, expected: str) -> None:
    recorder = Recorder()
    parallel = TensorParallel(PretendAxis(recorder), sequence_parallel=sequence_parallel)
    layers = [ColumnParallelLinear(parallel, H, 2 * FFN, bias=True, init_std=1.0) for _ in range(2)]
    for layer in layers:
        nn.init.normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    x = torch.randn(T // 2 if sequence_parallel else T, H, requires_grad=True)
    y = sum(column_parallel(x, layers))
    with recorder:
        recorder.events.clear()
        y.backward(torch.ones(T, FFN))
    assert ", ".join(recorder.events) == expected


def test_row_backward_sums_the_bias_while_it_gathers() -> None:
    recorder = Recorder()
    layer = RowParallelLinear(
        TensorParallel(PretendAxis(recorder), sequence_parallel=True), FFN, H, bias=True, init_std=1.0
    )
    nn.init.normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    y = layer(torch.randn(T, FFN // 2, requires_grad=True))
    recorder.events.clear()
    y.sum().backward()
    assert recorder.events == ["start gather", "wait gather"]
    assert torch.equal(layer.bias.grad, torch.full((H,), T / 2))


def test_only_the_slice_of_the_input_is_kept() -> None:
    parallel = TensorParallel(PretendAxis(Recorder()), sequence_parallel=True)
    layer = ColumnParallelLinear(parallel, H, FFN, bias=False, init_std=1.0)
    nn.init.normal_(layer.weight)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        layer(torch.randn(T // 2, H, requires_grad=True))
    assert kept == [(T // 2, H)]


def frozen_on_ranks() -> list[dict[str, dict[str, int]]]:
    """Traffic of one sequence-parallel column layer's backward when weight or input need no gradient."""
    seen = []
    with ProcessMesh.open(Layout(tp=2)) as mesh:
        for needs_x, needs_weight in itertools.product([True, False], repeat=2):
            layer = ColumnParallelLinear(parallel_on(mesh, True), H, FFN, bias=True, init_std=1.0)
            nn.init.ones_(layer.weight.requires_grad_(needs_weight))
            nn.init.zeros_(layer.bias)
            x = torch.ones(T // 2, H, dtype=torch.float64, requires_grad=needs_x)
            y = layer(x)
            mesh.traffic.reset()
            y.sum().backward()
            assert (x.grad is not None, layer.weight.grad is not None) == (needs_x, needs_weight)
            assert torch.equal(layer.bias.grad, torch.full_like(layer.bias, T))
            seen.append(mesh.traffic.as_dict())
    return seen


def test_what_needs_no_gradient_costs_no_communication() -> None:
    gather = {"tp.all_gather": {"calls": 1, "bytes": T * H * 8 // 2}}
    scatter = {"tp.reduce_scatter": {"calls": 1, "bytes": T * H * 8}}
    for seen in run_ranks(2, frozen_on_ranks):
        assert seen == [gather | scatter, scatter, gather, {}]


# ---- gradients into main_grad


def test_gradients_in_low_precision_are_added_in_fp32() -> None:
    """1.0 and 256 times 1/512 is 1.5; a bf16 sum would stay at 1.0."""
    parallel = TensorParallel(Axis.single(), dtype=torch.bfloat16, vocab_multiple=1)
    column = ColumnParallelLinear(parallel, 1, 1, bias=True, init_std=1.0)
    embedding = VocabParallelEmbedding(parallel, 1, 1, 1.0)
    for p in (column.weight, column.bias, embedding.weight):
        nn.init.ones_(p)
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    for factor in [1.0] + 256 * [1 / 512]:
        column(torch.ones(1, 1, dtype=torch.bfloat16)).backward(torch.full((1, 1), factor, dtype=torch.bfloat16))
        embedding(torch.zeros(1, dtype=torch.int64)).backward(torch.full((1, 1), factor, dtype=torch.bfloat16))
    for p in (column.weight, column.bias, embedding.weight):
        assert p.grad is None and float(p.main_grad) == 1.5


def test_half_precision_products_are_not_rounded_before_they_are_added() -> None:
    parallel = TensorParallel(Axis.single(), dtype=torch.bfloat16)
    layer = RowParallelLinear(parallel, FFN, H, bias=False, init_std=1.0)
    nn.init.normal_(layer.weight)
    layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
    x, dy = torch.randn(T, FFN).bfloat16(), torch.randn(T, H).bfloat16()
    layer(x).backward(dy)
    exact = dy.double().t() @ x.double()
    assert torch.allclose(layer.weight.main_grad.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_recomputed_region_adds_into_main_grad_once() -> None:
    parallel = TensorParallel(Axis.single())
    layer = ColumnParallelLinear(parallel, H, FFN, bias=True, init_std=1.0)
    arrived: list[str] = []
    for name, p in layer.named_parameters():
        nn.init.normal_(p)
        p.main_grad = torch.zeros_like(p)
        node = torch.autograd.graph.get_gradient_edge(p).node
        node.register_hook(lambda *_, name=name: arrived.append(name))
        p.keep = node  # type: ignore[attr-defined]
    x = torch.randn(T, H, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert torch.allclose(layer.weight.main_grad, torch.ones(T, FFN).t() @ x)
    assert torch.equal(layer.bias.main_grad, torch.full((FFN,), float(T)))
    assert sorted(arrived) == ["bias", "weight"]  # whoever waits for gradients is told, though autograd got None


# ---- row-parallel bias, with numbers one can check by hand


def bias_on_ranks(tp: int, sequence_parallel: bool) -> dict[str, torch.Tensor]:
    """x = [1, 1] (features repeated for tp 4), W = [[1, 2], [3, 4]], b = [10, 20], two tokens; loss = sum."""
    with ProcessMesh.open(Layout(tp=tp)) as mesh:
        copies = 2 if tp == 4 else 1  # tp 4 needs 4 input features: each feature in two halves
        weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64).repeat_interleave(copies, 1)
        layer = RowParallelLinear(parallel_on(mesh, sequence_parallel), 2 * copies, 2, bias=True, init_std=1.0)
        n = 2 * copies // tp
        mine = slice(mesh.coords.tp * n, (mesh.coords.tp + 1) * n)
        layer.weight.data.copy_(weight[:, mine] / copies)
        layer.bias.data.copy_(torch.tensor([10.0, 20.0]))
        x = torch.ones(4, n, dtype=torch.float64, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        return {"y": y.detach(), "db": layer.bias.grad, "dx": x.grad * copies}


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_a_row_parallel_bias_is_added_once(tp: int, sequence_parallel: bool) -> None:
    results = run_ranks(tp, bias_on_ranks, tp, sequence_parallel)
    tokens = 4 // tp if sequence_parallel else 4
    for result in results:
        assert torch.equal(result["y"], torch.tensor([[13.0, 27.0]], dtype=torch.float64).expand(tokens, 2))
        assert result["db"].tolist() == [tokens, tokens]  # under sequence parallelism a partial sum
    dx = torch.cat([r["dx"] for r in results], 1)[0]
    assert dx.tolist() == ([4.0, 6.0] if tp < 4 else [4.0, 4.0, 6.0, 6.0])


# ---- regions


def regions_on_ranks() -> None:
    """Every crossing: values, gradients by the transposed map."""
    with ProcessMesh.open(Layout(tp=4)) as mesh:
        axis, me = mesh.axis("tp"), mesh.coords.tp
        base = torch.arange(8 * 3, dtype=torch.float64).view(8, 3)
        weights = torch.stack(
            [torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(4)]
        )
        mine = slice(2 * me, 2 * me + 2)

        def check(function: Any, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, dx: torch.Tensor) -> None:
            x = x.clone().requires_grad_()
            out = function(x, axis)
            assert torch.equal(out, y), function
            out.backward(weight.clone())
            assert torch.allclose(x.grad, dx, rtol=1e-14), function

        check(regions.copy_to_tp, base, weights[me], base, weights.sum(0))
        check(regions.reduce_from_tp, base * (me + 1), weights[0], base * 10, weights[0])
        check(regions.gather_sequence, base[mine], weights[me], base, weights.sum(0)[mine])
        check(
            regions.reduce_scatter_sequence,
            base * (me + 1),
            weights[me][mine],
            base[mine] * 10,
            torch.cat([w[2 * r : 2 * r + 2] for r, w in enumerate(weights)]),
        )
        check(
            regions.split_sequence,
            base,
            weights[me][mine],
            base[mine],
            torch.cat([w[2 * r : 2 * r + 2] for r, w in enumerate(weights)]),
        )


def test_regions_and_their_gradients() -> None:
    run_ranks(4, regions_on_ranks)
    x = torch.ones(2)
    for name in ("copy_to_tp", "reduce_from_tp", "gather_sequence", "reduce_scatter_sequence", "split_sequence"):
        assert getattr(regions, name)(x, Axis.single()) is x


# ---- errors


def errors_on_ranks(tp: int) -> list[str]:
    """Texts of the errors of a token id, and of a target, outside the vocabulary."""
    texts = []
    with ProcessMesh.open(Layout(tp=tp)) as mesh:
        embedding = VocabParallelEmbedding(parallel_on(mesh, False), V, H, 1.0)
        for bad in (61, 70, -1):
            with pytest.raises(ValueError, match="outside the vocabulary of 61") as caught:
                embedding(torch.tensor([0, 60, bad, 5]))
            texts.append(str(caught.value))
    return texts


def test_ids_outside_the_vocabulary_are_refused_alike_on_every_layout() -> None:
    texts = [t for tp in (1, 2, 4) for t in run_ranks(tp, errors_on_ranks, tp)]
    assert all(t == texts[0] for t in texts)
    assert "token id 70" in texts[0][1] and "position 2" in texts[0][1]
    row = Row(torch.tensor([1, 2, 3, 64, 65]).numpy(), torch.tensor([0, 4]).numpy(), 0)
    batch = make_batch([row], first_row=7)
    check_token_ids(batch, 65)  # target 65 is the first token of another document and does not count
    with pytest.raises(
        ValueError, match=r"token id 64 \(row 7 of the global batch, position 3\) is outside the vocabulary of 64"
    ):
        check_token_ids(batch, 64)
    with pytest.raises(ValueError, match=r"target id 65 .*position 3.*ids run from 0 to 64"):
        check_token_ids(make_batch([row], document_mask=False), 65)


def test_sizes_that_do_not_divide_are_refused() -> None:
    parallel = TensorParallel(Axis("tp", (0, 1), 0, group=object()), sequence_parallel=True)
    with pytest.raises(ValueError, match=r"63 .ffn. cannot be split over 2"):
        ColumnParallelLinear(parallel, H, 63, bias=False, init_std=1.0)
    layer = RowParallelLinear(parallel, FFN, H, bias=False, init_std=1.0)
    with pytest.raises(ValueError, match=r"15 tokens .* cannot be cut into 2 equal slices"):
        layer(torch.zeros(15, FFN // 2))
