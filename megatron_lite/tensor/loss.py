"""Cross entropy over a vocabulary that is split over tensor-parallel ranks.

Each rank has its columns of the logits, [T, V / tp]. Three numbers per token cross ranks: the largest logit (for a safe
exponential), and then, in one sum, the sum of exponentials, the target's logit (which one rank has) and, with label
smoothing, the sum of all logits. Every rank then has the same loss, bit for bit.

The logarithm is taken of a sum whose largest term is 1 and no probability is ever formed before it, so that gaps of
1e4 between logits give finite numbers. Everything is in fp32, or fp64 where the logits are. One tensor of the size of
the logits is kept, the exponentials, and backward turns it in place into the gradient.

Label smoothing is PyTorch's: (1 - e) times the target's loss plus e times the mean loss over all V columns, the target
included, V the true vocabulary. Columns that only pad the vocabulary take no part in the softmax and get no gradient,
unless ``mask_padded_vocab`` is off. The sum is not divided here.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_lite.mesh.collectives import Axis
from megatron_lite.tensor.regions import start_all_reduce
from megatron_lite.tensor.spec import TensorParallel


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    parallel: TensorParallel,
    vocab_size: int,
    loss_mask: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Sum over tokens of the cross entropy, each weighted by ``loss_mask``.

    Args:
        logits: [T, padded V / tp], this rank's columns, any floating dtype.
        targets: int64 [T], the same on every rank. Targets that do not count may be anything.
        vocab_size: the true V; later columns are padding.
        loss_mask: [T] weights, None: all 1.
        label_smoothing: e in [0, 1].
        ignore_index: a target that does not count.

    Returns:
        Scalar, fp32 or fp64, the same on every rank of the axis. Not divided by anything.

    Raises:
        ValueError: label smoothing outside [0, 1], or, on a CPU, where looking is free, a target outside the
            vocabulary.
    """
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label smoothing {label_smoothing} is not in [0, 1]")
    counts = targets != ignore_index
    weights = counts.to(_wide(logits)) if loss_mask is None else torch.where(counts, loss_mask.to(_wide(logits)), 0)
    if targets.device.type == "cpu":
        _check_targets(targets, weights, vocab_size)
    mask = parallel.mask_padded_vocab
    return _CrossEntropy.apply(logits, targets, weights, parallel.axis, vocab_size, float(label_smoothing), mask)


def gather_vocab(logits: torch.Tensor, parallel: TensorParallel, vocab_size: int) -> torch.Tensor:
    """All columns on every rank, without padding: [T, padded V / tp] to [T, V]. No gradient: for generation."""
    axis = parallel.axis
    if axis.size == 1:
        return logits[:, :vocab_size].detach()
    gathered = logits.new_empty((axis.size, *logits.shape))
    axis.all_gather(gathered, logits.detach().contiguous()).wait()
    # [tp, T, V / tp] -> [T, padded V] -> [T, V]
    return gathered.transpose(0, 1).reshape(logits.shape[0], -1)[:, :vocab_size]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor,
        axis: Axis,
        vocab_size: int,
        smoothing: float,
        mask_padding: bool,
    ) -> torch.Tensor:
        columns = logits.shape[1]
        first = axis.index * columns
        true = min(max(vocab_size - first, 0), columns)  # columns of this rank that are no padding
        active = true if mask_padding else columns
        exps = _minus_largest(logits, active, axis)
        local = targets - first
        here = (local >= 0) & (local < true)
        local = local.clamp(0, columns - 1)
        # Over this rank's columns: sum of exponentials, the target's logit, sum of logits; all minus the largest.
        sums = exps.new_zeros((3 if smoothing else 2, len(targets)))
        sums[1] = torch.where(here, exps.gather(1, local[:, None])[:, 0], 0)
        if smoothing:
            torch.sum(exps[:, :true], 1, out=sums[2])
        exps.exp_()
        exps[:, active:] = 0
        torch.sum(exps, 1, out=sums[0])
        sums, reduced = start_all_reduce(sums, axis)
        reduced.wait()
        log_sum = sums[0].log()
        losses = log_sum - sums[1]
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (log_sum - sums[2] / vocab_size)
        ctx.save_for_backward(exps, sums[0], weights, local, here)
        ctx.dtype, ctx.smoothing, ctx.true, ctx.vocab_size = logits.dtype, smoothing, true, vocab_size
        # where: a token that does not count may have a loss that is not finite
        return torch.where(weights != 0, losses * weights, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        exps, sums, weights, local, here = ctx.saved_tensors
        scale = weights * dloss
        # In place: a second backward over the same graph is refused by autograd's version check.
        grad = exps.mul_((scale / sums)[:, None])
        if ctx.smoothing:
            grad[:, : ctx.true].sub_((scale * (ctx.smoothing / ctx.vocab_size))[:, None])
        hit = torch.where(here, scale * (ctx.smoothing - 1), 0)
        grad.scatter_add_(1, local[:, None], hit[:, None])
        return grad.to(ctx.dtype), None, None, None, None, None, None


def _minus_largest(logits: torch.Tensor, active: int, axis: Axis) -> torch.Tensor:
    """A new fp32 (fp64) tensor: the logits minus the largest of their row over the active columns of all ranks."""
    wide = _wide(logits)
    if active:
        largest = logits[:, :active].amax(1).to(wide)
    else:
        largest = torch.full((len(logits),), -torch.inf, dtype=wide, device=logits.device)
    axis.all_reduce(largest, op="max")
    if logits.dtype == wide:
        return logits - largest[:, None]
    return logits.to(wide).sub_(largest[:, None])


def _wide(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _check_targets(targets: torch.Tensor, weights: torch.Tensor, vocab_size: int) -> None:
    outside = ((targets < 0) | (targets >= vocab_size)) & (weights != 0)
    if outside.any():
        at = int(outside.nonzero()[0])
        raise ValueError(
            f"target id {int(targets[at])} (token {at} of the microbatch) is outside the vocabulary of {vocab_size}: "
            f"ids run from 0 to {vocab_size - 1}"
        )
