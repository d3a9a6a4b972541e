"""The built-in models: documents, dropout, decoding, tensor parallelism, FLOPs, and what configurations are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from whole_model import assert_same, enlarge, make_whole, random_batch

from megatron_lite.config.transformer import LlamaConfig, TransformerConfig
from megatron_lite.data.batch import Row, make_batch
from megatron_lite.mesh.collectives import Axis
from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.model.cache import KVCache
from megatron_lite.model.gpt import GPT
from megatron_lite.model.llama import Llama
from megatron_lite.model.problems import model_problems
from megatron_lite.model.protocol import ForwardContext, full_specs
from megatron_lite.tensor.spec import TensorParallel
from megatron_lite.testing.ranks import run_ranks

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61}
SIZES |= {"max_position_embeddings": 64, "ffn_hidden_size": 64}
QUIET: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
GQA = {"group_query_attention": True, "num_query_groups": 2}

MODELS: dict[str, TransformerConfig] = {
    "gpt": TransformerConfig(**SIZES, **QUIET),
    "gpt untied": TransformerConfig(**SIZES, **QUIET, untie_embeddings_and_output_weights=True, squared_relu=True),
    "gpt qk-norm 1p": TransformerConfig(**SIZES, **QUIET, qk_layernorm=True, apply_layernorm_1p=True, swiglu=True),
    "gpt no positions": TransformerConfig(**SIZES, **QUIET, position_embedding_type="none", add_bias_linear=False),
    "llama": LlamaConfig(**SIZES),
    "llama grouped": LlamaConfig(**SIZES, **GQA, qk_layernorm=True, add_qkv_bias=True),
    "llama one kv head, tied": LlamaConfig(
        **SIZES, group_query_attention=True, rotary_percent=0.5, untie_embeddings_and_output_weights=False
    ),
}
PACKED = [[0, 6], [0, 3, 4, 11], [0]]


# ---- documents


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_document_in_a_row_computes_what_it_computes_alone(name, dtype):
    """Logits of the second document: bitwise unchanged by the first one's tokens, equal to those alone."""
    model = enlarge(make_whole(GPT, MODELS[name], dtype=dtype))
    batch = random_batch(12, PACKED)
    other = random_batch(12, PACKED, seed=9)
    tokens = other.tokens.clone()
    second = slice(6, 12)
    tokens[second] = batch.tokens[second]
    logits = model.logits(batch)[second]
    assert torch.equal(logits, model.logits(replace(batch, tokens=tokens))[second])
    alone = make_batch([Row(np.append(batch.tokens[second].numpy(), 0), np.array([0]), 0)])
    torch.testing.assert_close(logits, model.logits(alone), rtol=0, atol=200 * torch.finfo(dtype).eps)


def test_without_the_document_mask_documents_see_each_other():
    """The feature has its effect: the same row without a border gives other logits."""
    model = enlarge(make_whole(GPT, MODELS["llama"]))
    apart, together = (random_batch(12, [[0, 6]], document_mask=mask) for mask in (True, False))
    difference = (model.logits(apart) - model.logits(together)).abs()
    assert difference[:6].max() < 1e-12 and difference[6:].max() > 1e-3


def test_positions_and_loss_at_borders():
    """Tokens 5 6 E 7 8 E 9: positions restart, E's own prediction does not count, the one of E does."""
    row = Row(np.array([5, 6, 0, 7, 8, 0, 9]), np.array([0, 3, 6]), 0)
    batch = make_batch([row], eod_id=0, eod_mask_loss=True)
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.loss_mask.tolist() == [1, 1, 0, 1, 1, 0]
    model = enlarge(make_whole(GPT, MODELS["gpt"]))
    log_p = model.logits(batch).log_softmax(-1)
    wanted = -sum(log_p[i, batch.targets[i]] for i in (0, 1, 3, 4))
    torch.testing.assert_close(model.loss(batch), wanted)


# ---- training is a function of the addresses


