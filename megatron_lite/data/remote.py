"""Token files in a store (S3 and its like, through ``fsspec``), with a bounded cache of their blocks on the node.

``.bin`` is read in blocks of 1 MiB. A block is a file under the cache directory, written under another name and renamed,
with a CRC-32 behind each 64 KiB of it, so that what a row touches is checked and no more. The directory may be used by
any number of ranks and runs: a lock per stripe of blocks has each block fetched once a node, and when the blocks take
more than their bound, the ones that were not used for longest (to the hour) are removed (each process looks now and then, so
that more than eight of them can be above it for a while). A reader that finds a block
gone or damaged fetches it again. ``.idx`` is copied whole, since the search for documents jumps in it.

A file is known by its address and what the store says of it (size, date, ETag): one that is replaced has new blocks. One that
is replaced while a run reads it ends the run: the store is asked after every fetch, and no block of another file is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

from megatron_lite.data.node_file import new_file, node_lock

BLOCK = 1 << 20
_PIECE = 1 << 16  # bytes under one checksum
_CRC = struct.Struct("<I")
_STRIPES = 64
_TRIES = 3
_NOT_THERE = (403, 404, 410)  # answers of HTTP; 403 is that of stores whose lists are closed
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "http": "aiohttp", "https": "aiohttp"}
_TOUCH_SECONDS = 3600
_KEEP = 7 / 8  # of the bound, when blocks are removed
_STATE = ("etag", "lastmodified", "last_modified", "last-modified", "mtime", "ino")  # of a file, in lower case; not when it was read
_CHECK_EVERY = 64  # a process looks at the size of the cache when it has added a 64th of the bound: eight add what is not kept


def is_remote(prefix: str) -> bool:
    """Whether a prefix is an address in a store."""
    return "://" in prefix


class RemoteFile:
    """One file of a store.

    Attributes:
        name: its address.
        size: bytes.
        key: 32 hexadecimal digits that change when the file does.
    """

    def __init__(self, name: str, filesystem: Any, path: str) -> None:
        self.name, self._filesystem, self._path = name, filesystem, path
        self.size, self.key = self._look()

    @classmethod
    def find(cls, name: str) -> RemoteFile | None:
        """Look a file up; None where there is none.

        Raises:
            ValueError: unknown scheme, a missing package (named), or the store refuses or does not answer.
        """
        try:
            from fsspec.core import url_to_fs

            filesystem, path = url_to_fs(name)
            reason: BaseException | None = None
            for attempt in range(_TRIES):
                time.sleep(attempt)
                try:
                    return cls(name, filesystem, path)
                except FileNotFoundError as error:
                    reason = error.__cause__  # fsspec makes this error of whatever happens over HTTP
                    if not name.startswith("http") or getattr(reason, "status", None) in _NOT_THERE:
                        return None
            raise ConnectionError(f"{_TRIES} times; the last: {type(reason).__name__}: {reason}")
        except ImportError as error:
            scheme = name.split("://")[0]
            package = _PACKAGES.get(scheme)
            remedy = f"pip install {package}" if package else "install it"
            raise ValueError(f"{name}: {scheme}:// needs a package that is not installed ({error}): {remedy}") from error
        except Exception as error:  # each store has its own
            raise ValueError(f"{name} cannot be opened: {type(error).__name__}: {error}") from error

    def _look(self) -> tuple[int, str]:
        """Size and key of what is there now."""
        self._filesystem.invalidate_cache(self._path)
        info = self._filesystem.info(self._path)
        state = {name: str(info[name]) for name in sorted(info) if name.lower() in _STATE}
        known = state or self._filesystem.ukey(self._path)
        return int(info["size"]), hashlib.sha256(f"{self.name}\0{info['size']}\0{known}".encode()).hexdigest()[:32]

    def fetch(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop); tried three times.

        Raises:
            ConnectionError: the store does not give them.
            ValueError: it has another file under the name now.
        """
        stop = min(stop, self.size)
        reason = ""
        for attempt in range(_TRIES):
            time.sleep(attempt)
            try:
                data = bytes(self._filesystem.cat_file(self._path, start=start, end=stop))
                key = self._look()[1]
            except Exception as error:  # noqa: BLE001  each store has its own
                reason = f"{type(error).__name__}: {error}"
                continue
            if key != self.key:
                raise ValueError(f"{self.name} has changed in the store since it was opened: its tokens would be mixed; start again")
            if len(data) == stop - start:
                return data
            reason = f"{len(data)} bytes came"
        raise ConnectionError(f"{self.name}: bytes {start} to {stop} could not be read, {_TRIES} times; the last: {reason}")


