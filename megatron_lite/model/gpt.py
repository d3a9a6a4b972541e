"""GPT: token and position embeddings, transformer blocks, and a head that may share the token matrix.

Every flag of the "Model" group is an option of this one definition; Llama (``model/llama.py``) is the same definition
with other defaults.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_lite.config.transformer import TransformerConfig
from megatron_lite.model.blocks import Block, hidden_dropout, make_norm
from megatron_lite.model.flops import transformer_flops
from megatron_lite.model.hf import hf_tensors
from megatron_lite.model.names import HfTensor
from megatron_lite.model.problems import transformer_problems
from megatron_lite.model.protocol import Flops, ForwardContext, ModelDefinition, tie
from megatron_lite.tensor.layers import ColumnParallelLinear, LearnedPositions, VocabParallelEmbedding
from megatron_lite.tensor.loss import gather_vocab, vocab_parallel_cross_entropy
from megatron_lite.tensor.spec import TensorParallel

if TYPE_CHECKING:
    from megatron_lite.mesh.layout import Layout

TOKENS = "embed.tokens.weight"


class Embed(nn.Module):
    """Token embedding, plus learned positions where the configuration has them, then dropout."""

    def __init__(self, config: TransformerConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.dropout = config.hidden_dropout
        h, std = config.hidden_size, config.init_method_std
        self.tokens = VocabParallelEmbedding(parallel, config.vocab_size, h, std)
        if config.tied:
            tie(self.tokens.weight, TOKENS)
        self.positions = None
        if config.position_embedding_type == "learned_absolute":
            assert config.max_position_embeddings is not None
            self.positions = LearnedPositions(parallel, config.max_position_embeddings, h, std)

    def forward(self, ctx: ForwardContext) -> torch.Tensor:
        """Hidden states [T, H], or this rank's slice of the row under sequence parallelism."""
        hidden = self.tokens(ctx.batch.tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(ctx.batch.positions)
        return hidden_dropout(hidden, self.dropout, ctx, -1, "embedding", self.parallel)


class Head(nn.Module):
    """Final norm, output projection over the vocabulary, and the summed cross entropy."""

    def __init__(self, config: TransformerConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.vocab_size, self.label_smoothing = config.vocab_size, config.label_smoothing
        self.norm = make_norm(config, parallel, config.hidden_size)
        self.output = ColumnParallelLinear(
            parallel,
            config.hidden_size,
            config.vocab_size,
            axes=("vocab", "embed"),
            bias=False,
            init_std=config.init_method_std,
        )
        if config.tied:
            weight = tie(self.output.weight, TOKENS)
            weight.spec = replace(weight.spec, tag="embedding")  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Sum of the losses of the tokens that count: fp32 (fp64) scalar, the same on every tp rank."""
        batch = ctx.batch
        return vocab_parallel_cross_entropy(
            self.output(self.norm(hidden)),
            batch.targets,
            self.parallel,
            self.vocab_size,
            batch.loss_mask,
            self.label_smoothing if ctx.training else 0.0,
        )

    def logits(self, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, vocab_size] on every tp rank, without padding and without gradient: for generation and comparison."""
        return gather_vocab(self.output(self.norm(hidden)), self.parallel, self.vocab_size)


class GPT(ModelDefinition):
    """The transformer that :class:`TransformerConfig` describes."""

    Config = TransformerConfig
    config: TransformerConfig

    def make_embed(self) -> nn.Module:
        """Token and position embedding."""
        return Embed(self.config, self.parallel)

    def make_block(self, index: int) -> nn.Module:
        """Attention and MLP."""
        return Block(self.config, self.parallel, index)

    def make_head(self) -> nn.Module:
        """Final norm, output projection and loss."""
        return Head(self.config, self.parallel)

    @classmethod
    def problems(cls, config: Any, layout: Layout, *, sequence_parallel: bool, seq_length: int) -> list[str]:
        """What is wrong with a configuration under a layout."""
        return transformer_problems(config, layout, sequence_parallel=sequence_parallel, seq_length=seq_length)

    @classmethod
    def flops(cls, config: Any, tokens: int, seq_length: int, sum_squared_lengths: int | None = None) -> Flops:
        """FLOPs of one step (model/flops.py)."""
        return transformer_flops(config, tokens, seq_length, sum_squared_lengths)

    @classmethod
    def hf_tensors(cls, config: Any) -> list[HfTensor]:
        """The name map to the Hugging Face architecture that computes the same (model/hf.py)."""
        return hf_tensors(config)
