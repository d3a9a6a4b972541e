"""Arrays of a sample order kept in files, so that a run's next start maps them instead of computing them.

A file is found by a digest of everything that its arrays follow from, is written by one process of a node under another
name and renamed, and is compared with a checksum when it is opened. What is not as it should be (cut off, damaged, of
another format, of other arrays under this name) is made anew and said. Nothing in it can execute: 8 bytes of magic, the
length of a JSON header as uint32, the header (the key, and each array's dtype, shape, place and CRC-32), the CRC-32 of
all that, and the arrays, each at a multiple of 64 bytes.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron_lite.data.access import map_file
from megatron_lite.data.node_file import new_file, node_lock

MAGIC = b"MLORDER1"
_LENGTH, _CRC = struct.Struct("<I"), struct.Struct("<I")
_ALIGN = 64
_SAID_FROM = 1.0  # seconds that computing has taken
Arrays = dict[str, np.ndarray]


class _Unfit(Exception):
    """A file that is not what was asked for; the message says why."""


def cached_arrays(
    path: Path, key: Mapping[str, Any], build: Callable[[], Arrays], tell: Callable[[str], None] = lambda text: None
) -> Arrays:
    """The arrays that follow from ``key``: mapped, read-only, from a file, which is made where it is missing or unfit.

    Args:
        path: beginning of the file's name; a digest of ``key`` and ``.order`` are added.
        key: what the arrays follow from, as JSON can hold it.
        build: computes them.
        tell: gets a line where a file had to be made anew.

    Raises:
        OSError: the directory cannot be written.
    """
    text = json.dumps(key, sort_keys=True)
    path = path.with_name(f"{path.name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.order")
    try:
        return read_arrays(path, text)
    except (FileNotFoundError, _Unfit):
        pass
    with node_lock(path):
        try:
            return read_arrays(path, text)  # another process was faster
        except FileNotFoundError:
            pass
        except _Unfit as error:
            tell(f"{path} {error}: built again")
        began = time.monotonic()
        arrays = build()
        if (seconds := time.monotonic() - began) > _SAID_FROM:
            tell(f"the order of {path.name} was computed in {seconds:.1f} s; later starts find it")
        with new_file(path, sync=False) as file:  # its checksums tell what a power cut leaves
            _write(file, text, arrays)
        del arrays
        try:
            return read_arrays(path, text)  # not those in memory: the mapped ones are shared by the ranks of the node
        except _Unfit as error:
            raise OSError(f"{path} {error}, just after it was written") from error


def read_arrays(path: Path, key: str) -> Arrays:
    """The arrays of a file; FileNotFoundError, or _Unfit with the reason."""
    data = map_file(path)
    if data[: len(MAGIC)] != MAGIC or len(data) < len(MAGIC) + _LENGTH.size:
        raise _Unfit("is not a file of sample orders")
    end = len(MAGIC) + _LENGTH.size + _LENGTH.unpack_from(data, len(MAGIC))[0]
    if len(data) < end + _CRC.size or zlib.crc32(data[:end]) != _CRC.unpack_from(data, end)[0]:
        raise _Unfit("is damaged")
    header = json.loads(data[len(MAGIC) + _LENGTH.size : end])
    if header["key"] != key:
        raise _Unfit("belongs to other data")
    found: Arrays = {}
    view = memoryview(data)
    for name, about in header["arrays"].items():
        dtype, shape, start = np.dtype(about["dtype"]), tuple(about["shape"]), about["start"]
        stop = start + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if stop > len(data):
            raise _Unfit(f"is cut off: it has {len(data)} bytes, {stop} are needed")
        if zlib.crc32(view[start:stop]) != about["crc"]:
            raise _Unfit(f"is damaged (its array {name})")
        found[name] = np.frombuffer(view[start:stop], dtype).reshape(shape)
    return found


def _write(file: IO[bytes], key: str, arrays: Arrays) -> None:
    about: dict[str, dict[str, Any]] = {
        name: {"dtype": a.dtype.str, "shape": a.shape, "start": 10**15, "crc": zlib.crc32(np.ascontiguousarray(a).data)}
        for name, a in arrays.items()
    }
    room = len(json.dumps({"key": key, "arrays": about}))  # with starts as long as they can get
    at = len(MAGIC) + _LENGTH.size + room + _CRC.size
    for name, array in arrays.items():
        at = -(-at // _ALIGN) * _ALIGN
        about[name]["start"] = at
        at += array.nbytes
    header = json.dumps({"key": key, "arrays": about}).encode().ljust(room)
    head = MAGIC + _LENGTH.pack(len(header)) + header
    file.write(head + _CRC.pack(zlib.crc32(head)))
    for name, array in arrays.items():
        file.write(bytes(int(about[name]["start"]) - file.tell()))
        file.write(np.ascontiguousarray(array).data)
