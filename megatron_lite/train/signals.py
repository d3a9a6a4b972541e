"""Signals as requests that all ranks agree on.

A handler only notes what was asked. The note travels in the vector that all ranks exchange once per step, so that every
rank stops (or saves) after the same step, whichever of them the signal reached. A second delivery of a stop signal
within five seconds is the same request passed on by both scheduler and launcher; a later one means *now*.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from types import FrameType

REPEAT_SECONDS = 5.0


class SignalRequests:
    """Notes stop and save requests. Handlers are installed by :meth:`install` and put back by :meth:`restore`."""

    def __init__(self, exit_signals: Iterable[str], save_signals: Iterable[str]) -> None:
        self.stop = False
        self.save = False
        self.name = ""
        self._first_stop = 0.0
        self._kinds = {self._number(s): "stop" for s in exit_signals} | {self._number(s): "save" for s in save_signals}
        self._previous: dict[int, object] = {}

    @staticmethod
    def _number(name: str) -> int:
        try:
            return int(getattr(signal, f"SIG{name.upper().removeprefix('SIG')}"))
        except AttributeError:
            raise ValueError(f"unknown signal {name!r}: give names such as TERM, INT, USR1") from None

    def install(self) -> None:
        """Take over the signals (main thread only)."""
        for number in self._kinds:
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._kinds[number] == "save":
            self.save = True
            return
        now = time.monotonic()
        if self.stop and now - self._first_stop > REPEAT_SECONDS:
            # Nothing half-written can be taken for whole: every file is published by a rename.
            os._exit(128 + number)
        if not self.stop:
            self._first_stop, self.stop = now, True
            self.name = signal.Signals(number).name

    def take_save(self) -> bool:
        """Whether a save was asked for since the last call."""
        asked, self.save = self.save, False
        return asked
