"""Which part of the input files a run reads: all of it, or one of n contiguous shares.

The files are laid end to end by their size on the disk and cut at n - 1 places. A cut inside a file is moved to the next
line (or row) border, by whoever reads; a file that cannot be read from its middle goes whole to the part that its own
middle falls into. So each line is in one part, and the parts after another are the input.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from megatron_lite.config.text_files import LINES
from megatron_lite.text.blocks import Block, InputOptions, Lines
from megatron_lite.text.inputs import STANDARD_INPUT, extent, lines_before, name_of, open_input

Part = tuple[int, int]  # (i, n): the i-th of n, from 0


@dataclass(frozen=True)
class Share:
    """A piece of a file, in the units of :func:`megatron_lite.text.inputs.open_input`.

    On the disk it begins at byte ``begin`` (about) and has ``size`` bytes; the shares before it have ``before`` bytes together.
    """

    file: int
    path: Path
    start: int = 0
    stop: int | None = None
    size: int = 0
    begin: int = 0
    before: int = 0

    def taken(self, block: Block) -> int:
        """Bytes on the disk that have been read of all shares when a block of this one has been."""
        own = block.taken - (self.begin if isinstance(block, Lines) else 0)
        return self.before + min(self.size, max(0, own))


def parse_part(text: str) -> Part:
    """``i/n``, i from 0. Raises ValueError."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise ValueError(f"--part {text}: give i/n with 0 <= i < n, such as 0/8 to 7/8")
    return int(found[1]), int(found[2])


def shares(paths: Sequence[Path], options: InputOptions, part: Part | None = None) -> list[Share]:
    """What a run reads, in order. Raises ValueError where the input cannot be cut."""
    sizes = [0 if str(path) == STANDARD_INPUT else os.path.getsize(path) for path in paths]
    if part is None:
        return _laid([Share(i, path, size=size) for i, (path, size) in enumerate(zip(paths, sizes, strict=True))])
    if STANDARD_INPUT in map(str, paths):
        raise ValueError(f"--part {part[0]}/{part[1]}: standard input cannot be read in parts")
    index, parts = part
    total = sum(sizes)
    low, high = total * index // parts, total * (index + 1) // parts
    found, begin = [], 0
    for i, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        first, last = max(low - begin, 0), min(high - begin, size)
        units = extent(path, options) if size and first < last and (first or last < size) else None
        if units is not None:
            cut = (first * units // size, last * units // size if last < size else None)
            found.append(Share(i, path, *cut, last - first, first))
        elif low <= begin + size // 2 < high or (index + 1 == parts and begin + size // 2 == total):  # empty files at the end
            found.append(Share(i, path, size=size))
        begin += size
    return _laid(found)


def _laid(found: Sequence[Share]) -> list[Share]:
    """The shares end to end."""
    starts = accumulate((share.size for share in found), initial=0)
    return [replace(share, before=before) for share, before in zip(found, starts, strict=False)]


@dataclass(frozen=True)
class Place:
    """Where a block begins: a file and, in the units of :func:`open_input`, where in it."""

    file: int
    start: int


def place_of(file: int, block: Block) -> Place:
    """Where a block of a file begins."""
    return Place(file, block.offset if isinstance(block, Lines) else block.first - 1)


def end_of(block: Block) -> int:
    """Where it ends, in the units of a place."""
    return block.end if isinstance(block, Lines) else block.first - 1 + len(block)


def after(all_shares: Sequence[Share], place: Place) -> list[Share]:
    """What is left from a place on."""
    left = [share for share in all_shares if share.file >= place.file]
    if left and left[0].file == place.file:
        left[0] = replace(left[0], start=place.start)
    return left


def numbers_before(share: Share, options: InputOptions) -> int:
    """What to add to the numbers of lines in a share, to have their numbers in the file."""
    name = name_of(share.path)
    if share.start == 0 or name is None or name.packing or name.kind not in LINES or extent(share.path, options) is None:
        return 0  # what is packed is read from a line whose number is known, and documents have their own
    return lines_before(share.path, options, share.start)


def read(all_shares: Sequence[Share], options: InputOptions) -> Iterator[tuple[Share, Block]]:
    """Every block of the shares, in order."""
    for share in all_shares:
        for block in open_input(share.path, options, share.start, share.stop):
            yield share, block
