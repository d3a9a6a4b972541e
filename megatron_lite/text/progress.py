"""How far a preprocessing run is: a bar on a terminal, lines in a log; and where it is when nothing comes of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from tqdm import tqdm

from megatron_lite.text.encode import Counts

T = TypeVar("T")
_PATIENCE = 10.0  # seconds


def told(results: Iterator[T], place: Callable[[], str], say: Callable[[str], None]) -> Generator[T, None, None]:
    """The results; while none comes for longer than 10, 20, 40, ... seconds, a thread says at which place the work is.

    ``place`` gives an empty text where nothing is worked on.
    """
    over, came = threading.Event(), [0]

    def watch() -> None:
        before, silent = 0, 0
        while not over.wait(_PATIENCE):
            silent = silent + 1 if came[0] == before else 0
            before = came[0]
            if silent.bit_count() == 1 and (where := place()):
                say(f"still at {where}, for {silent * _PATIENCE:.0f} s")

    threading.Thread(target=watch, daemon=True).start()
    try:
        for result in results:
            came[0] += 1
            yield result
    finally:
        over.set()


class Progress:
    """Shows documents, tokens, MB/s and the time that is left.

    Args:
        size: bytes on the disk of what is to be read; 0: not known.
        counts, taken: what an earlier run has done, which is no speed of this one.
        say: prints a line.
        log_interval: documents between lines; 0: none.
        bar: show a bar (on standard error) in place of lines.
    """

    def __init__(
        self, size: int, counts: Counts, taken: int, say: Callable[[str], None], log_interval: int, bar: bool
    ) -> None:
        self._size, self._say, self._interval = size, say, log_interval
        self._bytes, self._documents, self._taken = counts.bytes, counts.documents, taken
        self._said = counts.documents
        self._started = time.monotonic()
        shape = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]" if size else None
        self._bar = tqdm(total=size or None, initial=taken, unit="B", unit_scale=True, bar_format=shape, disable=not bar)

    def close(self) -> None:
        """The bar stays as it is."""
        self._bar.close()

    def show(self, counts: Counts, taken: int) -> None:
        """The counts so far, and how many bytes of the files have been read for them."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        speed = (counts.bytes - self._bytes) / 1e6 / seconds
        if not self._bar.disable:
            numbers = f"{speed:.1f} MB/s, {counts.documents:,} documents, {counts.tokens:,} tokens"
            self._bar.set_postfix_str(numbers, refresh=False)
            self._bar.update(max(0, taken - self._bar.n))
        elif self._interval and counts.documents - self._said >= self._interval:
            self._said = counts.documents
            rate = (counts.documents - self._documents) / seconds
            done = taken - self._taken
            left = f", {_clock((self._size - taken) * seconds / done)} left" if self._size and done > 0 else ""
            self._say(
                f"{counts.documents} documents, {rate:.0f} documents/s, {counts.tokens:,} tokens, {speed:.2f} MB/s{left}"
            )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
