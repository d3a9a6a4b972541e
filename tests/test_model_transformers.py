"""The same weights in Hugging Face's models: logits and loss agree, and names and settings translate both ways."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from whole_model import Whole, enlarge, make_whole, random_batch

from megatron_lite.config.transformer import LlamaConfig, TransformerConfig
from megatron_lite.model.gpt import GPT
from megatron_lite.model.hf import config_from_hf, config_to_hf, hf_tensors
from megatron_lite.model.protocol import full_specs

SIZES: dict[str, Any] = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61}
SIZES |= {"max_position_embeddings": 64, "ffn_hidden_size": 48, "attention_dropout": 0.0, "hidden_dropout": 0.0}
ROPE_SCALING: dict[str, Any] = {"use_rope_scaling": True, "rope_scaling_original_max_position_embeddings": 16}
ROPE_SCALING |= {"rope_scaling_factor": 4.0, "rope_scaling_low_freq_factor": 1.0, "rope_scaling_high_freq_factor": 3.0}
GQA = {"group_query_attention": True, "num_query_groups": 2}


def gpt2(**changes: Any) -> TransformerConfig:
    return TransformerConfig(**(SIZES | changes))


def llama(**changes: Any) -> TransformerConfig:
    return LlamaConfig(**(SIZES | changes))


NEMOTRON: dict[str, Any] = {"normalization": "LayerNorm", "apply_layernorm_1p": True, "swiglu": False}
NEMOTRON |= {"squared_relu": True, "rotary_percent": 0.5}
STABLELM: dict[str, Any] = {"normalization": "LayerNorm", "rotary_percent": 0.25, "add_qkv_bias": True}

CASES = {
    "gpt2 tied": ("GPT2LMHeadModel", gpt2()),
    "gpt2 untied": ("GPT2LMHeadModel", gpt2(untie_embeddings_and_output_weights=True, norm_epsilon=1e-3)),
    "llama": ("LlamaForCausalLM", llama()),
    "llama grouped, theta 5e5": ("LlamaForCausalLM", llama(**GQA, rotary_base=5e5)),
    "llama one kv head, tied": (
        "LlamaForCausalLM",
        llama(group_query_attention=True, untie_embeddings_and_output_weights=False),
    ),
    "llama 3 rope scaling": ("LlamaForCausalLM", llama(**GQA, **ROPE_SCALING, rotary_base=5e5)),
    "llama head size 12": ("LlamaForCausalLM", llama(**GQA, kv_channels=12)),
    "llama biases": ("LlamaForCausalLM", llama(add_bias_linear=True)),
    "qwen2 qkv bias": ("Qwen2ForCausalLM", llama(**GQA, add_qkv_bias=True)),
    "qwen3 qk-norm": ("Qwen3ForCausalLM", llama(**GQA, qk_layernorm=True)),
    "stablelm partial rotary 0.25": ("StableLmForCausalLM", llama(**GQA, **STABLELM)),
    "nemotron 1p, relu^2, partial": ("NemotronForCausalLM", llama(**GQA, **NEMOTRON)),
    "nemotron biases": ("NemotronForCausalLM", llama(**NEMOTRON, add_bias_linear=True)),
}


def reference_model(config: TransformerConfig, ours: Whole) -> Any:
    """The Hugging Face model built from our exported config.json and our weights, every tensor accounted for."""
    transformers = pytest.importorskip("transformers")
    settings = json.loads(json.dumps(config_to_hf(config)))
    hf_config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
    state = {
        tensor.name: tensor.join([ours.by_name[name].detach() for name in tensor.ours]) for tensor in hf_tensors(config)
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tied else set())
    model.tie_weights()
    return model.eval().to(torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_loss_equal_the_reference(name):
    architecture, config = CASES[name]
    ours = enlarge(make_whole(GPT, config, dtype=torch.float32), 4.0)
    theirs = reference_model(config, ours)
    assert type(theirs).__name__ == architecture
    batch = random_batch(24, [[0], [0]])
    rows = batch.tokens.view(2, 24)
    with torch.no_grad():
        expected = theirs(rows).logits.flatten(0, 1)
        logits = ours.logits(batch)
        loss = ours.loss(batch) / batch.valid_tokens
    assert expected.std() > 0.3  # far from uniform: the comparison says something
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    wanted = torch.nn.functional.cross_entropy(expected, batch.targets)
    assert abs(loss - wanted) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_the_reference(name):
    """Every tensor's gradient of the mean loss, in fp64."""
    _, config = CASES[name]
    ours = enlarge(make_whole(GPT, config), 4.0)
    theirs = reference_model(config, ours).to(torch.float64)
    batch = random_batch(24, [[0], [0]])
    grads = ours.gradients(batch)
    logits = theirs(batch.tokens.view(2, 24)).logits.flatten(0, 1).to(torch.float64)
    torch.nn.functional.cross_entropy(logits, batch.targets, reduction="sum").backward()
    wanted = {n: p.grad for n, p in theirs.named_parameters()}
    for tensor in hf_tensors(config):
        joined = tensor.join([grads[n] for n in tensor.ours])
        # 1e-4 of the largest: the reference takes rotary angles and RMS norms in fp32
        torch.testing.assert_close(
            joined, wanted[tensor.name], rtol=0, atol=1e-4 * float(wanted[tensor.name].abs().max())
        )


