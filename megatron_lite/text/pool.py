"""Worker processes that take items and give results back in order, and never leave anybody waiting.

A worker works on one item while a thread of its own receives the next. Its pipe closes when it ends, for whatever
reason, so a worker that was killed is noticed at once, by name and with what it had in hand; and it ends by itself when
the pipe to the parent closes, so a parent that was killed leaves no process behind. (The pools of the standard library
wait for ever in the one case and leave workers in the other.) Workers do not see a keyboard interrupt; the parent gets
it and ends them.

Through the pipes go a few bytes. What is said lies in memory that both processes see, a piece of it for each item in hand:
neither waits for the other to take a megabyte out of a pipe, for which it would have to stop working.

A function may be a generator. What it yields is a *question*, which the parent answers; meanwhile the worker goes on with
its next item. Questions are answered in the order of the items: the n-th of an item after the n-th of those before it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd, ForkingPickler
from queue import SimpleQueue
from typing import Any, NoReturn

from megatron_lite.data.locked_file import interrupts_held, naming

_IN_HAND = 2  # items that a worker has
_AHEAD = 4  # results per worker that may wait for an earlier one
_ASKS, _DONE, _FAILED = "asks", "done", "failed"


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


def unasked(question: Any) -> NoReturn:
    """Answers questions where there are none."""
    raise AssertionError(f"nobody answers {question!r}")


def without_workers(
    function: Callable[[Any], Any], items: Iterable[Any], answer: Callable[[Any], Any] = unasked
) -> Iterator[Any]:
    """What a pool does, in this process: the results of a function that may ask questions."""
    for item in items:
        found = function(item)
        if isinstance(found, Generator):
            reply = None
            try:
                while True:
                    reply = answer(found.send(reply))
            except StopIteration as end:
                found = end.value
        yield found


class _Shared:
    """Memory that two processes see and use in turns."""

    def __init__(self, descriptor: int) -> None:
        self._file = open(descriptor, "r+b", buffering=0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self._file.fileno()),)

    def put(self, value: Any) -> int:
        """Say something; how many bytes it takes."""
        self._file.seek(0)
        with naming("memory that worker processes share"):
            ForkingPickler(self._file, 5).dump(value)
        return self._file.tell()

    def get(self, size: int) -> Any:
        """What the other said."""
        with mmap(self._file.fileno(), size, access=ACCESS_READ) as memory:
            return ForkingPickler.loads(memory)

    def close(self) -> None:
        """Give it up."""
        self._file.close()


def _received(descriptor: Any) -> _Shared:
    return _Shared(descriptor.detach())


@dataclass(eq=False)
class _Held:
    """An item that a worker has.

    Attributes:
        position: among all items.
        slot: the piece of memory in which it is talked about.
        answered: questions that were answered.
        question: how long the one is that waits; None: there is none.
    """

    position: int
    item: Any
    slot: int
    answered: int = 0
    question: int | None = None


@dataclass(eq=False)
class _Worker:
    number: int
    process: Any
    pipe: Connection
    memory: list[_Shared]
    hand: list[_Held] = field(default_factory=list)  # the oldest comes first

    def say(self, held: _Held, value: Any) -> None:
        """An item, or an answer about it. Raises WorkerDied, or OSError where there is no memory for it."""
        size = self.memory[held.slot].put(value)  # memory that cannot be had is not the worker's end
        try:
            self.pipe.send((held.slot, size))
        except OSError:
            raise self.died() from None

    def died(self) -> WorkerDied:
        """That it ended, how, and at which item."""
        self.process.join(10)
        code = self.process.exitcode
        how = f"ended with exit status {code}"
        if code is None:
            how = "closed its pipe"
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        items = [held.item for held in self.hand if held.question is None] or [held.item for held in self.hand]
        return WorkerDied(f"worker {self.number} (process {self.process.pid}) {how}", items[0] if items else None)


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
                    memory = [_Shared(os.memfd_create("items")) for _ in range(_IN_HAND)]
                    process = context.Process(target=_serve, args=(theirs, memory, make), daemon=True)
                    process.start()
                    theirs.close()
                    self._workers.append(_Worker(number, process, ours, memory))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OrderedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def map(self, items: Iterator[Any], answer: Callable[[Any], Any] = unasked) -> Iterator[Any]:
        """The results in the order of the items. What ``items`` raises comes after the results before it.

        ``answer`` takes a question and gives the answer.

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
                    (slot, *_) = {*range(_IN_HAND)} - {held.slot for held in worker.hand}
                    worker.hand.append(_Held(given, item, slot))
                    worker.say(worker.hand[-1], item)
                    given += 1
            if taken in ready:
                yield ready.pop(taken)
                taken += 1
            elif taken == given:
                if failure is not None:
                    raise failure
                return
            else:
                for worker in self._heard():
                    ready.update(self._take(worker))
                self._answer(answer)

    def close(self) -> None:
        """End the workers at once."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
            for memory in worker.memory:
                memory.close()
        self._workers.clear()

    def _heard(self) -> list[_Worker]:
        """Workers that said something, or that ended."""
        busy = {worker.pipe: worker for worker in self._workers if worker.hand}
        return [busy[pipe] for pipe in wait(list(busy)) if isinstance(pipe, Connection)]

    def _take(self, worker: _Worker) -> dict[int, Any]:
        """Hear a worker: position and result, when it is one."""
        try:
            slot, kind, size = worker.pipe.recv()
        except (EOFError, OSError):
            raise worker.died() from None
        (held,) = (held for held in worker.hand if held.slot == slot)
        if kind == _ASKS:
            held.question = size
            return {}
        result = worker.memory[slot].get(size)
        if kind == _FAILED:
            raise WorkerFailed(f"worker {worker.number}: {result}")
        worker.hand.remove(held)
        return {held.position: result}

    def _answer(self, answer: Callable[[Any], Any]) -> None:
        """Answer the questions whose turn it is."""
        least = math.inf  # answered to an item before
        for held, worker in sorted(((h, w) for w in self._workers for h in w.hand), key=lambda both: both[0].position):
            if held.question is not None and held.answered < least:
                reply = answer(worker.memory[held.slot].get(held.question))
                held.question, held.answered = None, held.answered + 1
                worker.say(held, reply)
            least = min(least, held.answered)


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


def _serve(pipe: Connection, memory: list[_Shared], make: Callable[[], Callable[[Any], Any]]) -> None:
    """A worker: answer items until the parent's end of the pipe closes."""
    said: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, memory, said), daemon=True).start()
    function: Callable[[Any], Any] | None = None
    asking: dict[int, Generator[Any, Any, Any]] = {}
    with contextlib.suppress(ConnectionError):  # the parent has gone
        while True:
            slot, value = said.get()
            try:
                function = function or make()
                going = asking.pop(slot, None)
                if going is None:
                    kind, found = _DONE, function(value)
                    if isinstance(found, Generator):
                        going, value = found, None
                if going is not None:
                    try:
                        kind, found = _ASKS, going.send(value)
                        asking[slot] = going
                    except StopIteration as end:
                        kind, found = _DONE, end.value
                size = memory[slot].put(found)
            except Exception as error:
                kind, size = _FAILED, memory[slot].put(f"{type(error).__name__}: {error}")
            pipe.send((slot, kind, size))


def _receive(pipe: Connection, memory: list[_Shared], said: SimpleQueue[tuple[int, Any]]) -> None:
    """Take what is said as it comes, and end the process at once when the parent has gone."""
    try:
        while True:
            slot, size = pipe.recv()
            said.put((slot, memory[slot].get(size)))
    finally:
        os._exit(1)
