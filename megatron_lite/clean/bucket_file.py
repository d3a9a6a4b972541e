"""A file of named arrays: what a corpus step keeps of a bucket for corpora to come.

The arrays come first, each in raw little-endian bytes, so that they can be written before their lengths are known and
mapped into memory when they are read. A table in JSON follows, with what the step says about itself and the position and
CRC-32 of each array, and at the very end the table's length and CRC-32 and the mark of this format::

    array, array, ..., table, <length: uint64> <checksum: uint32> "MLBUCKET"

A file appears under its name when it is complete. Nothing in it can execute.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.clean.step import SAVED_BY, bucket_path
from megatron_lite.data.locked_file import LockedFile
from megatron_lite.text.records import BadInput

END = struct.Struct("<QI8s")
MARK = b"MLBUCKET"
_REMEDY = "bring it back from a copy, or save anew"


def damaged(path: str, why: str) -> BadInput:
    """A saved file that is not as it was written."""
    return BadInput(f"{path}: damaged ({why}); {_REMEDY}")


def seal(path: str) -> str:
    """What tells a file from any other: its end, with the checksum of the table that has those of the arrays."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - END.size))
        return file.read().hex()


def write_bucket_file(path: str, about: Mapping[str, Any], arrays: Mapping[str, Iterable[np.ndarray]]) -> None:
    """Write a file, or leave nothing under its name.

    Args:
        about: settings and numbers, as JSON; ``read`` gives them back.
        arrays: name -> pieces of one dimension and the same dtype; an array is their concatenation. At least one piece.
    """
    file, position = LockedFile(path), 0
    table: dict[str, Any] = {}
    file.open()
    try:
        for name, pieces in arrays.items():
            begin, checksum, dtype = position, 0, np.dtype(np.uint8)
            for piece in pieces:
                dtype = piece.dtype.newbyteorder("<")
                data = np.ascontiguousarray(piece, dtype).tobytes()
                file.write(data)
                checksum, position = zlib.crc32(data, checksum), position + len(data)
            table[name] = {"dtype": dtype.str, "begin": begin, "end": position, "crc32": checksum}
        text = json.dumps({"about": about, "arrays": table}, sort_keys=True).encode()
        file.write(text + END.pack(len(text), zlib.crc32(text), MARK))
        file.sync()
        file.publish(Path(path))
    finally:
        file.remove()


class BucketFile:
    """Reads a file of arrays.

    Attributes:
        path: its name.
        about: what the writer said about itself.

    Raises:
        BadInput: the file is not whole, or is no such file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        size = Path(path).stat().st_size
        with open(path, "rb") as file:
            file.seek(max(0, size - END.size))
            length, checksum, mark = END.unpack(file.read(END.size)) if size >= END.size else (0, 0, b"")
            if mark != MARK or length > size - END.size:
                raise BadInput(f"{path}: not the saved bucket of a cleaning step, or cut off ({size} bytes); {_REMEDY}")
            file.seek(size - END.size - length)
            text = file.read(length)
        if zlib.crc32(text) != checksum:
            raise damaged(path, "the checksum of its table does not match")
        table = json.loads(text)
        self.about: dict[str, Any] = table["about"]
        self._arrays: dict[str, dict[str, Any]] = table["arrays"]

    def mapped(self, name: str) -> np.ndarray:
        """An array, mapped into memory and not compared with its checksum."""
        entry = self._arrays[name]
        dtype = np.dtype(entry["dtype"])
        count = (entry["end"] - entry["begin"]) // dtype.itemsize
        if count == 0:
            return np.empty(0, dtype)
        return np.memmap(self.path, dtype, "r", entry["begin"], (count,))

    def read(self, name: str) -> np.ndarray:
        """An array in memory; BadInput when its checksum does not match."""
        array = np.array(self.mapped(name))
        if zlib.crc32(array.tobytes()) != self._arrays[name]["crc32"]:
            raise damaged(self.path, f"the checksum of {name} does not match")
        return array


def against_problems(directory: str, settings: Mapping[str, Any]) -> list[str]:
    """What speaks against comparing with what was saved to a directory, as far as the tables of its files tell."""
    if not directory or not Path(directory).is_dir():  # which is told elsewhere
        return []
    for bucket in range(settings["buckets"]):
        try:
            open_bucket_file(bucket_path(directory, bucket), settings, bucket)
        except FileNotFoundError as error:
            return [f"against {directory}: {error.filename} is missing"]
        except ValueError as error:
            return [f"against {directory}: {error}"]
    return []


def open_bucket_file(path: str, settings: Mapping[str, Any], bucket: int) -> BucketFile:
    """The file of a bucket whose writer had the same settings (``about["settings"]``), as the list of its directory has it.

    Raises:
        ValueError: names each setting that differs, with both values.
        BadInput: it is damaged, or not the one that was saved with the others.
    """
    file = BucketFile(path)
    theirs: Mapping[str, Any] = file.about.get("settings", {})
    if theirs.get("step") != settings.get("step"):
        raise ValueError(f"{path} was saved by the step {theirs.get('step')}, not {settings.get('step')}")
    names = sorted({*theirs, *settings})
    differ = [f"{n}: {theirs.get(n)} there, {settings.get(n)} here" for n in names if theirs.get(n) != settings.get(n)]
    if differ:
        raise ValueError(f"{path} was made with other settings and cannot be compared with ({'; '.join(differ)})")
    saved = Path(path).with_name(SAVED_BY)
    try:
        seals = json.loads(saved.read_text(encoding="utf-8").split("\n")[2])
    except (ValueError, IndexError):
        raise BadInput(f"{saved}: has no list of the buckets; {_REMEDY}") from None
    if seals[bucket] != seal(path):
        raise BadInput(f"{path} was not saved with the others: files of two saves were mixed, or exchanged; {_REMEDY}")
    return file
