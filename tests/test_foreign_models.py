"""Models of other people: loaded by name, built in parts, trained in parallel, or refused by the names of their layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from foreign.parallel_block import ParallelBlockConfig, ParallelBlockModel
from foreign.plain_linear import PlainConfig, PlainModel
from foreign.shared_block import SharedConfig, SharedModel
from whole_model import Whole, assert_same, enlarge, make_whole, random_batch

from megatron_lite.mesh.collectives import Axis
from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.model.gpt import GPT
from megatron_lite.model.llama import Llama
from megatron_lite.model.problems import model_problems
from megatron_lite.model.protocol import (
    ForwardContext,
    build_part,
    full_specs,
    load_definition,
    part_names,
    source_digest,
    tie,
)
from megatron_lite.tensor.spec import TensorParallel
from megatron_lite.testing.ranks import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
SIZES: dict[str, Any] = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61}
SIZES |= {"max_position_embeddings": 64, "ffn_hidden_size": 64, "attention_dropout": 0.0, "hidden_dropout": 0.0}
PACKED = [[0, 6], [0, 3, 4, 11], [0]]
PARALLEL = TensorParallel(Axis.single("tp"))
TWO_RANKS = TensorParallel(Axis("tp", (0, 1), 0, group=object()))


def my_model() -> tuple[Any, Any]:
    """The example and a configuration of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(EXAMPLES)
        definition = load_definition("my_model:MyModel")
    return definition, definition.Config(**SIZES, group_query_attention=True, num_query_groups=2, logit_cap=1.5)


def models() -> dict[str, tuple[Any, Any]]:
    """The foreign models whose layers are parallel."""
    return {
        "example": my_model(),
        "parallel block": (ParallelBlockModel, ParallelBlockConfig(**SIZES)),
        "shared block": (SharedModel, SharedConfig(**SIZES)),
    }


# ---- loading


def test_builtin_and_foreign_names():
    assert load_definition("gpt") is GPT and load_definition("llama") is Llama
    assert load_definition("foreign.shared_block:SharedModel") is SharedModel
    assert my_model()[0].__name__ == "MyModel"


