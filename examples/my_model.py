"""A team's own model in one file: sandwich norms and capped logits (Gemma 2), trained with every kind of parallelism.

    megatron-lite train --model examples.my_model:MyModel --model.logit-cap 30 ...     (or my_model:MyModel in this folder)

What such a file needs: a frozen dataclass of options and a class with ``make_embed``, ``make_block`` and ``make_head``.
Layers from ``megatron_lite.tensor.layers`` split themselves over tensor-parallel ranks; nothing here knows about ranks,
pipelines, ZeRO or recompute.

What differs from the built-in GPT: attention's and the MLP's outputs are normalised before they are added, token
embeddings are scaled by sqrt(H), and logits are squashed into (-cap, cap) by cap * tanh(x / cap) before the loss.

Source: Gemma Team 2024 (arXiv 2408.00118).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_lite.config.transformer import LlamaConfig
from megatron_lite.model.blocks import MLP, Attention, make_norm
from megatron_lite.model.flops import transformer_flops
from megatron_lite.model.problems import transformer_problems
from megatron_lite.model.protocol import Flops, ForwardContext, ModelDefinition
from megatron_lite.tensor.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron_lite.tensor.loss import gather_vocab, vocab_parallel_cross_entropy
from megatron_lite.tensor.spec import TensorParallel

if TYPE_CHECKING:
    from megatron_lite.mesh.layout import Layout


@dataclass(frozen=True)
class MyConfig(LlamaConfig):
    """Llama's options and one more."""

    logit_cap: float = 30.0
    """Largest absolute logit."""


class MyEmbed(nn.Module):
    """Token embeddings times sqrt(H)."""

    def __init__(self, config: MyConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.scale = config.hidden_size**0.5
        self.tokens = VocabParallelEmbedding(parallel, config.vocab_size, config.hidden_size, config.init_method_std)

    def forward(self, ctx: ForwardContext) -> torch.Tensor:
        """[T, H], a slice of it under sequence parallelism."""
        return self.tokens(ctx.batch.tokens) * self.scale


class MyBlock(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: MyConfig, parallel: TensorParallel, index: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, parallel, config.hidden_size)
        self.attention = Attention(config, parallel, index)
        self.attention_out_norm = make_norm(config, parallel, config.hidden_size)
        self.mlp_norm = make_norm(config, parallel, config.hidden_size)
        self.mlp = MLP(config, parallel)
        self.mlp_out_norm = make_norm(config, parallel, config.hidden_size)

    def forward(self, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, H] to the same."""
        hidden = hidden + self.attention_out_norm(self.attention(self.attention_norm(hidden), ctx))
        return hidden + self.mlp_out_norm(self.mlp(self.mlp_norm(hidden)))


class MyHead(nn.Module):
    """Final norm, output projection, capped logits, summed loss."""

    def __init__(self, config: MyConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.parallel, self.vocab_size, self.cap = parallel, config.vocab_size, config.logit_cap
        h, v, std = config.hidden_size, config.vocab_size, config.init_method_std
        self.norm = make_norm(config, parallel, h)
        self.output = ColumnParallelLinear(parallel, h, v, axes=("vocab", "embed"), bias=False, init_std=std)

    def _capped(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.output(self.norm(hidden))
        # The loss is computed in fp32, but in fp64 where the model is (as `megatron-lite check` has it).
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return self.cap * torch.tanh(logits / self.cap)

    def forward(self, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Sum of the losses of the tokens that count."""
        batch = ctx.batch
        logits = self._capped(hidden)
        return vocab_parallel_cross_entropy(logits, batch.targets, self.parallel, self.vocab_size, batch.loss_mask)

    def logits(self, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, V]."""
        return gather_vocab(self._capped(hidden), self.parallel, self.vocab_size)


class MyModel(ModelDefinition):
    """The model."""

    Config = MyConfig

    def make_embed(self) -> nn.Module:
        """Embedding."""
        return MyEmbed(self.config, self.parallel)

    def make_block(self, index: int) -> nn.Module:
        """One block."""
        return MyBlock(self.config, self.parallel, index)

    def make_head(self) -> nn.Module:
        """Head."""
        return MyHead(self.config, self.parallel)

    @classmethod
    def problems(cls, config: Any, layout: Layout, *, sequence_parallel: bool, seq_length: int) -> list[str]:
        """What is wrong with a configuration."""
        found = transformer_problems(config, layout, sequence_parallel=sequence_parallel, seq_length=seq_length)
        if config.logit_cap <= 0:
            found.append(f"logit-cap {config.logit_cap} must be positive")
        return found

    @classmethod
    def flops(cls, config: Any, tokens: int, seq_length: int, sum_squared_lengths: int | None = None) -> Flops:
        """The formula of the transformer: norms and caps count nothing."""
        return transformer_flops(config, tokens, seq_length, sum_squared_lengths)
