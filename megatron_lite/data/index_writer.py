"""Writing an indexed dataset: streamed, and published in one step.

Lengths and document borders go to disk as they come, so memory does not grow with the corpus; pointers are computed
from the lengths at the end, so there is one source of truth for them. Everything is written under temporary names in
the destination's directory, flushed to the disk and renamed, ``.idx`` last: a pair under its final names is complete,
and a killed run leaves nothing that opens. The temporary names are fixed and locked: a second run takes over what
a killed one left, and two runs cannot write the same prefix at once. It starts from nothing, or goes on from a state
(:class:`WriterState`) that the killed one had written down.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_lite.data.index_format import (
    HEADER,
    LENGTH,
    POINTER,
    DatasetMeta,
    IndexHeader,
    choose_dtype,
    dtype_code,
    mask_prefix,
    pieces,
    prefix_paths,
)
from megatron_lite.data.locked_file import HashedAppender, LockedFile, sync_directory

if TYPE_CHECKING:
    from megatron_lite.data.indexed import IndexedDataset

_CHUNK = 1 << 16  # lengths or borders in memory at a time
_BLOCK = 1 << 22  # bytes of tokens in memory at a time


@dataclass(frozen=True)
class WriterState:
    """What an unfinished writer has written: the digest is of the tokens."""

    sequences: int
    documents: int
    tokens: int
    largest: int
    sha256: str


class IndexedWriter:
    """Writes ``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.meta.json``.

    Use it in a ``with`` block: the end of the block publishes the files (:meth:`finish`), an exception inside removes
    everything (:meth:`abort`).

    Args:
        prefix: path without suffix; its directory is made.
        dtype: of the stored ids. Default: :func:`choose_dtype` of ``vocab_size``.
        vocab_size: true vocabulary size; ids at or above it are refused.
        overwrite: replace files that are there.
        empty: no document is no error.
        keep: :meth:`abort` leaves the temporary files, as being killed does.
        resume: go on with such files, from this state. They are read once, to be hashed, while new tokens come.
        mask: the unfinished writer of the loss mask of these tokens: :meth:`finish` publishes both or none, and at no time do
            tokens stand without their mask or beside another one's.
        recorded: what else ``.meta.json`` is to say: ``eod_id``, ``tokenizer``, ``tokenizer_flags``, ``made_of`` of :class:`DatasetMeta`.

    Raises:
        FileExistsError: the files are there, or another process is writing them.
        ValueError: the temporary files are not those of ``resume``.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        dtype: np.dtype | type | str | None = None,
        vocab_size: int | None = None,
        overwrite: bool = False,
        empty: bool = False,
        keep: bool = False,
        resume: WriterState | None = None,
        mask: IndexedWriter | None = None,
        **recorded: Any,
    ) -> None:
        self.prefix = str(prefix)
        self.dtype = choose_dtype(vocab_size) if dtype is None else np.dtype(dtype).newbyteorder("<")
        dtype_code(self.dtype)
        self.vocab_size, self.overwrite = vocab_size, overwrite
        self._recorded = DatasetMeta(0, 0, 0, self.dtype.name, vocab_size=vocab_size, **recorded)
        self._empty, self._keep, self._mask = empty, keep, mask
        start = resume or WriterState(0, 0, 0, -1, "")
        self.sequences, self.documents, self.tokens = start.sequences, start.documents, start.tokens
        self._largest = start.largest
        self._limit = _id_limit(self.dtype, vocab_size)
        self._paths = prefix_paths(prefix)
        self._refuse_existing()
        self._paths[0].parent.mkdir(parents=True, exist_ok=True)
        self._open = False
        self._bin, self._idx, self._borders, self._meta = self._files = tuple(
            LockedFile(self.prefix + suffix) for suffix in (".bin", ".idx", ".borders", ".meta.json")
        )
        self._appender = HashedAppender(self._bin)
        try:
            self._bin.open(self.tokens * self.dtype.itemsize)  # its lock is the lock of the prefix
            self._idx.open(HEADER.size + LENGTH.itemsize * self.sequences if resume else 0)
            self._borders.open(POINTER.itemsize * self.documents)
            if resume:
                self._appender.go_on(self.tokens * self.dtype.itemsize, resume.sha256)
            else:
                self._idx.write(bytes(HEADER.size))  # the header comes last
        except BaseException:
            self._give_up()
            raise
        self._open = True
        self._block, self._lengths, self._ends = bytearray(), bytearray(), bytearray()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._open:
            self.finish()
        else:
            self.abort()

    def add_document(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | None = None) -> None:
        """Append a document.

        Args:
            tokens: ids of the whole document.
            lengths: tokens of each of its sequences (sentences); default: the document is one sequence.

        Raises:
            ValueError: the lengths do not sum to the number of tokens, or an id does not fit.
        """
        array = np.asarray(tokens)
        sizes = np.array([array.size] if lengths is None else lengths, dtype=np.int64)
        self.add_documents(array, sizes, np.array([len(sizes)]))

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray, sequences: np.ndarray | None = None) -> None:
        """Append documents.

        Args:
            tokens: ids of all of them, back to back.
            lengths: tokens of each sequence.
            sequences: of each document; default: each document is one sequence.

        Raises:
            ValueError: the lengths do not sum to the number of tokens, the sequences of the documents not to their number,
                or an id does not fit.
        """
        counts = np.ones(len(lengths), dtype=np.int64) if sequences is None else sequences
        total = int(lengths.sum())
        if total != tokens.size or int(lengths.min(initial=0)) < 0:
            raise ValueError(
                f"document {self.documents}: the lengths of its {len(lengths)} sequences sum to {total}, "
                f"but it has {tokens.size} tokens"
            )
        if int(lengths.max(initial=0)) > np.iinfo(LENGTH).max:
            raise ValueError(
                f"document {self.documents}: {lengths.max()} tokens are more than a sequence can have, 2^31 - 1"
            )
        if int(counts.sum()) != len(lengths) or int(counts.min(initial=0)) < 0:
            raise ValueError(f"document {self.documents}: {counts.sum()} sequences, but {len(lengths)} lengths")
        self._append_tokens(self._checked(tokens))
        ends = self.sequences + np.cumsum(counts)
        self._append_lengths(lengths)
        self._append_ends(ends)

    def add_dataset(self, other: IndexedDataset, documents: range | None = None, seen: hashlib._Hash | None = None) -> None:
        """Append documents of another dataset of the same dtype (default: all), in pieces."""
        if other.dtype != self.dtype:
            raise ValueError(
                f"{other.prefix} holds {other.dtype}, {self.prefix} {self.dtype}: datasets of different dtypes cannot be joined"
            )
        documents = range(other.num_documents) if documents is None else documents
        first, last = int(other.documents[documents.start]), int(other.documents[documents.stop])
        begin, end, shift = other.start_of(first), other.start_of(last), self.sequences - first
        step = max(1, _BLOCK // self.dtype.itemsize)
        for start in range(begin, end, step):
            tokens = other.raw(start, min(end, start + step))
            if seen is not None:
                seen.update(tokens.tobytes())
            self._append_tokens(self._checked(tokens))
        for _, lengths in pieces(other.lengths[first:last], _CHUNK):
            self._append_lengths(lengths)
        for _, ends in pieces(other.documents[documents.start + 1 : documents.stop + 1], _CHUNK):
            self._append_ends(ends + shift)

    def finish(self) -> DatasetMeta:
        """Everything to the disk and under the final names."""
        meta = self.complete()
        self.publish()
        return meta

    def complete(self) -> DatasetMeta:
        """Everything to the disk, under the temporary names; :meth:`publish` is all that may follow.

        ValueError when there is no document.
        """
        assert self._open, "complete() after publish() or abort()"
        try:
            meta = self._complete()
            if self._mask is not None:
                self._mask._complete()
        except BaseException:
            self.abort()
            raise
        return meta

    def publish(self) -> None:
        """Rename what is complete; :func:`publish_left` can do it for a process that was killed."""
        try:
            self._publish()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove everything that was written, or leave it (``keep``). Does nothing after :meth:`finish`."""
        if self._open:
            self._open = False
            self._give_up()

    def state(self) -> WriterState:
        """What has been written, all of it on the disk."""
        self._flush()
        sha256 = self._appender.digest()
        for file in (self._bin, self._idx, self._borders):
            file.sync()
        return WriterState(self.sequences, self.documents, self.tokens, self._largest, sha256)

    def _refuse_existing(self) -> None:
        if not self.overwrite:
            refuse_existing(self.prefix, with_mask=self._mask is not None)

    def _checked(self, array: np.ndarray) -> np.ndarray:
        """The ids in the file's dtype, or ValueError."""
        if array.size == 0:
            return array.astype(self.dtype)
        if array.dtype.kind not in "iu" and self.dtype.kind != "f":
            raise ValueError(f"document {self.documents}: token ids must be integers, not {array.dtype}")
        largest = int(array.max())
        bad = int(array.min())
        if bad >= 0 and largest >= self._limit:
            bad = largest
        if bad < 0 or bad >= self._limit:
            of_vocabulary = self.vocab_size == self._limit
            raise ValueError(
                f"document {self.documents}: token id {bad} does not fit: {'the vocabulary' if of_vocabulary else self.dtype} "
                f"has ids 0 to {self._limit - 1}" + ("" if of_vocabulary else "; use a wider dtype")
            )
        self._largest = max(self._largest, largest)
        return array.astype(self.dtype, copy=False)

    def _append_tokens(self, array: np.ndarray) -> None:
        self._block += np.ascontiguousarray(array).view("u1").data
        self.tokens += array.size
        if len(self._block) >= _BLOCK:
            self._flush()

    def _append_lengths(self, lengths: np.ndarray) -> None:
        self._lengths += lengths.astype(LENGTH).tobytes()
        self.sequences += len(lengths)
        if len(self._lengths) >= _CHUNK * LENGTH.itemsize:
            self._flush()

    def _append_ends(self, ends: np.ndarray) -> None:
        self._ends += ends.astype(POINTER).tobytes()
        self.documents += len(ends)
        if len(self._ends) >= _CHUNK * POINTER.itemsize:
            self._flush()

    def _flush(self) -> None:
        self._appender.write(self._block)
        self._block = bytearray()
        self._idx.write(self._lengths)
        self._borders.write(self._ends)
        self._lengths.clear()
        self._ends.clear()

    def _complete_index(self) -> str:
        """Append pointers and borders to the lengths, write the header; the sha256 of the file."""
        header = IndexHeader(self.dtype, self.sequences, self.documents + 1)
        offset = 0
        for lengths in self._idx.read(header.lengths_at, header.pointers_at, LENGTH):
            ends = offset + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            pointers = np.concatenate(([offset], ends[:-1])).astype(POINTER)
            offset = int(ends[-1])
            self._idx.write(pointers.tobytes())
        assert offset == self.tokens * self.dtype.itemsize, (offset, self.tokens)
        self._idx.write(np.zeros(1, dtype=POINTER).tobytes())
        for ends in self._borders.read(0, POINTER.itemsize * self.documents, POINTER):
            self._idx.write(ends.tobytes())
        self._idx.write_at(0, header.pack())
        sha = hashlib.sha256()
        for data in self._idx.read(0, header.size, np.dtype("u1")):
            sha.update(data.tobytes())
        return sha.hexdigest()

    def _complete(self) -> DatasetMeta:
        """Everything on the disk, under the temporary names."""
        if self.documents == 0 and not self._empty:
            raise ValueError(f"{self.prefix}: no documents were written")
        self._flush()
        sha256_idx = self._complete_index()
        meta = replace(
            self._recorded,
            sequences=self.sequences,
            documents=self.documents,
            tokens=self.tokens,
            largest_id=self._largest if self._largest >= 0 else None,
            sha256_bin=self._appender.digest(),
            sha256_idx=sha256_idx,
        )
        self._meta.open()
        self._meta.write(meta.to_json().encode())
        for file in (self._bin, self._idx, self._meta):
            file.sync()
        return meta

    def _publish(self) -> None:
        """Rename; nothing more is written."""
        bin_path, idx_path, meta_path = self._paths
        self._refuse_existing()
        _clear(self.prefix)
        try:
            if self._mask is not None:
                self._mask._publish()
            self._appender.close()
            self._bin.publish(bin_path)
            self._meta.publish(meta_path)
            self._idx.publish(idx_path)
        except BaseException:
            if self._mask is not None:
                remove_dataset(self._mask.prefix)
            raise
        self._borders.remove()
        sync_directory(bin_path.parent)
        self._open = False

    def _give_up(self) -> None:
        self._appender.close()
        for file in self._files:
            if self._keep:
                file.close()
            else:
                file.remove()


def publish_left(prefix: str, with_mask: bool = False) -> None:
    """Go on renaming where a process was killed that had completed the files; also after the last of them."""
    bin_path, idx_path, meta_path = prefix_paths(prefix)
    first = prefix_paths(mask_prefix(prefix))[0] if with_mask else bin_path
    if Path(f"{first}.tmp").exists():
        _clear(prefix)
    if with_mask:
        publish_left(mask_prefix(prefix))
    for path in (bin_path, meta_path, idx_path):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}.tmp", path)
    Path(prefix + ".borders.tmp").unlink(missing_ok=True)
    sync_directory(bin_path.parent)


