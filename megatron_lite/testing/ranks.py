"""A pool of ranks for tests: real processes, a real gloo group, started once.

Importing torch takes seconds, so one process does it and forks the ranks, which are kept for the whole test run.
``run_ranks(n, function, *args)`` gives the function to ranks 0..n-1, each with a fresh default group of n over a
file (no port is taken), one thread and a fixed torch seed, and returns what each returned. If a rank raises, the test
fails with the first traceback and the values at its last line; if one hangs, the error shows where every rank stands,
the pool is killed and the next job starts a new one.

Functions and arguments reach the ranks through multiprocessing's pipes: the function is found by its module and
name, so it is defined at the top level of its file.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

MOST_RANKS = 8
_GRACE = 5.0  # seconds that the others get to notice a failed rank, before the pool is killed


class RankFailed(AssertionError):
    """A rank raised; the text has its traceback."""


class RankHang(AssertionError):
    """A rank did not finish in time; the text says where each rank stood."""


def run_ranks(n: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run ``function(*args)`` on n ranks with a gloo default group; the results in order of rank.

    Args:
        n: number of ranks, 1 to 8.
        function: a function at the top level of a module.
        args: anything that multiprocessing can send.
        timeout: seconds for the whole job.

    Raises:
        RankFailed: with the traceback of the rank that failed first.
        RankHang: when the time is over; the pool is then started anew by the next call.
    """
    return _pool().run(n, function, args, timeout)


def close_pool() -> None:
    """End the ranks (at the end of the test run)."""
    _pool().close()


@functools.cache
def _pool() -> RankPool:
    return RankPool()


