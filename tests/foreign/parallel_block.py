"""A block whose attention and MLP read one norm and one gathered input, side by side (GPT-J, PaLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_lite.config.transformer import LlamaConfig
from megatron_lite.model.blocks import MLP, Attention, make_norm
from megatron_lite.model.gpt import GPT
from megatron_lite.model.protocol import ForwardContext
from megatron_lite.tensor.layers import column_parallel, replicated
from megatron_lite.tensor.spec import Init, TensorParallel


@dataclass(frozen=True)
class ParallelBlockConfig(LlamaConfig):
    """A Llama with one more option."""

    mlp_share: float = 0.5
    """Weight of the MLP's output against attention's."""


class ParallelBlock(nn.Module):
    def __init__(self, config: ParallelBlockConfig, parallel: TensorParallel, index: int) -> None:
        super().__init__()
        self.norm = make_norm(config, parallel, config.hidden_size)
        self.attention = Attention(config, parallel, index)
        self.mlp = MLP(config, parallel)
        self.mlp_share = config.mlp_share
        self.scale = replicated(parallel, (config.hidden_size,), 0.9)  # of the two together, feature by feature
        self.key_scale = replicated(parallel, (config.head_dim,), Init("normal", 0.5), on_heads=True)

    def forward(self, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        layers = [*self.attention.inputs(), *self.mlp.inputs()]
        q, k, v, *wide = column_parallel(self.norm(hidden), layers)  # one gather, one reduction of the gradient
        k = (k.unflatten(-1, (-1, self.key_scale.numel())) * self.key_scale).flatten(-2)  # one factor for every head
        attended = self.attention.output(self.attention.attend(q, k, v, ctx))
        return hidden + self.scale * (attended + self.mlp_share * self.mlp.down(self.mlp.activate(*wide)))


class ParallelBlockModel(GPT):
    Config = ParallelBlockConfig

    def make_block(self, index: int) -> nn.Module:
        return ParallelBlock(self.config, self.parallel, index)

    @classmethod
    def problems(cls, config: Any, layout: Any, *, sequence_parallel: bool, seq_length: int) -> list[str]:
        found = super().problems(config, layout, sequence_parallel=sequence_parallel, seq_length=seq_length)
        if not 0 < config.mlp_share <= 1:
            found.append(f"mlp_share {config.mlp_share} must be in (0, 1]")
        return found
