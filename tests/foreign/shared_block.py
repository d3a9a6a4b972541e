"""One MLP shared by all blocks (a tie across stages), and an auxiliary loss that keeps hidden states small."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from megatron_lite.config.transformer import TransformerConfig
from megatron_lite.model.blocks import MLP, Attention, make_norm
from megatron_lite.model.gpt import GPT
from megatron_lite.model.protocol import ForwardContext, tie
from megatron_lite.tensor.regions import reduce_from_tp
from megatron_lite.tensor.spec import TensorParallel


@dataclass(frozen=True)
class SharedConfig(TransformerConfig):
    """A GPT with one more option."""

    aux_weight: float = 0.01
    """Weight of the auxiliary loss."""


class SharedBlock(nn.Module):
    def __init__(self, config: SharedConfig, parallel: TensorParallel, index: int) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = config.aux_weight
        self.attention_norm = make_norm(config, parallel, config.hidden_size)
        self.attention = Attention(config, parallel, index)
        self.mlp_norm = make_norm(config, parallel, config.hidden_size)
        self.shared = MLP(config, parallel)
        for name, parameter in self.shared.named_parameters():
            tie(parameter, f"blocks.0.shared.{name}")

    def forward(self, hidden: torch.Tensor, ctx: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden + self.attention(self.attention_norm(hidden), ctx)
        hidden = hidden + self.shared(self.mlp_norm(hidden))
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        aux = self.weight * wide.square().mean(-1).sum()  # over this rank's tokens
        if self.parallel.sequence_parallel:
            aux = reduce_from_tp(aux, self.parallel.axis)
        return hidden, aux


class SharedModel(GPT):
    Config = SharedConfig

    def make_block(self, index: int) -> nn.Module:
        return SharedBlock(self.config, self.parallel, index)
