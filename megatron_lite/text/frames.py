"""Files of zstd frames with an index, which can be read from their middle: the shards of :mod:`megatron_lite.clean.shards`.

Each frame holds whole lines. The index, ``.index/NAME.json`` beside the file, has for each frame where it begins in the file,
which line is its first, and where its text begins in the text of the file: all three rise, from 0.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType

INDEX = ".index"  # directory of the indices: hidden, so that a directory of shards holds nothing but text
_HEADER = 18  # bytes of the longest header of a frame


@dataclass(frozen=True)
class Frame:
    """One zstd frame.

    Attributes:
        offset: of its first byte in the file.
        line: number of its first line in the file, from 0.
        start: of its text in the text of the file, bytes.
    """

    offset: int
    line: int
    start: int


@dataclass(frozen=True)
class FrameIndex:
    """What the index of a file says: lines, bytes of text, and the frames in order."""

    lines: int
    bytes: int
    frames: list[Frame]


def index_path(path: Path) -> Path:
    """Where the index of a file of frames is."""
    return path.parent / INDEX / f"{path.name}.json"


def read_index(path: Path) -> FrameIndex:
    """The index of a file of frames. Raises FileNotFoundError: it has none; ValueError: its index is none."""
    try:
        index = json.loads(index_path(path).read_bytes())
        frames = [Frame(*map(int, frame)) for frame in index["frames"]]
        found = FrameIndex(int(index["lines"]), int(index["bytes"]), frames)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: its index {index_path(path)} is missing") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{index_path(path)}: not the index of a shard") from None
    columns = [[f.offset for f in frames], [f.line for f in frames] + [found.lines], [f.start for f in frames] + [found.bytes]]
    for column in columns:
        if column[:1] not in ([], [0]) or any(a >= b for a, b in pairwise(column)):
            raise ValueError(f"{index_path(path)}: damaged (its frames do not begin at 0, or do not rise)")
    return found


def fitting_index(path: Path) -> FrameIndex | None:
    """The index of a file, if it has one that fits: at every place that the index names a frame of that much text begins."""
    try:
        index = read_index(path)
    except (OSError, ValueError):
        return None
    zstandard = zstandard_package()
    starts = [frame.start for frame in index.frames] + [index.bytes]
    with open(path, "rb", buffering=0) as file:
        for number, frame in enumerate(index.frames):
            file.seek(frame.offset)
            try:
                size = zstandard.frame_content_size(file.read(_HEADER))
            except zstandard.ZstdError:
                return None
            if size != starts[number + 1] - frame.start:
                return None
    return index if index.frames else None


def zstandard_package() -> ModuleType:
    """The package, or ValueError that says how to get it."""
    try:
        import zstandard
    except ImportError:
        raise ValueError("reading .zst needs a package that is not installed: pip install zstandard") from None
    return zstandard
