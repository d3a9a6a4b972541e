"""What a checkpoint directory holds, and how one is told from half of one.

A run's directory holds one directory per saved step::

    step_00000010/
        rank00000.safetensors   one large file per rank: the tensor bytes, in the safetensors layout
        rank00000.json          its fragment: for each piece full shape, dtype, rectangle, byte offset; block checksums
        manifest.json           format version, step, state (counters, configuration, layout), size of every file and
                                checksum of every fragment
        COMPLETE                written last: the checksum of manifest.json, and when it was saved (Unix seconds)

A piece is a rectangle of a full tensor, so a reader needs to know nothing about the layout that wrote it: it intersects
the rectangles that it wants with those that are stored. Everything is JSON or raw numbers. A directory counts only
when ``COMPLETE`` matches the manifest and every file the manifest names has the size it says; a crash at any moment
leaves a temporary name or a directory without the marker, which no reader takes. Other files in it are ignored.

The *newest* checkpoint is the one saved last, not the one of the highest step: after a run has been taken back to an
earlier step, the later ones of the abandoned attempt are older.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_lite.tensor.spec import Rectangle

FORMAT_VERSION = 1
BLOCK = 16 << 20  # bytes covered by one checksum
MARKER = "COMPLETE"
TEMPORARY, REPLACED = ".tmp", ".replaced"  # a save under way; the older save of a step while a newer takes its name
_STEP = re.compile(r"step_(\d{8,})(\.replaced|\.tmp)?")
_FILE = re.compile(r"rank\d{5,}\.(json|safetensors)")


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
        """The content of ``rankNNNNN.json``."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Fragment:
        """Read it back. Raises ValueError for anything else."""
        try:
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
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"not the description of a rank's file ({type(error).__name__}: {error})") from None


