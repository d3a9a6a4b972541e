"""Worker processes that take items and give results back in order, and never leave anybody waiting.

A worker holds one item at a time. Its pipe closes when it ends, for whatever reason, so a worker that was killed is
noticed at once, by name and with what it had in hand; and it ends by itself when the pipe to the parent closes, so a
parent that was killed leaves no process behind. (The pools of the standard library wait for ever in the one case and
leave workers in the other.) Workers do not see a keyboard interrupt; the parent gets it and ends them.
"""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron_lite.data.locked_file import interrupts_held

_AHEAD = 4  # results per worker that may wait for an earlier one


class WorkerDied(RuntimeError):
    """A worker ended without an answer.

    Attributes:
        worker: which one, and how it ended.
        item: what it had in hand, or None.
    """

    def __init__(self, worker: str, item: Any) -> None:
        super().__init__(worker)
        self.worker, self.item = worker, item


class WorkerFailed(RuntimeError):
    """Something was raised in a worker; the text says what."""


@dataclass
class _Worker:
    number: int
    process: Any
    pipe: Connection
    hand: tuple[int, Any] | None = None  # position and item


class OrderedPool:
    """A pool of workers.

    Args:
        workers: number of processes.
        make: called once in each worker; gives the function of an item. Sent to the worker, so it and what it holds are
            importable by name.
    """

    def __init__(self, workers: int, make: Callable[[], Callable[[Any], Any]]) -> None:
        context = get_context("spawn")
        self._workers: list[_Worker] = []
        try:
            for number in range(workers):
                with _started_whole():
                    ours, theirs = context.Pipe()
                    process = context.Process(target=_serve, args=(theirs, make), daemon=True)
                    process.start()
                    theirs.close()
                    self._workers.append(_Worker(number, process, ours))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OrderedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def map(self, items: Iterator[Any]) -> Iterator[Any]:
        """The results in the order of the items. What ``items`` raises comes after the results before it.

        Raises:
            WorkerDied, WorkerFailed.
        """
        ready: dict[int, Any] = {}
        idle = deque(self._workers)
        given = taken = 0
        failure: BaseException | None = None
        exhausted = False
        while True:
            while idle and not exhausted and given - taken < _AHEAD * len(self._workers):
                try:
                    item = next(items)
                except StopIteration:
                    exhausted = True
                except Exception as error:
                    failure, exhausted = error, True
                else:
                    self._give(idle.popleft(), given, item)
                    given += 1
            if taken in ready:
                yield ready.pop(taken)
                taken += 1
            elif taken == given:
                if failure is not None:
                    raise failure
                return
            else:
                for worker in self._finished():
                    position, result = self._take(worker)
                    ready[position] = result
                    idle.append(worker)

    def close(self) -> None:
        """End the workers at once."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers.clear()

    def _give(self, worker: _Worker, position: int, item: Any) -> None:
        try:
            worker.pipe.send(item)
        except OSError:
            raise WorkerDied(_epitaph(worker), None) from None
        worker.hand = (position, item)

    def _finished(self) -> list[_Worker]:
        """Workers with an answer, or that ended."""
        busy = {worker.pipe: worker for worker in self._workers if worker.hand is not None}
        return [busy[pipe] for pipe in wait(list(busy)) if isinstance(pipe, Connection)]

    def _take(self, worker: _Worker) -> tuple[int, Any]:
        assert worker.hand is not None
        position, item = worker.hand
        try:
            ok, result = worker.pipe.recv()
        except (EOFError, OSError):
            raise WorkerDied(_epitaph(worker), item) from None
        if not ok:
            raise WorkerFailed(f"worker {worker.number}: {result}")
        worker.hand = None
        return position, result


@contextlib.contextmanager
def _started_whole() -> Iterator[None]:
    """A worker started here never sees a keyboard interrupt, and an interrupt of ours waits until it has started."""
    with interrupts_held():
        resource_tracker.ensure_running()  # multiprocessing's own helper, whose start would undo the next line
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the worker, for good
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _epitaph(worker: _Worker) -> str:
    """Which worker ended, and how."""
    worker.process.join(10)
    code = worker.process.exitcode
    how = f"ended with exit status {code}"
    if code is None:
        how = "closed its pipe"
    elif code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    return f"worker {worker.number} (process {worker.process.pid}) {how}"


def _serve(pipe: Connection, make: Callable[[], Callable[[Any], Any]]) -> None:
    """A worker: answer items until the parent's end of the pipe closes."""
    function: Callable[[Any], Any] | None = None
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has gone
        while True:
            item = pipe.recv()
            try:
                if function is None:
                    function = make()
                answer: tuple[bool, Any] = (True, function(item))
            except Exception as error:
                answer = (False, f"{type(error).__name__}: {error}")
            pipe.send(answer)