@pytest.mark.parametrize("name", ["llama grouped, theta 5e5", "llama 3 rope scaling", "stablelm partial rotary 0.25"])
def test_long_positions(name):
    """1,500 tokens, and position ids up to 4 k in the middle of a row: rotary angles are the reference's."""
    _, config = CASES[name]
    config = replace(config, max_position_embeddings=4096, num_layers=1)
    ours = enlarge(make_whole(GPT, config, dtype=torch.float32), 4.0)
    theirs = reference_model(config, ours)
    batch = random_batch(1500, [[0]])
    batch = replace(batch, positions=batch.positions + 2596)
    with torch.no_grad():
        expected = theirs(batch.tokens[None], position_ids=batch.positions[None]).logits[0]
        torch.testing.assert_close(ours.logits(batch), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_configuration_survives_the_round_trip(name):
    """What is written can be read back as the same model, also after the reference has rewritten the file."""
    transformers = pytest.importorskip("transformers")
    _, config = CASES[name]
    settings = json.loads(json.dumps(config_to_hf(config)))
    again = config_from_hf(settings)
    for field in [
        "head_dim",
        "kv_heads",
        "ffn_size",
        "rotary_dim",
        "rotary_base",
        "qkv_bias",
        "tied",
        "add_bias_linear",
        "normalization",
        "norm_epsilon",
        "swiglu",
        "squared_relu",
        "qk_layernorm",
        "apply_layernorm_1p",
        "position_embedding_type",
        "max_position_embeddings",
        "vocab_size",
        "num_layers",
        "use_rope_scaling",
        "rope_scaling_factor",
        "rope_scaling_high_freq_factor",
        "rope_scaling_original_max_position_embeddings",
    ]:
        if config.use_rope_scaling or not field.startswith("rope_scaling"):
            assert getattr(again, field) == getattr(config, field), field
    rewritten = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings).to_dict()
    assert config_from_hf(rewritten) == again


@pytest.mark.parametrize("name", CASES)
def test_tensors_survive_the_round_trip_bitwise(name):
    """Every tensor of ours is in exactly one of theirs, and comes back from it bit for bit."""
    _, config = CASES[name]
    ours = make_whole(GPT, config, dtype=torch.float32)
    specs = {n: s for part in full_specs(ours.definition).values() for n, s in part.items()}
    seen: list[str] = []
    for tensor in hf_tensors(config):
        parts = [ours.by_name[n].detach() for n in tensor.ours]
        seen += tensor.ours
        back = tensor.split(tensor.join(parts), [specs[n].full_shape for n in tensor.ours])
        assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True))
    assert sorted(seen) == sorted(specs)


def test_wrong_shapes_say_what_was_expected():
    tensor = next(t for t in hf_tensors(gpt2()) if t.name.endswith("c_attn.weight"))
    with pytest.raises(ValueError, match=r"c_attn.weight has shape \(32, 32\).*attention.query.weight"):
        tensor.split(torch.zeros(32, 32), [(32, 32)] * 3)


@pytest.mark.parametrize(
    "base, change, message",
    [
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1]}}, "mrope_section"),
        ("llama", {"partial_rotary_factor": 0.5}, "rotates whole heads"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"model_type": "mixtral"}, "model_type 'mixtral'"),
        ("qwen2 qkv bias", {"use_sliding_window": True}, "use_sliding_window"),
        ("gpt2 tied", {"activation_function": "relu"}, "activation_function 'relu'"),
        ("gpt2 tied", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("stablelm partial rotary 0.25", {"use_parallel_residual": True}, "use_parallel_residual"),
    ],
)
def test_settings_we_do_not_compute_are_refused(base, change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(config_to_hf(CASES[base][1]) | change)


def test_a_model_no_architecture_computes_is_refused():
    with pytest.raises(ValueError, match=r"no Hugging Face architecture.*rotary_percent=0.5"):
        config_to_hf(llama(rotary_percent=0.5))