def coverage_problem(pieces: Iterable[StoredPiece]) -> str | None:
    """Why pieces are not every element of their tensors, by number of elements; None when they are."""
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    held: dict[tuple[str, str], int] = {}
    for piece in pieces:
        key = (piece.kind, piece.name)
        if shapes.setdefault(key, piece.full_shape) != piece.full_shape:
            one, other = list(shapes[key]), list(piece.full_shape)
            return f"{piece.kind} of {piece.name} has shape {one} on one rank, {other} on another"
        held[key] = held.get(key, 0) + piece.rectangle.numel
    for key, shape in shapes.items():
        full = Rectangle((0,) * len(shape), shape).numel
        if held[key] != full:
            return f"{key[0]} of {key[1]}: {held[key]} of {full} elements"
    return None


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies."""
    return root / f"step_{step:08d}"


def write_durably(path: Path, data: bytes) -> None:
    """Write under a temporary name, flush to the disk, rename, flush the directory."""
    temporary = path.with_name(path.name + TEMPORARY)
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


def remove_directory(directory: Path) -> None:
    """Remove a step's directory, its marker first: a crash on the way leaves nothing that looks complete.

    Of a link only the link is removed: what it points to is somebody else's.
    """
    if directory.is_symlink():
        directory.unlink()
        return
    if (directory / MARKER).exists():
        (directory / MARKER).unlink()
        sync_directory(directory)
    shutil.rmtree(directory)


def marker_text(manifest: bytes, saved_at: float) -> bytes:
    """The content of ``COMPLETE``."""
    return f"{zlib.crc32(manifest):08x} {saved_at:.6f}\n".encode()


def read_marker(directory: Path) -> tuple[str, float] | None:
    """(checksum of the manifest, time of saving); None where there is no such file or it is not one of ours."""
    try:
        checksum, saved_at = (directory / MARKER).read_bytes()[:100].decode("ascii").split()
        return checksum, float(saved_at)
    except (OSError, ValueError):
        return None


def incomplete_reason(directory: Path) -> str | None:
    """Why a step directory is not a complete checkpoint, or None when it is one.

    Sizes are compared for every file; the bytes are checked against their checksums when they are read. A directory that
    has the name of another step is not one: its files were copied there.
    """
    marker = read_marker(directory)
    if marker is None:
        if not (directory / MARKER).exists():
            return f"no {MARKER} marker (the save did not finish)"
        return f"{MARKER} is not a marker of this program (empty, damaged or unreadable)"
    try:
        data = (directory / "manifest.json").read_bytes()
    except OSError as e:
        return f"manifest.json cannot be read ({e.strerror})"
    if marker[0] != f"{zlib.crc32(data):08x}":
        return f"manifest.json does not match the checksum in {MARKER}"
    try:
        manifest = json.loads(data)
        version, step, files = manifest["format_version"], manifest["step"], dict(manifest["files"])
    except (ValueError, KeyError, TypeError):
        return "manifest.json is not a manifest"
    if version != FORMAT_VERSION:
        return f"format version {version}, this program reads {FORMAT_VERSION}"
    name_of_step = _STEP.fullmatch(directory.name)
    if name_of_step and int(name_of_step.group(1)) != step:
        return f"holds the checkpoint of step {step}"
    for name, expected in files.items():
        if not _FILE.fullmatch(name):
            return f"manifest.json names {name!r}, which is no file of a checkpoint"
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


@dataclass(frozen=True)
class StepDirectory:
    """A directory that a save has made, complete or not.

    ``suffix`` is "", ``TEMPORARY`` or ``REPLACED``; ``saved_at`` is what its marker says, or None.
    """

    step: int
    path: Path
    suffix: str
    saved_at: float | None


def list_steps(root: Path) -> list[StepDirectory]:
    """Every directory of a save: those with a marker by time of saving, the newest first, then the others by step."""
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            suffix, marker = match.group(2) or "", read_marker(path)
            saved_at = marker[1] if marker is not None and suffix != TEMPORARY else None
            found.append(StepDirectory(int(match.group(1)), path, suffix, saved_at))
    return sorted(found, key=lambda d: (d.saved_at is None, -(d.saved_at or 0.0), -d.step, d.suffix))


@dataclass(frozen=True)
class Found:
    """The checkpoint to load, and what to tell the user about the choice."""

    step: int
    directory: Path
    notice: str


def find_checkpoint(root: Path, step: int | None = None) -> Found | None:
    """The newest complete checkpoint under ``root``, or that of ``step``.

    Returns None where ``root`` does not exist or holds no checkpoint at all (a save that died before it was complete
    and left only a temporary name is none).
    Raises ValueError where there are only incomplete or broken ones, or where ``step`` is not a complete one.
    """
    steps = [d for d in list_steps(root) if d.suffix != TEMPORARY]
    if step is not None:
        if all(d.step != step for d in steps):
            have = ", ".join(map(str, sorted({d.step for d in steps}))) or "none"
            raise ValueError(f"{root} has no checkpoint of step {step}; it has: {have}")
        steps = [d for d in steps if d.step == step]
    refused: list[tuple[StepDirectory, str]] = []
    for directory in steps:
        reason = incomplete_reason(directory.path)
        if reason is None:
            return Found(directory.step, directory.path, _notice(directory, step is not None, steps, refused))
        refused.append((directory, reason))
    if refused:
        listed = "; ".join(f"{d.path.name}: {reason}" for d, reason in refused)
        raise ValueError(
            f"{root} holds no complete checkpoint: {listed}. Give another --load, or remove these directories to "
            "start fresh."
        )
    return None


def _notice(
    found: StepDirectory, asked: bool, steps: Sequence[StepDirectory], refused: Sequence[tuple[StepDirectory, str]]
) -> str:
    """Which one, why, and which ones not."""
    notice = f"checkpoint: {found.path} ({'as asked' if asked else 'the newest complete one'})"
    unfinished = [(d, incomplete_reason(d.path)) for d in steps if d.saved_at is None and d.step >= found.step]
    passed = [f"{d.path.name}: {reason}" for d, reason in [*refused, *unfinished]]
    if passed:
        notice += "; passed over: " + "; ".join(passed)
    broken = {d.step for d, _ in refused}
    later = sorted({d.step for d in steps if d.saved_at is not None and d.step > found.step} - broken)
    if later and not asked:
        notice += f"; saved before it, by a run that was taken back: step {', '.join(map(str, later))}"
    return notice
