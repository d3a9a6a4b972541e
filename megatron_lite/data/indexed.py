"""Reading an indexed dataset: tokens by position, documents by borders, nothing loaded.

Both files are mapped; opening costs the same for a thousand documents and for a billion. Since sequences lie back to
back, the byte pointers of the index are at the same time its cumulative token counts, so "which documents does this
range of the stream touch" is a binary search in the file. (NumPy's ``searchsorted`` would copy the array first: the
arrays of the format are not aligned in memory. ``bisect`` reads the twenty numbers that it needs.)

Where the files lie, and how ranges of ``.bin`` are read, is :mod:`megatron_lite.data.access`'s business.

Opening checks what can be checked without a pass over the data: sizes against counts, ends of the arrays, a sample of
the pointers. :meth:`IndexedDataset.problems` makes the full pass.

A dataset may have a second pair, ``PREFIX_loss_mask``, one uint8 for each token of ``PREFIX``: 1 says that the token counts as a
target, 0 that it does not (a user's words, a template's). The pair has the same sequences and documents as the tokens, so every
position that an order of samples derives from the index of the tokens is right for the mask as well. The format is in
:mod:`megatron_lite.data.index_format`, writing in :mod:`megatron_lite.data.index_writer`, a summary for people in
:mod:`megatron_lite.data.describe`.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from bisect import bisect_left, bisect_right
from pathlib import Path

import numpy as np

from megatron_lite.data.access import Access
from megatron_lite.data.index_format import (
    HEADER,
    LENGTH,
    POINTER,
    DatasetMeta,
    IndexHeader,
    choose_dtype,
    mask_prefix,
    pieces,
)
from megatron_lite.data.index_writer import IndexedWriter
from megatron_lite.ops.library import index_module

__all__ = ["DatasetMeta", "IndexedDataset", "IndexedWriter", "choose_dtype"]

_index = index_module()[0]
_SPOT_CHECKS = 32
_CHUNK = 1 << 20


class IndexedDataset:
    """A pair ``PREFIX.bin`` and ``PREFIX.idx``.

    Args:
        prefix: path without suffix, or an address in a store.
        access: how files are read; the default maps them.

    Attributes:
        dtype: of the stored ids.
        lengths: int32 [sequences], tokens of each.
        pointers: int64 [sequences], byte offset of each in ``.bin``.
        documents: int64 [num_documents + 1], document borders as sequence numbers.
        num_sequences, num_documents, num_tokens: counts.
        meta: the content of ``PREFIX.meta.json``, or None.
        access: how it was opened.
        loss_mask: which tokens count as targets (:func:`open_mask`); None: all.

    Raises:
        FileNotFoundError: a file is missing (the message lists prefixes near by).
        ValueError: a file is broken or the files do not belong together.
    """

    def __init__(self, prefix: str | Path, access: Access | None = None) -> None:
        self.prefix, self.access = str(prefix), access or Access()
        self.loss_mask: IndexedDataset | None = None
        files = self.access.open(self.prefix)
        self.bin_name, self.idx_name = files.bin_name, files.idx_name
        header = IndexHeader.unpack(bytes(files.index[: HEADER.size]), files.idx_name)
        if len(files.index) != header.size:
            raise ValueError(
                f"{files.idx_name} has {len(files.index)} bytes, but {header.sequences} sequences and {header.borders - 1} "
                f"documents take {header.size}: it is truncated or damaged"
            )
        self.dtype = header.dtype
        self.lengths = np.frombuffer(files.index, LENGTH, header.sequences, header.lengths_at)
        self.pointers = np.frombuffer(files.index, POINTER, header.sequences, header.pointers_at)
        self.documents = np.frombuffer(files.index, POINTER, header.borders, header.borders_at)
        self._borders = None  # the compiled search, where there is one
        if _index is not None and sys.byteorder == "little":
            places = header.pointers_at, header.sequences, header.borders_at, header.borders
            self._borders = _index.Borders(files.index, *places, self.dtype.itemsize)
        self.num_sequences, self.num_documents = header.sequences, header.borders - 1
        self._item = self.dtype.itemsize
        size = int(self.pointers[-1]) + int(self.lengths[-1]) * self._item if self.num_sequences else 0
        self._check(files.size, size)
        self.num_tokens = size // self._item
        self.meta = files.meta
        self._check_meta(files.meta_name)
        self._reader = files.reader
        self._tokens = None if files.mapped is None else np.frombuffer(files.mapped, self.dtype)

    def __len__(self) -> int:
        return self.num_sequences

    def __repr__(self) -> str:
        return (
            f"IndexedDataset({self.prefix!r}: {self.num_documents} documents, {self.num_tokens} tokens, {self.dtype})"
        )

    def raw(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream in the stored dtype; a read-only view where ``.bin`` is mapped."""
        if self._tokens is not None:
            return self._tokens[start:stop]
        assert self._reader is not None, "closed"
        return np.frombuffer(self._reader.read(start * self._item, stop * self._item), self.dtype)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream, int64, a copy."""
        return self.raw(start, stop).astype(np.int64)

    @functools.cached_property
    def index_digest(self) -> str:
        """32 hexadecimal digits of the index's lengths, from which its pointers follow (one pass over 4 bytes a sequence)."""
        digest = hashlib.blake2b(f"{self.num_sequences} {self.dtype.name}\n".encode(), digest_size=16)
        for _, lengths in pieces(self.lengths):
            digest.update(lengths.tobytes())
        return digest.hexdigest()

    def start_of(self, sequence: int) -> int:
        """Position in the stream of a sequence's first token; for ``num_sequences``, the length of the stream."""
        return int(self.pointers[sequence]) // self._item if sequence < self.num_sequences else self.num_tokens

    def sequence(self, index: int) -> np.ndarray:
        """Tokens of one sequence, int64."""
        start = self.start_of(index)
        return self.read(start, start + int(self.lengths[index]))

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document, int64."""
        return self.read(self.start_of(int(self.documents[index])), self.start_of(int(self.documents[index + 1])))

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Where documents start in the stream.

        Returns:
            int64, ascending, the positions p with start <= p < stop at which a document that is not empty starts.
        """
        if self._borders is not None:
            return self._borders.starts(start, stop)
        first = bisect_left(self.pointers, start * self._item)
        last = bisect_left(self.pointers, stop * self._item, first)
        if first == last:
            return np.empty(0, dtype=np.int64)
        borders = self.documents[bisect_left(self.documents, first) : bisect_left(self.documents, last)]
        starts = self.pointers[borders] // self._item
        other = starts[1:] != starts[:-1]  # an empty document starts where the next one does
        return starts if other.all() else starts[np.concatenate(([True], other))]

    def close(self) -> None:
        """Forget the maps (memory is unmapped with the last array on it) and close what is open."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._tokens = None

    def problems(self) -> list[str]:
        """A full pass over the index; what is wrong, in words. :func:`megatron_lite.data.describe.verify` reads ``.bin`` too."""
        found: list[str] = []
        offset = 0
        for start, lengths in pieces(self.lengths):
            ends = offset + np.cumsum(lengths, dtype=np.int64) * self._item
            pointers = self.pointers[start : start + len(lengths)]
            expected = np.concatenate(([offset], ends[:-1]))
            wrong = np.flatnonzero((pointers != expected) | (lengths < 0))
            if len(wrong):
                i = int(wrong[0])
                found.append(
                    f"{self.idx_name}: sequence {start + i} of length {lengths[i]} is said to start at byte {pointers[i]}, "
                    f"but the sequences before it end at {expected[i]}"
                )
                break
            offset = int(ends[-1])
        for start, borders in pieces(self.documents):
            before = self.documents[start - 1] if start else 0
            wrong = np.flatnonzero(np.diff(borders, prepend=before) < 0)
            if len(wrong):
                found.append(f"{self.idx_name}: document border {start + int(wrong[0])} is below the one before it")
                break
        return found

    def largest_id(self) -> int:
        """The largest stored id (-1 without tokens): from ``.meta.json``, else by a pass over ``.bin``."""
        if self.meta is not None and self.meta.largest_id is not None:
            return self.meta.largest_id
        spans = ((start, min(self.num_tokens, start + _CHUNK)) for start in range(0, self.num_tokens, _CHUNK))
        return max((int(self.raw(*span).max()) for span in spans), default=-1)

    def _check(self, actual: int, size: int) -> None:
        """What can be seen without a pass over the data."""
        if actual != size:
            raise ValueError(
                f"{self.bin_name} has {actual} bytes, but its index describes {size}: one of the two files is truncated, "
                "damaged or belongs to another dataset"
            )
        borders = (int(self.documents[0]), int(self.documents[-1])) if len(self.documents) else (-1, -1)
        if borders != (0, self.num_sequences):
            raise ValueError(
                f"{self.idx_name}: its document borders run from {borders[0]} to {borders[1]}, not from 0 to the "
                f"{self.num_sequences} sequences: it is damaged"
            )
        step = max(1, self.num_sequences // _SPOT_CHECKS)
        for i in range(0, self.num_sequences, step):
            end = int(self.pointers[i]) + int(self.lengths[i]) * self._item
            following = int(self.pointers[i + 1]) if i + 1 < self.num_sequences else size
            if (i == 0 and self.pointers[0] != 0) or self.lengths[i] < 0 or end != following:
                raise ValueError(
                    f"{self.idx_name}: sequence {i} is {self.lengths[i]} tokens from byte {self.pointers[i]}, but the next "
                    f"one starts at byte {following}: sequences must lie back to back"
                )

    def _check_meta(self, path: str) -> None:
        if self.meta is None:
            return
        said = (self.meta.sequences, self.meta.documents, self.meta.tokens, self.meta.dtype)
        found = (self.num_sequences, self.num_documents, self.num_tokens, self.dtype.name)
        if said != found:
            raise ValueError(
                f"{path} describes another dataset: it says {said[0]} sequences, {said[1]} documents, {said[2]} tokens, "
                f"{said[3]}; the files hold {found[0]}, {found[1]}, {found[2]}, {found[3]}. Remove it if it is left over"
            )


def open_mask(dataset: IndexedDataset) -> IndexedDataset | None:
    """The mask beside ``dataset``, or None where there is none.

    Raises:
        FileNotFoundError: half of the pair is missing.
        ValueError: it is broken, holds anything but 0 and 1, or belongs to other tokens.
    """
    prefix = mask_prefix(dataset.prefix)
    if not dataset.access.exists(prefix):
        return None
    mask = IndexedDataset(prefix, dataset.access)
    if mask.dtype != np.uint8 or mask.largest_id() > 1:
        raise ValueError(f"{prefix}.bin is no loss mask: it must hold uint8 numbers, 0 or 1")
    same = len(mask) == len(dataset) and mask.num_documents == dataset.num_documents
    if not (same and _equal(mask.lengths, dataset.lengths) and _equal(mask.documents, dataset.documents)):
        raise ValueError(
            f"{prefix} is not the loss mask of {dataset.prefix}: it has {len(mask)} sequences and {mask.num_tokens} tokens, the "
            f"tokens {len(dataset)} and {dataset.num_tokens}, and all lengths must be equal. Make both anew, or remove the mask"
        )
    return mask


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one length are equal, without copies of them."""
    return all(np.array_equal(piece, b[start : start + len(piece)]) for start, piece in pieces(a))


