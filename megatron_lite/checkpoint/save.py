"""Writing a checkpoint so that it is there whole or not at all.

Every rank writes one file of its own pieces and a fragment that describes it into a directory with a temporary name.
When all ranks have said that theirs is on the disk, one rank looks at all of them, writes the manifest, renames the
directory and writes the marker. A failure on any rank is told to all, so that all end with that rank's error instead of
waiting for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_lite.checkpoint.manifest import (
    BLOCK,
    FORMAT_VERSION,
    MARKER,
    REPLACED,
    TEMPORARY,
    Fragment,
    StoredPiece,
    coverage_problem,
    incomplete_reason,
    marker_text,
    remove_directory,
    step_directory,
    sync_directory,
    write_durably,
)
from megatron_lite.checkpoint.retention import prune
from megatron_lite.checkpoint.together import SaveError, everyone
from megatron_lite.mesh.collectives import Axis
from megatron_lite.optim.shares import Share

__all__ = ["SaveError", "everyone", "prune", "save_checkpoint", "write_fragment"]

SAFETENSORS_DTYPE = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_WRITTEN_AT_ONCE = 64 << 20  # bytes of a tensor between two calls of ``progress``


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


@dataclass(frozen=True)
class FilePlan:
    """Where everything lies in a rank's file: ``head`` (length and JSON, as safetensors has it), then the pieces."""

    head: bytes
    pieces: tuple[StoredPiece, ...]
    size: int


def plan_file(shares: Sequence[Share]) -> FilePlan:
    """Lay out a rank's file: pure arithmetic, no tensor is read."""
    header: dict[str, Any] = {}
    position = 0
    for number, share in enumerate(shares):
        assert share.tensor.numel() == share.rectangle.numel, (share.name, share.tensor.shape, share.rectangle)
        end = position + share.tensor.numel() * share.tensor.element_size()
        header[f"{share.kind}/{share.name}/{number}"] = {
            "dtype": SAFETENSORS_DTYPE[share.tensor.dtype],
            "shape": list(share.rectangle.size),
            "data_offsets": [position, end],
        }
        position = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    head = struct.pack("<Q", len(encoded)) + encoded
    pieces = []
    for share, entry in zip(shares, header.values(), strict=True):
        begin, end = entry["data_offsets"]
        where = (share.rectangle, len(head) + begin, end - begin)
        pieces.append(StoredPiece(share.kind, share.name, tuple(share.full_shape), entry["dtype"], *where))
    return FilePlan(head, tuple(pieces), len(head) + position)


def write_fragment(
    directory: Path, rank: int, shares: Sequence[Share], progress: Callable[[], None] | None = None
) -> dict[str, dict[str, int]]:
    """Write ``rankNNNNN.safetensors`` and ``rankNNNNN.json`` durably; one tensor at a time passes through host memory.

    ``progress`` is called every now and then, at least after each tensor (a sign of life for who watches).

    Returns size and checksum of the files by name, as the manifest lists them.
    """
    plan, name = plan_file(shares), f"rank{rank:05d}"
    sums = _BlockSums()
    with open(directory / f"{name}.safetensors", "wb") as f:

        def put(data: memoryview) -> None:
            f.write(data)
            sums.add(data)

        put(memoryview(plan.head))
        for share in shares:
            host = share.tensor.detach().contiguous().cpu().reshape(-1)
            data = host.view(torch.uint8).numpy().data if host.numel() else memoryview(b"")
            for at in range(0, max(1, len(data)), _WRITTEN_AT_ONCE):
                put(data[at : at + _WRITTEN_AT_ONCE])
                if progress is not None:
                    progress()
        f.flush()
        os.fsync(f.fileno())
    sums.close()
    fragment = Fragment(f"{name}.safetensors", plan.size, tuple(sums.sums), plan.pieces).to_json()
    write_durably(directory / f"{name}.json", fragment)
    return {
        f"{name}.safetensors": {"size": plan.size},
        f"{name}.json": {"size": len(fragment), "checksum": zlib.crc32(fragment)},
    }


def save_checkpoint(
    root: Path,
    step: int,
    shares: Sequence[Share],
    state: dict[str, Any],
    world: Axis,
    *,
    progress: Callable[[], None] | None = None,
) -> Path:
    """Save one checkpoint; every rank calls it with its own shares.

    Args:
        root: the run's checkpoint directory, on a file system that all ranks see.
        step: number of finished steps.
        shares: this rank's rectangles; together with the other ranks' they cover every tensor once.
        state: counters, configuration (``config``), ``layout`` and everything else, JSON; taken from rank 0.
        world: the axis of all ranks.
        progress: see :func:`write_fragment`.

    Returns the step's directory. Raises SaveError on every rank when any rank failed, with that rank and its error.
    """
    final = step_directory(root, step)
    temporary = final.with_name(final.name + TEMPORARY)

    def prepare() -> None:
        root.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(temporary):
            remove_directory(temporary)  # left by a save that died
        temporary.mkdir()

    def write() -> dict[str, dict[str, int]]:
        if not temporary.is_dir():
            raise FileNotFoundError(
                f"{temporary}, made by rank 0, is not seen here: --save must be on a file system that every node shares"
            )
        return write_fragment(temporary, world.index, shares, progress)

    try:
        everyone(world, prepare, only=0)
        files = everyone(world, write)
        listed = {name: entry for rank in files for name, entry in rank.items()}
        everyone(world, lambda: publish(temporary, final, listed, step, state), only=0)
    except SaveError as error:
        if world.index == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # a full disk stays full otherwise
        raise SaveError(
            f"the checkpoint of step {step} could not be written; earlier ones are untouched. {error}"
        ) from None
    return final


def publish(temporary: Path, final: Path, files: dict[str, dict[str, int]], step: int, state: dict[str, Any]) -> None:
    """Make a directory in which all ranks have written the checkpoint of its step. Run by one rank."""
    pieces: list[StoredPiece] = []
    for name, expected in sorted(files.items()):
        try:
            size = (temporary / name).stat().st_size
            data = (temporary / name).read_bytes() if name.endswith(".json") else b""
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{temporary / name}, which its rank has written, is not seen by rank 0: --save must be on a file "
                "system that every node shares"
            ) from None
        if size != expected["size"] or (data and zlib.crc32(data) != expected["checksum"]):
            raise OSError(f"{temporary / name} is not as its rank has written it ({size} of {expected['size']} bytes)")
        if data:
            pieces += Fragment.from_json(data).pieces
    problem = coverage_problem(pieces)
    assert problem is None, f"the ranks' shares are not the whole model: {problem}"
    manifest = {"format_version": FORMAT_VERSION, "step": step, "state": state, "files": dict(sorted(files.items()))}
    data = json.dumps(manifest, indent=1).encode()
    write_durably(temporary / "manifest.json", data)
    replaced = final.with_name(final.name + REPLACED)
    if final.exists() and incomplete_reason(final) is None:
        if os.path.lexists(replaced):
            remove_directory(replaced)
        os.replace(final, replaced)
    elif os.path.lexists(final):
        remove_directory(final)  # left by a save that died before its marker; ``replaced`` may be the complete one
    os.replace(temporary, final)
    sync_directory(final.parent)
    write_durably(final / MARKER, marker_text(data, time.time()))
    with contextlib.suppress(OSError):  # the checkpoint is complete; pruning tries again, and tells
        if os.path.lexists(replaced):
            remove_directory(replaced)
