"""FLOPs of a dense transformer, from its configuration alone.

A matrix of n elements costs 2 FLOPs per element and token forward and 4 backward. Attention's two products cost
4 * q * S per token and layer forward when every position sees every other. Two conventions are in use for the second
part and both are given: *full* counts all S * S pairs (the papers' convention; MFU uses it) and *computed* the causal
half of each document's own square. Embedding look-ups, norms and activations count nothing, recompute counts nothing,
and the vocabulary is the true one, so no number depends on the layout.

Formula: Narayanan et al. 2021 (arXiv 2104.04473), with grouped heads and gated MLPs told apart.
"""

from __future__ import annotations

from megatron_lite.config.transformer import TransformerConfig
from megatron_lite.model.protocol import Flops


def matrix_elements(config: TransformerConfig) -> int:
    """Elements of all matrices a token is multiplied with: L * (h(q + 2kv) + qh + khf) + hV."""
    h, q, kv = config.hidden_size, config.query_size, config.kv_size
    block = h * (q + 2 * kv) + q * h + config.mlp_matrices * h * config.ffn_size
    return config.num_layers * block + h * config.vocab_size


def transformer_flops(
    config: TransformerConfig, tokens: int, seq_length: int, sum_squared_lengths: int | None = None
) -> Flops:
    """FLOPs of one step, forward and backward.

    Args:
        tokens: tokens of the global batch.
        seq_length: S, tokens of a row.
        sum_squared_lengths: sum over the batch's documents of their squared lengths; None: each row is one document.
    """
    matrices = 6 * tokens * matrix_elements(config)
    squares = tokens * seq_length if sum_squared_lengths is None else sum_squared_lengths
    attention = config.num_layers * config.query_size
    return Flops(matrices + 12 * attention * tokens * seq_length, matrices + 6 * attention * squares)
