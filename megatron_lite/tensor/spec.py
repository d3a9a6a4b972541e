"""One record per parameter, read by everybody.

A :class:`ParamSpec` says what a parameter is in the whole model, not on one rank: its full shape, which of its dims
are split over which part of the mesh, over which ranks its gradient is only a partial sum, how it starts and whether
it is tied to another tensor. Initialisation, slicing, gradient sums, the clip norm, optimizer buckets, checkpoint
coordinates and the memory formulas all read this record; two readers that disagree are how layouts drift apart.

Logical axes give the dims their names. One table, :data:`SPLIT_OVER`, says over which part of the mesh an axis is
split. ``kv_shard`` and ``kv_replica`` are sub-axes of tp: with fewer key/value heads than tp ranks, tp is
``kv_shard`` (slow) times ``kv_replica`` (fast), a key/value head lives on all replicas of its shard, and each replica
holds only the part of its gradient that came from its own query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_lite.mesh.collectives import Axis

SPLIT_OVER: dict[str, str | None] = {
    "embed": None,  # the hidden dim: every tp rank has all of it
    "position": None,  # learned positions
    "head_dim": None,  # qk-norm weights
    "ffn": "tp",
    "heads": "tp",  # heads * head_dim; tp divides the number of heads
    "kv_heads": "kv_shard",  # kv_heads * head_dim
    "vocab": "tp",  # padded on each rank to a common size; full_shape has the true vocabulary
}


@dataclass(frozen=True)
class Init:
    """How a parameter starts: ``normal`` with standard deviation ``value``, or the constant ``value``."""

    kind: str  # "normal" | "constant"
    value: float


@dataclass(frozen=True)
class Rectangle:
    """A box of a full tensor: element ``i`` of dim ``d`` is in it when ``start[d] <= i < start[d] + size[d]``."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        n = 1
        for s in self.size:
            n *= s
        return n


@dataclass(frozen=True)
class ParamSpec:
    """What one parameter is in the whole model.

    Attributes:
        name: global name, e.g. ``blocks.3.attention.query.weight``; the tie's canonical name if tied.
        full_shape: true shape in the whole model (the vocabulary without padding).
        axes: logical name of each dim, or None for a dim that has none (never split).
        init: how it starts, or None: it keeps what its module was built with (ordinary ``nn`` layers).
        partial_over: parts of the mesh over whose ranks the local gradient is a partial sum
            (``"tp"`` or ``"kv_replica"``), to be summed before the data-parallel reduction.
        tie: canonical name shared by every holder of one tied tensor, or None.
        decay: whether weight decay applies (decided on the full tensor: matrices and embeddings, not 1-D).
        tag: a group of parameters for the learning rate ("" or "embedding" or "head": ``--decoupled-lr``).
    """

    name: str
    full_shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init | None
    partial_over: tuple[str, ...] = ()
    tie: str | None = None
    decay: bool = True
    tag: str = ""

    def split_over(self) -> tuple[str | None, ...]:
        """Part of the mesh each dim is split over (``tp``, ``kv_shard`` or None)."""
        return tuple(SPLIT_OVER[a] if a is not None else None for a in self.axes)

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        n = 1
        for s in self.full_shape:
            n *= s
        return n


@dataclass(frozen=True)
class TensorParallel:
    """What a layer needs to know to build its shard: the tp ranks, the dtype and device, the padding rule.

    Attributes:
        axis: the tp axis (``Axis.single()`` without tensor parallelism).
        kv_heads: number of key/value heads of the model (splits tp into kv_shard x kv_replica), or None.
        sequence_parallel: hidden states between blocks are slices of the token row.
        dtype: dtype of the parameters; norms, softmax and losses use fp32, or fp64 where this is fp64.
        device: where parameters are made (``meta`` for dry runs).
        vocab_multiple: the local vocabulary is padded so that tp * vocab_multiple divides the padded size.
        mask_padded_vocab: padded columns take no part in the softmax.
    """

    axis: Axis
    kv_heads: int | None = None
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    vocab_multiple: int = 128
    mask_padded_vocab: bool = True

    @property
    def kv_replicas(self) -> int:
        """tp ranks that hold a copy of one key/value head."""
        return max(1, self.axis.size // self.kv_heads) if self.kv_heads else 1

    def shards(self, part: str | None) -> tuple[int, int]:
        """(number of shards, index of this rank's shard) of a part of the mesh named by :data:`SPLIT_OVER`."""
        if part is None:
            return 1, 0
        if part == "tp":
            return self.axis.size, self.axis.index
        assert part == "kv_shard", part
        return self.axis.size // self.kv_replicas, self.axis.index // self.kv_replicas

    def padded_vocab(self, vocab_size: int) -> int:
        """ceil(V / (multiple * tp)) * multiple * tp."""
        unit = self.vocab_multiple * self.axis.size
        return -(-vocab_size // unit) * unit

    def local_shape(self, spec_axes: tuple[str | None, ...], full_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of this rank's shard, vocabulary padding included."""
        shape = []
        for axis, size in zip(axes_or_none(spec_axes), full_shape, strict=True):
            if axis == "vocab":
                size = self.padded_vocab(size)
            count, _ = self.shards(SPLIT_OVER[axis] if axis is not None else None)
            if size % count:
                raise ValueError(
                    f"a dim of {size} ({axis}) cannot be split over {count} tensor-parallel shards: choose a tp that "
                    f"divides {size}"
                )
            shape.append(size // count)
        return tuple(shape)

    def rectangle(self, spec: ParamSpec) -> Rectangle:
        """The box of the full tensor that this rank holds; for a padded vocabulary only its true rows (maybe none)."""
        start, size = [], []
        local = self.local_shape(spec.axes, spec.full_shape)
        for part, full, here in zip(spec.split_over(), spec.full_shape, local, strict=True):
            _, index = self.shards(part)
            begin = min(index * here, full)
            start.append(begin)
            size.append(min(begin + here, full) - begin)
        return Rectangle(tuple(start), tuple(size))


def axes_or_none(axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """The axes, each checked to be a known name."""
    for axis in axes:
        if axis is not None and axis not in SPLIT_OVER:
            raise ValueError(f"unknown logical axis {axis!r}: known are {', '.join(SPLIT_OVER)}")
    return axes


def flat_range_rectangles(shape: tuple[int, ...], begin: int, end: int) -> list[Rectangle]:
    """Boxes, in row-major order, that together are elements [begin, end) of a row-major tensor of this shape.

    A range of a matrix is at most three boxes: the rest of its first row, whole rows, the start of its last row.
    """
    if begin >= end:
        return []
    if len(shape) == 0:
        return [Rectangle((), ())]
    if len(shape) == 1:
        return [Rectangle((begin,), (end - begin,))]
    inner = 1
    for s in shape[1:]:
        inner *= s
    first, last = begin // inner, (end - 1) // inner
    boxes: list[Rectangle] = []

    def partial(row: int, lo: int, hi: int) -> None:
        for box in flat_range_rectangles(shape[1:], lo, hi):
            boxes.append(Rectangle((row, *box.start), (1, *box.size)))

    if first == last and (end - begin) < inner:
        partial(first, begin - first * inner, end - first * inner)
        return boxes
    row = first
    if begin % inner:
        partial(first, begin - first * inner, inner)
        row = first + 1
    whole_end = end // inner
    if whole_end > row:
        boxes.append(Rectangle((row, *([0] * (len(shape) - 1))), (whole_end - row, *shape[1:])))
    if end % inner:
        partial(whole_end, 0, end - whole_end * inner)
    return boxes
