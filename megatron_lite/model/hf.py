"""Hugging Face architectures that are special cases of our transformer: their configurations and tensor names.

Six are: GPT-2, Llama, Qwen2 (biases on query, key and value), Qwen3 (qk-norm), StableLM (LayerNorm, partial rotary)
and Nemotron (squared ReLU, norms with 1 + weight). A setting of theirs that we do not compute is refused by name, and
one of ours that none of them has is refused at export: nothing is dropped without a word.

This file translates records; reading and writing the files is the business of ``checkpoint``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_lite.config.transformer import TransformerConfig
from megatron_lite.model.names import HfTensor

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "nemotron": "NemotronForCausalLM",
}
NORM_EPSILON = {"gpt2": "layer_norm_epsilon", "stablelm": "layer_norm_eps", "nemotron": "norm_eps"}  # else rms_norm_eps


def model_type_of(config: TransformerConfig) -> str:
    """The Hugging Face ``model_type`` that computes what this configuration computes.

    Raises:
        ValueError: none does; lists the settings that decide.
    """
    c = config
    plain_heads = c.head_dim * c.num_attention_heads == c.hidden_size
    if (
        c.position_embedding_type == "learned_absolute" and c.normalization == "LayerNorm" and c.add_bias_linear
        and not (c.swiglu or c.squared_relu or c.apply_layernorm_1p or c.qk_layernorm)
        and c.kv_heads == c.num_attention_heads and plain_heads
    ):  # fmt: skip
        return "gpt2"
    if c.position_embedding_type == "rope" and c.swiglu and not c.apply_layernorm_1p:
        if c.normalization == "RMSNorm" and c.rotary_percent == 1.0:
            if c.qk_layernorm and not c.qkv_bias:
                return "qwen3"
            if not c.qk_layernorm:
                return "qwen2" if c.add_qkv_bias and not c.add_bias_linear else "llama"
        if c.normalization == "LayerNorm" and plain_heads and not (c.qk_layernorm or c.add_bias_linear):
            return "stablelm"
    if (
        c.position_embedding_type == "rope" and c.normalization == "LayerNorm" and c.apply_layernorm_1p
        and c.squared_relu and not c.qk_layernorm and not (c.add_qkv_bias and not c.add_bias_linear)
    ):  # fmt: skip
        return "nemotron"
    settings = (
        "position_embedding_type", "rotary_percent", "normalization", "apply_layernorm_1p", "qk_layernorm", "swiglu",
        "squared_relu", "add_bias_linear", "add_qkv_bias", "num_query_groups", "kv_channels",
    )  # fmt: skip
    raise ValueError(
        "no Hugging Face architecture computes this combination of "
        + ", ".join(f"{name}={getattr(c, name)}" for name in settings)
        + f"; known are {', '.join(ARCHITECTURES.values())}"
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The ``config.json`` of this model.

    Raises:
        ValueError: no known architecture fits.
    """
    kind = model_type_of(config)
    common = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": config.tied,
        NORM_EPSILON.get(kind, "rms_norm_eps"): config.norm_epsilon,
    }
    if kind == "gpt2":
        return common | {
            "n_positions": config.max_position_embeddings,
            "n_embd": config.hidden_size,
            "n_layer": config.num_layers,
            "n_head": config.num_attention_heads,
            "n_inner": config.ffn_size,
            "activation_function": "gelu_new",
            "resid_pdrop": config.hidden_dropout,
            "embd_pdrop": config.hidden_dropout,
            "attn_pdrop": config.attention_dropout,
        }
    common |= {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "relu2" if config.squared_relu else "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "attention_dropout": config.attention_dropout,
        "rope_theta": config.rotary_base,
    }
    if kind in ("llama", "nemotron"):
        common |= {"attention_bias": config.add_bias_linear, "mlp_bias": config.add_bias_linear}
    if kind in ("stablelm", "nemotron"):
        common["partial_rotary_factor"] = config.rotary_percent
    if kind == "stablelm":
        common |= {"use_qkv_bias": config.qkv_bias, "hidden_dropout": config.hidden_dropout}
    if config.use_rope_scaling:
        common["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_scaling_factor,
            "low_freq_factor": config.rope_scaling_low_freq_factor,
            "high_freq_factor": config.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling_original_max_position_embeddings,
        }
    return common


