"""The transformer block: attention and MLP, each behind a norm, each added to the hidden states.

Hidden states are a flat row of tokens, [T, H] (or this rank's [T / tp, H] under sequence parallelism). No line here
knows how a layer is split: heads of this rank are whatever ``-1`` works out to, and the layers of
``megatron_lite.tensor`` say in their specs what they hold. Query, key and value are three matrices that share one
gathered input, so that grouped heads and every tensor-parallel size need no fused layout to take apart again.

Sources: Vaswani et al. 2017 (arXiv 1706.03762); pre-norm as in GPT-2; gated MLP: Shazeer 2020 (arXiv 2002.05202);
squared ReLU: So et al. 2021 (arXiv 2109.08668); qk-norm: Henry et al. 2020 (arXiv 2010.04245).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.config.transformer import TransformerConfig
from megatron_lite.model.protocol import ForwardContext
from megatron_lite.model.rotary import Rotary
from megatron_lite.ops.attention import Documents, DropWeights, attention, cached_attention
from megatron_lite.ops.gelu import gelu
from megatron_lite.ops.swiglu import swiglu
from megatron_lite.tensor.layers import (
    ColumnParallelLinear,
    LayerNorm,
    RMSNorm,
    RowParallelLinear,
    column_parallel,
    own_tokens,
)
from megatron_lite.tensor.random import DropoutKey, attention_dropout, dropout
from megatron_lite.tensor.spec import Rectangle, TensorParallel


def make_norm(
    config: TransformerConfig, parallel: TensorParallel, size: int, *, always_partial: bool = False
) -> nn.Module:
    """The norm the configuration names, over ``size`` features."""
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    return kind(parallel, size, config.norm_epsilon, one_plus=config.apply_layernorm_1p, always_partial=always_partial)


def hidden_dropout(
    x: torch.Tensor, p: float, ctx: ForwardContext, layer: int, site: str, parallel: TensorParallel
) -> torch.Tensor:
    """Dropout of hidden states in training, keyed by token and feature; ``x`` in evaluation.

    Args:
        x: [T, H], or this rank's slice of the row.
        layer: index of the block, -1 before the blocks.
        site: which of the layer's dropouts.
    """
    if not ctx.training or p == 0.0:
        return x
    token = own_tokens(torch.arange(ctx.batch.rows * ctx.batch.seq_length, device=x.device), parallel)
    rows = ctx.batch.first_row + token // ctx.batch.seq_length
    return dropout(x, p, DropoutKey(ctx.seed, ctx.step, layer, site), rows, token % ctx.batch.seq_length)


class Attention(nn.Module):
    """Causal self-attention within documents, with grouped heads and, when generating, a key/value cache.

    Parameters: ``query, key, value, output`` and with qk-norm ``query_norm, key_norm``. With fewer key/value heads
    than tp ranks each head lives on several ranks; the query heads of a rank are then all of one key/value head.
    """

    def __init__(self, config: TransformerConfig, parallel: TensorParallel, index: int) -> None:
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        h, std = config.hidden_size, config.init_method_std

        def projection(size: int, axis: str) -> ColumnParallelLinear:
            return ColumnParallelLinear(parallel, h, size, axes=(axis, "embed"), bias=config.qkv_bias, init_std=std)

        self.query = projection(config.query_size, "heads")
        self.key = projection(config.kv_size, "kv_heads")
        self.value = projection(config.kv_size, "kv_heads")
        if config.qk_layernorm:
            self.query_norm = make_norm(config, parallel, config.head_dim, always_partial=True)
            self.key_norm = make_norm(config, parallel, config.head_dim, always_partial=True)
        self.qk_norm = config.qk_layernorm
        self.rotary = Rotary(config, parallel.dtype, parallel.device) if config.rotary_dim else None
        box: Rectangle = self.query.weight.rectangle  # type: ignore[attr-defined]
        self.core = CoreAttention(config, index, first_head=box.start[0] // config.head_dim)
        self.output = RowParallelLinear(
            parallel,
            config.query_size,
            h,
            axes=("embed", "heads"),
            bias=config.add_bias_linear,
            init_std=config.output_init_std,
        )

    def inputs(self) -> list[ColumnParallelLinear]:
        """The layers that read the hidden states, for ``column_parallel``."""
        return [self.query, self.key, self.value]

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """From projected [T, heads * head_dim] (this rank's heads) to [T, heads * head_dim], before ``output``."""
        # [T, heads of this rank, head_dim]
        query, key, value = (t.view(len(t), -1, self.head_dim) for t in (query, key, value))
        if self.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary is not None:
            query, key = self.rotary(query, key, ctx.batch.positions)
        return self.core(query, key, value, ctx).flatten(1)

    def forward(self, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, H] (or this rank's slice of the row) to the same."""
        query, key, value = column_parallel(hidden, self.inputs())
        return self.output(self.attend(query, key, value, ctx))


class CoreAttention(nn.Module):
    """Softmax attention itself: no parameters; what selective recompute computes again.

    Args:
        first_head: index in the whole model of this rank's first query head; keys the dropout of attention weights.
    """

    def __init__(self, config: TransformerConfig, index: int, first_head: int) -> None:
        super().__init__()
        self.index, self.first_head = index, first_head
        self.dropout = config.attention_dropout
        self.scale = config.head_dim**-0.5

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Query [T, heads, head_dim], key and value [T, kv_heads, head_dim] to [T, heads, head_dim]."""
        batch = ctx.batch
        if ctx.cache is not None:
            query, key, value = (t.unflatten(0, (batch.rows, batch.seq_length)) for t in (query, key, value))
            key, value = ctx.cache.append(self.index, key, value)
            return cached_attention(query, key, value, self.scale).flatten(0, 1)
        documents = Documents(batch.cu_seqlens, batch.num_documents, batch.max_seqlen, batch.lengths)
        drop = self._drop(ctx) if ctx.training and self.dropout > 0 else None
        return attention(query, key, value, documents, scale=self.scale, drop=drop)

    def _drop(self, ctx: ForwardContext) -> DropWeights:
        site = DropoutKey(ctx.seed, ctx.step, self.index, "attention_weights")

        def drop(weights: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
            length = ctx.batch.seq_length
            rows = ctx.batch.first_row + first // length
            return attention_dropout(weights, self.dropout, site, rows, first % length, self.first_head)

        return drop


class MLP(nn.Module):
    """Two matrices with an activation between, or three with a gate: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: TransformerConfig, parallel: TensorParallel) -> None:
        super().__init__()
        h, f, bias = config.hidden_size, config.ffn_size, config.add_bias_linear
        self.gated, self.squared_relu = config.swiglu, config.squared_relu
        if self.gated:
            self.gate = ColumnParallelLinear(parallel, h, f, bias=bias, init_std=config.init_method_std)
        self.up = ColumnParallelLinear(parallel, h, f, bias=bias, init_std=config.init_method_std)
        self.down = RowParallelLinear(parallel, f, h, bias=bias, init_std=config.output_init_std)

    def inputs(self) -> list[ColumnParallelLinear]:
        """The layers that read the hidden states, for ``column_parallel``."""
        return [self.gate, self.up] if self.gated else [self.up]

    def activate(self, *wide: torch.Tensor) -> torch.Tensor:
        """From the outputs of ``inputs()`` to the input of ``down``."""
        if self.gated:
            return swiglu(*wide)
        return F.relu(wide[0]).square() if self.squared_relu else gelu(wide[0], approximate="tanh")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, H] (or this rank's slice of the row) to the same."""
        return self.down(self.activate(*column_parallel(hidden, self.inputs())))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on what is added."""

    def __init__(self, config: TransformerConfig, parallel: TensorParallel, index: int) -> None:
        super().__init__()
        self.index = index
        self.parallel = parallel
        self.dropout = config.hidden_dropout
        self.attention_norm = make_norm(config, parallel, config.hidden_size)
        self.attention = Attention(config, parallel, index)
        self.mlp_norm = make_norm(config, parallel, config.hidden_size)
        self.mlp = MLP(config, parallel)

    def forward(self, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, H] (or this rank's slice of the row) to the same."""
        added = self.attention(self.attention_norm(hidden), ctx)
        hidden = hidden + hidden_dropout(added, self.dropout, ctx, self.index, "attention_output", self.parallel)
        added = self.mlp(self.mlp_norm(hidden))
        return hidden + hidden_dropout(added, self.dropout, ctx, self.index, "mlp_output", self.parallel)