def _clear(prefix: str) -> None:
    """From here on no old index, and no old mask, stands beside new tokens."""
    for path in prefix_paths(prefix)[1:]:
        path.unlink(missing_ok=True)
    remove_dataset(mask_prefix(prefix))


def remove_dataset(prefix: str) -> None:
    """Delete a dataset's files that are there, the tokens last."""
    for path in reversed(prefix_paths(prefix)):
        path.unlink(missing_ok=True)


def refuse_existing(prefix: str, with_mask: bool = False) -> None:
    """Raises FileExistsError where tokens or an index stand under a prefix, or the mask of such (if none is to be written)."""
    paths = prefix_paths(prefix)[:2] + (() if with_mask else prefix_paths(mask_prefix(prefix))[1:2])
    found = [str(path) for path in paths if path.exists()]
    if found:
        raise FileExistsError(f"{' and '.join(found)} already there: give another prefix, or --overwrite")


def _id_limit(dtype: np.dtype, vocab_size: int | None) -> int:
    """The first id that does not fit. For floats, the integers that they hold exactly."""
    limit = np.iinfo(dtype).max + 1 if dtype.kind in "iu" else 2 ** (np.finfo(dtype).nmant + 1) + 1
    return limit if vocab_size is None else min(limit, vocab_size)