def local_index(index: RemoteFile, cache: Path, sha256: str | None) -> Path:
    """A copy of a remote ``.idx`` in the cache, made once a node; ValueError where it is not what ``.meta.json`` says."""
    path = cache / "index" / f"{index.key}.idx"
    if path.is_file() and path.stat().st_size == index.size:
        return path
    with node_lock(path):
        if path.is_file() and path.stat().st_size == index.size:
            return path
        sha = hashlib.sha256()
        with new_file(path) as file:
            for start in range(0, index.size, 8 * BLOCK):
                data = index.fetch(start, start + 8 * BLOCK)
                sha.update(data)
                file.write(data)
            if sha256 not in (None, sha.hexdigest()):
                raise ValueError(f"{index.name}: its sha256 is not the one in .meta.json: it is damaged, or of another dataset")
    return path


class BlockCache:
    """Blocks of remote files in a directory.

    Args:
        directory: of all blocks; shared by whoever likes.
        limit: bytes that they may take.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory, self.limit = directory, limit
        self._added = 0

    def open(self, remote: RemoteFile) -> CachedFile:
        """A file that is read through the cache."""
        return CachedFile(self, remote)

    def added(self, size: int) -> None:
        """Count what a process has written, and make room now and then."""
        self._added += size
        if self._added * _CHECK_EVERY >= self.limit:
            self._added = 0
            with node_lock(self.directory / "trim"):
                self.trim()

    def trim(self) -> None:
        """Remove the blocks that were not used for longest until 7/8 of the bound are left."""
        found = []
        for path in self.directory.glob("*/*"):
            with contextlib.suppress(OSError):
                if path.is_file() and path.parent.name != ".locks":  # with what killed writers have left
                    state = path.stat()
                    found.append((state.st_mtime, state.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.limit * _KEEP:
                break
            path.unlink(missing_ok=True)
            total -= size


class CachedFile:
    """A remote file read through a :class:`BlockCache`."""

    def __init__(self, cache: BlockCache, remote: RemoteFile) -> None:
        self._cache, self._remote, self.size = cache, remote, remote.size
        self._directory = cache.directory / remote.key

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop); raises what :meth:`RemoteFile.fetch` does."""
        if stop > self.size:
            raise ValueError(f"{self._remote.name} ends at byte {self.size}, before {stop}")
        parts = []
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            base = number * BLOCK
            parts.append(self._from_block(number, max(start - base, 0), min(stop - base, BLOCK)))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Nothing is held open."""

    def _from_block(self, number: int, start: int, stop: int) -> bytes:
        path = self._directory / f"{number:08d}"
        size = min(BLOCK, self.size - number * BLOCK)
        data = _read_block(path, size, start, stop)
        if data is not None:
            return data
        with node_lock(self._directory / f"stripe{number % _STRIPES}"):
            data = _read_block(path, size, start, stop)  # another rank may have been faster
            if data is not None:
                return data
            block = self._remote.fetch(number * BLOCK, number * BLOCK + size)
            try:
                with new_file(path, sync=False) as file:
                    for at in range(0, size, _PIECE):
                        piece = block[at : at + _PIECE]
                        file.write(piece + _CRC.pack(zlib.crc32(piece)))
            except OSError as error:  # a full disk makes a run slow; it need not end it
                warnings.warn(f"blocks of {self._remote.name} cannot be kept in {self._directory}: {error}", stacklevel=2)
        self._cache.added(size)
        return block[start:stop]


def _read_block(path: Path, size: int, start: int, stop: int) -> bytes | None:
    """Bytes [start, stop) of a cached block of ``size`` bytes; None where it is not there or damaged."""
    pieces = -(-size // _PIECE)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        state = os.fstat(descriptor)
        if state.st_size != size + pieces * _CRC.size:
            return None
        first, last = start // _PIECE, -(-stop // _PIECE)
        stride = _PIECE + _CRC.size
        stored = os.pread(descriptor, (last - first) * stride, first * stride)
        if time.time() - state.st_mtime > _TOUCH_SECONDS:
            os.utime(descriptor)
    finally:
        os.close(descriptor)
    found = []
    for at in range(0, len(stored), stride):
        piece = stored[at : at + stride]
        if _CRC.unpack(piece[-_CRC.size :])[0] != zlib.crc32(piece[: -_CRC.size]):
            return None
        found.append(piece[: -_CRC.size])
    data = found[0] if len(found) == 1 else b"".join(found)
    return data[start - first * _PIECE : stop - first * _PIECE]
