"""Where the shingle sets of near de-duplication lie: on disk, to be read when two texts are compared.

While a run reads, each worker process appends the sets of its documents to a file of its own in the step's scratch
directory, and a document's keys say where: (name of the file, position). A record is its document's number, the length
of the set and the CRC-32 of its bytes, and the set (uint32, sorted). What a killed worker left is referred to by nobody.

A saved index has the sets of all corpora so far in its bucket files, each in the *home* bucket of its document, sorted
by (corpus, document's number). Both kinds are mapped into memory: nothing is held that the system cannot drop.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from megatron_lite.clean.bucket_file import BucketFile, damaged, open_bucket_file
from megatron_lite.clean.step import bucket_path
from megatron_lite.data.locked_file import naming

COPIED = 1 << 22  # shingles that are copied at a time
MAPPED = 128  # files of sets that are open at a time
SHINGLE = np.dtype("<u4")
RECORD = struct.Struct("<QII")  # number of the document, shingles, CRC-32 of their bytes


class SetWriter:
    """A file of sets that one process appends to.

    Attributes:
        name: of the file, a random number of 64 bits, so that no two processes of a run choose the same.
    """

    def __init__(self, scratch: str) -> None:
        self.name = int.from_bytes(os.urandom(8), "little")
        self._path = set_path(scratch, self.name)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._position = 0

    def append(self, numbers: Sequence[int], sets: Sequence[np.ndarray]) -> list[int]:
        """Write some sets; their positions."""
        pieces: list[bytes] = []
        positions: list[int] = []
        for number, shingles in zip(numbers, sets, strict=True):
            data = shingles.astype("<u4", copy=False).tobytes()
            positions.append(self._position)
            pieces += RECORD.pack(number, len(shingles), zlib.crc32(data)), data
            self._position += RECORD.size + len(data)
        view = memoryview(b"".join(pieces))
        with naming(self._path):
            while view:
                view = view[os.write(self._file, view) :]
        return positions


def crc32(array: np.ndarray) -> int:
    """The checksum of an array's bytes."""
    return zlib.crc32(array.tobytes())


def set_path(scratch: str, name: int) -> str:
    """The file of a writer."""
    return f"{scratch}/sets-{name:016x}"


class SetReader:
    """Reads what the writers of a run left."""

    def __init__(self, scratch: str) -> None:
        self._scratch = scratch
        self._mapped = functools.lru_cache(MAPPED)(self._map)

    def _map(self, name: int) -> memoryview:
        """A file in memory, as far as it is looked at."""
        with open(set_path(self._scratch, name), "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def read(self, name: int, position: int, number: int) -> np.ndarray:
        """The set of a document: uint32 [n]. ValueError: it is not there, or damaged."""
        data, begin = self._mapped(name), position + RECORD.size
        if begin > len(data):
            raise ValueError(
                f"{set_path(self._scratch, name)}: cut off at byte {len(data)}, a set begins at {position}"
            )
        its_number, count, checksum = RECORD.unpack_from(data, position)
        found = data[begin : begin + 4 * count]
        if its_number != number or len(found) < 4 * count:
            raise ValueError(f"{set_path(self._scratch, name)}: the set of document {number} is not at byte {position}")
        if zlib.crc32(found) != checksum:
            raise ValueError(
                f"{set_path(self._scratch, name)}: damaged (the checksum of the set at byte {position} does not match)"
            )
        return np.frombuffer(found, SHINGLE)


class SavedSets:
    """The sets in the home buckets of a saved index."""

    def __init__(self, directory: str, settings: dict[str, Any]) -> None:
        self._directory, self._settings = directory, settings
        self._buckets: dict[int, _SavedBucket] = {}

    def read(self, home: int, corpus: int, number: int) -> np.ndarray:
        """The set of a document of an earlier corpus: uint32 [n]."""
        if home not in self._buckets:
            path = bucket_path(self._directory, home)
            self._buckets[home] = _SavedBucket(open_bucket_file(path, self._settings, home))
        return self._buckets[home].read(corpus, number)


class _SavedBucket:
    """The sets of one bucket file; each has a checksum, which also tells when the columns that lead to it are damaged."""

    def __init__(self, file: BucketFile) -> None:
        self._file = file
        self._firsts = np.concatenate([[0], np.cumsum(file.about["sets"])])  # of each corpus, among the sets
        self._numbers, self._ends, self._checksums = (file.mapped(n) for n in ("set_number", "set_end", "set_crc32"))
        self._shingles = file.mapped("shingles")

    def read(self, corpus: int, number: int) -> np.ndarray:
        first, last = self._firsts[corpus], self._firsts[corpus + 1]
        place = int(first + np.searchsorted(self._numbers[first:last], np.uint64(number)))
        if place >= last or self._numbers[place] != number:
            raise damaged(self._file.path, f"the set of document {number} of corpus {corpus} is not there")
        found = self._shingles[int(self._ends[place - 1]) if place else 0 : int(self._ends[place])]
        if crc32(found) != self._checksums[place]:
            raise damaged(self._file.path, f"the checksum of the set of document {number} does not match")
        return found


def arrays_of_sets(old: BucketFile | None, numbers: np.ndarray, sets: Iterable[np.ndarray]) -> dict[str, Any]:
    """The arrays of a bucket file that hold sets: those of an earlier file, then those of these documents.

    Args:
        numbers: of the documents at home in the bucket, ascending.
        sets: theirs, in the same order; one at a time is in memory.
    """
    ends: list[int] = []
    checksums: list[int] = []

    def shingles() -> Iterator[np.ndarray]:
        before = np.empty(0, "<u4") if old is None else old.mapped("shingles")
        for at in range(0, max(1, len(before)), COPIED):
            yield before[at : at + COPIED]
        position = len(before)
        for found in sets:
            position += len(found)
            ends.append(position)
            checksums.append(crc32(found))
            yield found

    def column(name: str, values: Sequence[int] | np.ndarray, dtype: str) -> Iterator[np.ndarray]:
        if old is not None:
            yield old.read(name)
        yield np.array(values, dtype)

    return {
        "shingles": shingles(),  # first: the others are known when it has been written
        "set_number": column("set_number", numbers, "<u8"),
        "set_end": column("set_end", ends, "<u8"),
        "set_crc32": column("set_crc32", checksums, "<u4"),
    }
