"""One rank's failure ends all of them, within seconds, with that rank's error.

A rank that fails claims the job's failure in the key-value store that all ranks share and leaves its error where the
launcher looks for it; a thread on every other rank polls the store and ends its process, even where the main thread
waits in a collective. Ranks on one host also watch each other's processes, since a killed rank writes nothing. The
rank that failed first prints last: the others end quietly, one rank on each other host repeats the error there.

The same thread is the watchdog: a main thread that gives no sign for longer than the timeout leaves the stacks of all
its threads in the log directory, and so do the other ranks, and the job ends with the exit code of a hang.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from megatron_lite.config.exit_codes import CONFIGURATION, HANG
from megatron_lite.config.exit_codes import ERROR as FAILURE
from megatron_lite.mesh.local import RankInfo

POLL_SECONDS = 0.5
RANKS_PER_SECOND = 1024  # polls that the store has to answer
FAILURE_KEY, PROCESS_KEY, DONE_KEY = "guard/failure", "guard/process", "guard/done"
_CONSEQUENCES = ("connection", "peer", "gloo", "nccl", "socket", "timed out", "broken pipe")


class Store(Protocol):
    """The part of torch.distributed's key-value store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class RankFailure(RuntimeError):
    """What stands in the launcher's error file: an error with the rank and host it happened on."""


