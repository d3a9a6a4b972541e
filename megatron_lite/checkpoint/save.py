"""Writing a checkpoint so that it is there whole or not at all.

Every rank writes one file of its own pieces and a fragment that describes it into a directory with a temporary name.
When all ranks have said that theirs is on the disk, one rank writes the manifest, renames the directory and writes the
marker. A failure on any rank is told to all, so that all end with that rank's error instead of waiting for it.
Retention runs after the marker and never removes the newest complete checkpoint, nor the final one.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_lite.checkpoint.manifest import (
    BLOCK,
    FORMAT_VERSION,
    MARKER,
    Fragment,
    StoredPiece,
    incomplete_reason,
    list_steps,
    step_directory,
    sync_directory,
    write_durably,
)
from megatron_lite.mesh.collectives import Axis
from megatron_lite.tensor.spec import Rectangle

SAFETENSORS_DTYPE = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class SaveError(RuntimeError):
    """A checkpoint could not be written; the previous one is untouched."""


@dataclass(frozen=True)
class Piece:
    """One rectangle of one full tensor, to be stored: ``tensor`` holds rectangle.numel elements in row-major order."""

    kind: str
    name: str
    full_shape: tuple[int, ...]
    rectangle: Rectangle
    tensor: torch.Tensor


class _BlockSums:
    """CRC-32 of consecutive blocks of a stream."""

    def __init__(self) -> None:
        self.sums: list[int] = []
        self._crc, self._filled = 0, 0

    def add(self, data: memoryview) -> None:
        while len(data):
            take = data[: BLOCK - self._filled]
            self._crc = zlib.crc32(take, self._crc)
            self._filled += len(take)
            if self._filled == BLOCK:
                self.close()
            data = data[len(take) :]

    def close(self) -> None:
        if self._filled:
            self.sums.append(self._crc)
        self._crc, self._filled = 0, 0


def write_fragment(directory: Path, rank: int, pieces: Sequence[Piece], progress: Callable[[], None] | None = None) -> Fragment:
    """Write ``rankNNNNN.safetensors`` and ``rankNNNNN.json`` durably; one tensor at a time passes through host memory.

    ``progress`` is called after each tensor (a test slows a save down by it).
    """
    file = f"rank{rank:05d}.safetensors"
    header: dict[str, Any] = {}
    position = 0
    for number, piece in enumerate(pieces):
        nbytes = piece.tensor.numel() * piece.tensor.element_size()
        assert piece.tensor.numel() == piece.rectangle.numel, piece.name
        header[f"{piece.kind}/{piece.name}/{number}"] = {
            "dtype": SAFETENSORS_DTYPE[piece.tensor.dtype],
            "shape": list(piece.rectangle.size),
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    start = 8 + len(encoded)
    sums, stored, offset = _BlockSums(), [], start
    with open(directory / file, "wb") as f:

        def put(data: bytes | memoryview) -> None:
            view = memoryview(data).cast("B")
            f.write(view)
            sums.add(view)

        put(struct.pack("<Q", len(encoded)) + encoded)
        for piece in pieces:
            host = piece.tensor.detach().contiguous().cpu().reshape(-1)
            nbytes = host.numel() * host.element_size()
            if nbytes:
                put(memoryview(host.view(torch.uint8).numpy()))
            dtype = SAFETENSORS_DTYPE[piece.tensor.dtype]
            stored.append(StoredPiece(piece.kind, piece.name, piece.full_shape, dtype, piece.rectangle, offset, nbytes))
            offset += nbytes
            if progress is not None:
                progress()
        f.flush()
        os.fsync(f.fileno())
    sums.close()
    fragment = Fragment(file, offset, tuple(sums.sums), tuple(stored))
    write_durably(directory / f"rank{rank:05d}.json", fragment.to_json())
    return fragment


def save_checkpoint(
    root: Path,
    step: int,
    pieces: Sequence[Piece],
    state: dict[str, Any],
    world: Axis,
    *,
    progress: Callable[[], None] | None = None,
) -> Path:
    """Save one checkpoint; every rank calls it with its own pieces.

    Args:
        root: the run's checkpoint directory, on a file system that all ranks see.
        step: number of finished steps.
        pieces: this rank's rectangles; together with the other ranks' they must cover every tensor once.
        state: counters, configuration and everything else, JSON; taken from rank 0.
        world: the axis of all ranks.

    Returns the step's directory. Raises SaveError on every rank when any rank failed, with that rank and its error.
    """
    final = step_directory(root, step)
    temporary = final.with_name(final.name + ".tmp")

    def prepare() -> None:
        root.mkdir(parents=True, exist_ok=True)
        if temporary.exists():
            shutil.rmtree(temporary)  # left by a save that died
        temporary.mkdir()

    def write() -> dict[str, int]:
        if not temporary.is_dir():
            raise FileNotFoundError(
                f"{temporary} made by rank 0 is not seen here: --save must be on a file system that every node shares"
            )
        write_fragment(temporary, world.index, pieces, progress)
        names = (f"rank{world.index:05d}.safetensors", f"rank{world.index:05d}.json")
        return {name: (temporary / name).stat().st_size for name in names}

    def publish(files: dict[str, int]) -> None:
        listed = {name: {"size": size} for name, size in sorted(files.items())}
        for name in listed:
            if name.endswith(".json"):
                listed[name]["checksum"] = zlib.crc32((temporary / name).read_bytes())
        manifest = {"format_version": FORMAT_VERSION, "step": step, "state": state, "files": listed}
        data = json.dumps(manifest, indent=1).encode()
        write_durably(temporary / "manifest.json", data)
        replaced = final.with_name(final.name + ".replaced")
        if final.exists():
            os.replace(final, replaced)
        os.replace(temporary, final)
        sync_directory(root)
        write_durably(final / MARKER, f"{zlib.crc32(data):08x}\n".encode())
        if replaced.exists():
            shutil.rmtree(replaced)

    everyone(world, prepare, only=0)
    sizes = everyone(world, write)
    everyone(world, lambda: publish({name: size for part in sizes for name, size in part.items()}), only=0)
    return final


def everyone(world: Axis, work: Callable[[], Any], only: int | None = None) -> list[Any]:
    """Do ``work`` on every rank (or one), tell all ranks how it went, and raise on all when it failed on any."""
    answer: dict[str, Any] = {"ok": None}
    if only is None or world.index == only:
        try:
            answer["ok"] = work()
        except Exception as e:  # every kind of failure must reach the other ranks, which would wait for ever otherwise
            answer["error"] = f"{type(e).__name__}: {e}"
    answers = world.gather_json(answer)
    failed = [f"rank {rank}: {a['error']}" for rank, a in enumerate(answers) if "error" in a]
    if failed:
        raise SaveError("the checkpoint could not be written; the previous one is untouched. " + "; ".join(failed))
    return [a["ok"] for a in answers]


def prune(root: Path, keep_last: int | None, keep_every: int | None, protect: Iterable[int] = ()) -> list[int]:
    """Remove old checkpoints; returns the steps removed. Called by one rank, after a save has been completed.

    Kept are the newest ``keep_last`` complete ones (at least one), every step that ``keep_every`` divides, and those in
    ``protect`` (the final one). Incomplete directories older than the newest complete one, left by a crash, go too.
    A directory loses its marker before its files, so that a crash here leaves nothing that looks complete.
    """
    if not keep_last:
        return []
    steps = list_steps(root)
    complete = [step for step, directory in steps if incomplete_reason(directory) is None]
    if not complete:
        return []
    keep = set(complete[: max(1, keep_last)]) | set(protect)
    if keep_every:
        keep |= {step for step in complete if step % keep_every == 0}
    removed = []
    for step, directory in steps:
        if step in keep or step > complete[0]:
            continue
        (directory / MARKER).unlink(missing_ok=True)
        shutil.rmtree(directory)
        removed.append(step)
    return removed
