"""The half of corpus steps that sees the whole corpus: keys in, decisions out, one bucket at a time.

A bucket is decided either as its keys come (:meth:`Decider.decide`), or when those of all parts are in their files
(:func:`decide_bucket`). It sees the same keys in the same order both ways.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron_lite.clean.config import StepConfig
from megatron_lite.clean.pipeline_stage import DROPS, between, read_array, taken
from megatron_lite.clean.shards import write_whole
from megatron_lite.clean.step import CorpusStep, bucket_path

_TOGETHER = 1 << 18  # decisions that are sorted at a time, at least


def by_bucket(keys: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(bucket, places of its keys, ascending) of the buckets that occur."""
    order = np.argsort(keys["bucket"], kind="stable")
    buckets, starts = np.unique(keys["bucket"][order], return_index=True)
    return zip(buckets.tolist(), np.split(order, starts[1:]), strict=False)


class Decider:
    """Decides the keys of one corpus step."""

    def __init__(self, config: StepConfig, scratch: Path) -> None:
        step = config.build()
        assert isinstance(step, CorpusStep)
        self.step, self.step.scratch = step, str(scratch)
        self._begun: set[int] = set()

    def decide(self, keys: np.ndarray) -> np.ndarray:
        """Which of the keys of the next documents drop: bool [keys]."""
        drop = np.zeros(len(keys), bool)
        for bucket, places in by_bucket(keys):
            drop[places] = self.decide_bucket(bucket, keys[places])
        return drop

    def decide_bucket(self, bucket: int, keys: np.ndarray) -> np.ndarray:
        """Which of the next keys of a bucket drop: bool [keys]."""
        self._begin(bucket)
        return np.asarray(self.step.decide(bucket, keys), dtype=bool)

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
        for bucket, places in by_bucket(keys):
            self._files[bucket].write(keys[places].tobytes())


def decide_bucket(config: StepConfig, scratch: Path, bucket: int, parts: Sequence[Path], into: Path) -> None:
    """Decide one bucket from the key directories of all parts, and write what follows into a directory."""
    decider = Decider(config, scratch)
    keys = np.concatenate([np.fromfile(bucket_path(str(part), bucket), decider.step.key_dtype) for part in parts])
    keys = keys[decider.decide_bucket(bucket, keys)]
    drops = np.zeros(len(keys), DROPS)
    drops["number"] = keys["number"]
    if "unit" in (keys.dtype.names or ()):
        drops["unit"] = keys["unit"]
    write_whole(into / "drops", drops.view(np.uint8).data)
    write_whole(into / "outcome.json", json.dumps(decider.outcome(bucket, into)).encode())


def gather_drops(decided: Sequence[Path], first: int | None, last: int | None, into: Path) -> None:
    """Write the decisions about the documents from number ``first`` to ``last`` as one sorted file of :data:`DROPS`."""
    found = np.empty(0, DROPS)
    more: list[np.ndarray] = []  # not looked at yet: buckets tell of the same documents again and again
    for directory in decided:
        if first is None or last is None:  # there are no documents
            break
        more.append(np.array(between(read_array(directory / "drops", DROPS), first, last)))
        if sum(map(len, more)) > len(found) + _TOGETHER:
            found, more = _each_once([found, *more]), []
    write_whole(into, _each_once([found, *more]).view(np.uint8).data)


def _each_once(drops: Sequence[np.ndarray]) -> np.ndarray:
    """Some :data:`DROPS` as one array, sorted."""
    found = np.concatenate(drops)
    found = found[np.lexsort((found["unit"], found["number"]))]
    is_new = np.ones(len(found), bool)
    is_new[1:] = found[1:] != found[:-1]
    return found[is_new]
