"""Worker processes that take items and give results back in order, and never leave anybody waiting.

A worker works on one item while a thread of its own receives the next. Its pipe closes when it ends, for whatever
reason, so a worker that was killed is noticed at once, by name and with what it had in hand; and it ends by itself when
the pipe to the parent closes, so a parent that was killed leaves no process behind. (The pools of the standard library
wait for ever in the one case and leave workers in the other.) Workers do not see a keyboard interrupt; the parent gets
it and ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

from megatron_lite.data.locked_file import interrupts_held

_IN_HAND = 2  # items that a worker has
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
    hand: deque[tuple[int, Any]] = field(default_factory=deque)  # (position, item); the first is being worked on


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
        given = taken = 0
        failure: BaseException | None = None
        exhausted = False
        while True:
            while not exhausted and given - taken < _AHEAD * len(self._workers):
                worker = min(self._workers, key=lambda w: len(w.hand))
                if len(worker.hand) == _IN_HAND:
                    break
                try:
                    item = next(items)
                except StopIteration:
                    exhausted = True
                except Exception as error:
                    failure, exhausted = error, True
                else:
                    self._give(worker, given, item)
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
            raise WorkerDied(_epitaph(worker), worker.hand[0][1] if worker.hand else None) from None
        worker.hand.append((position, item))

    def _finished(self) -> list[_Worker]:
        """Workers with an answer, or that ended."""
        busy = {worker.pipe: worker for worker in self._workers if worker.hand}
        return [busy[pipe] for pipe in wait(list(busy)) if isinstance(pipe, Connection)]

    def _take(self, worker: _Worker) -> tuple[int, Any]:
        position, item = worker.hand[0]
        try:
            ok, result = worker.pipe.recv()
        except (EOFError, OSError):
            raise WorkerDied(_epitaph(worker), item) from None
        if not ok:
            raise WorkerFailed(f"worker {worker.number}: {result}")
        worker.hand.popleft()
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
    items: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, items), daemon=True).start()
    function: Callable[[Any], Any] | None = None
    with contextlib.suppress(ConnectionError):  # the parent has gone
        while True:
            item = items.get()
            try:
                if function is None:
                    function = make()
                answer: tuple[bool, Any] = (True, function(item))
            except Exception as error:
                answer = (False, f"{type(error).__name__}: {error}")
            pipe.send(answer)


def _receive(pipe: Connection, items: SimpleQueue[Any]) -> None:
    """Take items as they come, and end the process at once when the parent has gone."""
    try:
        while True:
            items.put(pipe.recv())
    finally:
        os._exit(1)
