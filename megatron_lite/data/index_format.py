"""The layout of an indexed dataset on disk: ``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.meta.json``.

``.bin`` holds the token ids of all sequences back to back. ``.idx`` holds a header of 34 bytes and three arrays, all
little-endian and without padding: int32 lengths of the S sequences in tokens, int64 byte offsets of the S sequences in
``.bin``, and D int64 document borders as sequence numbers (the first is 0, the last is S). Both files are those of
Megatron-LM, byte for byte. ``.meta.json`` is ours: what the two cannot say (the end-of-document id, which tokenizer,
the true vocabulary size, the largest id) and counts and checksums that tie the three together. It may be missing.
"""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents + 1
META_FORMAT = 1
MASK_SUFFIX = "_loss_mask"

DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
LENGTH, POINTER = np.dtype("<i4"), np.dtype("<i8")


def dtype_code(dtype: np.dtype | type | str) -> int:
    """The format's number for a dtype; ValueError for one that the format lacks."""
    wanted = np.dtype(dtype).newbyteorder("<")
    for code, known in DTYPES.items():
        if known == wanted:
            return code
    raise ValueError(
        f"an indexed dataset cannot hold {np.dtype(dtype)}: use one of {', '.join(map(str, DTYPES.values()))}"
    )


def choose_dtype(vocab_size: int | None) -> np.dtype:
    """uint16 for a vocabulary smaller than 65,500 and int32 otherwise, as Megatron-LM writes."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65500 else np.dtype("<i4")


@dataclass(frozen=True)
class IndexHeader:
    """The header of an ``.idx`` file.

    Attributes:
        dtype: of the tokens in ``.bin``.
        sequences: S.
        borders: D, the number of documents + 1.
    """

    dtype: np.dtype
    sequences: int
    borders: int

    @property
    def lengths_at(self) -> int:
        """Byte offset of the lengths in ``.idx``."""
        return HEADER.size

    @property
    def pointers_at(self) -> int:
        """Byte offset of the byte pointers in ``.idx``."""
        return self.lengths_at + LENGTH.itemsize * self.sequences

    @property
    def borders_at(self) -> int:
        """Byte offset of the document borders in ``.idx``."""
        return self.pointers_at + POINTER.itemsize * self.sequences

    @property
    def size(self) -> int:
        """Bytes of the whole ``.idx``."""
        return self.borders_at + POINTER.itemsize * self.borders

    def pack(self) -> bytes:
        """The 34 bytes."""
        return HEADER.pack(MAGIC, VERSION, dtype_code(self.dtype), self.sequences, self.borders)

    @classmethod
    def unpack(cls, data: bytes, path: Path | str) -> IndexHeader:
        """Read the header; ValueError names ``path`` and what is wrong with it."""
        if len(data) < HEADER.size:
            raise ValueError(
                f"{path}: {len(data)} bytes are too few for an index, whose header alone has {HEADER.size}"
            )
        magic, version, code, sequences, borders = HEADER.unpack(data[: HEADER.size])
        if magic != MAGIC:
            raise ValueError(f"{path}: not an index of token files: it starts with {magic!r}, not with {MAGIC!r}")
        if version != VERSION:
            raise ValueError(f"{path}: index version {version}; this program reads version {VERSION}")
        if code not in DTYPES:
            known = ", ".join(f"{number} {dtype}" for number, dtype in DTYPES.items())
            raise ValueError(f"{path}: unknown dtype code {code}; known: {known}")
        return cls(DTYPES[code], sequences, borders)


@dataclass(frozen=True)
class DatasetMeta:
    """What ``PREFIX.meta.json`` says.

    Attributes:
        sequences, documents, tokens: counts, tokens over all sequences.
        dtype: of ``.bin``, e.g. "uint16".
        eod_id: the id that ends every document, or None when none was appended.
        tokenizer: fingerprint of the tokenizer, or None.
        tokenizer_flags: the flags that name it, as a command line, or None.
        vocab_size: its true vocabulary size, or None.
        largest_id: the largest token id in ``.bin``, or None when there is no token.
        sha256_bin, sha256_idx: checksums of the two files, hexadecimal.
        made_of: the text that it was made of and how (:mod:`megatron_lite.text.origin`), or None. Its ``part`` is [i, n] for
            the dataset of the i-th of n parts, and all else in it is the same for the parts of one run.
    """

    sequences: int
    documents: int
    tokens: int
    dtype: str
    eod_id: int | None = None
    tokenizer: str | None = None
    tokenizer_flags: str | None = None
    vocab_size: int | None = None
    largest_id: int | None = None
    sha256_bin: str | None = None
    sha256_idx: str | None = None
    made_of: dict[str, Any] | None = None

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"format": META_FORMAT, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> DatasetMeta | None:
        """Read the file; None where there is none; ValueError when it is not what it should be."""
        try:
            return cls.parse(path.read_bytes(), path)
        except FileNotFoundError:
            return None

    @classmethod
    def parse(cls, data: bytes, path: Path | str) -> DatasetMeta:
        """The content of the file ``path``; ValueError when it is not what it should be."""
        try:
            record = json.loads(data)
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error}); remove it to read the dataset without it") from None
        names = {field.name for field in dataclasses.fields(cls)}
        required = ("sequences", "documents", "tokens", "dtype")
        if (
            not isinstance(record, dict)
            or record.get("format") != META_FORMAT
            or any(n not in record for n in required)
        ):
            raise ValueError(
                f"{path}: not a description of format {META_FORMAT}; remove it to read the dataset without it"
            )
        for field in dataclasses.fields(cls):  # whose types are int, str or dict, and perhaps None
            value, kind = record.get(field.name), str(field.type)
            if type(value).__name__ != re.split(r"\W", kind)[0] and not (value is None and kind.endswith("None")):
                raise ValueError(f"{path}: {field.name} is {value!r}; remove the file to read the dataset without it")
        return cls(**{name: value for name, value in record.items() if name in names})


def prefix_paths(prefix: str | Path) -> tuple[Path, Path, Path]:
    """``PREFIX.bin``, ``PREFIX.idx``, ``PREFIX.meta.json`` (a prefix may contain dots)."""
    text = str(prefix)
    return Path(text + ".bin"), Path(text + ".idx"), Path(text + ".meta.json")


def mask_prefix(prefix: str) -> str:
    """Where the loss mask of a data set is (:mod:`.indexed`)."""
    return prefix + MASK_SUFFIX


def prefix_of(name: str | Path) -> str:
    """A dataset's prefix, also where one of its files is named (as by a pattern ``parts/*.idx``)."""
    text = str(name)
    return next((text.removesuffix(s) for s in (".bin", ".idx", ".meta.json") if text.endswith(s)), text)


def pieces(array: np.ndarray, size: int = 1 << 17) -> Iterator[tuple[int, np.ndarray]]:
    """An array of any length in parts, each with its start."""
    for start in range(0, len(array), size):
        yield start, array[start : start + size]
