"""The presets have the published sizes and run as they are, given data and a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_lite.config.check import check
from megatron_lite.config.derived import count_parameters
from megatron_lite.config.load import load
from megatron_lite.config.problem import format_problems
from megatron_lite.config.schema import RunConfig
from megatron_lite.config.transformer import LlamaConfig, TransformerConfig
from megatron_lite.mesh.layout import Layout
from megatron_lite.model.problems import transformer_problems
from megatron_lite.optim import from_config

PRESETS = Path(__file__).parent.parent / "examples" / "presets"

# Radford et al. 2019 (as released); Brown et al. 2020 (printed as 175B); Dubey et al. 2024 and the released models
PUBLISHED = {
    "gpt2_124m": 124_439_808,
    "gpt2_355m": 354_823_168,
    "gpt2_774m": 774_030_080,
    "gpt2_1.5b": 1_557_611_200,
    "gpt3_175b": 174_604_259_328,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama_1b": 1_235_814_400,
    "llama_3b": 3_212_749_824,
}
TOKENIZER = {
    "gpt": ["--vocab-file", "vocab.json", "--merge-file", "merges.txt"],
    "llama": ["--tokenizer-model", "tokenizer.json"],
}


def preset(name: str, *more: str) -> RunConfig[Any]:
    return load(["--config", str(PRESETS / f"{name}.yaml"), *more]).config


def rooms(config: RunConfig[Any], layout: Layout) -> list[str]:
    sp, length = config.parallel.sequence_parallel, config.data.seq_length
    return transformer_problems(config.model, layout, sequence_parallel=sp, seq_length=length)


def test_every_preset_is_listed() -> None:
    assert {path.stem for path in PRESETS.glob("*.yaml")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    config = preset(name)
    assert count_parameters(config.model) == PUBLISHED[name]
    printed = float(name.split("_")[1][:-1]) * (1e9 if name.endswith("b") else 1e6)
    assert count_parameters(config.model) == pytest.approx(printed, rel=0.25)


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_run_as_they_are(name: str) -> None:
    config = preset(name, "--data-path", "corpus", *TOKENIZER[name[:3] if name.startswith("gpt") else "llama"])
    parallel = config.parallel
    one_replica = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    for dp in (1, 8):
        found = check(config, one_replica * dp, [rooms, from_config.problems])
        assert format_problems(found) == "no problems"


def small(base: type, **changes: Any) -> Any:
    sizes = {
        "num_layers": 3,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "vocab_size": 97,
        "max_position_embeddings": 20,
    }
    return base(**(sizes | changes))


SHAPES = [
    small(TransformerConfig),
    small(TransformerConfig, untie_embeddings_and_output_weights=True, qk_layernorm=True),
    small(TransformerConfig, add_bias_linear=False, add_qkv_bias=True, position_embedding_type="none"),
    small(TransformerConfig, swiglu=True, ffn_hidden_size=80, group_query_attention=True, num_query_groups=2),
    small(LlamaConfig, ffn_hidden_size=80, qk_layernorm=True),
    small(LlamaConfig, ffn_hidden_size=80, kv_channels=8, group_query_attention=True, num_query_groups=1),
    small(LlamaConfig, ffn_hidden_size=80, add_bias_linear=True, untie_embeddings_and_output_weights=False),
]


@pytest.mark.parametrize("config", SHAPES, ids=range(len(SHAPES)))
def test_the_count_is_that_of_the_model(config: Any) -> None:
    """The formula against the parameters that the model itself describes."""
    import torch

    from megatron_lite.mesh.collectives import Axis
    from megatron_lite.model.protocol import full_specs, load_definition
    from megatron_lite.tensor.spec import TensorParallel

    definition = load_definition("llama" if isinstance(config, LlamaConfig) else "gpt")
    specs = full_specs(definition(config, TensorParallel(Axis.single("tp"), device=torch.device("meta"))))
    by_name = {spec.tie or spec.name: spec.numel for part in specs.values() for spec in part.values()}
    assert count_parameters(config) == sum(by_name.values())
