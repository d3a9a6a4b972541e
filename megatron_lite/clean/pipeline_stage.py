"""One stage of a pipeline, as far as it is local: what a worker does with a block of documents.

A pipeline is cut into stages after its corpus steps. A stage begins with what an earlier corpus step decided about its
documents (when that was not decided while they were read), goes through local steps, and ends with the keys for the next
corpus step, or with the lines of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_lite.clean.config import Keys, Pipeline, StepConfig
from megatron_lite.clean.counts import StageCounts
from megatron_lite.clean.documents import dropped_line, output_line, read_block, read_spool, spool_line, spooled_numbers
from megatron_lite.clean.pipeline_work import WorkDirectory
from megatron_lite.clean.step import CorpusStep, Document, LocalStep, place_of
from megatron_lite.text import inputs
from megatron_lite.text.records import BadInput

DROPS = np.dtype([("number", np.uint64), ("unit", np.uint32)])  # what to drop, sorted, each once


class StepFailed(RuntimeError):
    """A step raised; the text says which and at what documents."""


@dataclass(frozen=True)
class Stage:
    """What happens between two readings of the documents.

    Attributes:
        number: of the stage, from 0.
        pipeline: the whole of it; steps are named by their position in it.
        applied: position of the corpus step whose decisions are applied first; None: there is none.
        local: positions of the local steps.
        keyed: position of the corpus step whose keys come last; None: this stage is the last.
        decides: the keys are decided, and the decisions applied, as they come.
        last: its documents are the output.
        keep_dropped: write dropped documents too.
        skip_bad: leave bad records out and count them.
    """

    number: int
    pipeline: Pipeline
    applied: int | None
    local: tuple[int, ...]
    keyed: int | None
    decides: bool
    last: bool
    keep_dropped: bool = False
    skip_bad: bool = False

    @property
    def keys(self) -> Keys:
        return self.pipeline.keys

    def step(self, position: int) -> StepConfig:
        """A step of the pipeline."""
        return self.pipeline.steps[position]

    def label(self, position: int) -> str:
        """What the report calls a step."""
        return self.pipeline.labels()[position]


def cut(pipeline: Pipeline, alone: bool, keep_dropped: bool = False, skip_bad: bool = False) -> list[Stage]:
    """The stages of a pipeline; ``alone``: one part does it all, so steps that can decide while reading do."""
    stages: list[Stage] = []
    applied: int | None = None
    local: list[int] = []
    ends = len(pipeline.steps)

    def add(keyed: int | None, decides: bool, last: bool) -> None:
        found = Stage(len(stages), pipeline, applied, tuple(local), keyed, decides, last, keep_dropped, skip_bad)
        stages.append(found)
        local.clear()

    for position, step in enumerate(pipeline.steps):
        kind = step.kind
        if issubclass(kind, CorpusStep):
            decides = alone and not kind.needs_barrier
            add(position, decides, decides and position + 1 == ends)
            applied = None if decides else position
        else:
            local.append(position)
    if not stages or not stages[-1].last:
        add(None, False, True)
    return stages


@dataclass(frozen=True)
class Block:
    """Documents for a worker: a block of the ``file``-th input, or of the spool of the stage before.

    Attributes:
        stage: number of the stage to take it through.
        base: records of the input before those that the block's numbers count.
    """

    stage: int
    file: int = 0
    base: int = 0
    block: inputs.Block | None = None
    spool: bytes = b""

    def place(self) -> str:
        """Where the block is, for people."""
        if self.block is None:
            (file, first), (last_file, last) = (place_of(number) for number in spooled_numbers(self.spool))
            return f"record {first} of input {file + 1} to record {last} of input {last_file + 1}"
        is_lines = isinstance(self.block, inputs.Lines)
        size = self.block.data.rstrip().count(b"\n") + 1 if isinstance(self.block, inputs.Lines) else len(self.block)
        first = self.block.first
        return f"{'lines' if is_lines else 'documents'} {first} to {first + size - 1} of {self.block.file}"


@dataclass
class Done:
    """A block after a worker.

    Attributes:
        lines: the documents that are left, written for where they go.
        heads: number, source and language of each, when the stage decides.
        dropped: (number, line) of dropped documents, when these are kept.
        keys: of the stage's corpus step.
        counts: of this block.
        error: bad input, which ends the run; nothing else counts then.
    """

    lines: list[bytes] = field(default_factory=list)
    heads: list[tuple[int, str, str | None]] = field(default_factory=list)
    dropped: list[tuple[int, bytes]] = field(default_factory=list)
    keys: np.ndarray | None = None
    counts: StageCounts = field(default_factory=StageCounts)
    error: str | None = None

    def take_dropped(self, stage: Stage, position: int, documents: Sequence[Document]) -> None:
        """Write documents that a step dropped."""
        if stage.keep_dropped:
            label = stage.label(position)
            self.dropped += [(d.number, dropped_line(d, stage.keys, label)) for d in documents]

    def write(self, stage: Stage, documents: Sequence[Document]) -> None:
        """Write the documents that are left."""
        if documents:
            self.counts.first, self.counts.last = documents[0].number, documents[-1].number
        if stage.last:
            self.counts.lengths.update(len(d.text).bit_length() for d in documents)
        self.lines = [line_of(stage, d) for d in documents]


def line_of(stage: Stage, document: Document) -> bytes:
    """A document as the stage writes it."""
    return output_line(document, stage.keys) if stage.last else spool_line(document, stage.keys)


def apply_drops(step: CorpusStep, documents: Sequence[Document], drops: np.ndarray) -> None:
    """Drop what was decided about some documents, which come in order; ``drops`` [n] of :data:`DROPS` may hold more."""
    numbers = np.fromiter((d.number for d in documents), dtype=np.uint64, count=len(documents))
    starts = np.searchsorted(drops["number"], numbers, side="left")
    ends = np.searchsorted(drops["number"], numbers, side="right")
    with_unit = "unit" in (step.key_dtype.names or ())
    for at in np.flatnonzero(ends > starts).tolist():
        units = drops["unit"][starts[at] : ends[at]] if with_unit else np.empty(0, np.uint32)
        step.apply(documents[at], units)


class StageWorker:
    """Takes blocks through a stage.

    Args:
        stage: which.
        work: the run's directory.
    """

    def __init__(self, stage: Stage, work: WorkDirectory) -> None:
        self._stage = stage
        self._local: list[tuple[int, LocalStep]] = []
        for position in stage.local:
            step = stage.step(position).build()
            assert isinstance(step, LocalStep)
            self._local.append((position, step))
        self._applied = None if stage.applied is None else corpus_step(stage.step(stage.applied))
        self._keyed = None if stage.keyed is None else corpus_step(stage.step(stage.keyed), work.scratch(stage.number))
        self._drops = np.empty(0, DROPS) if stage.applied is None else read_array(work.drops(stage.number), DROPS)

    def __call__(self, block: Block) -> Done:
        """Take one block through the stage. Raises StepFailed."""
        done, stage = Done(), self._stage
        if block.block is None:
            documents = read_spool(block.spool, stage.keys)
        else:
            try:
                records = read_block(block.file, block.block, block.base, stage.keys, stage.skip_bad)
            except BadInput as error:
                done.error = str(error)
                return done
            documents = records.documents
            done.counts.read, done.counts.empty, done.counts.bad = records.read, records.empty, records.bad
        if self._applied is not None and stage.applied is not None:
            applied = self._applied
            documents = self._pass(
                block, done, stage.applied, documents, lambda some: apply_drops(applied, some, self._drops)
            )
            done.counts.step(stage.applied).done.update(taken(applied.counts))
        for position, step in self._local:
            documents = self._pass(block, done, position, documents, step.apply)
            counts = done.counts.step(position)
            counts.done.update(taken(step.counts))
            counts.notes = step.take_notes()
        if self._keyed is not None and stage.keyed is not None:
            with _named(stage, stage.keyed, block):
                done.keys = self._keyed.keys(documents)
            done.counts.step(stage.keyed).done.update(taken(self._keyed.counts))
        if stage.decides and stage.keyed is not None:  # most are kept: counted so here, and corrected by who decides
            counts = done.counts.step(stage.keyed)
            counts.came(documents)
            counts.left(documents, "")
            done.heads = [(d.number, d.source, d.language) for d in documents]
        done.write(stage, documents)
        return done

    def _pass(
        self,
        block: Block,
        done: Done,
        position: int,
        documents: Sequence[Document],
        apply: Callable[[Sequence[Document]], None],
    ) -> list[Document]:
        """Let a step do its work, count, and return what is left."""
        counts = done.counts.step(position)
        counts.came(documents)
        with _named(self._stage, position, block):
            if documents:
                apply(documents)
        kept, dropped = counts.left(documents, self._stage.label(position))
        done.take_dropped(self._stage, position, dropped)
        return kept


class Worker:
    """What a worker process does: it takes blocks through the stages that they are for, one after the other."""

    def __init__(self, stages: Sequence[Stage], work: WorkDirectory) -> None:
        self._stages, self._work = list(stages), work
        self._current: tuple[int, StageWorker] | None = None

    def __call__(self, block: Block) -> Done:
        """As of :class:`StageWorker`."""
        if self._current is None or self._current[0] != block.stage:
            self._current = block.stage, StageWorker(self._stages[block.stage], self._work)
        return self._current[1](block)


def corpus_step(config: StepConfig, scratch: Path | None = None) -> CorpusStep:
    """Build a step that is known to be a corpus step; ``scratch`` is its directory."""
    step = config.build()
    assert isinstance(step, CorpusStep)
    step.scratch = str(scratch or "")
    return step


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
