"""Files of zstd frames with an index, which can be read from their middle: the shards of :mod:`megatron_lite.clean.shards`.

Each frame holds whole lines. The index, ``.index/NAME.json`` beside the file, has for each frame where it begins in the file,
which line is its first, and where its text begins in the text of the file: all three rise, from 0. A directory of them may have
a list, ``.index/shards.json``, of all that belong to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

INDEX = ".index"  # directory of the indices: hidden, so that a directory of shards holds nothing but text
LIST = "shards.json"  # in it: the shards and their lines
_NAMED = 3  # files in a message
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


def read_list(directory: Path) -> list[dict[str, Any]]:
    """The shards of a directory: ``name``, ``lines``, ``bytes`` of text, ``packed_bytes`` of the file.

    Raises FileNotFoundError: it has no list; ValueError: its list is none.
    """
    path = directory / INDEX / LIST
    try:
        shards = json.loads(path.read_bytes())["shards"]
        return [{"name": str(s["name"]), **{n: int(s[n]) for n in ("lines", "bytes", "packed_bytes")}} for s in shards]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: not the list of a directory of shards") from None


def differing(directory: Path, names: Iterable[str]) -> str:
    """How a directory with files of these names differs from its list of shards, in words; empty: it does not, or has none."""
    try:
        listed = {shard["name"]: shard["packed_bytes"] for shard in read_list(directory)}
    except FileNotFoundError:
        return ""
    there = {name: (directory / name).stat().st_size for name in names if name.endswith(".jsonl.zst")}
    found = {
        "missing": listed.keys() - there,
        "not listed": there.keys() - listed,
        "of another size": {name for name in listed.keys() & there if listed[name] != there[name]},
    }
    return "; ".join(f"{_few(sorted(some))} {what}" for what, some in found.items() if some)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def zstandard_package() -> ModuleType:
    """The package, or ValueError that says how to get it."""
    try:
        import zstandard
    except ImportError:
        raise ValueError("reading .zst needs a package that is not installed: pip install zstandard") from None
    return zstandard
