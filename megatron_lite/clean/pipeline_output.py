"""What a run leaves: directories of shards, complete or not there at all.

Shards are gathered in ``NAME.DIGEST.tmp`` beside the directory (the digest is the plan's, so that no run takes up
another's), which is renamed when all are there. A part alone has written them already and they are moved; several parts have
left their lines in a spool each, and anybody writes any shard from those, in a directory of its own first. Parts that come
to the end at the same time do some work twice and never meet each other's halves. What killed runs left under such names goes
when a run has its output: nobody can give it the name any more.
"""

from __future__ import annotations

import errno
import heapq
import json
import os
import re
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from megatron_lite.clean.pipeline_work import PLAN, WorkDirectory, digest, lasting, not_from
from megatron_lite.clean.shards import (
    INDEX,
    LIST,
    UNCUT,
    FrameReader,
    ShardWriter,
    first_line,
    index_path,
    shard_name,
    write_list,
    write_whole,
)

_DIGITS = 16  # hexadecimal, of the document's number before a line of dropped documents


class Output:
    """One directory of shards, which any part may bring to its end, several of them at the same time.

    Args:
        directory: its final name.
        work: the run's.
        shard_bytes: of text in a shard.
    """

    def __init__(self, directory: Path, work: WorkDirectory, shard_bytes: int) -> None:
        self.directory, self.shard_bytes = directory, shard_bytes
        self._work = work
        self._own = directory.with_name(f"{directory.name}.{work.part}.tmp")  # of this part

    def is_complete(self, plan: Mapping[str, Any]) -> bool:
        """Whether the directory is there as the plan makes it.

        Raises:
            FileExistsError: it is there, and something else.
        """
        if not self.directory.exists():
            return False
        with suppress(OSError, ValueError, KeyError):
            if json.loads((self.directory / INDEX / LIST).read_bytes())["plan"] == digest(plan):
                return True
        raise not_from(str(self.directory), self.directory, plan)

    def _draft(self, plan: Mapping[str, Any]) -> Path:
        """Where the parts of the run of a plan gather what is finished: whole files only."""
        return self.directory.with_name(f"{self.directory.name}.{digest(plan)[:12]}.tmp")

    def write(self, stage: int, plan: Mapping[str, Any], documents: int) -> None:
        """Put the shards of what all parts left after a stage into the draft.

        Raises:
            OSError: they have not as many documents as were counted.
        """
        draft = self._draft(plan)
        with self._unless_complete(plan):
            if self.is_complete(plan):
                return
            (draft / INDEX).mkdir(parents=True, exist_ok=True)
            self.clear()
            (self._own / INDEX).mkdir(parents=True)
            sources = [directory / "documents" for directory in self._work.all_parts(stage)]
            if self._work.parts == 1:
                for path in sources[0].glob("shard-*.jsonl.zst"):  # those that are not there have been moved before
                    self._put(path, draft)
            else:
                self._write_shards(sources, draft)
            write_whole(draft / PLAN, lasting(plan), self._own / PLAN)
            found = write_list(draft, digest(plan), self._own / LIST)
            if found != documents and not self.is_complete(plan):
                raise OSError(
                    f"{draft} has {found:,} documents, but {documents:,} were counted; "
                    f"remove it and {self._work.path}, and start again"
                )

    def publish(self, plan: Mapping[str, Any]) -> None:
        """Give the draft its name."""
        draft = self._draft(plan)
        with self._unless_complete(plan):
            if not self.directory.exists():
                os.rename(draft, self.directory)
        self.clear()

    def clear(self) -> None:
        """Remove what this part has left half done, and all that anybody has, once the directory has its name."""
        shutil.rmtree(self._own, ignore_errors=True)
        if self.directory.exists():
            draft = re.compile(re.escape(self.directory.name) + r"\.[0-9a-f]+\.tmp")
            for path in self.directory.parent.iterdir():
                if draft.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _unless_complete(self, plan: Mapping[str, Any]) -> Iterator[None]:
        """When the draft vanishes, another part has given it its name (and mkdir says that it was there a moment ago)."""
        try:
            yield
        except (FileNotFoundError, FileExistsError):
            if not self.is_complete(plan):
                raise

    def _put(self, path: Path, draft: Path) -> None:
        """Move a shard and its index, which comes first, into the draft; both are there whole or not at all."""
        for part in (index_path(path), path):
            name = part.relative_to(path.parent)
            if not part.exists():
                continue
            try:
                os.replace(part, draft / name)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                shutil.copyfile(part, self._own / name)  # the work directory is on another file system
                os.replace(self._own / name, draft / name)
                part.unlink()

    def _write_shards(self, sources: Sequence[Path], draft: Path) -> None:
        files = [source / shard_name(0) for source in sources]
        readers = [FrameReader(file) for file in files if file.exists()]
        total = sum(reader.bytes for reader in readers)
        for number in self._work.share(-(-total // self.shard_bytes)):
            if (draft / shard_name(number)).exists():
                continue
            start, end = number * self.shard_bytes, (number + 1) * self.shard_bytes
            pieces = _lines_of_shard(readers, start, end)
            for at, first in pieces:  # if any: one long line may fill a shard and the next
                with ShardWriter(self._own, self.shard_bytes, at) as writer:
                    writer.add(first)
                    for _, data in pieces:
                        writer.add(data)
                self._put(self._own / shard_name(number), draft)


def _lines_of_shard(readers: Sequence[FrameReader], start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The lines of some files, laid end to end, that begin at a byte in [start, end): (byte at which they begin, lines)."""
    before = 0  # bytes of the files before
    for reader in readers:
        first = max(0, bisect_right(reader.frames, start - before, key=lambda frame: frame.start) - 1)
        for frame, data in zip(reader.frames[first:], reader.read_frames(first), strict=True):
            at = before + frame.start
            begin, stop = first_line(data, start - at), first_line(data, end - at)
            if begin < stop:
                yield at + begin, data[begin:stop]
            if at + len(data) >= end:
                return
        before += reader.bytes


def dropped_spool(directory: Path) -> ShardWriter:
    """Takes lines of dropped documents, each behind its number."""
    (directory / "dropped").mkdir()
    return ShardWriter(directory / "dropped", UNCUT)


def merge_dropped(work: WorkDirectory, stages: int, shard_bytes: int) -> None:
    """Bring what this part's stages dropped into the order of the corpus, as if it were a stage after them."""
    directory = work.part_directory(stages)
    if directory.is_dir():
        return
    spools = [work.part_directory(stage) / "dropped" / shard_name(0) for stage in range(stages)]
    with work.finishing(directory) as draft:
        (draft / "documents").mkdir()
        with ShardWriter(draft / "documents", shard_bytes) as writer:
            for line in heapq.merge(*(_spooled(spool) for spool in spools if spool.exists())):
                writer.add(line[_DIGITS + 1 :])


def _spooled(path: Path) -> Iterator[bytes]:
    for data in FrameReader(path).read_frames():
        yield from BytesIO(data)
