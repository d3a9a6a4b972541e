"""A model of ordinary torch layers only, with names of its own: data parallelism, ZeRO and pipelines, but no tp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.model.protocol import Flops, ForwardContext, ModelDefinition
from megatron_lite.ops.attention import Documents, attention


@dataclass(frozen=True)
class PlainConfig:
    """Options under names of the team's own."""

    depth: int = 3
    """Blocks."""
    width: int = 32
    """Hidden size."""
    heads: int = 4
    """Attention heads."""
    context: int = 64
    """Longest position."""
    vocab_size: int = 64
    """Vocabulary."""


class Embed(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)

    def forward(self, ctx: ForwardContext) -> torch.Tensor:
        return self.tokens(ctx.batch.tokens) + self.positions(ctx.batch.positions)


class Block(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        batch = ctx.batch
        q, k, v = self.qkv(self.norm1(hidden)).view(len(hidden), 3, self.heads, -1).unbind(1)
        documents = Documents(batch.cu_seqlens, batch.num_documents, batch.max_seqlen)
        hidden = hidden + self.out(attention(q, k, v, documents).flatten(1))
        return hidden + self.mlp(self.norm2(hidden))


class Head(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, config.vocab_size, bias=False)

    def logits(self, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self.output(self.norm(hidden))

    def forward(self, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        logits = self.logits(hidden, ctx)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        losses = F.cross_entropy(logits, ctx.batch.targets, reduction="none")
        return (losses * ctx.batch.loss_mask).sum()


class PlainModel(ModelDefinition):
    Config = PlainConfig

    @property
    def num_blocks(self) -> int:
        return self.config.depth

    @property
    def hidden_size(self) -> int:
        return self.config.width

    def make_embed(self) -> nn.Module:
        return Embed(self.config)

    def make_block(self, index: int) -> nn.Module:
        return Block(self.config)

    def make_head(self) -> nn.Module:
        return Head(self.config)

    @classmethod
    def problems(cls, config: PlainConfig, layout: Any, *, sequence_parallel: bool, seq_length: int) -> list[str]:
        if seq_length > config.context:
            return [f"sequence length {seq_length} is more than context {config.context}: raise --model.context"]
        return []

    @classmethod
    def flops(cls, config: PlainConfig, tokens: int, seq_length: int, sum_squared_lengths: int | None = None) -> Flops:
        w, squares = config.width, tokens * seq_length if sum_squared_lengths is None else sum_squared_lengths
        matrices = 6 * tokens * (config.depth * 12 * w * w + w * config.vocab_size)
        return Flops(matrices + 12 * config.depth * w * tokens * seq_length, matrices + 6 * config.depth * w * squares)
