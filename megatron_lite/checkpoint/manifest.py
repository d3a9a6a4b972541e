"""What a checkpoint directory holds, and how one is told from half of one.

A run's directory holds one directory per saved step::

    step_00000010/
        rank00000.safetensors   one large file per rank: the tensor bytes, in the safetensors layout
        rank00000.json          its fragment: for each piece full shape, dtype, rectangle, byte offset; block checksums
        manifest.json           format version, step, counters, configuration, and size and checksum of every fragment
        COMPLETE                written last: the checksum of manifest.json

A piece is a rectangle of a full tensor, so a reader needs to know nothing about the layout that wrote it: it intersects
the rectangles that it wants with those that are stored. Everything is JSON or raw numbers. A directory counts only
when ``COMPLETE`` matches the manifest and every file the manifest names has the size it says; a crash at any moment
leaves a temporary name or a directory without the marker, which no reader takes.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_lite.tensor.spec import Rectangle

FORMAT_VERSION = 1
BLOCK = 16 << 20  # bytes covered by one checksum
MARKER = "COMPLETE"
_STEP = re.compile(r"step_(\d{8,})(\.replaced)?$")  # .replaced: the older save of the same step, while a newer takes its name


@dataclass(frozen=True)
class StoredPiece:
    """One rectangle of one full tensor in one file.

    ``kind`` is ``weight`` (the master), ``exp_avg`` or ``exp_avg_sq``; ``offset`` counts from the start of the file.
    """

    kind: str
    name: str
    full_shape: tuple[int, ...]
    dtype: str
    rectangle: Rectangle
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Fragment:
    """One rank's file and the pieces in it; ``checksums`` are CRC-32 of consecutive blocks of ``BLOCK`` bytes."""

    file: str
    size: int
    checksums: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Fragment:
        raw = json.loads(data)
        pieces = tuple(
            StoredPiece(
                p["kind"],
                p["name"],
                tuple(p["full_shape"]),
                p["dtype"],
                Rectangle(tuple(p["rectangle"]["start"]), tuple(p["rectangle"]["size"])),
                p["offset"],
                p["nbytes"],
            )
            for p in raw["pieces"]
        )
        return cls(raw["file"], raw["size"], tuple(raw["checksums"]), pieces)


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies."""
    return root / f"step_{step:08d}"


def write_durably(path: Path, data: bytes) -> None:
    """Write under a temporary name, flush to the disk, rename, flush the directory."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def incomplete_reason(directory: Path) -> str | None:
    """Why a step directory is not a complete checkpoint, or None when it is one.

    Sizes are compared for every file; the bytes are checked against their checksums when they are read.
    """
    try:
        marker = (directory / MARKER).read_text().strip()
    except FileNotFoundError:
        return f"no {MARKER} marker (the save did not finish)"
    except OSError as e:
        return f"{MARKER} cannot be read ({e.strerror})"
    try:
        manifest_bytes = (directory / "manifest.json").read_bytes()
    except OSError as e:
        return f"manifest.json cannot be read ({e.strerror})"
    if marker != f"{zlib.crc32(manifest_bytes):08x}":
        return "manifest.json does not match the checksum in COMPLETE"
    manifest = json.loads(manifest_bytes)
    if manifest.get("format_version") != FORMAT_VERSION:
        return f"format version {manifest.get('format_version')}, this program reads {FORMAT_VERSION}"
    for name, expected in manifest["files"].items():
        try:
            size = (directory / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != expected["size"]:
            return f"{name} has {size} bytes, {expected['size']} were written"
    return None


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint."""
    manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_bytes())
    return manifest


def list_steps(root: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every step directory, complete or not, newest first."""
    if not root.is_dir():
        return []
    found = [(int(m.group(1)), p) for p in root.iterdir() if p.is_dir() and (m := _STEP.fullmatch(p.name))]
    return sorted(found, key=lambda item: (-item[0], item[1].name))


@dataclass(frozen=True)
class Found:
    """The checkpoint to load, and what to tell the user about the choice."""

    step: int
    directory: Path
    notice: str


def find_checkpoint(root: Path, step: int | None = None) -> Found | None:
    """The newest complete checkpoint under ``root``, or that of ``step``.

    Returns None where ``root`` does not exist or holds no checkpoint at all.
    Raises ValueError where there are only incomplete or broken ones, or where ``step`` is not a complete one.
    """
    steps = list_steps(root)
    if step is not None:
        if step not in dict(steps):
            have = ", ".join(str(s) for s, _ in steps) or "none"
            raise ValueError(f"{root} has no checkpoint of step {step}; it has: {have}")
        steps = [(number, directory) for number, directory in steps if number == step]
    refused: list[str] = []
    for number, directory in steps:
        reason = incomplete_reason(directory)
        if reason is None:
            notice = f"checkpoint: {directory} ({'as asked' if step is not None else 'the newest complete one'})"
            if refused:
                notice += "; passed over: " + "; ".join(refused)
            return Found(number, directory, notice)
        refused.append(f"{directory.name}: {reason}")
    if refused:
        raise ValueError(
            f"{root} holds no complete checkpoint: " + "; ".join(refused) + ". Give another --load, or remove these directories to start fresh."
        )
    return None
