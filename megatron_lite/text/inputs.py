"""Input files of text: which files the arguments name, and blocks of lines or documents out of each.

What a file is, is told by its name: a kind and perhaps a packing, as in ``pages.jsonl.zst``.

====================================  =================================================================================
``.jsonl``, ``.json``, ``.ndjson``    JSON lines: an object on each line. A file that is one JSON array is refused.
``.txt``                              plain text: the file is a document, or ``separator`` parts it into documents
``.parquet``                          the keys are columns of strings, a row is a document
``.dat.zst``, ``.jsonl.zst.tar``      archives of lm_dataformat (:mod:`.inputs_texts`, :mod:`.inputs_bytes`); its
                                      ``.jsonl.zst`` are JSON lines, with the document's facts in the field ``meta``
``.gz``, ``.zst``, ``.bz2``, ``.xz``  packings of JSON lines and plain text
``-``                                 standard input: JSON lines, not packed
====================================  =================================================================================

A block is :class:`Lines` (JSON lines, to be parsed) or :class:`Texts` (documents that need no parsing). Files are read,
and unpacked, as blocks are asked for: memory does not grow with the file, except for one line or one plain-text document.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from megatron_lite.text.records import BadRecord

STANDARD_INPUT = "-"
LINES: tuple[str, ...] = (".jsonl", ".json", ".ndjson")
PLAIN = ".txt"
PACKINGS: tuple[str, ...] = (".gz", ".zst", ".bz2", ".xz")
PARQUET, DAT, TAR = ".parquet", ".dat.zst", ".jsonl.zst.tar"
SUPPORTED = f"{', '.join(LINES)}, {PLAIN} (each also with {', '.join(PACKINGS)}), {PARQUET}, {DAT}, {TAR}"


@dataclass(frozen=True)
class InputOptions:
    """How files are read.

    Attributes:
        keys: of the texts: columns of a Parquet file. Plain text and ``.dat.zst`` have the one key ``text``. (Of JSON lines
            the reader of the lines takes what it wants.)
        encoding: of JSON lines and plain text; Python's name.
        separator: between the documents of a plain-text file; None: the file is one document.
        whole: also give the other columns of a Parquet file (``Texts.records``).
        block_bytes: about how much text is in a block.
    """

    keys: tuple[str, ...] = ("text",)
    encoding: str = "utf-8"
    separator: str | None = None
    whole: bool = False
    block_bytes: int = 1 << 20


@dataclass(frozen=True)
class Lines:
    """A block of whole JSON lines in UTF-8.

    Where a line's bytes are not in the input's encoding, it holds bytes that are not UTF-8 in their place, so that parsing it
    fails at that place.

    Attributes:
        file: name for messages.
        first: number of the first line, 1-based.
        data: lines; the last may lack its newline at the end of the file.
        offset: where the block begins in the unpacked file, in bytes (of the file's encoding).
        taken: bytes of the file on the disk that have been read so far, for progress.
    """

    file: str
    first: int
    data: bytes
    offset: int = 0
    taken: int = 0


@dataclass(frozen=True)
class Refused:
    """A document of :class:`Texts` that is bad.

    Attributes:
        index: in the block.
        why: reason and place.
        start: of what there is, UTF-8 or not, for the message.
    """

    index: int
    reason: str
    detail: str
    start: bytes

    @property
    def why(self) -> BadRecord:
        return BadRecord(self.reason, self.detail)


@dataclass(frozen=True)
class Texts:
    """A block of documents whose texts are there already.

    Attributes:
        file: name for messages.
        first: number of the first document, 1-based.
        columns: for each key the text of each document; no lone surrogates.
        keys: of the columns.
        refused: documents that are bad, in order; their texts in ``columns`` are empty and mean nothing.
        records: for each document the other fields, if they were asked for.
        taken: bytes of the file on the disk that have been read so far, for progress.
    """

    file: str
    first: int
    columns: list[list[str]]
    keys: tuple[str, ...]
    refused: tuple[Refused, ...] = ()
    records: list[dict[str, Any]] | None = None
    taken: int = 0

    def __len__(self) -> int:
        return len(self.columns[0])


Block = Lines | Texts


@dataclass(frozen=True)
class Name:
    """What a file's name says: its kind (one of LINES, PLAIN, PARQUET, DAT, TAR) and packing (one of PACKINGS or "")."""

    kind: str
    packing: str = ""


def name_of(path: str | Path) -> Name | None:
    """What a file is by its name; None: it is not read. Standard input is JSON lines."""
    name = os.path.basename(str(path)).lower()
    if str(path) == STANDARD_INPUT:
        return Name(LINES[0])
    for kind in (TAR, DAT, PARQUET):
        if name.endswith(kind):
            return Name(kind)
    packing = next((p for p in PACKINGS if name.endswith(p)), "")
    kind = next((k for k in (*LINES, PLAIN) if name.removesuffix(packing).endswith(k)), "")
    return Name(kind, packing) if kind else None


def is_text_file(path: str) -> bool:
    """Whether the name is that of a file of text that is read here (and not a dataset's prefix)."""
    return path != STANDARD_INPUT and name_of(path) is not None


def open_input(path: str | Path, options: InputOptions, start: int = 0, stop: int | None = None) -> Iterator[Block]:
    """The blocks of a file, in order.

    ``start`` and ``stop`` take a part of it: of JSON lines the lines that begin at an unpacked byte in [start, stop), of
    other kinds the documents with a (0-based) number in [start, stop). Parts whose ends meet have each line once, wherever
    the cuts are. Lines of a file without packing are numbered from the first of the part (:func:`lines_before` says how
    many there are before it); everything else keeps its number in the file.

    Raises:
        BadInput: a file that is damaged, cut off, a JSON array, or lacks a column; as soon as that is seen.
        ValueError: keys that the kind does not have.
        OSError: the file cannot be opened.
    """
    from megatron_lite.text import inputs_bytes, inputs_texts

    name = name_of(path)
    assert name is not None, path
    if name.kind in LINES or name.kind == TAR:
        return inputs_bytes.line_blocks(str(path), name, options, start, stop)
    return inputs_texts.text_blocks(str(path), name, options, start, stop)
