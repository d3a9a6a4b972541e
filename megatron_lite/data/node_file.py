"""Files that one process of a node makes and the others find.

Whoever gets the lock looks whether the file is there and makes it if not; the others wait for the lock and then find
it. The lock is the kernel's (``flock``): it ends with its holder, so a maker that fails or is killed keeps nobody
waiting, the next one tries for itself and fails with the same error. No collective is involved, and a directory may be
local to a node or shared by all. On a shared one whose locks do not reach other nodes each node makes the file once;
since a file is renamed into place complete, that is harmless.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from megatron_lite.data.locked_file import naming

_POLL_SECONDS = 0.1


def _nothing() -> None:
    pass


@contextlib.contextmanager
def node_lock(path: Path, waiting: Callable[[], None] = _nothing) -> Iterator[IO[bytes]]:
    """Hold the lock of ``path`` (a file in ``.locks`` beside it, which stays), and give it; its directory is made if need be.

    Args:
        path: what is guarded; it need not exist.
        waiting: called about ten times a second while another process has it; may raise to give up.
    """
    folder = path.parent / ".locks"
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process has just removed the directory
            file = open(folder / path.name, "a+b", buffering=0)
            break
    with file:  # the lock ends with it
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(_POLL_SECONDS)
            except OSError:
                break  # a file system without locks: the file may be made twice
        yield file


@contextlib.contextmanager
def new_file(path: Path, *, sync: bool = True) -> Iterator[IO[bytes]]:
    """A file to write that becomes ``path`` when the block ends, and nothing when it raises.

    What writers of this host that are gone have left beside it is removed.
    """
    host = socket.gethostname()
    for left in path.parent.glob(f"{path.name}.{host}.*.tmp"):
        if not _alive(left.name.split(".")[-2].partition("-")[0]):
            left.unlink(missing_ok=True)
    temporary = path.with_name(f"{path.name}.{host}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with naming(temporary), open(temporary, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _alive(process: str) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
