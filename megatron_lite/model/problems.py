"""Everything that can be wrong with a model under a layout, found before any weight exists.

Each problem is one sentence: what, the numbers, the rule, and the nearest values that would do.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch

from megatron_lite.config.problem import either, nearest_divisors, nearest_multiples
from megatron_lite.config.transformer import TransformerConfig
from megatron_lite.mesh.collectives import Axis
from megatron_lite.mesh.layout import Layout
from megatron_lite.model.protocol import ModelDefinition, full_specs, ordinary_refusal
from megatron_lite.tensor.spec import TensorParallel


def model_problems(
    definition: type[ModelDefinition], config: Any, layout: Layout, *, sequence_parallel: bool, seq_length: int
) -> list[str]:
    """A model's own problems, and those that every model shares; empty when the configuration can run.

    Under tensor parallelism the model is built once on the meta device, to name the ordinary layers it holds.
    """
    found = definition.problems(config, layout, sequence_parallel=sequence_parallel, seq_length=seq_length)
    if sequence_parallel and seq_length % layout.tp:
        found.append(
            f"seq-length {seq_length} is not divisible by tensor-model-parallel-size {layout.tp}, as "
            f"--sequence-parallel needs: use {either(nearest_multiples(seq_length, layout.tp))}"
        )
    if found:
        return found
    parallel = TensorParallel(Axis.single("tp"), device=torch.device("meta"))
    try:
        whole = definition(config, parallel)
        specs = full_specs(whole)
    except ValueError as error:
        return [str(error)]
    if whole.num_blocks < layout.pp * layout.virtual:
        found.append(
            f"{whole.num_blocks} blocks cannot fill {layout.pp * layout.virtual} pipeline stages "
            f"({layout.pp} ranks x {layout.virtual} virtual): every stage needs at least one"
        )
    every = {spec.name for part in specs.values() for spec in part.values()}
    for pattern in getattr(config, "no_weight_decay_patterns", ()):
        if not any(fnmatchcase(name, pattern) for name in every):
            near = ", ".join(sorted(every)[:3])
            found.append(f"no-weight-decay-patterns: {pattern!r} matches no parameter; names are {near}, ...")
    if layout.tp > 1:
        names = [spec.name for part in specs.values() for spec in part.values() if spec.init is None]
        if names:
            found.append(ordinary_refusal(names, layout.tp))
    return found


def transformer_problems(
    config: TransformerConfig, layout: Layout, *, sequence_parallel: bool, seq_length: int
) -> list[str]:
    """What is wrong with a transformer configuration under a layout."""
    found = _missing(config)
    if found:
        return found  # the rest would be about numbers nobody gave
    return [
        *_sizes(config),
        *_positions(config, seq_length),
        *_ranges(config),
        *_divisibility(config, layout.tp),
    ]


def _missing(config: TransformerConfig) -> list[str]:
    required = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
    found = []
    for name in required:
        value = getattr(config, name)
        flag = name.replace("_", "-")
        if value == 0:
            found.append(f"--{flag} is required" + (" (or a tokenizer)" if name == "vocab_size" else ""))
        elif value < 0:
            found.append(f"{flag} {value} must be positive")
    if config.max_position_embeddings is None:
        found.append("--max-position-embeddings is required (at least the sequence length)")
    return found


def _sizes(config: TransformerConfig) -> list[str]:
    found = []
    heads, hidden = config.num_attention_heads, config.hidden_size
    if config.kv_channels is None and hidden % heads:
        found.append(
            f"hidden-size {hidden} is not divisible by num-attention-heads {heads}: "
            f"use {either(nearest_multiples(hidden, heads))}, or set --kv-channels"
        )
    if config.head_dim < 1:
        found.append(f"kv-channels {config.head_dim} must be positive")
    if config.group_query_attention and (config.num_query_groups < 1 or heads % config.num_query_groups):
        found.append(
            f"num-query-groups {config.num_query_groups} does not divide num-attention-heads {heads}: "
            f"use {either(nearest_divisors(config.num_query_groups, heads))}"
        )
    if config.ffn_size < 1:
        found.append(
            f"ffn-hidden-size is {config.ffn_size} (hidden-size {hidden}, and --swiglu rounds 8/3 of it down to a "
            "multiple of 64): set --ffn-hidden-size"
        )
    return found


def _positions(config: TransformerConfig, seq_length: int) -> list[str]:
    found = []
    longest = config.max_position_embeddings
    assert longest is not None
    if longest < seq_length:
        found.append(
            f"max-position-embeddings {longest} is less than seq-length {seq_length}: "
            f"use at least {seq_length}, or a shorter sequence"
        )
    if config.position_embedding_type not in ("learned_absolute", "rope", "none"):
        found.append(f"position-embedding-type {config.position_embedding_type}: use learned_absolute, rope or none")
    if config.position_embedding_type == "rope":
        if config.rotary_base <= 0:
            found.append(f"rotary-base {config.rotary_base} must be positive")
        if not 0 < config.rotary_percent <= 1 or config.rotary_dim < 2 or config.rotary_dim % 2:
            found.append(
                f"rotary-percent {config.rotary_percent} of a head of {config.head_dim} features rotates "
                f"{config.rotary_dim} of them: an even number from 2 to {config.head_dim} is needed"
            )
        if config.use_rope_scaling and not (
            config.rope_scaling_factor >= 1
            and 0 < config.rope_scaling_low_freq_factor < config.rope_scaling_high_freq_factor
            and config.rope_scaling_original_max_position_embeddings > 0
        ):
            found.append(
                f"rope scaling needs factor {config.rope_scaling_factor} >= 1, 0 < low {config.rope_scaling_low_freq_factor} "
                f"< high {config.rope_scaling_high_freq_factor} frequency factor and a positive original length "
                f"({config.rope_scaling_original_max_position_embeddings})"
            )
    elif config.use_rope_scaling:
        found.append(f"--use-rope-scaling has no effect with position-embedding-type {config.position_embedding_type}")
    return found


def _ranges(config: TransformerConfig) -> list[str]:
    found = []
    for name in ("attention_dropout", "hidden_dropout", "label_smoothing"):
        value = getattr(config, name)
        if not 0 <= value < 1:
            found.append(f"{name.replace('_', '-')} {value} must be at least 0 and less than 1")
    if config.init_method_std <= 0:
        found.append(f"init-method-std {config.init_method_std} must be positive")
    if config.norm_epsilon <= 0:
        found.append(f"norm-epsilon {config.norm_epsilon} must be positive")
    if config.normalization not in ("LayerNorm", "RMSNorm"):
        found.append(f"normalization {config.normalization}: use LayerNorm or RMSNorm")
    if config.make_vocab_size_divisible_by < 1:
        found.append(f"make-vocab-size-divisible-by {config.make_vocab_size_divisible_by} must be positive")
    if config.swiglu and config.squared_relu:
        found.append("--swiglu and --squared-relu are two activations of the same MLP: give one")
    return found


def _divisibility(config: TransformerConfig, tp: int) -> list[str]:
    found: list[str] = []
    if tp == 1:
        return found
    heads, kv, ffn = config.num_attention_heads, config.kv_heads, config.ffn_size
    if heads % tp:
        found.append(
            f"num-attention-heads {heads} not divisible by tensor-model-parallel-size {tp}: "
            f"use a size of {either(nearest_divisors(tp, heads))}, or {either(nearest_multiples(heads, tp))} heads"
        )
    if config.group_query_attention and kv > 0 and kv % tp and tp % kv:
        found.append(
            f"num-query-groups {kv} and tensor-model-parallel-size {tp}: one must divide the other; "
            f"use {either(nearest_multiples(kv, tp))} groups"
        )
    if ffn > 0 and ffn % tp:
        found.append(
            f"ffn-hidden-size {ffn} not divisible by tensor-model-parallel-size {tp}: "
            f"use {either(nearest_multiples(ffn, tp))}"
        )
    return found