def test_dropout_does_not_depend_on_the_microbatch():
    config = replace(MODELS["gpt"], attention_dropout=0.2, hidden_dropout=0.3)
    model = enlarge(make_whole(GPT, config))
    whole = random_batch(12, PACKED, first_row=4)
    rows = [
        Row(np.append(whole.tokens[b * 12 : b * 12 + 12].numpy(), whole.targets[b * 12 + 11]), np.array(s), b)
        for b, s in enumerate(PACKED)
    ]
    with pytest.warns(UserWarning, match="attention dropout"):
        loss = model.loss(whole, seed=3, step=7, training=True)
    parts = [model.loss(make_batch([r], 4 + b), seed=3, step=7, training=True) for b, r in enumerate(rows)]
    torch.testing.assert_close(sum(parts), loss, rtol=1e-12, atol=0)
    for changed in ({"step": 8}, {"seed": 4}):
        assert model.loss(whole, **({"seed": 3, "step": 7, "training": True} | changed)) != loss
    plain = model.loss(whole)
    assert plain != loss and plain == model.loss(whole, seed=5, step=1)


def test_recomputing_a_block_gives_the_same_gradients_bitwise():
    config = replace(MODELS["llama grouped"], attention_dropout=0.2, hidden_dropout=0.3)
    model = make_whole(GPT, config)
    ctx = ForwardContext(random_batch(12, PACKED), seed=1, step=2, training=True)

    def gradients(recompute: bool) -> list[torch.Tensor]:
        hidden = model.parts["embed"](ctx)
        for i in range(2):
            block = model.parts[f"blocks/{i}"]
            hidden = checkpoint(block, hidden, ctx, use_reentrant=False) if recompute else block(hidden, ctx)
        return list(torch.autograd.grad(model.parts["head"](hidden, ctx), list(model.by_name.values())))

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


def test_label_smoothing_is_of_training_only():
    batch = random_batch(12, PACKED)
    model = enlarge(make_whole(GPT, replace(MODELS["llama"], label_smoothing=0.1)))
    logits, counts = model.logits(batch), batch.loss_mask.bool()
    for training, smoothing in ((True, 0.1), (False, 0.0)):
        wanted = torch.nn.functional.cross_entropy(
            logits[counts], batch.targets[counts], label_smoothing=smoothing, reduction="sum"
        )
        torch.testing.assert_close(model.loss(batch, training=training), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_loss_is_fp32_in_short_dtypes(dtype):
    model = make_whole(Llama, MODELS["llama grouped"], dtype=dtype)
    batch = random_batch(12, PACKED)
    ctx = ForwardContext(batch)
    loss = model.parts["head"](model.hidden(ctx)[0], ctx)
    assert loss.dtype == torch.float32
    assert abs(float(loss.detach()) / batch.valid_tokens - np.log(61)) < 0.1


# ---- decoding


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("steps", [[5, 1, 1, 1, 1, 1], [4, 3, 3], [1] * 10], ids=str)
def test_decoding_with_a_cache_is_the_forward_pass(name, steps):
    model = enlarge(make_whole(GPT, MODELS[name]))
    batch = random_batch(10, [[0], [0]])
    whole = model.logits(batch).view(2, 10, -1)
    tokens, cache = batch.tokens.view(2, 10), KVCache(10)
    pieces = []
    for n in steps:
        piece = make_batch(
            [Row(np.append(row, 0), np.array([0]), 0) for row in tokens[:, cache.length :][:, :n].numpy()]
        )
        piece = replace(piece, positions=piece.positions + cache.length)
        pieces.append(model.logits(piece, cache=cache).view(2, n, -1))
        cache.advance(n)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="11 tokens do not fit"):
        model.logits(make_batch([Row(np.zeros(2, np.int64), np.array([0]), 0)] * 2), cache=cache)


# ---- tensor parallelism


def tensor_parallel_rank(configs: dict[str, Any], sequence_parallel: bool, multiple: int) -> dict[str, Any]:
    """One rank's results for every model."""
    return {name: one_model_of_rank(config, sequence_parallel, multiple) for name, config in configs.items()}


