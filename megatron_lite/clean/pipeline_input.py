"""What a part of a run reads: the blocks of its pieces of files.

A document's number is its place in the corpus, whatever part reads it, so lines keep the number that they have in their
whole file, and the files inside an archive count on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from megatron_lite.clean.pipeline_stage import Block
from megatron_lite.clean.shards import FrameReader
from megatron_lite.text.blocks import InputOptions, Lines
from megatron_lite.text.inputs import open_input
from megatron_lite.text.shares import Share, numbers_before

_SAY_EVERY = 10.0  # seconds


def input_blocks(pieces: Sequence[Share], reading: InputOptions) -> Iterator[Block]:
    """The blocks of some pieces of the inputs; lines have their numbers in their whole file."""
    for piece in pieces:
        skipped = numbers_before(piece, reading)
        base, before = 0, None
        for block in open_input(piece.path, reading, piece.start, piece.stop):
            if isinstance(before, Lines) and block.file != before.file:  # the next file of an archive
                base += before.first + before.data.count(b"\n")
            if skipped and isinstance(block, Lines):
                block = replace(block, first=block.first + skipped)
            before = block
            yield Block(0, piece.file, base, block, taken=piece.taken(block))


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
        self._reading = False  # a block is waited for

    def counted(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Pass blocks on and count their bytes, those of files as they lie on the disk."""
        source = iter(blocks)
        while True:
            self._reading = True
            block = next(source, None)
            self._reading = False
            if block is None:
                return
            self._read = block.taken if block.block is not None else self._read + len(block.spool)
            self._given.append(block)
            yield block

    def oldest(self) -> str:
        """The place of the block whose result is waited for; nothing while it is the input that does not come."""
        given = [] if self._reading else list(self._given)
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
