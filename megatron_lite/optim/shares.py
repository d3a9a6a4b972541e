"""This rank's state in the coordinates of full tensors: what a checkpoint stores.

A rank holds, of a parameter, a stretch of its tensor-parallel shard; of the full tensor that is a few rectangles
(:func:`megatron_lite.tensor.spec.flat_range_rectangles`). Rows that pad the vocabulary are not part of the tensor and
are left out. Only where padding takes part in the softmax (``--mask-padded-vocab off``) is it trained, and then it is a
tensor of its own, ``<name>.padding``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_lite.optim.flat import Slot
from megatron_lite.tensor.spec import Rectangle, TensorParallel, flat_range_rectangles

KINDS = ("weight", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Share:
    """One rectangle of one full tensor.

    Attributes:
        kind: ``weight`` (the master), ``exp_avg`` or ``exp_avg_sq``.
        name: the tensor's global name.
        full_shape: its shape in the whole model.
        rectangle: which part of it.
        tensor: flat view of the state itself, rectangle.numel elements, row-major.
    """

    kind: str
    name: str
    full_shape: tuple[int, ...]
    rectangle: Rectangle
    tensor: torch.Tensor


def slot_shares(parallel: TensorParallel, slot: Slot, begin: int, state: Mapping[str, torch.Tensor]) -> list[Share]:
    """The shares of a stretch of one parameter.

    Args:
        parallel: where this rank stands in tp.
        slot: the parameter.
        begin: first element of the stretch, counted in this rank's (padded, row-major) shard.
        state: for each kind a flat tensor of the stretch.
    """
    spec, shape = slot.spec, slot.entry.shape
    box = parallel.rectangle(spec)
    if box.size == shape:
        return _cut(spec.name, spec.full_shape, box, begin, state)
    assert box.size[1:] == shape[1:], f"{spec.name}: only the first dim is ever padded, not {box.size} to {shape}"
    end = begin + state["weight"].numel()
    true = min(max(box.numel - begin, 0), end - begin)  # elements of the stretch before the padding
    shares = _cut(spec.name, spec.full_shape, box, begin, {k: t[:true] for k, t in state.items()})
    if parallel.mask_padded_vocab:
        return shares
    count, index = parallel.shards(spec.split_over()[0])
    rows = spec.full_shape[0]
    first = max(index * shape[0], rows) - rows  # this rank's first row among the rows of padding
    padding = Rectangle((first, *box.start[1:]), (shape[0] - box.size[0], *shape[1:]))
    full = (count * shape[0] - rows, *spec.full_shape[1:])
    rest = {k: t[true:] for k, t in state.items()}
    return shares + _cut(f"{spec.name}.padding", full, padding, max(begin - box.numel, 0), rest)


def _cut(
    name: str, full_shape: tuple[int, ...], box: Rectangle, begin: int, state: Mapping[str, torch.Tensor]
) -> list[Share]:
    """Elements [begin, begin + length) of a box, as rectangles of the full tensor."""
    shares = []
    length = state["weight"].numel()
    at = 0
    for part in flat_range_rectangles(box.size, begin, begin + length):
        where = Rectangle(tuple(a + b for a, b in zip(box.start, part.start, strict=True)), part.size)
        n = where.numel
        shares += [Share(kind, name, full_shape, where, state[kind][at : at + n]) for kind in KINDS]
        at += n
    assert at == length, (name, at, length)
    return shares