def one_model_of_rank(config: Any, sequence_parallel: bool, multiple: int) -> dict[str, Any]:
    """One rank's loss, logits, and gradients summed over what their specs name, with their boxes."""
    training = config.hidden_dropout > 0
    mesh = ProcessMesh.open(Layout(tp=dist.get_world_size()), backend="gloo", kv_heads=config.kv_heads)
    model = make_whole(GPT, config, axis=mesh.axis("tp"), sequence_parallel=sequence_parallel, vocab_multiple=multiple)
    batch = random_batch(12, PACKED)
    grads = model.gradients(batch, training=training)
    out: dict[str, Any] = {"boxes": {}, "specs": {n: p.spec for n, p in model.by_name.items()}}
    for name, grad in grads.items():
        parameter = model.by_name[name]
        for part in parameter.spec.partial_over:
            grad = grad.contiguous()
            mesh.axis(part).all_reduce(grad)
        box = parameter.rectangle
        out["boxes"][name] = (box, grad[tuple(slice(0, n) for n in box.size)].numpy())
    mesh.traffic.reset()
    out["loss"] = float(model.loss(batch, training=training).detach())
    out["traffic"] = mesh.traffic.as_dict()
    logits = model.logits(batch)
    changed = replace(batch, tokens=torch.cat([random_batch(12, PACKED, seed=9).tokens[:6], batch.tokens[6:]]))
    out["unmoved"] = torch.equal(logits[6:12], model.logits(changed)[6:12])
    out["logits"] = logits.numpy()
    mesh.close()
    return out