def process_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not). Always true where there is no /proc."""
    if not os.path.exists("/proc/self/stat"):
        return True
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

    Attributes:
        last_word_seconds: how long a rank that failed waits for the others to see it and end, before it does.
    """

    def __init__(
        self, info: RankInfo, store: Store | None, hang_seconds: float | None = None, log_dir: Path | None = None
    ) -> None:
        self.info, self._store, self.log_dir = info, store, log_dir
        self._hang_seconds = hang_seconds
        self._beat, self._phase, self._patience = time.monotonic(), "start-up", 1.0
        self._poll = max(POLL_SECONDS, info.world_size / RANKS_PER_SECOND)
        self.last_word_seconds = max(2.0, 3 * self._poll)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
        self._neighbours: dict[int, int] = {}
        self._ending = threading.Lock()  # held by the thread that ends this process; taken once and never given back

    def start(self) -> None:
        """Tell the others who we are and begin to watch."""
        if self._store is not None:
            self._store.set(f"{PROCESS_KEY}/{self.info.rank}", json.dumps([self.info.host, os.getpid()]))
        self._thread.start()

    def beat(self, phase: str, patience: float = 1.0) -> None:
        """A sign of life, with what comes next (shown when nothing comes after it).

        ``patience``: how much longer than usual that may take.
        """
        self._beat, self._phase, self._patience = time.monotonic(), phase, patience

    def stop(self) -> None:
        """The job is done: watch no longer. Every rank calls it right after the last collective."""
        self._stop.set()
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the rank that holds the store has ended already
                self._store.set(f"{DONE_KEY}/{self.info.rank}", "1")
                if self.info.rank == 0:  # which may hold the store: the others say good-bye first
                    self.wait_for([f"{DONE_KEY}/{rank}" for rank in range(self.info.world_size)], 10.0)
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def fail(self, error: BaseException, code: int = FAILURE) -> int:
        """Report this rank's failure to the launcher and all ranks, print it last, and return the exit code.

        Called in the ``except`` block that caught it.
        """
        if not self._ending.acquire(blocking=False):
            while True:  # another thread ends this process, because of what made this error too
                time.sleep(1)
        if self._store is not None:
            _ignore_signals()  # a launcher ends the others when the first rank is gone; this one has something to say
        if self._store is not None and _may_be_a_consequence(error):
            self._wait_for_cause()
        message = f"{type(error).__name__}: {error}{_advice(error)}" if code == FAILURE else str(error)
        first = self.claim(message, code, error)
        if first is not None:  # another rank failed before: ours is a consequence
            return int(first["code"])
        self._stop.set()
        text = "".join(traceback.format_exception(error)) if code == FAILURE else ""
        alone = self.info.world_size == 1 and code == CONFIGURATION
        who = "megatron-lite: error" if alone else f"rank {self.info.rank} on {self.info.host} failed"
        self._last(f"{text}{who}: {message}")
        return code

    def leave(self, message: str) -> NoReturn:
        """End this process now, and with it the job. From any thread."""
        if self._ending.acquire(blocking=False) and self.claim(message, FAILURE) is None:
            print(f"rank {self.info.rank} on {self.info.host}: {message}", file=sys.stderr, flush=True)
        os._exit(FAILURE)

    # ---- inside

    def _last(self, text: str) -> None:
        """Print the job's last words: let the others end first."""
        if self._store is not None:
            time.sleep(self.last_word_seconds)
        print(text, file=sys.stderr, flush=True)

    def claim(self, message: str, code: int, cause: BaseException | None = None) -> dict[str, Any] | None:
        """Make this the job's failure. Returns the earlier one if there is one.

        Either way the error file of this rank then holds the job's failure, since a launcher shows the file of the
        rank that it saw end first.
        """
        failure: dict[str, Any] = {"rank": self.info.rank, "host": self.info.host, "error": message, "code": code}
        first = None
        if self._store is not None:
            mine = json.dumps(failure)
            with contextlib.suppress(RuntimeError):  # the store is gone, and with it whoever could have been first
                now = self._store.compare_set(FAILURE_KEY, "", mine).decode()
                if now != mine:
                    first = failure = json.loads(now)
        if failure["code"] == CONFIGURATION:  # torchrun repeats the file of every rank after the one that was printed
            failure = failure | {"error": f"{failure['error'].splitlines()[0].rstrip(':')} (printed in full above)"}
        _write_error_file(failure, cause if first is None else None)
        return first

    def wait_for(self, keys: list[str], seconds: float) -> bool:
        """Wait until all keys are there. Raises what the store raises when it is gone."""
        assert self._store is not None
        end = time.monotonic() + seconds
        while not self._store.check(keys):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def _wait_for_cause(self) -> None:
        """A connection that broke is what the others see when a rank fails or is killed: let its own error be first."""
        assert self._store is not None
        try:
            end = time.monotonic() + 2 * self._poll + 0.5
            while time.monotonic() < end and not self._store.check([FAILURE_KEY]):
                dead = self._dead_neighbour(self._store)
                if dead is not None:
                    self._report_dead(*dead)
                time.sleep(0.05)
        except RuntimeError as error:
            self._report_no_store(error)

    def _watch(self) -> None:
        while not self._stop.wait(self._poll):
            if self._ending.locked():
                return
            if self._hang_seconds is not None and time.monotonic() - self._beat > self._hang_seconds * self._patience:
                self._hang()
            if self._store is None:
                continue
            try:
                self._look_around(self._store)
            except RuntimeError as error:  # what the store raises when its host is gone
                if not self._stop.is_set() and self._ending.acquire(blocking=False):
                    self._report_no_store(error)

    def _look_around(self, store: Store) -> None:
        if store.check([FAILURE_KEY]):
            failure = json.loads(store.get(FAILURE_KEY))
            if not self._ending.acquire(blocking=False):
                return
            if failure["code"] == HANG:
                self._write_stacks(f"rank {failure['rank']} hangs; this one is in: {self._phase}")
            if failure["host"] != self.info.host and self.info.local_rank == 0:
                print(f"rank {failure['rank']} on {failure['host']} failed: {failure['error']}", file=sys.stderr, flush=True)
            _write_error_file(failure)
            if self.info.rank == 0:  # which may hold the store: the others have to read it
                time.sleep(2 * self._poll)
            os._exit(failure["code"])
        dead = self._dead_neighbour(store)
        if dead is not None and self._ending.acquire(blocking=False):
            self._report_dead(*dead)

    def _dead_neighbour(self, store: Store) -> tuple[int, int] | None:
        """(rank, process) of a rank on this host that is gone without having said why."""
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
            return rank, pid
        return None

    def _report_dead(self, rank: int, pid: int) -> NoReturn:
        message = f"rank {rank} on {self.info.host} (process {pid}) died without a word: it was killed, perhaps for memory"
        if self.claim(message, FAILURE) is None:
            self._last(message)
        os._exit(FAILURE)

    def _report_no_store(self, error: RuntimeError) -> NoReturn:
        message = f"the rank or launcher that holds the job's store is gone ({str(error).splitlines()[0]})"
        _write_error_file({"rank": self.info.rank, "host": self.info.host, "error": message})
        print(f"rank {self.info.rank} on {self.info.host}: {message}", file=sys.stderr, flush=True)
        os._exit(FAILURE)

    def _hang(self) -> None:
        if not self._ending.acquire(blocking=False):
            return
        message = f"no progress for {time.monotonic() - self._beat:.0f} s in: {self._phase}"
        path = self._write_stacks(message)
        if path is not None:
            message += f"; stacks are in {path}"
        if self.claim(message, HANG) is None:
            self._last(f"rank {self.info.rank} on {self.info.host} hangs: {message}")
        os._exit(HANG)

    def _write_stacks(self, message: str) -> Path | None:
        """Leave what every thread of this process is doing in the log directory, else on stderr."""
        if self.log_dir is None:
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            return None
        path = self.log_dir / f"hang-rank{self.info.rank:05d}.txt"
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            with open(path, "w", encoding="utf-8") as f:
                f.write(message + "\n")
                f.flush()  # what follows writes to the descriptor
                faulthandler.dump_traceback(f, all_threads=True)
        except OSError:
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            return None
        return path


