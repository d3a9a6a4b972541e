"""One stage of a pipeline, as far as it is local: what a worker does with a block of documents.

A stage ends after a corpus step that wants the keys of all documents before it decides: it begins with what the earlier one
decided about its documents, goes through steps, and ends with the keys for the next one, or with the lines of the output.
A corpus step inside it decides as the documents pass: the worker asks what its keys drop (:data:`Question`), and the process
that sees the whole corpus answers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from megatron_lite.clean.config import Keys, Pipeline, StepConfig
from megatron_lite.clean.counts import StageCounts, StepCounts
from megatron_lite.clean.documents import (
    bad_line,
    dropped_line,
    output_line,
    read_block,
    read_spool,
    spool_line,
    spooled_numbers,
)
from megatron_lite.clean.pipeline_work import WorkDirectory
from megatron_lite.clean.step import CorpusStep, Document, LocalStep, place_name, place_of
from megatron_lite.text import blocks
from megatron_lite.text.records import BadInput

DROPS = np.dtype([("number", np.uint64), ("unit", np.uint32)])  # what to drop, sorted, each once
Question = tuple[int, np.ndarray]  # position of a corpus step, keys of some documents; the answer: which drop (bool [keys])


class StepFailed(RuntimeError):
    """A step raised; the text says which and at what documents."""


@dataclass(frozen=True)
class Stage:
    """What happens between two readings of the documents.

    Attributes:
        number: of the stage, from 0.
        pipeline: the whole of it; steps are named by their position in it.
        applied: position of the corpus step whose decisions are applied first; None: there is none.
        steps: positions of the steps that follow: local ones, and corpus steps that decide as the documents pass.
        keyed: position of the corpus step whose keys come last; None: the documents are the output.
        inputs: names of the files.
        keep_dropped: write dropped documents too.
        skip_bad: leave bad records out and count them.
    """

    number: int
    pipeline: Pipeline
    applied: int | None
    steps: tuple[int, ...]
    keyed: int | None
    inputs: tuple[str, ...] = ()
    keep_dropped: bool = False
    skip_bad: bool = False

    @property
    def keys(self) -> Keys:
        return self.pipeline.keys

    def step(self, position: int) -> StepConfig:
        """A step of the pipeline."""
        return self.pipeline.steps[position]

    def deciding(self) -> list[int]:
        """Positions of the corpus steps that decide as the documents pass."""
        return [position for position in self.steps if issubclass(self.step(position).kind, CorpusStep)]

    def label(self, position: int) -> str:
        """What the report calls a step."""
        return self.pipeline.labels()[position]


def cut(
    pipeline: Pipeline, alone: bool, inputs: tuple[str, ...] = (), keep_dropped: bool = False, skip_bad: bool = False
) -> list[Stage]:
    """The stages of a pipeline; ``alone``: one part does it all, so steps that can decide while reading do."""
    stages: list[Stage] = []
    applied: int | None = None
    steps: list[int] = []
    for position, step in [*enumerate(pipeline.steps), (None, None)]:
        ends = step is None or (issubclass(step.kind, CorpusStep) and not (alone and not step.kind.needs_barrier))
        if ends:
            stages.append(Stage(len(stages), pipeline, applied, tuple(steps), position, inputs, keep_dropped, skip_bad))
            applied, steps = position, []
        elif position is not None:
            steps.append(position)
    return stages


@dataclass(frozen=True)
class Block:
    """Documents for a worker: a block of the ``file``-th input, or of the spool of the stage before.

    Attributes:
        stage: number of the stage to take it through.
        base: records of the input before those that the block's numbers count.
        taken: bytes of this part's input on the disk that have been read when it has been.
    """

    stage: int
    file: int = 0
    base: int = 0
    block: blocks.Block | None = None
    spool: bytes = b""
    taken: int = 0

    def place(self) -> str:
        """Where the block is, for people."""
        if self.block is None:
            (file, first), (last_file, last) = (place_of(number) for number in spooled_numbers(self.spool))
            return f"record {first} of input {file + 1} to record {last} of input {last_file + 1}"
        is_lines = isinstance(self.block, blocks.Lines)
        size = self.block.data.rstrip().count(b"\n") + 1 if isinstance(self.block, blocks.Lines) else len(self.block)
        first = self.block.first
        return f"{'lines' if is_lines else 'documents'} {first} to {first + size - 1} of {self.block.file}"


@dataclass
class Done:
    """A block after a worker.

    Attributes:
        lines: the documents that are left, written for where they go.
        dropped: lines of dropped documents behind their numbers, in order, when these are kept.
        keys: of the corpus step that ends the stage.
        counts: of this block.
        error: bad input, which ends the run; nothing else counts then.
    """

    lines: bytes = b""
    dropped: bytes = b""
    keys: np.ndarray | None = None
    counts: StageCounts = field(default_factory=StageCounts)
    error: str | None = None


def apply_drops(step: CorpusStep, drops: np.ndarray, documents: Sequence[Document]) -> None:
    """Drop what was decided about documents, which come in order; ``drops`` has fields of :data:`DROPS`, sorted."""
    if not documents:
        return
    drops = between(drops, documents[0].number, documents[-1].number)
    numbers = np.fromiter((d.number for d in documents), dtype=np.uint64, count=len(documents))
    starts = np.searchsorted(drops["number"], numbers, side="left")
    ends = np.searchsorted(drops["number"], numbers, side="right")
    with_unit = "unit" in (step.key_dtype.names or ())
    for at in np.flatnonzero(ends > starts).tolist():
        units = drops["unit"][starts[at] : ends[at]] if with_unit else np.empty(0, np.uint32)
        step.apply(documents[at], units)


def between(drops: np.ndarray, first: int, last: int) -> np.ndarray:
    """The part about the documents from number ``first`` to ``last``. (NumPy's own search would copy the whole of a column.)"""
    numbers = drops["number"]
    return drops[bisect_left(numbers, first) : bisect_right(numbers, last)]


class StageWorker:
    """Takes blocks through a stage.

    Args:
        stage: which.
        work: the run's directory.
    """

    def __init__(self, stage: Stage, work: WorkDirectory) -> None:
        self._stage = stage
        found = [p for p in (stage.applied, *stage.steps, stage.keyed) if p is not None]
        self._steps = {position: stage.step(position).build() for position in found}
        for position, step in self._steps.items():
            if isinstance(step, CorpusStep):
                step.scratch = str(work.scratch(position))
        self._drops = np.empty(0, DROPS) if stage.applied is None else read_array(work.drops(stage.number), DROPS)

    def __call__(self, block: Block) -> Generator[Question, np.ndarray, Done]:
        """Take one block through the stage. Raises StepFailed."""
        done, stage = Done(), self._stage
        gone: list[tuple[int, bytes]] = []  # number and line of what is dropped
        if block.block is None:
            documents = read_spool(block.spool, stage.keys)
        else:
            try:
                records = read_block(block.file, block.block, block.base, stage.keys, stage.skip_bad)
            except BadInput as error:
                done.error = str(error)
                return done
            documents = records.documents
            done.counts.read, done.counts.empty = records.read, records.empty
            done.counts.add_bad(records.bad)
            gone += [(bad.number, bad_line(bad)) for bad in records.bad if stage.keep_dropped]
        for position, step in self._steps.items():
            apply: Callable[[Sequence[Document]], None]
            if position == stage.keyed:
                break
            if isinstance(step, LocalStep):
                apply = step.apply
            else:
                assert isinstance(step, CorpusStep)
                drops = self._drops
                if position != stage.applied:
                    keys = self._keys(block, position, documents)
                    drops = keys[(yield position, keys)]
                apply = partial(apply_drops, step, drops)
            documents, dropped = self._pass(block, done.counts.step(position), position, documents, apply)
            if stage.keep_dropped and dropped:
                label = stage.label(position)
                gone += [(d.number, dropped_line(d, stage.keys, label, place_name(d.number, stage.inputs))) for d in dropped]
        if stage.keyed is not None:
            done.keys = self._keys(block, stage.keyed, documents)
            done.counts.step(stage.keyed).done.update(taken(self._steps[stage.keyed].counts))
        else:
            done.counts.lengths.update(len(d.text).bit_length() for d in documents)
        if documents:
            done.counts.first, done.counts.last = documents[0].number, documents[-1].number
        write = output_line if stage.keyed is None else spool_line
        done.lines = b"\n".join([*(write(d, stage.keys) for d in documents), b""])
        done.dropped = b"".join(b"%016x %b\n" % entry for entry in sorted(gone))
        return done

    def _keys(self, block: Block, position: int, documents: Sequence[Document]) -> np.ndarray:
        step = self._steps[position]
        assert isinstance(step, CorpusStep)
        with _named(self._stage, position, block):
            return step.keys(documents)

    def _pass(
        self,
        block: Block,
        counts: StepCounts,
        position: int,
        documents: Sequence[Document],
        apply: Callable[[Sequence[Document]], None],
    ) -> tuple[list[Document], list[Document]]:
        """Let a step do its work, and count; (kept, dropped)."""
        step = self._steps[position]
        counts.came(documents)
        with _named(self._stage, position, block):
            if documents:
                apply(documents)
        counts.done.update(taken(step.counts))
        if isinstance(step, LocalStep):
            counts.notes = step.take_notes()
        return counts.left(documents, self._stage.label(position))


class Worker:
    """What a worker process does: it takes blocks through the stages that they are for, one after the other."""

    def __init__(self, stages: Sequence[Stage], work: WorkDirectory) -> None:
        self._stages, self._work = list(stages), work
        self._current: tuple[int, StageWorker] | None = None

    def __call__(self, block: Block) -> Generator[Question, np.ndarray, Done]:
        """As of :class:`StageWorker`."""
        if self._current is None or self._current[0] != block.stage:
            self._current = block.stage, StageWorker(self._stages[block.stage], self._work)
        return self._current[1](block)


def taken(counts: dict[str, int]) -> dict[str, int]:
    """A step's counts, which begin anew."""
    found = dict(counts)
    counts.clear()
    return found


def read_array(path: Path, dtype: np.dtype) -> np.ndarray:
    """A file of one array, mapped into memory."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


@contextmanager
def _named(stage: Stage, position: int, block: Block) -> Iterator[None]:
    """What a step raises names the step and the documents."""
    try:
        yield
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise StepFailed(f"step {stage.label(position)} failed at {block.place()}: {what}") from error