def full_gradients(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Full tensors from the ranks' boxes; where ranks hold the same box they must agree bit for bit."""
    full = {}
    for name, spec in ranks[0]["specs"].items():
        whole = torch.full(spec.full_shape, float("nan"), dtype=torch.float64)
        for rank in ranks:
            box, values = rank["boxes"][name]
            window = whole[tuple(slice(b, b + n) for b, n in zip(box.start, box.size, strict=True))]
            assert torch.isnan(window).all() or torch.equal(window, torch.from_numpy(values)), f"{name}: ranks differ"
            window.copy_(torch.from_numpy(values))
        full[name] = whole
    return full


DROPPED = {**MODELS, "gpt dropout": replace(MODELS["gpt qk-norm 1p"], attention_dropout=0.2, hidden_dropout=0.3)}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_equals_one_process(tp, sequence_parallel):
    """Loss, logits and every gradient, with a vocabulary of 61 padded by ranks; replicated gradients agree bitwise."""
    results = run_ranks(tp, tensor_parallel_rank, DROPPED, sequence_parallel, 8 if tp == 2 else 1, timeout=120)
    for name, config in DROPPED.items():
        ranks = [result[name] for result in results]
        training = config.hidden_dropout > 0
        single, batch = make_whole(GPT, config), random_batch(12, PACKED)
        expected, got = single.gradients(batch, training=training), full_gradients(ranks)
        for key in [n for n in expected if n.endswith("attention.key.bias")]:
            if not (config.rotary_dim or config.qk_layernorm):  # softmax does not see it: exactly zero
                assert max(float(expected.pop(key).abs().max()), float(got.pop(key).abs().max())) < 1e-12
        assert_same(got, expected)
        loss = float(single.loss(batch, training=training).detach())
        for rank in ranks:
            assert rank["loss"] == ranks[0]["loss"] and abs(rank["loss"] - loss) <= 1e-12 * loss, name
            assert np.abs(rank["logits"] - single.logits(batch).numpy()).max() <= 1e-12, name
            assert rank["unmoved"], f"{name}: a document's logits moved with its neighbour's tokens"
        _check_traffic(ranks[0]["traffic"], config, sequence_parallel)


def _check_traffic(traffic: dict[str, Any], config: Any, sequence_parallel: bool) -> None:
    """Two crossings a block: query, key and value share one gather, gate and up another."""
    calls = {kind: value["calls"] for kind, value in traffic.items()}
    crossings = 1 + 2 * config.num_layers  # embedding; attention output and MLP down of each block
    if sequence_parallel:
        assert calls["tp.reduce_scatter"] == crossings
        assert calls["tp.all_gather"] == 2 * config.num_layers + 1  # into attention and MLP; into the head
    else:
        assert calls["tp.all_reduce"] == crossings + 2  # and two of the loss
        assert "tp.all_gather" not in calls


def test_partial_gradients_are_named():
    """Under sequence parallelism norms, positions and row biases are partial; qk-norm always; key/value per replica."""

    def partial(sequence_parallel: bool) -> dict[str, tuple[str, ...]]:
        axis = Axis("tp", (0, 1, 2, 3), 1, group=object())
        parallel = TensorParallel(axis, kv_heads=2, sequence_parallel=sequence_parallel)
        config = TransformerConfig(**SIZES, **GQA, qk_layernorm=True)
        specs = full_specs(GPT(config, parallel))
        return {n: s.partial_over for part in specs.values() for n, s in part.items() if s.partial_over}

    per_replica = {
        f"blocks.{i}.attention.{m}.{k}" for i in (0, 1) for m in ("key", "value") for k in ("weight", "bias")
    }
    heads = {f"blocks.{i}.attention.{m}_norm.{k}" for i in (0, 1) for m in ("query", "key") for k in ("weight", "bias")}
    plain = partial(False)
    assert {n for n, p in plain.items() if p == ("kv_replica",)} == per_replica
    assert {n for n, p in plain.items() if p == ("tp",)} == heads
    rows = {f"blocks.{i}.{m}.bias" for i in (0, 1) for m in ("attention.output", "mlp.down")}
    norms = {f"blocks.{i}.{m}_norm.{k}" for i in (0, 1) for m in ("attention", "mlp") for k in ("weight", "bias")}
    ends = {"embed.positions.weight", "head.norm.weight", "head.norm.bias"}
    assert set(partial(True)) - set(plain) == rows | norms | ends


# ---- specs


def count(config: TransformerConfig) -> int:
    specs = full_specs(GPT(config, TensorParallel(Axis.single("tp"))))
    return sum({n: s.numel for part in specs.values() for n, s in part.items()}.values())


def test_every_block_is_there_once_under_its_global_name():
    specs = full_specs(GPT(replace(MODELS["gpt"], num_layers=7), TensorParallel(Axis.single("tp"))))
    assert list(specs) == ["embed", *(f"blocks.{i}" for i in range(7)), "head"]
    assert all(n.startswith(f"blocks.{i}.") for i in range(7) for n in specs[f"blocks.{i}"])
    assert specs["head"]["embed.tokens.weight"] == specs["embed"]["embed.tokens.weight"]


def test_parameter_counts():
    """GPT-2 small and Llama 2 7B, counted from specs alone; a tied matrix once."""
    small = TransformerConfig(
        num_layers=12, hidden_size=768, num_attention_heads=12, vocab_size=50257, max_position_embeddings=1024
    )
    assert count(small) == 124_439_808
    seven = LlamaConfig(
        num_layers=32, hidden_size=4096, num_attention_heads=32, vocab_size=32000, max_position_embeddings=4096,
        ffn_hidden_size=11008,
    )  # fmt: skip
    assert count(seven) == 6_738_415_616


def test_initial_values_and_groups():
    config = replace(MODELS["llama grouped"], num_layers=8, no_weight_decay_patterns=("*.attention.key.*",))
    specs = {
        n: s for part in full_specs(Llama(config, TensorParallel(Axis.single("tp")))).values() for n, s in part.items()
    }
    stds = {n: s.init.value for n, s in specs.items() if s.init is not None and s.init.kind == "normal"}
    for name, std in stds.items():
        assert std == (0.005 if name.endswith(("attention.output.weight", "mlp.down.weight")) else 0.02), name
    assert {n for n, s in specs.items() if s.tag == "embedding"} == {"embed.tokens.weight"}
    assert {n for n, s in specs.items() if s.tag == "head"} == {"head.output.weight"}
    for name, spec in specs.items():
        assert spec.decay == (len(spec.full_shape) > 1 and ".attention.key." not in name), name


def test_default_sizes_are_megatron_lms():
    def ffn(hidden: int, swiglu: bool) -> int:
        return TransformerConfig(num_layers=1, hidden_size=hidden, num_attention_heads=1, swiglu=swiglu).ffn_size

    assert [ffn(h, False) for h in (64, 100)] == [256, 400]
    assert [ffn(h, True) for h in (4096, 768, 1024, 2560)] == [
        int((4 * h * 2 / 3) / 64) * 64 for h in (4096, 768, 1024, 2560)
    ]
    assert ffn(4096, True) == 10880
    config = TransformerConfig(hidden_size=64, num_attention_heads=4, num_query_groups=2)
    assert (config.head_dim, config.kv_heads) == (16, 4)  # num-query-groups without group-query-attention is ignored


# ---- FLOPs


def test_flops_of_the_published_case():
    config = LlamaConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256, ffn_hidden_size=128, **GQA
    )
    flops = Llama.flops(config, tokens=32, seq_length=32)
    assert (flops.model_full, flops.computed) == (18_874_368, 18_087_936)
    assert flops.model_full == 3 * 6_291_456
    packed = Llama.flops(config, tokens=32, seq_length=32, sum_squared_lengths=16 * 16 * 2)
    assert packed.model_full == flops.model_full and packed.computed == 17_301_504 + 6 * 2 * 64 * 512
    assert Llama.flops(config, 3 * 32, 32) == type(flops)(3 * flops.model_full, 3 * flops.computed)


