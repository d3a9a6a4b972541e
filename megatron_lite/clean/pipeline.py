"""Runs a cleaning pipeline: reads files, takes documents through its stages, writes shards and the report.

One part takes the inputs from end to end. ``--part i/n`` takes a contiguous piece of them; before a corpus step decides,
and before the shards are cut, a part needs what the others have written to the work directory
(:mod:`megatron_lite.clean.pipeline_work`), so it waits, or ends and is started again later. Neither the parts nor the
workers nor a restart changes a byte of what is written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from megatron_lite import __version__
from megatron_lite.clean.config import Pipeline, StepConfig
from megatron_lite.clean.counts import StageCounts
from megatron_lite.clean.pipeline_input import Progress, input_blocks, spool_blocks
from megatron_lite.clean.pipeline_keys import Decider, KeyFiles, decide_bucket, gather_drops
from megatron_lite.clean.pipeline_output import Output, dropped_spool, merge_dropped
from megatron_lite.clean.pipeline_stage import Block, Done, Question, Stage, StepFailed, Worker, cut
from megatron_lite.clean.pipeline_work import PLAN, PlanDiffers, WorkDirectory, digest, file_state, lasting, not_from
from megatron_lite.clean.report import as_json, is_report, report_data
from megatron_lite.clean.report_html import as_html
from megatron_lite.clean.saved import is_saved_by, saved_by, steps_before
from megatron_lite.clean.shards import (
    SHARD_BYTES,
    UNCUT,
    FrameReader,
    ShardWriter,
    shard_name,
    write_whole,
)
from megatron_lite.clean.step import SAVED_BY, CorpusStep, bucket_path
from megatron_lite.config.values import plain
from megatron_lite.text.blocks import InputOptions
from megatron_lite.text.inputs import STANDARD_INPUT, called
from megatron_lite.text.pool import OrderedPool, WorkerDied, WorkerFailed, without_workers
from megatron_lite.text.progress import told
from megatron_lite.text.records import BadInput
from megatron_lite.text.shares import shares


@dataclass(frozen=True)
class RunOptions:
    """How a pipeline is run.

    Attributes:
        part, parts: which piece of the inputs this process takes, from 0, and of how many.
        wait: seconds to wait for other parts.
        workers: processes for local steps; 1: this one.
        shard_bytes: of text in a shard.
        work: the work directory; None: beside the output.
        keep_dropped: directory for the documents that were dropped; None: they are not written.
        json: file for the report's numbers; None: they are in the HTML alone.
        skip_bad: leave bad records out and count them.
        reading: how the inputs are read.
    """

    part: int = 0
    parts: int = 1
    wait: float = 0.0
    workers: int = 1
    shard_bytes: int = SHARD_BYTES
    work: Path | None = None
    keep_dropped: Path | None = None
    json: Path | None = None
    skip_bad: bool = False
    reading: InputOptions = field(default_factory=InputOptions)


class Run:
    """One part's run of a pipeline.

    Args:
        pipeline: what to do.
        inputs: the files, in the order of the corpus.
        output: directory of the shards; must not be there yet.
        options: how.
        say: takes lines about the progress.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        inputs: Sequence[Path],
        output: Path,
        options: RunOptions,
        say: Callable[[str], None],
    ) -> None:
        self.pipeline, self.inputs, self.options, self.say = pipeline, list(inputs), options, say
        self.alone = options.parts == 1
        self._number = uuid4().hex  # of this run alone
        self.stages = cut(pipeline, self.alone, tuple(map(str, inputs)), options.keep_dropped is not None, options.skip_bad)
        self.work = WorkDirectory(options.work or output.with_name(f"{output.name}.work"), options.part, options.parts)
        self._worker = Worker(self.stages, self.work)
        self._pool: OrderedPool | None = None
        self.html = output.with_name(f"{output.name}.html")
        self.documents = Output(output, self.work, options.shard_bytes)
        self.dropped = (
            None if options.keep_dropped is None else Output(options.keep_dropped, self.work, options.shard_bytes)
        )

    def plan(self) -> dict[str, Any]:
        """What the output follows from; the same for all parts."""
        named = [path for step in self.pipeline.steps for path in step.kind.files(step.options)]
        named += [f"{step.options.against}/{SAVED_BY}" for _, step in self._corpus_steps() if step.options.against]
        return {
            "program": __version__,
            "pipeline": self.pipeline.as_data(),
            "inputs": [self._input_state(str(path)) for path in self.inputs],
            "files": [file_state(path) for path in named],
            "outputs": [os.path.relpath(output.directory, self.work.path) for output in self.outputs()],
            "parts": self.options.parts,
            "shard_bytes": self.options.shard_bytes,
            "keep_dropped": self.options.keep_dropped is not None,
            "skip_bad": self.options.skip_bad,
            "reading": plain(self.options.reading),
        }

    def _input_state(self, path: str) -> dict[str, Any]:
        """As :func:`file_state`; what comes from standard input comes once, so no other run has the same."""
        return {"path": path, "read by": self._number} if path == STANDARD_INPUT else file_state(path)

    def _check_unchanged(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Raises BadInput when a file is not as it was when the run began."""
        for state in states:
            path = state["path"]
            if path != STANDARD_INPUT and (not os.path.exists(path) or file_state(path) != state):
                raise BadInput(f"{path} has changed while it was read")

    def run(self) -> dict[str, Any] | None:
        """Do what this part can do; the report, or None when the output was complete before.

        Raises:
            BadInput: a bad record, no document at all (a part may be without); nothing stands under the output's name.
            FileExistsError: an output is there and is another run's; what stands under the name of a report is none.
            PartsMissing, PlanDiffers: as of the work directory.
            StepFailed: a step raised.
            OSError: shards have not as many documents as were counted; nothing stands under the output's name.
        """
        plan = self.plan()
        self._check_outputs(plan)
        if self.documents.is_complete(plan):
            if self.options.json is not None and not self.options.json.exists():
                raise FileExistsError(
                    f"{self.documents.directory} is complete, and was made without {self.options.json}: "
                    f"{self.html} has its numbers; to have them there too, remove {self.documents.directory} and run it again"
                )
            self._clear(plan)
            return None
        try:
            with self.work.joined(plan), ExitStack() as stack:
                if self.options.workers > 1:
                    make = partial(Worker, self.stages, self.work)
                    self._pool = stack.enter_context(OrderedPool(self.options.workers, make))
                for stage in self.stages:
                    self._run_part(stage, plan)
                    self._decide(stage)
                last = len(self.stages)
                if self.dropped is not None:
                    merge_dropped(self.work, last, self.dropped.shard_bytes if self.alone else UNCUT)
                    last += 1
                self.work.wait_for_parts(last - 1, self.options.wait, self.say)
                return self._finish(plan)
        except BadInput:
            if self.alone:
                shutil.rmtree(self.work.path, ignore_errors=True)
            raise

    def _run_part(self, stage: Stage, plan: Mapping[str, Any]) -> None:
        """Take this part's documents through a stage, unless that has been done."""
        directory = self.work.part_directory(stage.number)
        if not directory.is_dir():
            with self.work.finishing(directory) as draft:
                counts = self._run_stage(stage, draft)
                self._check_unchanged([*plan["files"], *(() if stage.number else plan["inputs"])])
                write_whole(draft / "counts.json", json.dumps(plain(counts)).encode())
        self.work.drops(stage.number).unlink(missing_ok=True)
        if stage.number:  # what the stage before left has been read
            shutil.rmtree(self.work.part_directory(stage.number - 1) / "documents", ignore_errors=True)

    def _run_stage(self, stage: Stage, draft: Path) -> StageCounts:
        counts, options = StageCounts(), self.options
        if stage.applied is not None:
            before = self.counts(stage.number - 1, options.part)
            kind: Any = self.pipeline.steps[stage.applied].kind
            decided = self.work.decided(stage.number - 1, kind.buckets)
            gather_drops(decided, before.first, before.last, self.work.drops(stage.number))
        deciders = {n: Decider(self.pipeline.steps[n], self.work.scratch(n)) for n in stage.deciding()}
        (draft / "documents").mkdir()
        with ExitStack() as stack:
            shard_bytes = options.shard_bytes if stage.keyed is None and self.alone else UNCUT
            writer = stack.enter_context(ShardWriter(draft / "documents", shard_bytes))
            dropped = stack.enter_context(dropped_spool(draft)) if stage.keep_dropped else None
            files = None
            if stage.keyed is not None:
                kind = self.pipeline.steps[stage.keyed].kind
                files = stack.enter_context(KeyFiles(draft / "keys", kind.buckets))
            for done in self._results(stage, deciders):
                if files is not None and done.keys is not None:
                    files.add(done.keys)
                writer.add(done.lines)
                if dropped is not None:
                    dropped.add(done.dropped)
                counts.add(done.counts, self.pipeline.steps)
            for position, decider in deciders.items():
                saved = draft / f"saved-{position}"
                saved.mkdir()
                counts.decided[position] = {n: decider.outcome(n, saved) for n in range(decider.step.buckets)}
        return counts

    def _results(self, stage: Stage, deciders: Mapping[int, Decider]) -> Iterator[Done]:
        """What workers make of the stage's documents, in order. Raises BadInput, StepFailed."""

        def answer(question: Question) -> np.ndarray:
            return deciders[question[0]].decide(question[1])

        options = self.options
        if stage.number == 0:
            pieces = shares(self.inputs, options.reading, None if self.alone else (options.part, options.parts))
            blocks = input_blocks(pieces, options.reading)
            total = sum(piece.size for piece in pieces)
        else:
            spool = self.work.part_directory(stage.number - 1) / "documents" / shard_name(0)
            reader = FrameReader(spool) if spool.exists() else None
            blocks = spool_blocks(stage.number, reader) if reader else iter(())
            total = reader.bytes if reader else 0
        progress = Progress(f"stage {stage.number + 1} of {len(self.stages)}", total, self.say)
        blocks = progress.counted(blocks)
        if self._pool is None:
            results = without_workers(self._worker, blocks, answer)
        else:
            results = self._pool.map(blocks, answer)
        try:
            with closing(told(results, progress.oldest, self.say)) as results:
                for done in results:
                    if done.error is not None:
                        raise BadInput(done.error)
                    progress.tell()
                    yield done
        except WorkerFailed as error:
            raise StepFailed(str(error)) from None
        except WorkerDied as error:
            where = f" at {error.item.place()}" if isinstance(error.item, Block) else ""
            hint = " Out of memory? Fewer --workers need less." if "SIGKILL" in error.worker else ""
            raise StepFailed(f"{error.worker}{where}.{hint}") from None

    def _decide(self, stage: Stage) -> None:
        """Decide what the keys of all parts drop, as far as others have not."""
        if stage.keyed is None:
            return
        config = self.pipeline.steps[stage.keyed]
        kind: Any = config.kind
        assert issubclass(kind, CorpusStep)
        decided = self.work.decided(stage.number, kind.buckets)
        if all(directory.is_dir() for directory in decided):
            return
        self.work.wait_for_parts(stage.number, self.options.wait, self.say)
        parts = [directory / "keys" for directory in self.work.all_parts(stage.number)]
        for bucket in self.work.share(kind.buckets):
            if not decided[bucket].is_dir():
                with self.work.finishing(decided[bucket]) as draft:
                    decide_bucket(config, self.work.scratch(stage.keyed), bucket, parts, draft)

    def counts(self, stage: int, part: int) -> StageCounts:
        """The counts of a part of a finished stage."""
        return StageCounts.from_data(json.loads((self.work.part_directory(stage, part) / "counts.json").read_bytes()))

    def _corpus_steps(self) -> Iterator[tuple[int, StepConfig]]:
        return ((n, step) for n, step in enumerate(self.pipeline.steps) if issubclass(step.kind, CorpusStep))

    def outputs(self) -> list[Output]:
        """The directories of shards."""
        return [self.documents] if self.dropped is None else [self.documents, self.dropped]

    def _pages(self) -> list[tuple[Path, Path]]:
        """(name, name of this part's draft) of the report as a page and, where it is asked for, as numbers."""
        paths = [self.html] if self.options.json is None else [self.html, self.options.json]
        return [(path, path.with_name(f"{path.name}.{self.options.part}.tmp")) for path in paths]

    def _clear(self, plan: Mapping[str, Any]) -> None:
        """Remove what this part left half done when it was killed, where the run has been brought to its end."""
        for output in self.outputs():
            output.clear()
        for _, draft in self._pages():
            draft.unlink(missing_ok=True)
        for _, step in self._corpus_steps():
            if step.options.save:
                shutil.rmtree(self.work.draft(Path(step.options.save)), ignore_errors=True)
        if self.alone and self.work.path.is_dir():
            with suppress(PlanDiffers, FileExistsError), self.work.joined(plan):
                shutil.rmtree(self.work.path)

    def _check_outputs(self, plan: Mapping[str, Any]) -> None:
        """Refuse outputs that are there and another run's, and directories of saved buckets that meet something else's."""
        taken = [*(output.directory for output in self.outputs()), *(path for path, _ in self._pages()), self.work.path]
        for _, step in self._corpus_steps():
            if not step.options.save:
                continue
            save = Path(step.options.save).absolute()
            for path in map(Path.absolute, taken):
                if path in (save, *save.parents) or save in path.parents:
                    raise ValueError(f"save: {step.options.save}: give a directory apart from {path}, where something else goes")
            if blocked := next((path for path in save.parents if path.exists() and not path.is_dir()), None):
                raise ValueError(f"save: {step.options.save}: {blocked} is not a directory")
            taken.append(save)
        for output in self.outputs():
            output.is_complete(plan)
        for path, _ in self._pages():
            if path.exists() and not is_report(path):
                raise FileExistsError(f"{path} is there, and not a report of cleaning, which would be written over it; give another name")
        for _, step in self._corpus_steps():
            if os.path.exists(step.options.save) and not is_saved_by(step.options.save, digest(plan)):
                raise not_from(f"save: {step.options.save}", Path(step.options.save), plan)

    def _publish_saved(self, plan: Mapping[str, Any]) -> None:
        """Bring together what the buckets of each corpus step saved."""
        for position, step in self._corpus_steps():
            if not step.options.save or is_saved_by(step.options.save, digest(plan)):
                continue
            (stage,) = (stage for stage in self.stages if position in (*stage.steps, stage.keyed))
            kind: Any = step.kind
            directories = self.work.decided(stage.number, kind.buckets)
            if position != stage.keyed:
                directories = [self.work.part_directory(stage.number) / f"saved-{position}"] * kind.buckets
            with self.work.finishing(Path(step.options.save)) as draft:
                for bucket, directory in enumerate(directories):
                    shutil.copyfile(bucket_path(str(directory), bucket), bucket_path(str(draft), bucket))
                before = steps_before(self.pipeline.steps, position)
                (draft / PLAN).parent.mkdir()
                write_whole(draft / PLAN, lasting(plan))
                write_whole(draft / SAVED_BY, saved_by(digest(plan), before, str(draft), kind.buckets))
            if not is_saved_by(step.options.save, digest(plan)):
                raise FileExistsError(f"save: {step.options.save}: another run has saved there in the meantime; give another")

    def report(self) -> dict[str, Any]:
        """The report's numbers, when all parts have gone through all stages."""
        counts = StageCounts()
        for stage in self.stages:
            for part in range(self.options.parts):
                counts.add(self.counts(stage.number, part), self.pipeline.steps)
            if stage.keyed is not None:
                kind: Any = self.pipeline.steps[stage.keyed].kind
                decided = self.work.decided(stage.number, kind.buckets)
                outcomes = [json.loads((directory / "outcome.json").read_bytes()) for directory in decided]
                counts.decided[stage.keyed] = dict(enumerate(outcomes))
        return report_data(self.pipeline, [str(path) for path in self.inputs], counts)

    def _finish(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Cut the shards, write the report and what corpus steps save, and give everything its name."""
        report = self.report()
        if not report["total"]["documents_in"]:
            empty, bad = report["records"]["empty"], report["records"]["bad"]
            why = "".join(f"; {n:,} bad: {reason}" for reason, n in bad.items())
            raise BadInput(f"no document in {called(self.inputs)}: {empty:,} empty and {sum(bad.values()):,} bad records{why}")
        kept, records = report["total"]["documents_out"], report["records"]
        self.documents.write(len(self.stages) - 1, plan, kept)
        if self.dropped is not None:
            self.dropped.write(len(self.stages), plan, records["documents"] + sum(records["bad"].values()) - kept)
            self.dropped.publish(plan)
        self._publish_saved(plan)
        for (path, draft), data in zip(self._pages(), (as_html(report), as_json(report)), strict=False):
            write_whole(path, data, draft)
        self.documents.publish(plan)
        if self.alone:
            shutil.rmtree(self.work.path)
        return report
