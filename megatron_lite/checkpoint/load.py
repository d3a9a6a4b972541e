"""Reading rectangles out of a checkpoint, whatever layout wrote it.

:class:`Reader` maps the ranks' files into memory and copies the intersection of what is asked for with what is stored.
It reads no more than that, and checks the checksum of every block it touches. Nothing is unpickled: descriptions are
JSON, numbers are raw bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_lite.checkpoint.manifest import BLOCK, Fragment, StoredPiece, read_manifest
from megatron_lite.tensor.spec import Rectangle

TORCH_DTYPE = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class CorruptCheckpoint(ValueError):
    """Stored bytes do not match their checksum, or pieces are missing."""


def intersect(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """The common box of two boxes, or None."""
    start = tuple(max(x, y) for x, y in zip(a.start, b.start, strict=True))
    end = tuple(min(x + n, y + m) for x, n, y, m in zip(a.start, a.size, b.start, b.size, strict=True))
    size = tuple(e - s for s, e in zip(start, end, strict=True))
    return Rectangle(start, size) if all(n > 0 for n in size) else None


def _inside(box: Rectangle, outer: Rectangle) -> tuple[slice, ...]:
    return tuple(slice(s - o, s - o + n) for s, n, o in zip(box.start, box.size, outer.start, strict=True))


class Reader:
    """A complete checkpoint opened for reading.

    Attributes:
        manifest: the manifest as stored.
        tensors: (kind, name) -> pieces that hold it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: dict[str, Any] = read_manifest(directory)
        self.tensors: dict[tuple[str, str], list[StoredPiece]] = {}
        self._fragments: dict[str, Fragment] = {}
        self._file_of: dict[int, str] = {}
        self._maps: dict[str, np.ndarray] = {}
        self._checked: set[tuple[str, int]] = set()
        for name, expected in self.manifest["files"].items():
            if not name.endswith(".json"):
                continue
            data = (directory / name).read_bytes()
            if zlib.crc32(data) != expected["checksum"]:
                raise CorruptCheckpoint(f"{directory / name} does not match its checksum in manifest.json")
            fragment = Fragment.from_json(data)
            self._fragments[fragment.file] = fragment
            for piece in fragment.pieces:
                self._file_of[id(piece)] = fragment.file
                self.tensors.setdefault((piece.kind, piece.name), []).append(piece)

    @property
    def state(self) -> dict[str, Any]:
        """Counters, configuration and the rest of the JSON state."""
        state: dict[str, Any] = self.manifest["state"]
        return state

    def names(self, kind: str = "weight") -> dict[str, tuple[int, ...]]:
        """Full shape of every stored tensor of a kind, by name."""
        return {name: pieces[0].full_shape for (k, name), pieces in self.tensors.items() if k == kind}

    def read(self, kind: str, name: str, rectangle: Rectangle, out: torch.Tensor) -> None:
        """Fill ``out`` (rectangle.numel elements, row-major, any dtype or device) with a rectangle of a full tensor.

        Raises CorruptCheckpoint where a byte read does not match its checksum or no piece holds an element.
        """
        if rectangle.numel == 0:
            return
        assert out.numel() == rectangle.numel, (name, out.shape, rectangle)
        pieces = self.tensors.get((kind, name))
        if pieces is None:
            raise CorruptCheckpoint(f"{self.directory} has no {kind} of {name}")
        target = out.detach().view(rectangle.size)
        filled = 0
        for piece in pieces:
            box = intersect(rectangle, piece.rectangle)
            if box is None:
                continue
            stored = self._array(piece)
            part = stored[_inside(box, piece.rectangle)]
            target[_inside(box, rectangle)].copy_(part)
            filled += box.numel
        if filled != rectangle.numel:
            raise CorruptCheckpoint(
                f"{self.directory}: {kind} of {name}: {filled} of {rectangle.numel} elements of the box "
                f"{rectangle.start}+{rectangle.size} are stored"
            )

    def _array(self, piece: StoredPiece) -> torch.Tensor:
        file = self._file_of[id(piece)]
        if file not in self._maps:
            self._maps[file] = np.memmap(self.directory / file, dtype=np.uint8, mode="c")
        data = self._maps[file]
        fragment = self._fragments[file]
        for block in range(piece.offset // BLOCK, -(-(piece.offset + piece.nbytes) // BLOCK)):
            if (file, block) in self._checked:
                continue
            if zlib.crc32(data[block * BLOCK : (block + 1) * BLOCK]) != fragment.checksums[block]:
                raise CorruptCheckpoint(
                    f"{self.directory / file}: bytes {block * BLOCK} to {min((block + 1) * BLOCK, len(data))} do not match "
                    "their checksum: the file was damaged after it was written"
                )
            self._checked.add((file, block))
        raw = torch.from_numpy(data[piece.offset : piece.offset + piece.nbytes])
        dtype = TORCH_DTYPE[piece.dtype]
        if piece.offset % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(piece.rectangle.size)


def name_problems(stored: dict[str, tuple[int, ...]], wanted: Iterable[tuple[str, tuple[int, ...]]]) -> list[str]:
    """How the tensors of a checkpoint differ from a model's: missing, unexpected, of another shape. Empty when equal."""
    want = dict(wanted)
    problems = [f"{name}: not in the checkpoint" for name in want if name not in stored]
    problems += [f"{name}: in the checkpoint, not in the model" for name in stored if name not in want]
    problems += [
        f"{name}: {list(stored[name])} in the checkpoint, {list(shape)} in the model"
        for name, shape in want.items()
        if name in stored and tuple(stored[name]) != tuple(shape)
    ]
    return problems
