"""How far a preprocessing run is: a bar on a terminal, lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from tqdm import tqdm

from megatron_lite.text.encode import Counts


class Progress:
    """Shows documents, tokens, MB/s and the time that is left.

    Args:
        size: bytes on the disk of what is to be read; 0: not known.
        say: prints a line.
        log_interval: documents between lines; 0: none.
        bar: show a bar (on standard error) in place of lines.
    """

    def __init__(self, size: int, say: Callable[[str], None], log_interval: int, bar: bool) -> None:
        self._size, self._say, self._interval = size, say, log_interval
        self._started = time.monotonic()
        self._begun: Counts | None = None
        self._taken = 0  # at the beginning, as of `_said`
        self._said = 0
        shape = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
        self._bar = (
            tqdm(total=size or None, unit="B", unit_scale=True, bar_format=shape if size else None) if bar else None
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def resume(self, counts: Counts, taken: int) -> None:
        """What an earlier run has done is no speed of this one."""
        self._begun, self._taken, self._said = (
            Counts(bytes=counts.bytes, documents=counts.documents),
            taken,
            counts.documents,
        )
        if self._bar is not None:
            self._bar.update(taken)
            self._bar.unpause()

    def show(self, counts: Counts, taken: int) -> None:
        """The counts so far, and how many bytes of the files have been read for them."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        begun = self._begun or Counts()
        speed = (counts.bytes - begun.bytes) / 1e6 / seconds
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"{speed:.1f} MB/s, {counts.documents:,} documents, {counts.tokens:,} tokens", refresh=False
            )
            self._bar.update(max(0, taken - self._bar.n))
        elif self._interval and counts.documents - self._said >= self._interval:
            self._said = counts.documents
            rate = (counts.documents - begun.documents) / seconds
            done = taken - self._taken
            left = f", {_clock((self._size - taken) * seconds / done)} left" if self._size and done > 0 else ""
            self._say(
                f"{counts.documents} documents, {rate:.0f} documents/s, {counts.tokens:,} tokens, {speed:.2f} MB/s{left}"
            )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
