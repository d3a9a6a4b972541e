"""Reading rectangles out of a checkpoint, whatever layout wrote it.

:class:`Reader` maps the ranks' files into memory and copies the intersection of what is asked for with what is stored.
It reads no more than that, and checks the checksum of every block it touches. Nothing is unpickled: descriptions are
JSON, numbers are raw bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_lite.checkpoint.manifest import BLOCK, Fragment, StoredPiece, incomplete_reason, read_manifest
from megatron_lite.optim.shares import Share
from megatron_lite.tensor.spec import Rectangle

TORCH_DTYPE = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SHOWN = 5  # problems in one message


class CorruptCheckpoint(ValueError):
    """Stored bytes do not match their checksum, or pieces are missing."""


def intersect(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """The common box of two boxes of one tensor, or None where they share no element."""
    start = tuple(max(x, y) for x, y in zip(a.start, b.start, strict=True))
    end = tuple(min(x + n, y + m) for x, n, y, m in zip(a.start, a.size, b.start, b.size, strict=True))
    size = tuple(e - s for s, e in zip(start, end, strict=True))
    return Rectangle(start, size) if all(n > 0 for n in size) else None


def _inside(box: Rectangle, outer: Rectangle) -> tuple[slice, ...]:
    return tuple(slice(s - o, s - o + n) for s, n, o in zip(box.start, box.size, outer.start, strict=True))


class Reader:
    """A complete checkpoint opened for reading.

    Attributes:
        directory: where it lies.
        manifest: the manifest as stored.
        tensors: (kind, name) -> (file, piece) of all pieces that hold it.

    Raises CorruptCheckpoint for a directory that is not a complete checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        reason = incomplete_reason(directory)
        if reason is not None:
            raise CorruptCheckpoint(f"{directory} is not a complete checkpoint: {reason}")
        self.manifest: dict[str, Any] = read_manifest(directory)
        self.tensors: dict[tuple[str, str], list[tuple[str, StoredPiece]]] = {}
        self._fragments: dict[str, Fragment] = {}
        self._maps: dict[str, np.ndarray] = {}
        self._checked: set[tuple[str, int]] = set()
        for name, expected in self.manifest["files"].items():
            if name.endswith(".json"):
                self._add(name, expected["checksum"])

    def _add(self, name: str, checksum: int) -> None:
        path = self.directory / name
        data = path.read_bytes()
        if zlib.crc32(data) != checksum:
            raise CorruptCheckpoint(f"{path} does not match its checksum in manifest.json: it was damaged")
        try:
            fragment = Fragment.from_json(data)
        except ValueError as error:
            raise CorruptCheckpoint(f"{path}: {error}") from None
        listed = self.manifest["files"].get(fragment.file)
        if listed is None or listed["size"] != fragment.size:
            raise CorruptCheckpoint(f"{path} describes {fragment.file!r}, which is not the file in manifest.json")
        self._fragments[fragment.file] = fragment
        for piece in fragment.pieces:
            held = self.tensors.setdefault((piece.kind, piece.name), [])
            if held and held[0][1].full_shape != piece.full_shape:
                raise CorruptCheckpoint(f"{path}: {piece.kind} of {piece.name} has another shape than in {held[0][0]}")
            held.append((fragment.file, piece))

    @property
    def step(self) -> int:
        """Finished steps."""
        return int(self.manifest["step"])

    @property
    def state(self) -> dict[str, Any]:
        """Counters, configuration and the rest of the JSON state."""
        state: dict[str, Any] = self.manifest["state"]
        return state

    def names(self, kind: str = "weight") -> dict[str, tuple[int, ...]]:
        """Full shape of every stored tensor of a kind, by name."""
        return {name: pieces[0][1].full_shape for (k, name), pieces in self.tensors.items() if k == kind}

    def read(self, kind: str, name: str, rectangle: Rectangle, out: torch.Tensor) -> None:
        """Fill ``out`` (rectangle.numel elements, row-major, any dtype or device) with a rectangle of a full tensor.

        Raises CorruptCheckpoint where a byte read does not match its checksum, or an element is stored nowhere or
        twice.
        """
        assert out.numel() == rectangle.numel, (name, out.shape, rectangle)
        pieces = self.tensors.get((kind, name))
        if pieces is None:
            raise CorruptCheckpoint(f"{self.directory} has no {kind} of {name}")
        shape = pieces[0][1].full_shape
        if len(shape) != len(rectangle.size) or any(
            not 0 <= s <= s + n <= full for s, n, full in zip(rectangle.start, rectangle.size, shape, strict=True)
        ):
            asked = f"{list(rectangle.start)}+{list(rectangle.size)}"
            raise CorruptCheckpoint(f"{self.directory}: {kind} of {name} has shape {list(shape)}, asked for is {asked}")
        if rectangle.numel == 0:
            return
        target = out.detach().view(rectangle.size)
        parts = [(f, p, box) for f, p in pieces if (box := intersect(rectangle, p.rectangle)) is not None]
        for file, piece, box in parts:
            target[_inside(box, rectangle)].copy_(self._array(file, piece)[_inside(box, piece.rectangle)])
        problem = _not_once([box for _, _, box in parts], rectangle)
        if problem is not None:
            where = f"the box {list(rectangle.start)}+{list(rectangle.size)}"
            raise CorruptCheckpoint(f"{self.directory}: {kind} of {name}: of {where} {problem}")

    def problems(self) -> Iterator[str]:
        """Read everything: each file that does not match its checksums, each tensor that is not whole, in words."""
        for (kind, name), pieces in self.tensors.items():
            shape = pieces[0][1].full_shape
            problem = _not_once(
                [p.rectangle for _, p in pieces if p.rectangle.numel], Rectangle((0,) * len(shape), shape)
            )
            if problem is not None:
                yield f"{kind} of {name}: {problem}"
        for file, fragment in self._fragments.items():
            for block in range(len(fragment.checksums)):
                try:
                    self._check(file, block)
                except CorruptCheckpoint as error:
                    yield str(error)

    def _check(self, file: str, block: int) -> np.ndarray:
        """The bytes of a file, one block of which has been compared with its checksum."""
        if file not in self._maps:
            self._maps[file] = np.memmap(self.directory / file, dtype=np.uint8, mode="c")
        data = self._maps[file]
        if (file, block) not in self._checked:
            begin, end = block * BLOCK, min((block + 1) * BLOCK, len(data))
            if zlib.crc32(data[begin:end].data) != self._fragments[file].checksums[block]:
                raise CorruptCheckpoint(
                    f"{self.directory / file}: bytes {begin} to {end - 1} do not match their checksum: the file was "
                    "damaged after it was written"
                )
            self._checked.add((file, block))
        return data

    def _array(self, file: str, piece: StoredPiece) -> torch.Tensor:
        end = piece.offset + piece.nbytes
        data = np.empty(0, dtype=np.uint8)
        for block in range(piece.offset // BLOCK, -(-end // BLOCK)):
            data = self._check(file, block)
        raw = torch.from_numpy(data[piece.offset : end])
        dtype = TORCH_DTYPE[piece.dtype]
        if piece.offset % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(piece.rectangle.size)


def _not_once(boxes: Sequence[Rectangle], whole: Rectangle) -> str | None:
    """Why boxes inside ``whole`` do not hold each of its elements once, or None."""
    total = sum(box.numel for box in boxes)
    if total < whole.numel:
        return f"only {total} of {whole.numel} elements are stored"
    if len(boxes) > 1:
        seen = torch.zeros(whole.size, dtype=torch.bool)
        for box in boxes:
            part = seen[_inside(box, whole)]
            if part.any():
                return "elements are stored twice"
            part.fill_(True)
    return None


def load_shares(reader: Reader, shares: Sequence[Share], *, weights_only: bool = False) -> None:
    """Fill the tensors of this rank's shares (``optimizer.targets()``) from a checkpoint.

    Args:
        reader: the checkpoint.
        shares: what is wanted.
        weights_only: leave the moments as they are.

    Raises CorruptCheckpoint after all have been tried, with what could not be read. Ranks do this apart; wrap it in
    :func:`megatron_lite.checkpoint.together.everyone` so that a failure ends all of them.
    """
    wanted = [s for s in shares if s.kind == "weight" or not weights_only]
    if any(s.kind != "weight" for s in wanted) and not reader.names("exp_avg"):
        raise CorruptCheckpoint(f"{reader.directory} holds weights only: give --no-load-optim or --finetune")
    failures: dict[str, None] = {}  # in order, each text once
    for share in wanted:
        stored = reader.tensors.get((share.kind, share.name))
        if stored is not None and stored[0][1].full_shape != tuple(share.full_shape):
            shapes = f"{list(stored[0][1].full_shape)} in the checkpoint, {list(share.full_shape)} in the model"
            failures[f"{share.kind} of {share.name}: {shapes}"] = None
            continue
        try:
            reader.read(share.kind, share.name, share.rectangle, share.tensor)
        except CorruptCheckpoint as error:
            failures[str(error)] = None
    if failures:
        texts = list(failures)
        more = f"; and {len(texts) - _SHOWN} problems more" if len(texts) > _SHOWN else ""
        raise CorruptCheckpoint("; ".join(texts[:_SHOWN]) + more)


def name_problems(stored: dict[str, tuple[int, ...]], wanted: Iterable[tuple[str, tuple[int, ...]]]) -> list[str]:
    """How a checkpoint's tensors differ from a model's: missing, unexpected, of another shape. Empty when equal."""
    want = dict(wanted)
    problems = [f"{name}: not in the checkpoint" + _padding(name) for name in want if name not in stored]
    problems += [f"{name}: in the checkpoint, not in the model" + _padding(name) for name in stored if name not in want]
    problems += [
        f"{name}: {list(stored[name])} in the checkpoint, {list(shape)} in the model"
        for name, shape in want.items()
        if name in stored and tuple(stored[name]) != tuple(shape)
    ]
    return problems


def _padding(name: str) -> str:
    return " (trained rows of padding: --mask-padded-vocab has changed)" if name.endswith(".padding") else ""
