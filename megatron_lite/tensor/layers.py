"""Layers that split themselves over tensor-parallel ranks, each parameter carrying its :class:`ParamSpec`.

A layer is told the whole model's sizes and the logical axes of its weight; one table (spec.py) says which axes are
split. A column-parallel layer's output axis is split, a row-parallel layer's input axis, an embedding's vocabulary.
Model code holds no tensor-parallel arithmetic.

Parameters are made empty: ``tensor.init.initialise`` fills them, or a checkpoint does. Beside ``.spec`` each carries
``.rectangle``, the box of the full tensor that this rank holds (padded vocabulary rows are outside it).

Which gradients are partial sums, and over what: norms, learned positions and row-parallel biases over tp under
sequence parallelism (a rank sees its slice of tokens); qk-norm weights over tp always (a rank sees its heads); key and
value projections over the replicas of one head.

Sources: Shoeybi et al. 2019 (arXiv 1909.08053); Korthikanti et al. 2022 (arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from megatron_lite.ops.layer_norm import layer_norm
from megatron_lite.ops.rms_norm import rms_norm
from megatron_lite.tensor.linear import column_product, lookup, row_product
from megatron_lite.tensor.regions import slice_length
from megatron_lite.tensor.spec import Init, ParamSpec, TensorParallel

Axes = tuple[str | None, ...]


class Tokens(Protocol):
    """What :func:`check_token_ids` reads of a batch (data/batch.py, which this room does not import)."""

    tokens: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    seq_length: int
    first_row: int


def make_parameter(
    parallel: TensorParallel,
    full_shape: tuple[int, ...],
    axes: Axes,
    init: Init,
    *,
    partial_over: tuple[str, ...] = (),
    tag: str = "",
) -> nn.Parameter:
    """An empty parameter of this rank's shape, with ``.spec`` (named later) and ``.rectangle``."""
    spec = ParamSpec("", full_shape, axes, init, partial_over, decay=len(full_shape) > 1, tag=tag)
    local = parallel.local_shape(axes, full_shape)
    parameter = nn.Parameter(torch.empty(local, dtype=parallel.dtype, device=parallel.device))
    parameter.spec = spec  # type: ignore[attr-defined]
    parameter.rectangle = parallel.rectangle(spec)  # type: ignore[attr-defined]
    return parameter


def partial_of_slices(parallel: TensorParallel) -> tuple[str, ...]:
    """``partial_over`` of a parameter that each rank uses on its own slice of tokens."""
    return ("tp",) if parallel.sequence_parallel and parallel.axis.size > 1 else ()


def replicated(
    parallel: TensorParallel, shape: tuple[int, ...], value: float | Init = 0.0, *, on_heads: bool = False
) -> nn.Parameter:
    """A parameter that every tensor-parallel rank holds whole: a scale, a gate, a bias of the hidden state.

    Its gradient is summed over tp where each rank has used it on a part only: on its slice of the tokens (sequence
    parallelism), or, with ``on_heads``, on its own heads (then always). A parameter along a dim that is split, such as
    one value per ffn feature, is no such parameter: give :func:`make_parameter` its axes.

    Args:
        parallel: of the model.
        shape: the full shape.
        value: what it starts as: a constant, or an :class:`Init`.
    """
    partial = ("tp",) if on_heads and parallel.axis.size > 1 else partial_of_slices(parallel)
    init = value if isinstance(value, Init) else Init("constant", value)
    return make_parameter(parallel, shape, (None,) * len(shape), init, partial_over=partial)


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the rows of W (``axes[0]``) split over tp: [T, in] to this rank's [T, out / tp].

    Under sequence parallelism the input is this rank's slice [T / tp, in]. Layers that read the same input should go
    through :func:`column_parallel` together. With the axis ``vocab`` the rows are padded on each rank.

    Args:
        in_features, out_features: of the whole model.
        axes: logical axes of the weight [out, in].
        init_std: standard deviation of the initial weight; the bias starts at 0.
    """

    def __init__(
        self,
        parallel: TensorParallel,
        in_features: int,
        out_features: int,
        *,
        axes: Axes = ("ffn", "embed"),
        bias: bool,
        init_std: float,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        partial = ("kv_replica",) if axes[0] == "kv_heads" and parallel.kv_replicas > 1 else ()
        tag = "head" if axes[0] == "vocab" else ""
        self.weight = make_parameter(
            parallel, (out_features, in_features), axes, Init("normal", init_std), partial_over=partial, tag=tag
        )
        self.bias = None
        if bias:
            self.bias = make_parameter(
                parallel, (out_features,), axes[:1], Init("constant", 0.0), partial_over=partial, tag=tag
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] (or this rank's slice) to [T, out / tp]."""
        return column_parallel(x, [self])[0]


def column_parallel(x: torch.Tensor, layers: Sequence[ColumnParallelLinear]) -> list[torch.Tensor]:
    """Outputs of several column-parallel layers on one input: one gather of it, one reduction of its gradient.

    Args:
        x: [T, in], or this rank's [T / tp, in] under sequence parallelism.

    Returns:
        [T, out_i / tp] for each layer.
    """
    parallel = layers[0].parallel
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    return list(column_product(x, parallel.axis, parallel.sequence_parallel, weights, biases))


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the columns of W (``axes[1]``) split over tp: products are summed, then the bias is added.

    The output is the same on every rank, or a slice of the tokens under sequence parallelism.
    """

    def __init__(
        self,
        parallel: TensorParallel,
        in_features: int,
        out_features: int,
        *,
        axes: Axes = ("embed", "ffn"),
        bias: bool,
        init_std: float,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = make_parameter(parallel, (out_features, in_features), axes, Init("normal", init_std))
        self.bias = None
        if bias:
            self.bias = make_parameter(
                parallel, (out_features,), axes[:1], Init("constant", 0.0), partial_over=partial_of_slices(parallel)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in / tp] to [T, out], or to this rank's [T / tp, out]."""
        return row_product(x, self.parallel.axis, self.parallel.sequence_parallel, self.weight, self.bias)


