"""A file under a temporary name that becomes a complete file or nothing.

It is written as ``NAME.tmp`` and renamed at the end. The name is fixed and the file is locked while it is open: what
a killed process left is taken over by the next one, and two processes that write the same file notice each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np


class LockedFile:
    """``NAME.tmp``, locked while it is open; errors name it."""

    def __init__(self, name: str) -> None:
        self.path = Path(name + ".tmp")
        self._file: IO[bytes] | None = None

    def open(self) -> None:
        """Create it, empty; FileExistsError when another process is writing it."""
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
        file.truncate(0)
        self._file = file

    def write(self, data: bytes | bytearray) -> None:
        """Append."""
        assert self._file is not None
        view = memoryview(data)
        try:
            while view:
                written = self._file.write(view)
                view = view[written:]
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} (while writing {self.path})") from None
        finally:
            view.release()

    def write_at(self, offset: int, data: bytes) -> None:
        """Write over existing bytes (the file is opened for appending, so through a descriptor of its own)."""
        with open(self.path, "r+b", buffering=0) as file:
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
        os.fsync(self._file.fileno())

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