@pytest.mark.parametrize("name", MODELS)
def test_flops_equal_a_counter_on_the_real_modules(name, monkeypatch):
    """Forward and backward, counted on what runs: the reference attention computes full squares."""
    from torch.utils.flop_counter import FlopCounterMode

    from megatron_lite.ops import attention as ops

    monkeypatch.setattr(
        "megatron_lite.model.blocks.attention", lambda *args, **kw: ops.attention(*args, **kw, kernel="reference")
    )
    config = replace(MODELS[name], vocab_size=64)
    model = make_whole(GPT, config)
    batch = random_batch(16, [[0], [0]], vocab=64)

    def in_place(_: Any, a: Any, b: Any, **__: Any) -> int:  # the counter knows addmm, and not that it is also in place
        return 2 * a[0] * a[1] * b[1]

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
        model.loss(batch).backward()
    assert counter.get_total_flops() == GPT.flops(config, tokens=32, seq_length=16).model_full


# ---- refusals


def problems(config: Any, *, sp: bool = False, seq_length: int = 16, **layout: int) -> list[str]:
    return model_problems(GPT, config, Layout(**layout), sequence_parallel=sp, seq_length=seq_length)


def test_a_good_configuration_has_no_problems():
    for config in MODELS.values():
        for tp in (1, 2, 4):
            assert problems(config, sp=True, tp=tp, pp=2) == []


@pytest.mark.parametrize(
    "change, kwargs, words",
    [
        ({"num_attention_heads": 6, "hidden_size": 48}, {"tp": 4}, ["num-attention-heads 6 not divisible", "3 or 6"]),
        ({"ffn_hidden_size": 63}, {"tp": 4}, ["ffn-hidden-size 63 not divisible", "60 or 64"]),
        (
            {"num_attention_heads": 24, "hidden_size": 48, "group_query_attention": True, "num_query_groups": 3},
            {"tp": 2},
            ["num-query-groups 3", "one must divide the other"],
        ),
        ({}, {"tp": 2, "sp": True, "seq_length": 15}, ["seq-length 15", "14 or 16"]),
        ({"hidden_size": 30}, {}, ["hidden-size 30 is not divisible by num-attention-heads 4", "28 or 32"]),
        ({"max_position_embeddings": 8}, {}, ["max-position-embeddings 8 is less than seq-length 16"]),
        ({"max_position_embeddings": None}, {}, ["--max-position-embeddings is required"]),
        ({"group_query_attention": True, "num_query_groups": 3}, {}, ["num-query-groups 3 does not divide", "2 or 4"]),
        ({"position_embedding_type": "rope", "rotary_percent": 0.4}, {}, ["rotary-percent 0.4", "even number"]),
        ({"swiglu": True, "squared_relu": True}, {}, ["--swiglu and --squared-relu"]),
        ({"swiglu": True, "ffn_hidden_size": None, "hidden_size": 16}, {}, ["set --ffn-hidden-size"]),
        ({"hidden_dropout": 1.0}, {}, ["hidden-dropout 1.0"]),
        ({"num_layers": 3}, {"pp": 4}, ["3 blocks cannot fill 4 pipeline stages"]),
        ({"use_rope_scaling": True}, {}, ["--use-rope-scaling has no effect"]),
    ],
)
def test_a_problem_says_numbers_and_remedy(change, kwargs, words):
    found = problems(replace(MODELS["gpt"], **change), **kwargs)
    assert len(found) == 1, found
    for word in words:
        assert word in found[0]


def test_all_problems_at_once():
    config = replace(MODELS["gpt"], num_attention_heads=6, hidden_size=40, ffn_hidden_size=63, init_method_std=0.0)
    found = problems(config, tp=4, sp=True, seq_length=15)
    assert len(found) == 5, found
    assert problems(TransformerConfig())[:3] == [
        "--num-layers is required",
        "--hidden-size is required",
        "--num-attention-heads is required",
    ]
