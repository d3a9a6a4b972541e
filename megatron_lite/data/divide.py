"""A dataset cut into several, at borders of documents; joining the parts in order gives it back byte for byte."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from megatron_lite.data.index_format import mask_prefix, prefix_paths
from megatron_lite.data.index_writer import IndexedWriter, refuse_existing
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.loss_mask import open_mask

By = Literal["documents", "tokens"]
_TOKENS = 1 << 20  # in memory at a time, but for a longer document


def part_ranges(dataset: IndexedDataset, shares: Sequence[float], by: By) -> list[range]:
    """The documents of each part, in order.

    Borders are the running sum of the shares, times the number of documents (rounded half to even) or of tokens (the
    nearest document border, the earlier of two).

    Raises:
        ValueError: shares that are none, or a part without documents.
    """
    if not shares or not all(share > 0 for share in shares) or sum(shares) == float("inf"):
        raise ValueError(f"shares {', '.join(map(str, shares))}: each a number above 0")
    sums = list(accumulate(shares))
    inner = [total / sums[-1] for total in sums[:-1]]
    if by == "documents":
        borders = [round(share * dataset.num_documents) for share in inner]
    else:
        borders = [_nearest(dataset, share * dataset.num_tokens) for share in inner]
    ranges = [range(a, b) for a, b in pairwise([0, *borders, dataset.num_documents])]
    if not all(ranges):
        counts = ", ".join(str(len(r)) for r in ranges[:20])
        raise ValueError(
            f"{dataset.prefix} has {dataset.num_documents} documents, which make parts of {counts}: none may be empty"
        )
    return ranges


def divide(
    prefix: str, outs: Sequence[str], shares: Sequence[float], by: By, *, overwrite: bool = False
) -> list[range]:
    """Write a dataset's parts, with those of its loss mask if it has one; the documents of each.

    Raises:
        FileExistsError: an output is there; no part is written then.
        ValueError: see :func:`part_ranges`.
        OSError: an output cannot be written; none is left.
    """
    assert len(outs) == len(shares)
    with contextlib.closing(IndexedDataset(prefix)) as dataset:
        mask = open_mask(dataset)
        ranges = part_ranges(dataset, shares, by)
        if any(Path(out).resolve() == Path(prefix).resolve() for out in outs):
            raise ValueError(f"{prefix} is one of the outputs itself: give another --output-prefix")
        for out in () if overwrite else outs:
            refuse_existing(out)
        done: list[str] = []
        try:
            for out, part in zip(outs, ranges, strict=True):
                _write(dataset, mask, out, part, overwrite)
                done.append(out)
        except BaseException:
            for out in done:
                for path in (*reversed(prefix_paths(out)), *reversed(prefix_paths(mask_prefix(out)))):
                    path.unlink(missing_ok=True)
            raise
    return ranges


def _nearest(dataset: IndexedDataset, target: float) -> int:
    """The document that starts nearest to a position of the stream."""

    def start(document: int) -> int:
        return dataset.start_of(int(dataset.documents[document]))

    after = bisect_left(range(dataset.num_documents), target, key=start)
    return after - 1 if after and target - start(after - 1) <= start(after) - target else after


def _write(dataset: IndexedDataset, mask: IndexedDataset | None, out: str, part: range, overwrite: bool) -> None:
    """Publish a part, with its mask."""
    with contextlib.ExitStack() as stack:
        own_mask = None
        if mask is not None:
            own_mask = _copied(mask, mask_prefix(out), part, overwrite)
            stack.callback(own_mask.abort)  # does nothing once it has been finished
        _copied(dataset, out, part, overwrite, own_mask).finish()


def _copied(
    dataset: IndexedDataset, out: str, part: range, overwrite: bool, mask: IndexedWriter | None = None
) -> IndexedWriter:
    """A part, not yet published."""
    meta = dataset.meta
    writer = IndexedWriter(
        out,
        dtype=dataset.dtype,
        vocab_size=meta.vocab_size if meta else None,
        eod_id=meta.eod_id if meta else None,
        tokenizer=meta.tokenizer if meta else None,
        overwrite=overwrite,
        mask=mask,
    )
    try:
        first = part.start
        while first < part.stop:
            limit = dataset.start_of(int(dataset.documents[first])) + _TOKENS
            last = min(part.stop, max(first + 1, _documents_before(dataset, limit)))
            borders = np.asarray(dataset.documents[first : last + 1])
            tokens = dataset.raw(dataset.start_of(int(borders[0])), dataset.start_of(int(borders[-1])))
            writer.add_documents(tokens, dataset.lengths[borders[0] : borders[-1]].astype(np.int64), np.diff(borders))
            first = last
    except BaseException:
        writer.abort()
        raise
    return writer


def _documents_before(dataset: IndexedDataset, position: int) -> int:
    """How many documents begin before a position, at least roughly: those of whole sequences."""
    sequence = bisect_left(dataset.pointers, position * dataset.dtype.itemsize)
    return bisect_left(dataset.documents, sequence)
