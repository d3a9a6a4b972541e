"""A dataset cut into several, at borders of documents; joining the parts in order gives it back byte for byte."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from megatron_lite.data.index_format import prefix_paths
from megatron_lite.data.indexed import IndexedDataset, IndexedWriter
from megatron_lite.data.loss_mask import mask_prefix, open_mask

By = Literal["documents", "tokens"]
_TOKENS = 1 << 20  # in memory at a time, but for a longer document


def part_ranges(dataset: IndexedDataset, shares: Sequence[float], by: By) -> list[range]:
    """The documents of each part, in order.

    Borders are the running sum of the shares, times the number of documents (rounded half to even) or of tokens (the
    nearest document border, the earlier of two).

    Raises:
        ValueError: shares that are none, or a part without documents.
    """
    if not shares or min(shares) <= 0 or sum(shares) == float("inf"):
        raise ValueError(f"shares {', '.join(map(str, shares))}: each above 0")
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
        pairs = [(dataset, list(outs))]
        if mask is not None:  # first, so that tokens never stand without their mask
            pairs.insert(0, (mask, [mask_prefix(out) for out in outs]))
        targets = [path for _, names in pairs for name in names for path in prefix_paths(name)]
        found = [path for path in targets if path.exists()]
        if found and not overwrite:
            raise FileExistsError(f"{found[0]} already there: give another --output-prefix, or --overwrite")
        done: list[str] = []
        try:
            for source, names in pairs:
                for name, part in zip(names, ranges, strict=True):
                    _write(source, name, part, overwrite)
                    done.append(name)
        except BaseException:
            for path in (path for name in reversed(done) for path in reversed(prefix_paths(name))):
                path.unlink(missing_ok=True)
            raise
    return ranges


def _nearest(dataset: IndexedDataset, target: float) -> int:
    """The document that starts nearest to a position of the stream."""

    def start(document: int) -> int:
        return dataset.start_of(int(dataset.documents[document]))

    after = bisect_left(range(dataset.num_documents), target, key=start)
    return after - 1 if after and target - start(after - 1) <= start(after) - target else after


def _write(dataset: IndexedDataset, out: str, part: range, overwrite: bool) -> None:
    meta = dataset.meta
    with IndexedWriter(
        out,
        dtype=dataset.dtype,
        vocab_size=meta.vocab_size if meta else None,
        eod_id=meta.eod_id if meta else None,
        tokenizer=meta.tokenizer if meta else None,
        overwrite=overwrite,
    ) as writer:
        first = part.start
        while first < part.stop:
            limit = dataset.start_of(int(dataset.documents[first])) + _TOKENS
            last = min(part.stop, max(first + 1, _documents_before(dataset, limit)))
            borders = np.asarray(dataset.documents[first : last + 1])
            tokens = dataset.raw(dataset.start_of(int(borders[0])), dataset.start_of(int(borders[-1])))
            writer.add_documents(tokens, dataset.lengths[borders[0] : borders[-1]].astype(np.int64), np.diff(borders))
            first = last


def _documents_before(dataset: IndexedDataset, position: int) -> int:
    """How many documents begin before a position, at least roughly: those of whole sequences."""
    sequence = bisect_left(dataset.pointers, position * dataset.dtype.itemsize)
    return bisect_left(dataset.documents, sequence)
