"""What a dataset holds, for people and for ``megatron-lite`` commands that print it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.data.index_format import mask_prefix, pieces
from megatron_lite.data.indexed import IndexedDataset, open_mask

OPEN, CLOSE = "\u27e6", "\u27e7"  # around tokens that count as targets
_CHUNK = 1 << 20
_MASK_UP_TO = 1 << 26  # bytes of a loss mask that is read to count in it


def describe(prefix: str | Path, *, first: int = 3, ids: int = 16, checksums: bool = False) -> dict[str, Any]:
    """Open a dataset, pass over its index and say what it holds.

    Args:
        first: how many documents to show.
        ids: how many ids of each.
        checksums: :func:`verify` besides.

    Returns:
        A dictionary that JSON can hold: ``prefix, dtype, documents, sequences, tokens, bytes, empty_documents, shortest,
        longest, mean``, ``lengths`` (documents per range of lengths, e.g. ``{"1": 2, "2-3": 10, "4-7": 40}``),
        ``first_documents`` (their lengths and first ids), ``loss_mask`` (its prefix, or None), ``loss_tokens`` (how many tokens
        it counts; None where there is none, or a large one), ``meta`` (what ``.meta.json``
        says, or None), ``problems``.
    """
    with contextlib.closing(IndexedDataset(prefix)) as dataset:
        problems = verify(prefix)[0] if checksums else dataset.problems()
        counts = np.zeros(65, dtype=np.int64)
        shortest, longest = None, 0
        for start, borders in pieces(dataset.documents[:-1]):
            lengths = _document_lengths(dataset, start, len(borders))
            bits = np.frexp(lengths.astype(np.float64))[1]  # 0 for 0, else k with 2^(k-1) <= length < 2^k
            counts += np.bincount(bits, minlength=65)
            shortest = int(lengths.min()) if shortest is None else min(shortest, int(lengths.min()))
            longest = max(longest, int(lengths.max()))
        return {
            "prefix": dataset.prefix,
            "dtype": dataset.dtype.name,
            "documents": dataset.num_documents,
            "sequences": dataset.num_sequences,
            "tokens": dataset.num_tokens,
            "bytes": dataset.num_tokens * dataset.dtype.itemsize,
            "empty_documents": int(counts[0]),
            "shortest": shortest or 0,
            "longest": longest,
            "mean": dataset.num_tokens / max(1, dataset.num_documents),
            "lengths": {_range(k): int(counts[k]) for k in np.flatnonzero(counts).tolist()},
            "first_documents": [_document(dataset, d, ids) for d in range(min(first, dataset.num_documents))],
            "loss_mask": mask_prefix(dataset.prefix) if dataset.access.exists(mask_prefix(dataset.prefix)) else None,
            "loss_tokens": _counted(dataset),
            "meta": vars(dataset.meta).copy() if dataset.meta is not None else None,
            "problems": problems,
        }


def verify(prefix: str | Path) -> tuple[list[str], list[str]]:
    """Read a dataset, and its loss mask if it has one, to the end: (what is wrong, what could not be compared).

    Sizes, lengths, pointers and borders must fit together; where there is a ``.meta.json`` also the checksums, counts,
    largest id and vocabulary size in it.

    Raises:
        FileNotFoundError, ValueError: it does not even open; see :class:`IndexedDataset`.
    """
    with contextlib.closing(IndexedDataset(prefix)) as dataset:
        problems, notices = dataset.problems(), []
        sha, largest = hashlib.sha256(), -1
        for start in range(0, dataset.num_tokens, _CHUNK):
            tokens = dataset.raw(start, min(dataset.num_tokens, start + _CHUNK))
            sha.update(tokens.tobytes())
            largest = max(largest, int(tokens.max()))
        meta = dataset.meta
        if meta is None:
            notices.append(f"{prefix}.meta.json: not there, so nothing says what the checksums should be")
        else:
            if meta.sha256_bin not in (None, sha.hexdigest()):
                problems.append(f"{dataset.bin_name}: its sha256 is not the one in {prefix}.meta.json")
            if meta.sha256_idx not in (None, _sha256(dataset.idx_name)):
                problems.append(f"{dataset.idx_name}: its sha256 is not the one in {prefix}.meta.json")
            if meta.largest_id is not None and largest != meta.largest_id and dataset.dtype.kind != "f":
                problems.append(
                    f"{dataset.bin_name}: its largest id is {largest}, and {meta.largest_id} in {prefix}.meta.json"
                )
            if meta.vocab_size is not None and largest >= meta.vocab_size:
                problems.append(
                    f"{dataset.bin_name}: its largest id is {largest}, and its vocabulary has {meta.vocab_size}"
                )
        if dataset.access.exists(mask_prefix(dataset.prefix)):
            open_mask(dataset)
            found = verify(mask_prefix(dataset.prefix))
            problems, notices = problems + found[0], notices + found[1]
        return problems, notices


def _sha256(name: str) -> str:
    sha = hashlib.sha256()
    with open(name, "rb") as file:
        while data := file.read(_CHUNK):
            sha.update(data)
    return sha.hexdigest()


def _counted(dataset: IndexedDataset) -> int | None:
    """How many tokens of a dataset count as targets; None without a mask, and where it is large or broken."""
    if dataset.num_tokens > _MASK_UP_TO:
        return None
    try:
        mask = open_mask(dataset)
    except (OSError, ValueError):  # what is wrong with it is verify's to say
        return None
    if mask is None:
        return None
    with contextlib.closing(mask):
        return int(np.count_nonzero(mask.raw(0, mask.num_tokens)))


def marked(decode: Callable[[Sequence[int]], str] | None, ids: list[int], loss: Sequence[int]) -> str:
    """Text, or ids where there is no ``decode``, with marks around what counts as a target."""
    pieces, at, before = [], 0, ""
    for has_loss, run_of in groupby(loss):
        at += (length := len(list(run_of)))
        if decode is None:
            piece, between = " ".join(map(str, ids[at - length : at])), " "
        else:
            text = decode(ids[:at])  # from the start: what a token's text is depends on those before it
            common = text.startswith(before)
            piece, before, between = text[len(before) :] if common else decode(ids[at - length : at]), text, ""
        pieces.append(f"{OPEN}{piece}{CLOSE}" if has_loss else piece)
    return between.join(pieces) if pieces else ""


def _document_lengths(dataset: IndexedDataset, start: int, count: int) -> np.ndarray:
    """Tokens of documents [start, start + count), int64."""
    borders = dataset.documents[start : start + count + 1]
    inside = borders < dataset.num_sequences
    positions = np.full(count + 1, dataset.num_tokens, dtype=np.int64)
    positions[inside] = dataset.pointers[borders[inside]] // dataset.dtype.itemsize
    return np.diff(positions)


def _document(dataset: IndexedDataset, index: int, ids: int) -> dict[str, Any]:
    start, stop = (dataset.start_of(int(dataset.documents[i])) for i in (index, index + 1))
    return {"tokens": stop - start, "ids": dataset.read(start, min(stop, start + ids)).tolist()}


def _range(k: int) -> str:
    if k < 2:
        return str(k)
    return f"{1 << (k - 1)}-{(1 << k) - 1}"
