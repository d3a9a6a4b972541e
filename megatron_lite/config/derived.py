"""What follows from a configuration without being said in it."""

from __future__ import annotations

from typing import Any, Literal

from megatron_lite.config.schema import ParallelConfig, RunConfig, TrainingConfig
from megatron_lite.config.transformer import TransformerConfig

Precision = Literal["fp32", "bf16", "fp16", "fp64"]

TOKENIZER_FILES: dict[str, tuple[str, ...]] = {  # what each kind of tokenizer is read from
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "NullTokenizer": (),
}


def precision(training: TrainingConfig) -> Precision:
    """The dtype of computation: fp32 unless a flag says otherwise."""
    for name in ("bf16", "fp16", "fp64"):
        if getattr(training, name):
            return name  # type: ignore[return-value]
    return "fp32"


def bucket_parameters(parallel: ParallelConfig, dp: int) -> int:
    """Parameters in a gradient bucket: ``--ddp-bucket-size``, else max(40M, 1M * dp) as Megatron-LM."""
    return parallel.ddp_bucket_size or max(40_000_000, 1_000_000 * dp)


def log_directory(config: RunConfig[Any], now: str) -> str:
    """Where metrics.jsonl and run.json go: ``--log-dir``, else ``--save``, else runs/NOW."""
    return config.logging.log_dir or config.checkpoint.save or f"runs/{now}"


def count_parameters(model: TransformerConfig, vocab_size: int | None = None) -> int:
    """Parameters of a transformer of ours, the vocabulary without padding, a tied head once.

    Per block: attention h(q + 2kv) + qh, MLP k*h*f, norms; biases where the configuration has them.
    """
    vocab = model.vocab_size if vocab_size is None else vocab_size
    h, q, kv, f = model.hidden_size, model.query_size, model.kv_size, model.ffn_size
    norm = h * (2 if model.normalization == "LayerNorm" else 1)
    block = h * (q + 2 * kv) + q * h + model.mlp_matrices * h * f + 2 * norm
    if model.qkv_bias:
        block += q + 2 * kv
    if model.add_bias_linear:
        block += h + (model.mlp_matrices - 1) * f + h
    if model.qk_layernorm:
        block += 2 * model.head_dim * (norm // h)
    embedding = vocab * h
    if model.position_embedding_type == "learned_absolute":
        embedding += (model.max_position_embeddings or 0) * h
    head = norm + (0 if model.tied else vocab * h)
    return model.num_layers * block + embedding + head