class VocabParallelEmbedding(nn.Module):
    """Token embeddings [V, H] with the rows split over tp, padded on each rank to one size.

    Ids are checked here where that is free (on the CPU); on a GPU, where it would stop the host, call
    :func:`check_token_ids` before the batch is moved.
    """

    def __init__(self, parallel: TensorParallel, vocab_size: int, hidden: int, init_std: float) -> None:
        super().__init__()
        self.parallel = parallel
        self.vocab_size = vocab_size
        self.weight = make_parameter(
            parallel, (vocab_size, hidden), ("vocab", "embed"), Init("normal", init_std), tag="embedding"
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [T], the same on every rank, to [T, H] or this rank's [T / tp, H]."""
        if tokens.device.type == "cpu":
            _check_ids(tokens, self.vocab_size, "token", len(tokens))
        parallel = self.parallel
        first = parallel.axis.index * self.weight.shape[0]
        return lookup(tokens, parallel.axis, parallel.sequence_parallel, self.weight, first)


class LearnedPositions(nn.Module):
    """Position embeddings [positions, H], whole on every rank."""

    def __init__(self, parallel: TensorParallel, max_positions: int, hidden: int, init_std: float) -> None:
        super().__init__()
        self.parallel = parallel
        self.max_positions = max_positions
        self.weight = make_parameter(
            parallel,
            (max_positions, hidden),
            ("position", "embed"),
            Init("normal", init_std),
            partial_over=partial_of_slices(parallel),
        )

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 [T], the same on every rank, to [T, H] or, under sequence parallelism, this rank's [T / tp, H]."""
        return nn.functional.embedding(own_tokens(positions, self.parallel), self.weight)


class RMSNorm(nn.Module):
    """RMS norm over the last dim (ops/rms_norm.py), in fp32 or fp64 inside.

    Args:
        one_plus: the stored weight is gamma - 1 and starts at 0 (``--apply-layernorm-1p``).
        always_partial: a norm over ``head_dim``: each rank sees its own heads, so the gradient is a partial sum over tp
            with or without sequence parallelism.
    """

    def __init__(
        self,
        parallel: TensorParallel,
        hidden: int,
        eps: float,
        one_plus: bool = False,
        always_partial: bool = False,
    ) -> None:
        super().__init__()
        self.eps, self.one_plus = eps, one_plus
        self.weight = _norm_parameter(parallel, hidden, 0.0 if one_plus else 1.0, always_partial)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] to the same."""
        return rms_norm(x, _gamma(self.weight, self.one_plus), self.eps)


class LayerNorm(nn.Module):
    """Layer norm over the last dim (ops/layer_norm.py), with a bias; arguments as in :class:`RMSNorm`."""

    def __init__(
        self,
        parallel: TensorParallel,
        hidden: int,
        eps: float,
        one_plus: bool = False,
        always_partial: bool = False,
    ) -> None:
        super().__init__()
        self.eps, self.one_plus = eps, one_plus
        self.weight = _norm_parameter(parallel, hidden, 0.0 if one_plus else 1.0, always_partial)
        self.bias = _norm_parameter(parallel, hidden, 0.0, always_partial)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] to the same."""
        return layer_norm(x, _gamma(self.weight, self.one_plus), self.bias, self.eps)


def own_tokens(x: torch.Tensor, parallel: TensorParallel) -> torch.Tensor:
    """This rank's slice, under sequence parallelism, of what is given for every token: [T, ...] to [T / tp, ...]."""
    if not parallel.sequence_parallel or parallel.axis.size == 1:
        return x
    n = slice_length(x.shape[0], parallel.axis.size)
    return x[parallel.axis.index * n : (parallel.axis.index + 1) * n]


def check_token_ids(batch: Tokens, vocab_size: int) -> None:
    """Check inputs, and targets that count, of a batch on the host.

    Raises:
        ValueError: an id is outside the vocabulary; the text does not depend on the layout.
    """
    _check_ids(batch.tokens, vocab_size, "token", batch.seq_length, batch.first_row)
    counted = torch.where(batch.loss_mask != 0, batch.targets, 0)
    _check_ids(counted, vocab_size, "target", batch.seq_length, batch.first_row)


def _check_ids(ids: torch.Tensor, vocab_size: int, what: str, seq_length: int, first_row: int = 0) -> None:
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        at = int(outside.nonzero()[0])
        row, position = divmod(at, seq_length)
        raise ValueError(
            f"{what} id {int(ids[at])} (row {first_row + row} of the global batch, position {position}) is outside the "
            f"vocabulary of {vocab_size}: ids run from 0 to {vocab_size - 1}; the data was tokenized with another "
            f"tokenizer, or --vocab-size is too small"
        )


def _norm_parameter(parallel: TensorParallel, hidden: int, value: float, always_partial: bool) -> nn.Parameter:
    partial = partial_of_slices(parallel)
    if always_partial and parallel.axis.size > 1:
        partial = ("tp",)
    axes = ("head_dim",) if always_partial else ("embed",)
    return make_parameter(parallel, (hidden,), axes, Init("constant", value), partial_over=partial)


def _gamma(weight: torch.Tensor, one_plus: bool) -> torch.Tensor:
    """The factor of a norm; 1 + weight is taken in fp32 where the weight is shorter."""
    if not one_plus:
        return weight
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1