def config_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    """Our configuration from a ``config.json``.

    Raises:
        ValueError: an unknown ``model_type``, or a setting that we do not compute.
    """
    kind = hf.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type {kind!r} is not supported: known are {', '.join(ARCHITECTURES)}")
    tied = bool(hf.get("tie_word_embeddings", kind == "gpt2"))
    shared: dict[str, Any] = {
        "vocab_size": hf["vocab_size"],
        "init_method_std": hf.get("initializer_range", 0.02),
        "untie_embeddings_and_output_weights": not tied,
        "norm_epsilon": hf.get(
            NORM_EPSILON.get(kind, "rms_norm_eps"), 1e-6 if kind in ("llama", "qwen2", "qwen3") else 1e-5
        ),
    }
    if kind == "gpt2":
        return TransformerConfig(**shared, **_gpt2_fields(hf))
    return TransformerConfig(**shared, **_llama_fields(hf, kind))


def _gpt2_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    _refuse(hf, "activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    _refuse(hf, "scale_attn_weights", (True,), True)
    _refuse(hf, "scale_attn_by_inverse_layer_idx", (False,), False)
    _refuse(hf, "add_cross_attention", (False,), False)
    hidden_dropout = hf.get("resid_pdrop", 0.1)
    _refuse(hf, "embd_pdrop", (hidden_dropout,), 0.1)
    return {
        "num_layers": hf["n_layer"],
        "hidden_size": hf["n_embd"],
        "num_attention_heads": hf["n_head"],
        "ffn_hidden_size": hf.get("n_inner"),
        "max_position_embeddings": hf["n_positions"],
        "hidden_dropout": hidden_dropout,
        "attention_dropout": hf.get("attn_pdrop", 0.1),
    }


def _llama_fields(hf: Mapping[str, Any], kind: str) -> dict[str, Any]:
    act = "relu2" if kind == "nemotron" else "silu"
    _refuse(hf, "hidden_act", (act,), act)
    _refuse(hf, "use_sliding_window", (False,), False)
    _refuse(hf, "use_parallel_residual", (False,), False)
    _refuse(hf, "mlp_bias", (bool(hf.get("attention_bias", False)),), False)
    if kind == "qwen3":
        _refuse(hf, "attention_bias", (False,), False)
    if kind == "stablelm":
        _refuse(hf, "qk_layernorm", (False,), False)
    heads = hf["num_attention_heads"]
    kv_heads = hf.get("num_key_value_heads") or heads
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": heads,
        "ffn_hidden_size": hf["intermediate_size"],
        "group_query_attention": kv_heads != heads,
        "num_query_groups": kv_heads,
        "kv_channels": hf.get("head_dim") or (128 if kind == "qwen3" else hf["hidden_size"] // heads),
        "max_position_embeddings": hf["max_position_embeddings"],
        "position_embedding_type": "rope",
        "normalization": "LayerNorm" if kind in ("stablelm", "nemotron") else "RMSNorm",
        "apply_layernorm_1p": kind == "nemotron",
        "qk_layernorm": kind == "qwen3",
        "swiglu": kind != "nemotron",
        "squared_relu": kind == "nemotron",
        "add_bias_linear": bool(hf.get("attention_bias", False)),
        "add_qkv_bias": kind == "qwen2" or bool(hf.get("use_qkv_bias", False)),
        "attention_dropout": hf.get("attention_dropout") or 0.0,
        "hidden_dropout": hf.get("hidden_dropout") or 0.0,
        **_rope_fields(hf, {"stablelm": 0.25, "nemotron": 0.5}.get(kind, 1.0)),
    }


def _rope_fields(hf: Mapping[str, Any], default_share: float) -> dict[str, Any]:
    """Rotary settings, from ``rope_parameters`` (new files) or ``rope_theta`` and ``rope_scaling`` (older ones)."""
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    fields = {
        "rotary_base": float(rope.pop("rope_theta", hf.get("rope_theta", 10000.0))),
        "rotary_percent": float(rope.pop("partial_rotary_factor", hf.get("partial_rotary_factor", default_share))),
    }
    if default_share == 1.0 and fields["rotary_percent"] != 1.0:
        raise ValueError(f"partial_rotary_factor {fields['rotary_percent']}: this architecture rotates whole heads")
    if kind == "llama3":
        fields |= {
            "use_rope_scaling": True,
            "rope_scaling_factor": float(rope.pop("factor")),
            "rope_scaling_low_freq_factor": float(rope.pop("low_freq_factor")),
            "rope_scaling_high_freq_factor": float(rope.pop("high_freq_factor")),
            "rope_scaling_original_max_position_embeddings": int(
                rope.pop("original_max_position_embeddings", hf["max_position_embeddings"])
            ),
        }
    elif kind != "default":
        raise ValueError(f"rope type {kind!r} is not supported: default and llama3 are")
    if rope:
        raise ValueError(f"rope settings {', '.join(sorted(map(str, rope)))} are not supported with rope type {kind!r}")
    return fields


def _refuse(hf: Mapping[str, Any], key: str, supported: tuple[Any, ...], default: Any) -> None:
    value = hf.get(key, default)
    if value is not None and value not in supported:
        raise ValueError(f"{key} {value!r} in config.json is not supported: only {' or '.join(map(str, supported))} is")


def hf_tensors(config: TransformerConfig) -> list[HfTensor]:
    """Every tensor of the Hugging Face checkpoint of this model, and what it is made of.

    Raises:
        ValueError: no known architecture fits.
    """
    tensors = _gpt2_tensors if model_type_of(config) == "gpt2" else _llama_tensors
    return list(tensors(config))


def _gpt2_tensors(config: TransformerConfig) -> Iterator[HfTensor]:
    yield HfTensor("transformer.wte.weight", ("embed.tokens.weight",))
    yield HfTensor("transformer.wpe.weight", ("embed.positions.weight",))
    for i in range(config.num_layers):
        theirs, ours = f"transformer.h.{i}", f"blocks.{i}"
        for kind, transpose in (("weight", True), ("bias", False)):
            qkv = tuple(f"{ours}.attention.{part}.{kind}" for part in ("query", "key", "value"))
            yield HfTensor(f"{theirs}.ln_1.{kind}", (f"{ours}.attention_norm.{kind}",))
            yield HfTensor(f"{theirs}.attn.c_attn.{kind}", qkv, transpose)
            yield HfTensor(f"{theirs}.attn.c_proj.{kind}", (f"{ours}.attention.output.{kind}",), transpose)
            yield HfTensor(f"{theirs}.ln_2.{kind}", (f"{ours}.mlp_norm.{kind}",))
            yield HfTensor(f"{theirs}.mlp.c_fc.{kind}", (f"{ours}.mlp.up.{kind}",), transpose)
            yield HfTensor(f"{theirs}.mlp.c_proj.{kind}", (f"{ours}.mlp.down.{kind}",), transpose)
    yield HfTensor("transformer.ln_f.weight", ("head.norm.weight",))
    yield HfTensor("transformer.ln_f.bias", ("head.norm.bias",))
    if not config.tied:
        yield HfTensor("lm_head.weight", ("head.output.weight",))


def _llama_tensors(config: TransformerConfig) -> Iterator[HfTensor]:
    norm_bias = config.normalization == "LayerNorm"
    modules = [
        ("input_layernorm", "attention_norm", norm_bias),
        ("self_attn.q_proj", "attention.query", config.qkv_bias),
        ("self_attn.k_proj", "attention.key", config.qkv_bias),
        ("self_attn.v_proj", "attention.value", config.qkv_bias),
        ("self_attn.o_proj", "attention.output", config.add_bias_linear),
        ("post_attention_layernorm", "mlp_norm", norm_bias),
        ("mlp.up_proj", "mlp.up", config.add_bias_linear),
        ("mlp.down_proj", "mlp.down", config.add_bias_linear),
    ]
    if config.swiglu:
        modules.append(("mlp.gate_proj", "mlp.gate", config.add_bias_linear))
    if config.qk_layernorm:
        modules.append(("self_attn.q_norm", "attention.query_norm", norm_bias))
        modules.append(("self_attn.k_norm", "attention.key_norm", norm_bias))
    yield HfTensor("model.embed_tokens.weight", ("embed.tokens.weight",))
    for i in range(config.num_layers):
        for theirs, ours, bias in modules:
            for kind in ("weight", "bias") if bias else ("weight",):
                yield HfTensor(f"model.layers.{i}.{theirs}.{kind}", (f"blocks.{i}.{ours}.{kind}",))
    for kind in ("weight", "bias") if norm_bias else ("weight",):
        yield HfTensor(f"model.norm.{kind}", (f"head.norm.{kind}",))
    if not config.tied:
        yield HfTensor("lm_head.weight", ("head.output.weight",))
