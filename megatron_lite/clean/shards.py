"""Shards: ``.jsonl.zst`` files with an index, readable by line number without reading the rest.

A shard is a row of independent zstd frames of about a megabyte of text, which any zstd reader takes as one file. Its index,
``.index/NAME.json`` beside it, has for each frame where it begins in the file and which line is its first. To read a line,
one frame is read.

Where shards and frames begin follows from the text alone: a line belongs to the shard and the frame in which its first
byte falls when the lines of the whole corpus are laid end to end. So any part of a corpus can be written by itself.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import zstandard

from megatron_lite.data.locked_file import LockedFile, naming
from megatron_lite.text.frames import INDEX, LIST, index_path, read_index, read_list
from megatron_lite.text.records import count_lines

FRAME_BYTES = 1_000_000  # of text
_LEVEL = 1  # of zstd: 7% larger than its default, and not half the work, which was most of that of writing
SHARD_BYTES = 128_000_000  # of text
UNCUT = 1 << 62  # bytes of text in a shard, where all lines are to be in one
_AHEAD = 8  # frames that may wait for their compression


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.jsonl.zst"


def _compress(pieces: list[memoryview]) -> bytes:
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(data)


class FrameFile:
    """Writes one file of frames, and its index. Nothing stands under its name before :meth:`finish`.

    Args:
        path: of the file.
        compressor: runs the compression; its frames come in order whatever its threads do.
    """

    def __init__(self, path: Path, compressor: ThreadPoolExecutor) -> None:
        self.path = path
        self.lines = self.bytes = 0
        index_path(path).parent.mkdir(exist_ok=True)
        self._file = LockedFile(str(path))
        self._file.open()
        self._compressor = compressor
        self._pending: deque[Future[bytes]] = deque()
        self._buffer: list[memoryview] = []
        self._begins: list[tuple[int, int]] = []  # (line, start) of each frame
        self._offsets = [0]

    def add(self, data: memoryview, lines: int, new_frame: bool) -> None:
        """Append whole lines; ``new_frame``: the first of them is the first of a frame."""
        if new_frame or not self._begins:
            self._end_frame()
            self._begins.append((self.lines, self.bytes))
        self._buffer.append(data)
        self.lines += lines
        self.bytes += len(data)

    def finish(self) -> None:
        """Complete the file; its index first, so that a file that is there has one."""
        self._end_frame()
        while self._pending:
            self._write_one()
        self._file.sync()
        frames = [[offset, *begin] for offset, begin in zip(self._offsets, self._begins, strict=False)]
        index = {
            "format": "megatron-lite shard",
            "version": 1,
            "lines": self.lines,
            "bytes": self.bytes,
            "frames": frames,
        }
        write_whole(index_path(self.path), json.dumps(index).encode() + b"\n")
        self._file.publish(self.path)

    def close(self) -> None:
        """Give up what is not finished."""
        self._file.remove()

    def _end_frame(self) -> None:
        if self._buffer:
            self._pending.append(self._compressor.submit(_compress, self._buffer))
            self._buffer = []
        while len(self._pending) > _AHEAD:
            self._write_one()

    def _write_one(self) -> None:
        data = self._pending.popleft().result()
        self._file.write(data)
        self._offsets.append(self._offsets[-1] + len(data))


class ShardWriter:
    """Writes the shards of a corpus, or of a piece of it, into a directory.

    Args:
        directory: for the files.
        shard_bytes: of text in a shard.
        start: bytes of text of the corpus before this piece, which begins a shard.
    """

    def __init__(self, directory: Path, shard_bytes: int = SHARD_BYTES, start: int = 0) -> None:
        self._directory, self._shard_bytes = directory, shard_bytes
        self._at = start
        self._compressor = ThreadPoolExecutor(2, "zstd")
        self._file: FrameFile | None = None
        self._number, self._frame = -1, -1

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if self._file is not None:
            if kind is None:
                self._file.finish()
            else:
                self._file.close()
        self._compressor.shutdown(cancel_futures=True)

    def add(self, data: bytes) -> None:
        """Append whole lines, each with its newline."""
        done = 0
        while done < len(data):
            number, frame = self._at // self._shard_bytes, self._at // FRAME_BYTES
            if number != self._number:
                if self._file is not None:
                    self._file.finish()
                self._file = FrameFile(self._directory / shard_name(number), self._compressor)
            assert self._file is not None
            end = min((number + 1) * self._shard_bytes, (frame + 1) * FRAME_BYTES) - self._at
            stop = first_line(data, done + end)
            is_first = frame != self._frame or number != self._number
            self._file.add(memoryview(data)[done:stop], count_lines(data, done, stop), is_first)
            self._number, self._frame = number, frame
            self._at += stop - done
            done = stop


def first_line(data: bytes, at: int) -> int:
    """Where the first of some whole lines begins that begins at byte ``at`` or later; ``len(data)``: there is none."""
    return data.find(b"\n", at - 1) + 1 or len(data) if at > 0 else 0


def write_whole(path: Path, data: bytes | memoryview, draft: Path | None = None) -> None:
    """Write a file that is there whole or not at all; ``draft`` is its name until then (``path.tmp``)."""
    draft = draft or Path(f"{path}.tmp")
    with naming(draft), open(draft, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


class FrameReader:
    """Reads one file of frames: ``frames``, ``lines`` and ``bytes`` (of text) as its index has them.

    Raises:
        FileNotFoundError: it has no index.
        ValueError: its index is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        index = read_index(path)
        self.lines, self.bytes, self.frames = index.lines, index.bytes, index.frames

    def read_frames(self, first: int = 0) -> Iterator[bytes]:
        """The text of the frames from the ``first`` on: whole lines.

        Raises:
            ValueError: the file does not fit its index, or is damaged.
        """
        with open(self.path, "rb") as file:
            for number in range(first, len(self.frames)):
                yield self._read(file, number)

    def line(self, number: int) -> bytes:
        """A line, without its newline; the first has number 0. Raises IndexError, ValueError."""
        if not 0 <= number < self.lines:
            raise IndexError(f"{self.path}: line {number} of {self.lines}")
        at = bisect_right(self.frames, number, key=lambda frame: frame.line) - 1
        with open(self.path, "rb") as file:
            return self._read(file, at).split(b"\n", number - self.frames[at].line + 1)[number - self.frames[at].line]

    def _read(self, file: IO[bytes], number: int) -> bytes:
        last = number + 1 == len(self.frames)
        file.seek(self.frames[number].offset)
        data = file.read() if last else file.read(self.frames[number + 1].offset - self.frames[number].offset)
        size = (self.bytes if last else self.frames[number + 1].start) - self.frames[number].start
        try:
            text = zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
        except zstandard.ZstdError as error:
            raise ValueError(f"{self.path}: damaged or cut off in frame {number} ({error})") from None
        if len(text) != size:
            raise ValueError(f"{self.path}: frame {number} has {len(text)} bytes of text, its index says {size}")
        expected = (self.lines if last else self.frames[number + 1].line) - self.frames[number].line
        if (lines := count_lines(text, 0, size)) != expected:
            raise ValueError(f"{self.path}: frame {number} has {lines} lines, its index says {expected}")
        return text