class RankPool:
    """Ranks, each with a pipe; grows on demand."""

    def __init__(self) -> None:
        forks = sys.platform == "linux"
        self._context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            self._context.set_forkserver_preload(["torch.distributed", "megatron_lite.testing.layouts"])
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder: Path | None = None
        self._jobs = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in order."""
        return [process.pid for process, _ in self._ranks]

    def run(self, n: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        """See :func:`run_ranks`."""
        if not 1 <= n <= MOST_RANKS:
            raise ValueError(f"run_ranks({n}, ...): 1 to {MOST_RANKS} ranks")
        self._grow(n)
        assert self._folder is not None
        self._jobs += 1
        job = self._folder / f"job{self._jobs}"
        job.mkdir()
        for rank in range(n):
            connection = self._ranks[rank][1]
            # sys.path first: what follows may need it to be read at all.
            connection.send((list(sys.path), os.getcwd()))
            connection.send((rank, n, str(job), timeout, function, args))
        try:
            return self._collect(n, function.__qualname__, job, timeout)
        finally:
            shutil.rmtree(job, ignore_errors=True)

    def close(self) -> None:
        """End every rank."""
        for process, _ in self._ranks:
            process.kill()  # they hold nothing that must be put away
        for process, connection in self._ranks:
            process.join()
            connection.close()
        self._ranks.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _grow(self, n: int) -> None:
        if any(not process.is_alive() for process, _ in self._ranks):
            self.close()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        started = []
        while len(self._ranks) < n:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
            started.append(ours)
        for connection in started:  # torch is imported outside of any job's time
            if not connection.poll(180):
                self.close()
                raise RankHang("a rank did not start within 180 s")
            connection.recv()

    def _collect(self, n: int, name: str, job: Path, timeout: float) -> list[Any]:
        results: list[Any] = [None] * n
        failures: list[tuple[float, int, str]] = []
        open_: dict[Any, int] = {self._ranks[r][1]: r for r in range(n)}
        deadline = time.monotonic() + timeout
        while open_:
            left = deadline - time.monotonic()
            ready = wait(list(open_), max(0.0, left))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = open_.pop(connection)
                try:
                    ok, when, value = connection.recv()
                except (EOFError, ConnectionError):
                    process = self._ranks[rank][0]
                    process.join(1)
                    ok, when, value = False, time.time(), f"the process ended (exit code {process.exitcode})"
                if ok:
                    results[rank] = value
                else:
                    failures.append((float(when), rank, str(value)))
                    deadline = min(deadline, time.monotonic() + _GRACE)
        if open_:
            stuck = sorted(open_.values())
            where = self._where(stuck, job) if not failures else ""
            self.close()
            if not failures:
                raise RankHang(f"{name}: rank {', '.join(map(str, stuck))} of {n} not done after {timeout:g} s{where}")
        if failures:
            failures.sort()
            _, rank, text = failures[0]
            others = "".join(f"\n(then rank {r}: {_last_line(t)})" for _, r, t in failures[1:])
            raise RankFailed(f"{name}: rank {rank} of {n} failed:\n{text}{others}")
        return results

    def _where(self, ranks: list[int], job: Path) -> str:
        time.sleep(0.5)  # each rank writes its stacks when its own time is over
        texts = []
        for rank in ranks:
            with contextlib.suppress(OSError):
                texts.append(f"\n--- rank {rank}\n{(job / f'stacks{rank}').read_text()}")
        return "".join(texts)


def _serve(connection: Connection) -> None:
    """A rank: take jobs until the pipe closes."""
    names = [name for _, name in socket.if_nameindex()]
    os.environ["GLOO_SOCKET_IFNAME"] = next((n for n in ("lo", "lo0") if n in names), names[0])
    import torch
    import torch.distributed  # noqa: F401

    from megatron_lite.mesh.local import die_with_parent
    from megatron_lite.testing.offline import refuse_network

    die_with_parent()
    refuse_network()
    torch.set_num_threads(1)
    connection.send("ready")
    while True:
        try:
            path, folder = connection.recv()
        except (EOFError, ConnectionError):
            return
        sys.path[:] = path
        with contextlib.suppress(OSError):
            os.chdir(folder)
        try:
            job = connection.recv()
        except (EOFError, ConnectionError):
            return
        except BaseException:  # the function's module could not be imported here
            answer = (False, time.time(), traceback.format_exc())
        else:
            answer = _work(*job)
        gc.collect()
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionError):
            return
        except Exception:  # a result that cannot be sent
            connection.send((False, time.time(), traceback.format_exc()))


def _work(
    rank: int, n: int, job: str, timeout: float, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[bool, float, Any]:
    """One job on this rank: (True, time, result) or (False, time, traceback)."""
    import torch
    import torch.distributed as dist

    with open(os.path.join(job, f"stacks{rank}"), "w") as stacks:
        faulthandler.dump_traceback_later(timeout, file=stacks)
        try:
            torch.manual_seed(0)
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(os.path.join(job, "store"), n),
                rank=rank,
                world_size=n,
                timeout=datetime.timedelta(seconds=timeout + 30),
            )
            dist.barrier()  # a function that is over at once must not close connections that others still make
            return True, time.time(), function(*args)
        except BaseException as error:
            return False, time.time(), _story(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
            with contextlib.suppress(Exception):
                if dist.is_initialized():
                    dist.destroy_process_group()
            torch.set_num_threads(1)
            torch.set_default_dtype(torch.float32)
            if torch.are_deterministic_algorithms_enabled():  # asking for what is so costs a second the first time
                torch.use_deterministic_algorithms(False)


def _last_line(text: str) -> str:
    """The line of a story that says what was raised."""
    return text.split("\nvalues at the last line:")[0].strip().splitlines()[-1]


def _story(error: BaseException) -> str:
    """Traceback and the values at its last line (assertions of a rank are not rewritten by pytest)."""
    text = traceback.format_exc()
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return text
    values = []
    for name, value in frame.tb_frame.f_locals.items():
        with contextlib.suppress(Exception):
            values.append(f"    {name} = {repr(value)[:300]}")
    return "\n".join([text.rstrip(), "values at the last line:", *values[:30]])