class TokenStream:
    """The sequences ``part`` of a dataset, back to back.

    Attributes:
        name: for messages.
        num_tokens, num_documents: of the part (a document that the part's borders cut counts).
    """

    def __init__(self, dataset: IndexedDataset, part: range, name: str = "") -> None:
        assert part.step == 1 and 0 <= part.start <= part.stop <= dataset.num_sequences, part
        self.dataset, self.part, self.name = dataset, part, name or dataset.prefix
        self._base = dataset.start_of(part.start)
        self.num_tokens = dataset.start_of(part.stop) - self._base if len(part) else 0
        first = bisect_right(dataset.documents, part.start)
        self.num_documents = bisect_right(dataset.documents, part.stop - 1) - first + 1 if len(part) else 0

    def raw(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as they are stored."""
        return self.dataset.raw(self._base + start, self._base + stop)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), int64."""
        return self.dataset.read(self._base + start, self._base + stop)

    def loss_mask(self, start: int, stop: int) -> np.ndarray | None:
        """Which of the tokens [start, stop) count as targets, uint8; None: all."""
        mask = self.dataset.loss_mask
        return None if mask is None else mask.raw(self._base + start, self._base + stop)

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Positions in [start, stop) at which a document starts, int64."""
        return self.dataset.document_starts(self._base + start, self._base + stop) - self._base


def within(tokens: np.ndarray, vocab_size: int) -> bool:
    """Whether all ids of a row, in the dtype in which they are stored, are in [0, vocab_size)."""
    if tokens.dtype.kind != "u":
        return not tokens.size or (int(np.minimum.reduce(tokens)) >= 0 and int(np.maximum.reduce(tokens)) < vocab_size)
    return not tokens.size or int(np.maximum.reduce(tokens)) < vocab_size


def check_ids(tokens: np.ndarray, vocab_size: int | None, where: str) -> None:
    """Refuse ids that the model has no embedding for.

    Args:
        tokens: int64.
        vocab_size: true vocabulary size, or None for no check.
        where: names the place in the message.
    """
    if vocab_size is None or not tokens.size:
        return
    if int(tokens.view(np.uint64).max()) >= vocab_size:  # as unsigned, a negative id is large
        bad = int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])
        raise ValueError(
            f"{where}: token id {bad}, but the model's vocabulary has {vocab_size} ids, 0 to {vocab_size - 1}: the data were "
            "tokenized with another tokenizer, or --vocab-size is too small"
        )