def write_list(directory: Path, plan: str, draft: Path | None = None) -> int:
    """Write the list of a directory's shards, in the order of their numbers, and return how many lines they have.

    ``plan`` is the digest of what made them, ``draft`` as of write_whole.
    """
    (directory / INDEX).mkdir(exist_ok=True)
    shards: list[dict[str, Any]] = []
    for path in sorted(directory.glob("shard-*.jsonl.zst"), key=lambda path: (len(path.name), path.name)):
        reader = FrameReader(path)
        sizes = {"lines": reader.lines, "bytes": reader.bytes, "packed_bytes": path.stat().st_size}
        shards.append({"name": path.name, **sizes})
    data = {"format": "megatron-lite shards", "version": 1, "plan": plan, "shards": shards}
    write_whole(directory / INDEX / LIST, json.dumps(data, indent=1).encode() + b"\n", draft)
    return sum(shard["lines"] for shard in shards)


class ShardReader:
    """The lines of a directory of shards by number, through all of them; ``len`` is how many there are.

    Raises:
        ValueError: no directory of shards.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        try:
            self._shards = read_list(self.directory)
        except (OSError, ValueError) as error:
            raise ValueError(f"{directory}: no directory of shards ({error})") from None
        self._first = [0]
        for shard in self._shards:
            self._first.append(self._first[-1] + shard["lines"])
        self._open: dict[int, FrameReader] = {}

    def __len__(self) -> int:
        return self._first[-1]

    def line(self, number: int) -> bytes:
        """A line, without its newline; the first has number 0. Raises IndexError, ValueError."""
        if not 0 <= number < len(self):
            raise IndexError(f"{self.directory}: line {number} of {len(self)}")
        at = bisect_right(self._first, number) - 1
        if at not in self._open:
            self._open[at] = FrameReader(self.directory / self._shards[at]["name"])
        return self._open[at].line(number - self._first[at])
