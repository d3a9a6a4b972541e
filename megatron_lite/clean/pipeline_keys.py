"""The half of corpus steps that sees the whole corpus: keys in, decisions out, one bucket at a time.

A bucket is decided either as its keys come (:meth:`Decider.decide_block`), or when those of all parts are in their files
(:func:`decide_bucket`). It sees the same keys in the same order both ways.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron_lite.clean.config import StepConfig
from megatron_lite.clean.documents import read_output, read_spool
from megatron_lite.clean.pipeline_stage import DROPS, Done, Stage, apply_drops, corpus_step, line_of, read_array, taken
from megatron_lite.clean.shards import write_whole
from megatron_lite.clean.step import bucket_path


def by_bucket(keys: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(bucket, its keys in their order) of the buckets that occur."""
    ordered = keys[np.argsort(keys["bucket"], kind="stable")]
    buckets, starts = np.unique(ordered["bucket"], return_index=True)
    return [(int(b), part) for b, part in zip(buckets, np.split(ordered, starts[1:]), strict=False)]


class Decider:
    """Decides the keys of one corpus step."""

    def __init__(self, config: StepConfig, scratch: Path) -> None:
        self.step = corpus_step(config, scratch)
        self._begun: set[int] = set()

    def decide(self, bucket: int, keys: np.ndarray) -> np.ndarray:
        """What the next keys of a bucket drop. [n] of :data:`DROPS`, in their order."""
        self._begin(bucket)
        duplicates = keys[np.asarray(self.step.decide(bucket, keys), dtype=bool)]
        drops = np.zeros(len(duplicates), DROPS)
        drops["number"] = duplicates["number"]
        if "unit" in (duplicates.dtype.names or ()):
            drops["unit"] = duplicates["unit"]
        return drops

    def decide_block(self, keys: np.ndarray) -> np.ndarray:
        """What the keys of the next documents drop. [n] of :data:`DROPS`, sorted, each once."""
        found = [self.decide(bucket, part) for bucket, part in by_bucket(keys)] if len(keys) else []
        return np.unique(np.concatenate(found)) if found else np.empty(0, DROPS)

    def outcome(self, bucket: int, directory: Path) -> dict[str, Any]:
        """End a bucket: save it where the options ask for that, and say what the report needs."""
        self._begin(bucket)
        facts = self.step.bucket_facts(bucket)
        if self.step.options.save:
            self.step.save(bucket, bucket_path(str(directory), bucket))
        self.step.close(bucket)
        return {"facts": facts, "done": taken(self.step.counts)}

    def _begin(self, bucket: int) -> None:
        if bucket not in self._begun:
            self._begun.add(bucket)
            if against := self.step.options.against:
                self.step.load(bucket, bucket_path(against, bucket))


def decide_now(stage: Stage, decider: Decider, done: Done) -> None:
    """Decide the keys of a block as it comes, and drop; the worker has written and counted all documents as kept."""
    assert stage.keyed is not None and done.keys is not None
    drops = decider.decide_block(done.keys)
    meant = set(drops["number"].tolist())
    places = [at for at, head in enumerate(done.heads) if head[0] in meant] if meant else []
    if not places:
        return
    documents = [
        read_output(done.lines[at], stage.keys, *done.heads[at]) if stage.last else read_spool(done.lines[at], stage.keys)[0]
        for at in places
    ]
    counts = done.counts.step(stage.keyed)
    counts.take_back(documents)
    lengths = done.counts.lengths
    if stage.last:
        lengths.subtract(len(d.text).bit_length() for d in documents)
    apply_drops(decider.step, documents, drops)
    kept, dropped = counts.left(documents, stage.label(stage.keyed))
    if stage.last:
        lengths.update(len(d.text).bit_length() for d in kept)
        done.counts.lengths = +lengths  # without bins that are empty now
    done.take_dropped(stage, stage.keyed, dropped)
    for at, document in zip(places, documents, strict=True):
        done.lines[at] = b"" if document.dropped is not None else line_of(stage, document)
    done.lines = [line for line in done.lines if line]


class KeyFiles:
    """Writes the keys of one part, a file for each bucket."""

    def __init__(self, directory: Path, buckets: int) -> None:
        directory.mkdir()
        self._stack = ExitStack()
        self._files: list[IO[bytes]] = []
        for bucket in range(buckets):
            self._files.append(self._stack.enter_context(open(bucket_path(str(directory), bucket), "wb")))

    def __enter__(self) -> KeyFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, keys: np.ndarray) -> None:
        """Append the keys of the next documents."""
        for bucket, part in by_bucket(keys) if len(keys) else []:
            self._files[bucket].write(part.tobytes())


def decide_bucket(config: StepConfig, scratch: Path, bucket: int, parts: Sequence[Path], into: Path) -> None:
    """Decide one bucket from the key directories of all parts, and write what follows into a directory."""
    decider = Decider(config, scratch)
    keys = np.concatenate([np.fromfile(bucket_path(str(part), bucket), decider.step.key_dtype) for part in parts])
    np.sort(decider.decide(bucket, keys)).tofile(into / "drops")
    write_whole(into / "outcome.json", json.dumps(decider.outcome(bucket, into)).encode())


def gather_drops(decided: Sequence[Path], first: int | None, last: int | None, into: Path) -> None:
    """Write the decisions about the documents from number ``first`` to ``last`` as one sorted file of :data:`DROPS`."""
    found = [np.empty(0, DROPS)]
    if first is not None and last is not None:
        for directory in decided:
            drops = read_array(directory / "drops", DROPS)
            numbers = drops["number"]
            start, end = (
                np.searchsorted(numbers, np.uint64(first), "left"),
                np.searchsorted(numbers, np.uint64(last), "right"),
            )
            found.append(np.array(drops[start:end]))
    np.unique(np.concatenate(found)).tofile(into)
