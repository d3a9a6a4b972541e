"""What a part of a run reads: which pieces of which files, and their blocks.

A document's number is its place in the corpus, whatever part reads it, so lines keep the number that they have in their
whole file, and the files inside an archive count on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_lite.clean.pipeline_stage import Block
from megatron_lite.clean.shards import FrameReader
from megatron_lite.text.inputs import STANDARD_INPUT, InputOptions, Lines, extent, lines_before, open_input

_SAY_EVERY = 10.0  # seconds


def shares(inputs: Sequence[Path], reading: InputOptions, part: int, parts: int) -> list[tuple[int, int, int | None]]:
    """(number of the file, start, stop) of the pieces of inputs that a part reads, as of ``open_input``.

    Parts are contiguous and about equal in bytes; a file that cannot be read from its middle is one part's.
    """
    sizes = [0 if str(path) == STANDARD_INPUT else path.stat().st_size for path in inputs]
    total, before = sum(sizes), 0
    found: list[tuple[int, int, int | None]] = []
    low, high = total * part // parts, total * (part + 1) // parts
    for number, (path, size) in enumerate(zip(inputs, sizes, strict=True)):
        end, middle = before + size, before + size // 2
        length = extent(path, reading) if parts > 1 else None
        if length is None:
            if low <= middle < high or (part + 1 == parts and middle == total):
                found.append((number, 0, None))
        elif size and low < end and high > before:
            start = max(low - before, 0) * length // size
            stop = None if high >= end else (high - before) * length // size
            if stop is None or start < stop:
                found.append((number, start, stop))
        before = end
    return found


def input_blocks(
    inputs: Sequence[Path], pieces: Sequence[tuple[int, int, int | None]], reading: InputOptions
) -> Iterator[Block]:
    """The blocks of some pieces of the inputs; lines have their numbers in their whole file."""
    for number, start, stop in pieces:
        path = inputs[number]
        is_cut = start > 0 and path.suffix != ".parquet"
        skipped = lines_before(path, reading, start) if is_cut else 0
        base, before = 0, None
        for block in open_input(path, reading, start, stop):
            if isinstance(before, Lines) and block.file != before.file:  # the next file of an archive
                base += before.first + before.data.count(b"\n")
            if skipped and isinstance(block, Lines):
                block = replace(block, first=block.first + skipped)
            before = block
            yield Block(0, number, base, block)


def spool_blocks(stage: int, reader: FrameReader) -> Iterator[Block]:
    """The documents that the stage before ``stage`` left."""
    return (Block(stage, spool=data) for data in reader.read_frames())


class Progress:
    """Says now and then how far a part is in a stage.

    Args:
        what: begins each line.
        total: bytes to read, about; 0: unknown.
        say: takes lines.
    """

    def __init__(self, what: str, total: float, say: Callable[[str], None]) -> None:
        self._what, self._total, self._say = what, total, say
        self._begun = self._said = time.monotonic()
        self._read = 0
        self._given: deque[Block] = deque()

    def counted(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Pass blocks on and count their bytes, those of files as they lie on the disk."""
        file, before = -1, 0
        for block in blocks:
            if block.block is None:
                self._read += len(block.spool)
            else:
                if block.file != file:  # a part may begin inside the file
                    file, before = block.file, block.block.offset if isinstance(block.block, Lines) else 0
                self._read += block.block.taken - before
                before = block.block.taken
            self._given.append(block)
            yield block

    def oldest(self) -> str:
        """The place of the block whose result is waited for."""
        given = list(self._given)
        return given[0].place() if given else ""

    def tell(self) -> None:
        """The next block's result is there: say how far it is, when the last time is long ago."""
        self._given.popleft()
        now = time.monotonic()
        if now - self._said > _SAY_EVERY:
            self._said = now
            read, seconds = self._read, now - self._begun
            left = f", about {seconds * (self._total - read) / read:,.0f} s left" if self._total > read > 0 else ""
            self._say(
                f"{self._what}: {read / 1e6:,.0f} of {self._total / 1e6:,.0f} MB, {read / 1e6 / seconds:.1f} MB/s{left}"
            )