def fail_early(info: RankInfo, error: Exception, env: Mapping[str, str], seconds: float = 10.0) -> int:
    """End the job because of an error before this rank has joined it; returns the exit code.

    What is wrong with a configuration is usually found by all ranks alike: rank 0 prints it at once and the others keep
    quiet, unless rank 0 turns out to have nothing to complain about. Any other error is that of one rank.

    Args:
        info: this rank.
        error: what happened.
        env: with the address of the job's store.
        seconds: how long to try to reach the store.
    """
    configuration = isinstance(error, ValueError)
    code = CONFIGURATION if configuration else FAILURE
    text = f"megatron-lite: error: {error}"
    if info.world_size == 1:
        if not configuration:
            raise error
        print(text, file=sys.stderr, flush=True)
        return code
    alike = configuration and info.rank == 0
    if alike:
        print(text, file=sys.stderr, flush=True)
    store = _store_within(info, env, seconds)
    if configuration and store is None:
        return code
    guard = Guard(info, store)
    if not configuration:
        return guard.fail(error, code)
    _ignore_signals()
    if alike:
        guard.claim(str(error), code)
        time.sleep(guard.last_word_seconds)
        return code
    with contextlib.suppress(RuntimeError):
        guard.wait_for([FAILURE_KEY], 4.0)
    return guard.fail(error, code)


def _store_within(info: RankInfo, env: Mapping[str, str], seconds: float) -> Store | None:
    """The job's store, or None where it cannot be reached in time."""
    from megatron_lite.mesh.local import meet

    try:
        return meet(info, seconds / 60.0, env)
    except ValueError:
        return None


def _may_be_a_consequence(error: BaseException) -> bool:
    """Whether an error may only say that another rank is gone."""
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(word in text for word in _CONSEQUENCES)


def _advice(error: BaseException) -> str:
    """What to do about an error that has a remedy."""
    short = isinstance(error, MemoryError) or any(text in str(error) for text in ("can't allocate memory", "out of memory"))
    if not short:
        return ""
    return (
        ". This rank's memory is full: less is needed with a smaller --micro-batch-size, --recompute-granularity full, "
        "--use-distributed-optimizer, or a higher --tensor-model-parallel-size or --pipeline-model-parallel-size."
    )


def _ignore_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


def _write_error_file(failure: Mapping[str, Any], cause: BaseException | None = None) -> None:
    """Leave the job's failure where torchrun looks for it (``@record``), with the traceback of its cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    if failure.get("code") == CONFIGURATION:  # as `record` writes it, without a traceback: it is nobody's bug
        text = {"message": failure["error"], "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": text}))
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise RankFailure(f"rank {failure['rank']} on {failure['host']}: {failure['error']}") from cause
    except RankFailure as error:
        get_error_handler().record_exception(error)
