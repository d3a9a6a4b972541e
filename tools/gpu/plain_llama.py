"""Llama in plain PyTorch, to be compared with: ``nn.Linear``, SDPA, RoPE, and nothing of ours."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.config.transformer import LlamaConfig


class Block(nn.Module):
    """Attention with grouped heads and a gated MLP, each behind a norm."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        h, f = c.hidden_size, c.ffn_size
        self.heads, self.groups = c.num_attention_heads, c.kv_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(h, c.norm_epsilon), nn.RMSNorm(h, c.norm_epsilon)
        self.query, self.output = nn.Linear(h, c.query_size, bias=False), nn.Linear(c.query_size, h, bias=False)
        self.key, self.value = nn.Linear(h, c.kv_size, bias=False), nn.Linear(h, c.kv_size, bias=False)
        self.gate, self.up = nn.Linear(h, f, bias=False), nn.Linear(h, f, bias=False)
        self.down = nn.Linear(f, h, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[B, S, H] to the same; cos and sin are [S, head_dim]."""
        y = self.attention_norm(x)
        # [B, S, heads * head_dim] -> [B, heads, S, head_dim]
        q = turned(self.query(y).unflatten(-1, (self.heads, -1)).transpose(1, 2), cos, sin)
        k = turned(self.key(y).unflatten(-1, (self.groups, -1)).transpose(1, 2), cos, sin)
        v = self.value(y).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.groups)
        x = x + self.output(a.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def turned(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, in fp32."""
    first, second = t.float().chunk(2, -1)
    return (torch.cat((first, second), -1) * cos + torch.cat((-second, first), -1) * sin).to(t.dtype)


class Llama(nn.Module):
    """The whole model; returns the mean loss."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.hidden_size, c.norm_epsilon)
        self.output = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.head_dim, self.base = c.head_dim, c.rotary_base

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """int64 [B, S] each."""
        even = torch.arange(0, self.head_dim, 2, device=tokens.device, dtype=torch.float32)
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        angles = torch.outer(positions, self.base ** (-even / self.head_dim)).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def take(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy our weights under their names here (rows that pad our vocabulary are left out)."""
        parts = {"gate": "mlp.gate", "up": "mlp.up", "down": "mlp.down"}
        parts |= {name: f"attention.{name}" for name in ("query", "key", "value", "output")}
        whole = {"tokens": "embed.tokens", "norm": "head.norm", "output": "head.output"}
        for name, parameter in self.named_parameters():
            module = name.removesuffix(".weight")
            if module.startswith("blocks."):
                _, index, part = module.split(".")
                source = weights[f"blocks.{index}.{parts.get(part, part)}.weight"]
            else:
                source = weights[f"{whole[module]}.weight"]
            parameter.copy_(source[: parameter.shape[0]])
