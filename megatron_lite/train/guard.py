"""One rank's failure ends all of them, within seconds, with that rank's error.

A rank that fails writes its error where the launcher looks for it and into the job's key-value store; a thread on every
other rank polls the store and ends its process, even where the main thread waits in a collective. Ranks on one host also
watch each other's processes, since a killed rank writes nothing. The failing rank prints last: the others end quietly,
one rank per other host repeats the error there.

The same thread is the watchdog: a main thread that gives no sign for longer than the timeout leaves the stacks of all
its threads in the log directory and ends the job with the exit code of a hang.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Protocol

from megatron_lite.config.exit_codes import ERROR as FAILURE
from megatron_lite.config.exit_codes import HANG
from megatron_lite.mesh.local import RankInfo

POLL_SECONDS = 0.5
LAST_WORD_SECONDS = 2.0  # the failing rank lets the others see its error and end before it prints
FAILURE_KEY, PROCESS_KEY, DONE_KEY = "guard/failure", "guard/process", "guard/done"


class Store(Protocol):
    """The part of torch.distributed's key-value store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


def process_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rsplit(b")", 1)[1].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


class Guard:
    """Watches over one rank; see the module's text.

    Args:
        info: this rank.
        store: the job's store, or None for a single rank.
        hang_seconds: how long the main thread may be silent between two calls of :meth:`beat`; None: for ever.
        log_dir: where stacks go when it hangs.
    """

    def __init__(self, info: RankInfo, store: Store | None, hang_seconds: float | None, log_dir: Path | None) -> None:
        self.info, self._store, self.log_dir = info, store, log_dir
        self._hang_seconds = hang_seconds
        self._beat, self._phase = time.monotonic(), "start-up"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
        self._neighbours: dict[int, int] = {}
        self._failing = False

    def start(self) -> None:
        """Tell the others who we are and begin to watch."""
        if self._store is not None:
            self._store.set(f"{PROCESS_KEY}/{self.info.rank}", json.dumps([self.info.host, os.getpid()]))
        self._thread.start()

    def beat(self, phase: str) -> None:
        """A sign of life, with what comes next (shown when nothing comes after it)."""
        self._beat, self._phase = time.monotonic(), phase

    def stop(self) -> None:
        """The job is done: watch no longer. Every rank calls it after the last collective."""
        if self._store is not None:
            try:
                self._store.set(f"{DONE_KEY}/{self.info.rank}", "1")
            except RuntimeError:
                pass  # the rank that holds the store has ended already
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def fail(self, error: BaseException, code: int = FAILURE) -> int:
        """Report this rank's failure to the launcher and all ranks, print it last, and return the exit code."""
        self._failing = True
        text = "".join(traceback.format_exception(error)) if code == FAILURE else f"{error}\n"
        _write_error_file(error)
        first = self._claim(f"{type(error).__name__}: {error}" if code == FAILURE else str(error), code)
        if first is not None:  # another rank failed before: ours is a consequence
            return code
        self._stop.set()
        if self._store is not None:
            time.sleep(LAST_WORD_SECONDS)
        print(f"{text}rank {self.info.rank} on {self.info.host} failed: {error}", file=sys.stderr, flush=True)
        return code

    def _claim(self, message: str, code: int) -> dict[str, object] | None:
        """Make this the job's failure. Returns the earlier one if there is one."""
        if self._store is None:
            return None
        mine = json.dumps({"rank": self.info.rank, "host": self.info.host, "error": message, "code": code})
        try:
            now = self._store.compare_set(FAILURE_KEY, "", mine)
        except RuntimeError:
            return None
        if now.decode() == mine:
            return None
        earlier: dict[str, object] = json.loads(now)
        return earlier

    def _watch(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            if self._hang_seconds is not None and time.monotonic() - self._beat > self._hang_seconds:
                self._hang()
            if self._store is None:
                continue
            try:
                self._look_around(self._store)
            except RuntimeError as e:  # what the store raises when its host is gone
                if not self._stop.is_set() and not self._failing:
                    print(
                        f"rank {self.info.rank} on {self.info.host}: the rank or launcher that holds the job's store is gone ({e})",
                        file=sys.stderr,
                        flush=True,
                    )
                    os._exit(FAILURE)

    def _look_around(self, store: Store) -> None:
        if store.check([FAILURE_KEY]):
            failure = json.loads(store.get(FAILURE_KEY))
            if self._failing or failure["rank"] == self.info.rank:
                return
            if failure["host"] != self.info.host and self.info.local_rank == 0:
                print(f"rank {failure['rank']} on {failure['host']} failed: {failure['error']}", file=sys.stderr, flush=True)
            os._exit(failure["code"])
        first = self.info.rank - self.info.local_rank
        for rank in range(first, first + self.info.local_world_size):
            if rank == self.info.rank:
                continue
            if rank not in self._neighbours:
                key = f"{PROCESS_KEY}/{rank}"
                if not store.check([key]):
                    continue
                host, pid = json.loads(store.get(key))
                self._neighbours[rank] = pid if host == self.info.host else 0
            pid = self._neighbours[rank]
            if not pid or process_alive(pid) or store.check([f"{DONE_KEY}/{rank}"]) or store.check([FAILURE_KEY]):
                continue
            message = f"rank {rank} on {self.info.host} (process {pid}) died without a word: it was killed, perhaps for memory"
            if self._claim(message, FAILURE) is None:
                time.sleep(LAST_WORD_SECONDS)
                print(message, file=sys.stderr, flush=True)
            os._exit(FAILURE)

    def _hang(self) -> None:
        silent = time.monotonic() - self._beat
        message = f"no progress for {silent:.0f} s in: {self._phase}"
        where = sys.stderr
        if self.log_dir is not None:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            path = self.log_dir / f"hang-rank{self.info.rank:05d}.txt"
            with open(path, "w", encoding="utf-8") as f:
                f.write(message + "\n")
                faulthandler.dump_traceback(f, all_threads=True)
            message += f"; stacks are in {path}"
        else:
            faulthandler.dump_traceback(where, all_threads=True)
        _write_error_file(TimeoutError(message))
        if self._claim(message, HANG) is None and self._store is not None:
            time.sleep(LAST_WORD_SECONDS)
        print(f"rank {self.info.rank} on {self.info.host} hangs: {message}", file=where, flush=True)
        os._exit(HANG)


def _write_error_file(error: BaseException) -> None:
    """Leave the error where torchrun looks for it (``@record``)."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    handler.record_exception(error)
