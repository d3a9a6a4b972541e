"""A microbatch as one typed record.

A microbatch is one flat row of B*S tokens: the rows of B samples back to back. Documents in it are given by
``cu_seqlens``; a row border is always a document border too, so attention never crosses it. The last fields
are host integers, so that nothing reads from the device to launch a kernel. ``first_row`` is the index, in the global
batch, of the microbatch's first row: dropout is keyed by it, so a resharded run keeps its masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_lite.data.row import Row

__all__ = ["Batch", "Row", "make_batch"]

_TENSORS = ("tokens", "targets", "positions", "cu_seqlens", "loss_mask")


@dataclass(frozen=True)
class Batch:
    """A microbatch.

    Attributes:
        tokens: int64 [B*S] inputs.
        targets: int64 [B*S].
        positions: int64 [B*S], position inside the document (or the row when documents see each other).
        cu_seqlens: int32 [B*S + 1], document offsets, padded at the end with B*S (fixed length: no shape depends on data).
        loss_mask: float32 [B*S], 1 where the target counts, else 0.
        rows, seq_length: B and S.
        first_row: index in the global batch of this microbatch's first row.
        max_seqlen: longest document in it, host integer.
        valid_tokens: number of ones in loss_mask, host integer.
        num_documents: cu_seqlens[:num_documents + 1] are the true offsets, host integer.
        squared_lengths: sum over documents of their squared length, host integer (attention's part of the FLOPs).
        lengths: of the documents, host integers; () where whoever made the batch does not tell (then attention that
            wants them has to read them from the device).
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    loss_mask: torch.Tensor
    rows: int
    seq_length: int
    first_row: int
    max_seqlen: int
    valid_tokens: int
    num_documents: int
    squared_lengths: int = 0
    lengths: tuple[int, ...] = ()

    def to(self, device: torch.device, non_blocking: bool = True) -> Batch:
        """The same batch with its tensors on ``device``."""
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in _TENSORS}
        return replace(self, **moved)

    def pin(self) -> Batch:
        """The same batch in page-locked memory."""
        return replace(self, **{name: getattr(self, name).pin_memory() for name in _TENSORS})

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that ``stream`` reads the tensors, which were made on another one."""
        for name in _TENSORS:
            getattr(self, name).record_stream(stream)


def make_batch(
    rows: Sequence[Row],
    first_row: int = 0,
    *,
    document_mask: bool = True,
    eod_id: int | None = None,
    eod_mask_loss: bool = False,
) -> Batch:
    """Build a microbatch from rows of equal length.

    Args:
        rows: B rows of S + 1 tokens.
        first_row: index in the global batch of the first row.
        document_mask: documents do not see each other, positions restart, and a target that is the first token of
            another document has loss weight 0.
        eod_id, eod_mask_loss: with both, the loss weight is 0 wherever the *input* is the end-of-document token.
    """
    seq_length = len(rows[0].tokens) - 1
    total = seq_length * len(rows)
    tokens = np.concatenate([row.tokens[:-1] for row in rows]).astype(np.int64, copy=False)
    targets = np.concatenate([row.tokens[1:] for row in rows]).astype(np.int64, copy=False)
    mask = np.ones(total, dtype=np.float32)
    offsets: list[np.ndarray] = []
    for b, row in enumerate(rows):
        assert len(row.tokens) == seq_length + 1 and (len(row.starts) == 0 or row.starts[0] == 0)
        base = b * seq_length
        if row.loss_mask is not None:
            assert len(row.loss_mask) == seq_length, len(row.loss_mask)
            mask[base : base + seq_length] = row.loss_mask
        starts = np.asarray(row.starts if document_mask else (), dtype=np.int64)
        borders = starts[starts > 0]
        mask[base + borders - 1] = 0.0  # the target at b - 1 is the token at b, the first of another document
        begins = borders if row.cuts is None else np.union1d(borders, row.cuts)
        offsets.append(np.append(base, base + begins[begins < seq_length]))
    if eod_mask_loss and eod_id is not None:
        mask[tokens == eod_id] = 0.0
    starts_all = np.concatenate(offsets)
    ends = np.append(starts_all[1:], total)
    cu_seqlens = np.full(total + 1, total, dtype=np.int32)
    cu_seqlens[: len(starts_all)] = starts_all
    lengths = ends - starts_all
    positions = np.arange(total, dtype=np.int64) - np.repeat(starts_all, lengths)
    return Batch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        loss_mask=torch.from_numpy(mask),
        rows=len(rows),
        seq_length=seq_length,
        first_row=first_row,
        max_seqlen=int(lengths.max()),
        valid_tokens=int(np.count_nonzero(mask)),  # a sum in float32 ends at 2^24
        num_documents=len(starts_all),
        squared_lengths=int((lengths * lengths).sum()),
        lengths=tuple(lengths.tolist()),
    )
