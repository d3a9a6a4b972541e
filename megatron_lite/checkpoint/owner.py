"""One run at a time writes to a directory of checkpoints.

Two runs with the same ``--save`` (a job that was submitted twice, say) would replace each other's checkpoints and remove
what the other has half written. Each therefore holds a lock on ``.lock`` in the directory from its start on. The lock
belongs to the open file: it falls with the process, however that ends. The file itself stays, and says who was the last.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from megatron_lite.checkpoint.together import everyone
from megatron_lite.mesh.collectives import Axis

LOCK = ".lock"
PATIENCE = 10.0  # seconds in which a run that is just ending may let go


class Owner:
    """The right of this process to write to ``root``, where the file system has locks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._file: IO[bytes] | None = None

    def take(self) -> None:
        """Create ``root`` and lock it; ValueError names the run that still holds it after ``PATIENCE``.

        Other errors are let pass: a file system without locks protects nobody, and a directory that cannot be written
        is the first save's to report.
        """
        with contextlib.suppress(OSError):
            self.root.mkdir(parents=True, exist_ok=True)
            self._file = open(self.root / LOCK, "a+b", buffering=0)
            if not self._locked(time.monotonic() + PATIENCE):
                self._file.seek(0)
                holder = self._file.read(1000).decode(errors="replace").strip()
                self.release()
                raise ValueError(
                    f"--save {self.root} is being written by another run ({holder or 'it has not said which'}): end it, "
                    "or give another --save"
                )
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())

    def _locked(self, until: float) -> bool:
        """Try until then."""
        assert self._file is not None
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= until:
                    return False
            time.sleep(0.1)

    def release(self) -> None:
        """Let go; does nothing where nothing is held."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)  # closing is not enough where a child has the open file too
            self._file.close()
            self._file = None


def take_together(root: Path, world: Axis) -> Callable[[], None]:
    """Rank 0 takes ``root`` for the run; returns what lets go of it. Collective: ValueError on every rank where it is taken."""
    owner = Owner(root)
    everyone(world, owner.take, only=0, error=_plain)
    return owner.release


def _plain(text: str) -> ValueError:
    """A message for people: without the rank and the class of the error."""
    return ValueError(text.removeprefix("rank 0: ").removeprefix("ValueError: "))
