"""What files of text are read as: blocks of lines or of documents, and the options of reading.

A block is :class:`Lines` (JSON lines, to be parsed) or :class:`Texts` (documents that need no parsing).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_lite.text.records import BadRecord


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
        offset: where the block begins in the unpacked file, in bytes (of the file's encoding); end: where it ends.
        taken: bytes of the file on the disk that have been read so far, for progress.
    """

    file: str
    first: int
    data: bytes
    offset: int = 0
    taken: int = 0
    end: int = 0


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
        records: for each document the other fields, if they were asked for: as JSON has them, but for bytes, UUIDs and NaN.
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
