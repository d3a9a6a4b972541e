"""Signals as requests that all ranks agree on.

A handler only notes what was asked. The note travels in the vector that all ranks exchange once per step, so that every
rank stops (or saves) after the same step, whichever of them the signal reached. A second delivery of a stop signal
within five seconds is the same request passed on by both scheduler and launcher; a later one means *now*.

Python runs a handler when its main thread comes back from C, which may be long (a collective that waits, a disk that is
slow). That is early enough for a request, but not for *now*: a thread reads the numbers of the signals from the
descriptor to which the interpreter writes them at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType

REPEAT_SECONDS = 5.0
_URGENT = (signal.SIGTERM, signal.SIGINT)  # a later one of these means now, whichever of them came first
_QUIT = b"\0"


def signal_number(name: str) -> int:
    """The number of ``TERM`` or ``SIGTERM``. Raises ValueError for a name that no signal has."""
    try:
        return int(getattr(signal, f"SIG{name.upper().removeprefix('SIG')}"))
    except AttributeError:
        raise ValueError(f"unknown signal {name!r}: give names such as TERM, INT, USR1") from None


class SignalRequests:
    """Notes stop and save requests. Handlers are installed by :meth:`install` and put back by :meth:`restore`.

    Args:
        exit_signals, save_signals: names.
        at_once: called from a thread when a stop signal comes again after five seconds; it ends the process.

    Attributes:
        stop: a stop was asked for.
        name: by which signal.
    """

    def __init__(
        self,
        exit_signals: Iterable[str],
        save_signals: Iterable[str],
        at_once: Callable[[str], None] = lambda name: os._exit(1),
    ) -> None:
        self.stop = False
        self.name = ""
        self._saves_asked = self._saves_taken = 0
        self._kinds = {signal_number(s): "stop" for s in exit_signals} | {signal_number(s): "save" for s in save_signals}
        self._at_once = at_once
        self._first: dict[int, float] = {}  # when each stop signal came first
        self._previous: dict[int, object] = {}
        self._pipe: tuple[int, int] | None = None
        self._previous_fd = -1
        self._thread: threading.Thread | None = None

    @property
    def save(self) -> bool:
        """Whether a save was asked for since the last :meth:`take_save`."""
        return self._saves_asked > self._saves_taken

    def take_save(self) -> bool:
        """Whether a save was asked for since the last call."""
        asked = self._saves_asked
        found = asked > self._saves_taken
        self._saves_taken = asked
        return found

    def install(self) -> None:
        """Take over the signals (main thread only)."""
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._previous_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, args=(self._pipe[0],), name="signals", daemon=True)
        self._thread.start()
        for number in self._kinds:
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()
        if self._pipe is None or self._thread is None:
            return
        signal.set_wakeup_fd(self._previous_fd)
        os.write(self._pipe[1], _QUIT)
        self._thread.join()
        for fd in self._pipe:
            os.close(fd)
        self._pipe = self._thread = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread: note the request."""
        if self._kinds[number] == "save":
            self._saves_asked += 1
        elif not self.stop:
            self.name = signal.Signals(number).name
            self.stop = True

    def _listen(self, fd: int) -> None:
        """In a thread: end the process when a stop signal comes again."""
        while True:
            data = os.read(fd, 64)
            for number in data:
                if number == _QUIT[0]:
                    return
                if self._kinds.get(number) == "stop" and self._again(number):
                    self._at_once(signal.Signals(number).name)

    def _again(self, number: int) -> bool:
        """Whether a stop signal is more than the first request delivered twice."""
        now = time.monotonic()
        same = _URGENT if number in _URGENT else (number,)
        earlier = [self._first[n] for n in same if n in self._first]
        self._first.setdefault(number, now)
        return bool(earlier) and now - min(earlier) > REPEAT_SECONDS