def test_the_working_directory_comes_first_and_leaves_nothing_in_front(tmp_path, monkeypatch):
    import sys

    (tmp_path / "team_model_a.py").write_text((EXAMPLES / "my_model.py").read_text())
    monkeypatch.chdir(tmp_path)
    first = sys.path[0]
    found = load_definition("team_model_a:MyModel")
    assert found.__module__ == "team_model_a" and Path(sys.modules["team_model_a"].__file__).parent == tmp_path
    assert sys.path[0] == first
    sys.path.remove(str(tmp_path))


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("mamba", None, "no model 'mamba': choose gpt, llama or"),
        ("nowhere.module:Model", None, "no module nowhere.module in .* or among the installed packages"),
        ("team_b:Model", "import no_such_package", "module team_b was found, but it needs no_such_package"),
        (
            "team_c:Model",
            "from megatron_lite.model.gpt import GPT\nclass Mine(GPT): ...",
            "has no Model; it defines GPT, Mine",
        ),
        ("team_h:Model", "x = 1\ny = (", r"module team_h: .*team_h.py, line 2: '\(' was never closed"),
        ("team_i:Model", "import sys\nsys.exit(0)", r"module team_i ends the program when it is imported \(exit code 0\)"),
        ("team_d:Model", "x = 1", "has no Model; it defines no subclass of ModelDefinition"),
        ("team_e:Model", "class Model: ...", "Model is not a subclass of megatron_lite.model.protocol.ModelDefinition"),
        (
            "team_f:Model",
            "from megatron_lite.model.protocol import ModelDefinition\nclass Model(ModelDefinition): ...",
            "Model does not define make_block, make_embed, make_head",
        ),
        (
            "team_g:Model",
            "from megatron_lite.model.gpt import GPT\nclass Model(GPT):\n    Config = dict",
            "Model.Config must be a frozen dataclass",
        ),
    ],
)
def test_what_cannot_be_loaded_says_why(name, text, message, tmp_path, monkeypatch):
    if text is not None:
        (tmp_path / f"{name.split(':')[0]}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    with pytest.raises(ValueError, match=message):
        load_definition(name)


def test_the_digest_is_of_the_source(tmp_path, monkeypatch):
    """Ranks with another file of this name, or another file that its class is derived from, are told apart."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    text = "from megatron_lite.model.gpt import GPT as Base\nclass Model(Base): ..."
    (tmp_path / "team_base.py").write_text(text)
    (tmp_path / "team_derived.py").write_text(text.replace("megatron_lite.model.gpt import GPT", "team_base import Model"))
    found = load_definition("team_derived:Model")
    first = source_digest(found)
    assert first == source_digest(found) != source_digest(load_definition("team_base:Model"))
    (tmp_path / "team_base.py").write_text(text + "  # another")
    second = source_digest(found)
    (tmp_path / "team_derived.py").write_text("")
    assert len({first, second, source_digest(found)}) == 3
    assert source_digest(GPT) == source_digest(Llama)  # of ours, all files are compared


# ---- parallel layers: every layout computes the same


def foreign_rank(sequence_parallel: bool) -> dict[str, Any]:
    """One rank's loss and summed gradients of each model, with their boxes."""
    out = {}
    for name, (definition, config) in models().items():
        mesh = ProcessMesh.open(Layout(tp=dist.get_world_size()), backend="gloo", kv_heads=config.kv_heads)
        model = make_whole(definition, config, axis=mesh.axis("tp"), sequence_parallel=sequence_parallel)
        batch = random_batch(12, PACKED)
        boxes = {}
        for key, grad in model.gradients(batch).items():
            for part in model.by_name[key].spec.partial_over:
                grad = grad.contiguous()
                mesh.axis(part).all_reduce(grad)
            box = model.by_name[key].rectangle
            boxes[key] = (box, grad[tuple(slice(0, n) for n in box.size)].numpy())
        out[name] = (float(model.loss(batch).detach()), boxes)
        mesh.close()
    return out


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_tensor_parallel_equals_one_process(sequence_parallel):
    results = run_ranks(2, foreign_rank, sequence_parallel, timeout=120)
    for name, (definition, config) in models().items():
        single = make_whole(definition, config)
        batch = random_batch(12, PACKED)
        expected = single.gradients(batch)
        got = {key: torch.full_like(grad, float("nan")) for key, grad in expected.items()}
        for result in results:
            loss, boxes = result[name]
            assert abs(loss - float(single.loss(batch).detach())) <= 1e-12 * loss, name
            for key, (box, values) in boxes.items():
                window = tuple(slice(b, b + n) for b, n in zip(box.start, box.size, strict=True))
                got[key][window] = torch.from_numpy(values)
        expected = {k: g for k, g in expected.items() if k not in _zero_by_theory(config, expected)}
        assert_same({k: got[k] for k in expected}, expected)


def _zero_by_theory(config: Any, names: Any) -> set[str]:
    """Key biases without rotary positions: softmax does not see them."""
    return set() if config.rotary_dim else {n for n in names if n.endswith("attention.key.bias")}


def test_documents_stay_apart_in_foreign_models():
    for definition, config in [*models().values(), (PlainModel, PlainConfig())]:
        model = enlarge(make_whole(definition, config), 4.0)
        batch, other = random_batch(12, PACKED), random_batch(12, PACKED, seed=5)
        changed = replace(batch, tokens=torch.cat([other.tokens[:6], batch.tokens[6:]]))
        before, after = model.logits(batch), model.logits(changed)
        assert torch.equal(before[6:], after[6:]) and not torch.equal(before[:6], after[:6])


def test_the_parallel_block_gathers_once():
    model = make_whole(ParallelBlockModel, ParallelBlockConfig(**SIZES))
    block = model.parts["blocks/0"]
    hidden = torch.randn(36, 32, dtype=torch.float64)
    ctx = ForwardContext(random_batch(12, PACKED))
    normed = block.norm(hidden)
    with torch.no_grad():
        block.key_scale.fill_(1)  # which attention by itself does not have
    apart = hidden + block.scale * (block.attention(normed, ctx) + 0.5 * block.mlp(normed))
    torch.testing.assert_close(block(hidden, ctx), apart, rtol=0, atol=1e-14)


def test_the_auxiliary_loss_and_the_tie_are_in_the_gradient():
    """Finite differences through the shared MLP and the auxiliary sum."""
    model = enlarge(make_whole(SharedModel, SharedConfig(**SIZES, aux_weight=0.5)))
    batch = random_batch(12, PACKED)
    assert sum(n.startswith("blocks.") and ".shared." in n for n in model.by_name) == 4  # up and down, once
    weight = model.by_name["blocks.0.shared.up.weight"]
    slope = model.gradients(batch)["blocks.0.shared.up.weight"][3, 5]
    plain = make_whole(SharedModel, SharedConfig(**SIZES, aux_weight=0.0))
    plain.load_state_dict(model.state_dict())
    assert model.loss(batch) - plain.loss(batch) > 1.0
    with torch.no_grad():
        step = 1e-5
        weight[3, 5] += step
        up = model.loss(batch)
        weight[3, 5] -= 2 * step
        down = model.loss(batch)
    torch.testing.assert_close((up - down) / (2 * step), slope, rtol=1e-5, atol=1e-7)


# ---- ordinary layers


def test_ordinary_layers_are_refused_by_name_under_tensor_parallelism():
    found = model_problems(PlainModel, PlainConfig(), Layout(tp=2), sequence_parallel=False, seq_length=16)
    assert len(found) == 1
    for words in ("tensor-model-parallel-size 2", "embed.tokens.weight", "and 33 more", "megatron_lite.tensor.layers"):
        assert words in found[0]
    assert not model_problems(PlainModel, PlainConfig(), Layout(dp=2, pp=3), sequence_parallel=False, seq_length=16)
    with pytest.raises(ValueError, match=r"ordinary torch layers.*blocks.1.qkv.weight"):
        build_part(PlainModel(PlainConfig(), TWO_RANKS), "blocks.1")


def test_a_foreign_models_own_problems_are_listed():
    found = model_problems(PlainModel, PlainConfig(), Layout(), sequence_parallel=False, seq_length=128)
    assert found == ["sequence length 128 is more than context 64: raise --model.context"]
    definition, config = my_model()
    assert "logit-cap -1 must be positive" in model_problems(
        definition, replace(config, logit_cap=-1), Layout(), sequence_parallel=False, seq_length=16
    )


def test_ordinary_parameters_start_the_same_wherever_a_part_is_built():
    """Values depend on (seed, part) alone: not on the order of building, the dtype, or torch's own generator."""
    definition = PlainModel(PlainConfig(), PARALLEL)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    alone = build_part(definition, "blocks.2", seed=7).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    for part in part_names(definition):
        built = build_part(definition, part, seed=7)
        if part == "blocks.2":
            assert all(torch.equal(built.state_dict()[k], v) for k, v in alone.items())
            wide = build_part(PlainModel(PlainConfig(), replace(PARALLEL, dtype=torch.float64)), part, seed=7)
            assert all(torch.equal(wide.state_dict()[k], v.double()) for k, v in alone.items())
        elif part.startswith("blocks."):
            assert not torch.equal(built.state_dict()["qkv.weight"], alone["qkv.weight"])
    assert not torch.equal(build_part(definition, "blocks.2", seed=8).state_dict()["qkv.weight"], alone["qkv.weight"])


def test_specs_of_ordinary_parameters():
    specs = full_specs(PlainModel(PlainConfig(), PARALLEL))
    qkv = specs["blocks.1"]["blocks.1.qkv.weight"]
    assert (qkv.full_shape, qkv.axes, qkv.init, qkv.decay) == ((96, 32), (None, None), None, True)
    assert not specs["blocks.1"]["blocks.1.qkv.bias"].decay
    built = build_part(PlainModel(PlainConfig(), PARALLEL), "blocks.1")
    assert built.qkv.weight.spec == qkv and built.qkv.weight.rectangle.size == (96, 32)


class TiedPlain(PlainModel):
    """The head's matrix is the embedding's, both ordinary."""

    def make_embed(self) -> Any:
        embed = super().make_embed()
        tie(embed.tokens.weight, "embed.tokens.weight")
        return embed

    def make_head(self) -> Any:
        head = super().make_head()
        tie(head.output.weight, "embed.tokens.weight")
        return head


def test_an_ordinary_tied_parameter_starts_as_its_canonical_holder():
    definition = TiedPlain(PlainConfig(), PARALLEL)
    head, embed = build_part(definition, "head", seed=3), build_part(definition, "embed", seed=3)
    assert torch.equal(head.output.weight, embed.tokens.weight)
    assert head.output.weight.spec == embed.tokens.weight.spec
    assert len(Whole(definition).by_name) == len(make_whole(PlainModel, PlainConfig()).by_name) - 1


class BadTie(PlainModel):
    def make_head(self) -> Any:
        head = super().make_head()
        tie(head.output.weight, self.config_tie)
        return head

    config_tie = "embed.nothing"


def test_a_tie_to_nothing_or_of_another_shape_is_found_at_the_start():
    class OtherShape(BadTie):
        config_tie = "blocks.0.qkv.weight"

    for definition, words in (
        (BadTie, "embed.nothing, which is no parameter"),
        (OtherShape, r"shape \(64, 32\) to .*\(96, 32\)"),
    ):
        with pytest.raises(ValueError, match=words):
            full_specs(definition(PlainConfig(), PARALLEL))
        found = model_problems(definition, PlainConfig(), Layout(), sequence_parallel=False, seq_length=16)
        assert len(found) == 1


def test_flops_of_foreign_models():
    from torch.utils.flop_counter import FlopCounterMode

    config = PlainConfig(vocab_size=64)
    flops = PlainModel.flops(config, tokens=32, seq_length=16)
    model = make_whole(PlainModel, config)
    with FlopCounterMode(display=False) as counter:
        model.loss(random_batch(16, [[0], [0]], vocab=64)).backward()
    # PyTorch's fused CPU attention is not counted: only the matrices are
    assert counter.get_total_flops() == flops.model_full - 12 * config.depth * config.width * 32 * 16
    definition, config = my_model()
    assert definition.flops(config, 32, 16) == GPT.flops(config, 32, 16)


def test_glue_is_short():
    for path in (Path(__file__).parent / "foreign").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 150, path
