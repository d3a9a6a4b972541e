"""A file under a temporary name that becomes a complete file or nothing.

It is written as ``NAME.tmp`` and renamed at the end. The name is fixed and the file is locked while it is open: what
a killed process left is taken over by the next one, and two processes that write the same file notice each other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@contextlib.contextmanager
def naming(what: object) -> Iterator[None]:
    """An error of the disk in here names what is written, which the system leaves out when a file is open already."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _DISK:
            raise OSError(error.errno, error.strerror, str(what)) from None
        raise


class LockedFile:
    """``NAME.tmp``, locked while it is open; errors name it."""

    def __init__(self, name: str) -> None:
        self.path = Path(name + ".tmp")
        self._file: IO[bytes] | None = None

    def open(self, keep: int = 0) -> None:
        """Create it, or keep the first bytes of what is there.

        Raises:
            FileExistsError: another process is writing it.
            ValueError: fewer bytes are there than are to be kept.
        """
        file = open(self.path, "a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise FileExistsError(f"{self.path} is being written by another process") from None
        except OSError:
            pass  # a file system without locks
        try:
            same = os.fstat(file.fileno()).st_ino == os.stat(self.path).st_ino
        except FileNotFoundError:
            same = False
        if not same:  # its writer published or removed it between our opening and our lock
            file.close()
            raise FileExistsError(f"{self.path} was being written by another process")
        if os.fstat(file.fileno()).st_size < keep:
            file.close()
            raise ValueError(
                f"{self.path} has fewer than the {keep} bytes that were written to it: leave --resume out to start anew"
            )
        file.truncate(keep)
        self._file = file

    def write(self, data: bytes | bytearray) -> None:
        """Append."""
        assert self._file is not None
        view = memoryview(data)
        try:
            with naming(self.path):
                while view:
                    written = self._file.write(view)
                    view = view[written:]
        finally:
            view.release()

    def write_at(self, offset: int, data: bytes) -> None:
        """Write over existing bytes (the file is opened for appending, so through a descriptor of its own)."""
        with naming(self.path), open(self.path, "r+b", buffering=0) as file:
            file.seek(offset)
            file.write(data)

    def read(self, start: int, stop: int, dtype: np.dtype, chunk: int = 1 << 16) -> Iterator[np.ndarray]:
        """The bytes [start, stop) as arrays of at most ``chunk`` items."""
        assert self._file is not None
        step = chunk * dtype.itemsize
        for at in range(start, stop, step):
            data = os.pread(self._file.fileno(), min(step, stop - at), at)
            assert len(data) == min(step, stop - at)
            yield np.frombuffer(data, dtype=dtype)

    def sync(self) -> None:
        """Flush to the disk."""
        assert self._file is not None
        with naming(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close and leave it; it can be opened again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def publish(self, path: Path) -> None:
        """Rename to ``path`` and close."""
        assert self._file is not None
        os.replace(self.path, path)
        self._file.close()
        self._file = None

    def remove(self) -> None:
        """Close and delete; does nothing to a file that was not opened or has been published."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


class HashedAppender:
    """Appends to a file and hashes what it appends, in a thread of its own, while the caller makes the next piece.

    What has been given is flushed to the disk as it grows, so that little is left to flush at the end. An error of the disk
    is raised by a later call. At most ``_WAITING`` pieces wait.
    """

    _WAITING = 8
    _UNFLUSHED = 1 << 26  # bytes

    def __init__(self, file: LockedFile) -> None:
        self._file = file
        self._sha = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        self._pending: deque[Future[None]] = deque()
        self._unflushed = 0
        self._closed = False

    def write(self, data: bytes | bytearray) -> None:
        """Append; the caller does not touch the data again."""
        while len(self._pending) >= self._WAITING or (self._pending and self._pending[0].done()):
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._append, data))

    def go_on(self, size: int, sha256: str) -> None:
        """Hash the first bytes of the file, which an earlier process wrote; a later call raises ValueError if it is not them."""
        self._pending.append(self._thread.submit(self._hash_again, size, sha256))

    def digest(self) -> str:
        """The sha256 of everything, once it has been written."""
        while self._pending:
            self._pending.popleft().result()
        return self._sha.hexdigest()

    def close(self) -> None:
        """End the thread; what it has in hand is written first."""
        self._closed = True
        self._thread.shutdown(cancel_futures=True)
        self._pending.clear()

    def _hash_again(self, size: int, sha256: str) -> None:
        for piece in self._file.read(0, size, np.dtype("u1"), 1 << 22):
            self._sha.update(piece.data)
            if self._closed:
                return
        if self._sha.hexdigest() != sha256:
            raise ValueError(f"{self._file.path} does not hold what was written to it: leave --resume out to start anew")

    def _append(self, data: bytes | bytearray) -> None:
        self._file.write(data)
        self._sha.update(data)
        self._unflushed += len(data)
        if self._unflushed >= self._UNFLUSHED:
            self._file.sync()
            self._unflushed = 0


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait: an exception between two instructions would leave a file that nobody knows of.

    What came meanwhile is handled at the end. Other threads than the main one are never interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # set by something that is not Python
                signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def sync_directory(path: Path) -> None:
    """Flush a directory's entries (renames) to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
