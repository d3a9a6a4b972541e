"""A run that makes datasets of files: text, or conversations; what is different about these is a :class:`Job`.

The parent reads blocks of the input (:mod:`.inputs`, in a thread of its own), workers make columns of ids of them, and the
parent writes what comes back in order, so the output is the same bytes for any number of workers.

A worker that raises or dies ends the run; nothing stands under the final names before everything is complete. What is
finished is written down as the run goes and when it is interrupted (:mod:`.journal`), and the next run goes on from there on
request. An input that changes while it is read ends the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat, takewhile
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import numpy as np

from megatron_lite.data.index_format import mask_prefix, prefix_paths
from megatron_lite.data.index_writer import IndexedWriter, WriterState, publish_left, refuse_existing, remove_dataset
from megatron_lite.data.locked_file import interrupts_held
from megatron_lite.text.blocks import Block, InputOptions, Lines
from megatron_lite.text.encode import Counts, Encoded, Work, encoder_in_worker
from megatron_lite.text.inputs import STANDARD_INPUT, called
from megatron_lite.text.journal import Finished, Identity, Journal
from megatron_lite.text.origin import found_complete, made_of
from megatron_lite.text.pool import OrderedPool, WorkerDied, WorkerFailed
from megatron_lite.text.progress import Progress, told
from megatron_lite.text.records import BadInput, count_lines
from megatron_lite.text.shares import Part, Place, Share, after, end_of, numbers_before, place_of, read, shares
from megatron_lite.text.tokenizer_fast import Encoder, encoder_for

T = TypeVar("T")
_FINISHED_BYTES = 1 << 28  # of input, after which the finished part is written down,
_FINISHED_SECONDS = 10.0  # or after so long, whichever is first
_COMPARED = 10_000  # one of so many records is compared with the reference tokenizer
_AHEAD = 8  # blocks that are read before they are asked for


@dataclass
class Stream:
    """The blocks of a run in order, and where those that the workers have began."""

    blocks: Iterator[tuple[Share, Block]]
    options: InputOptions
    given: deque[tuple[Share, Block]] = field(default_factory=deque)
    reading: bool = False  # a block is waited for

    def work(self) -> Iterator[Work]:
        """What workers get."""
        records = compared = 0  # those that were given out, and those of them that are to be compared
        while True:
            self.reading = True
            try:
                share, block = next(self.blocks)
            except StopIteration:
                return
            finally:
                self.reading = False
            records += count_lines(block.data) if isinstance(block, Lines) else len(block)
            due = records // _COMPARED - compared
            compared += due
            self.given.append((share, block))
            yield Work(block, due)

    def numbers_before(self, share: Share) -> int:
        """What to add to the numbers of lines in blocks of a share."""
        return numbers_before(share, self.options)

    def at(self, share: Share, block: Block) -> str:
        """Which lines a block holds, for people."""
        if not isinstance(block, Lines):
            return f"documents {block.first} to {block.first + len(block) - 1} of {block.file}"
        first = block.first + self.numbers_before(share)
        return f"lines {first} to {first + block.data.rstrip().count(bytes([10]))} of {block.file}"

    def oldest(self) -> str:
        """The lines whose result is waited for; nothing while it is the input that does not come."""
        given = [] if self.reading else list(self.given)
        return self.at(*given[0]) if given else ""


class AlreadyComplete(Exception):
    """Nothing is left to do: the run that was to go on had ended well. What is there, in words."""


class Job(ABC):
    """What a run makes of its input: a dataset of tokens for each of ``outputs``, perhaps with a loss mask beside it.

    Args:
        outputs: prefixes of the datasets, and the key of a record that each is made of.
        reading: how files are read.
        options: what is done to the records: ``tokenizer`` (makes it), ``fast``, ``skip_bad``, ...
        ends: the tokenizer's end-of-document token ends each document.
        identity: what else decides the output, besides the inputs and which part of them is read; JSON.

    Attributes:
        mask: a loss mask is written beside each output.
        called: what a record is.
        recorded: what ``.meta.json`` of the outputs says of the tokenizer.

    Raises:
        ValueError: a tokenizer that cannot be used: before any work.
    """

    mask = False
    called = "documents"

    def __init__(self, outputs: dict[str, str], reading: InputOptions, options: Any, ends: bool, **identity: Any) -> None:
        self.outputs, self.reading, self.options = outputs, reading, options
        self.tokenizer = tokenizer = options.tokenizer()
        self.encoder = Encoder(tokenizer)
        self.recorded: dict[str, Any] = {"tokenizer": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
        self.recorded["eod_id"] = tokenizer.eod_id if ends else None
        self.identity: Identity = {"tokenizer": tokenizer.fingerprint, "skip_bad": options.skip_bad, "encoding": reading.encoding}
        self.identity |= identity

    def begin(self, first: Block | None, say: Callable[[str], None]) -> None:
        """Use the fast form of the tokenizer, if it is proved on hard texts and on those of the first block of the input."""
        if self.options.fast:
            self.encoder = encoder_for(self.tokenizer, [] if first is None else self.texts(first), say)
            self.options = replace(self.options, fast=self.encoder.is_fast)

    @abstractmethod
    def texts(self, block: Block) -> list[str]:
        """Some of a block."""

    def check(self, counts: Counts) -> None:  # noqa: B027  of most jobs there is nothing to say
        """Raises BadInput where what was made of everything is of no use."""

    def record(self, output: str, inputs: Sequence[Path], part: Part | None) -> dict[str, Any]:
        """What ``.meta.json`` of an output says of the input."""
        options = {name: value for name, value in self.identity.items() if name not in self.recorded}
        return made_of(inputs, part, self.outputs[output], options)

    def writers(self, states: Sequence[WriterState], records: dict[str, Any], **options: Any) -> Iterator[IndexedWriter]:
        """A writer for each column of a block, that of a mask before that of its output.

        They go on from the states, if there are any, and record of each output what is given; the options are those of
        :class:`IndexedWriter`.
        """
        left = iter(states)
        for output in self.outputs:
            mask = None
            if self.mask:  # a mask without tokens is what a killed run left
                own = {**options, "overwrite": True}
                mask = IndexedWriter(mask_prefix(output), dtype=np.uint8, resume=next(left, None), **own)
                yield mask
            facts = {"tokenizer_flags": self.tokenizer.flags, "made_of": records[output], **self.recorded}
            yield IndexedWriter(output, resume=next(left, None), mask=mask, **facts, **options)

    @staticmethod
    @abstractmethod
    def work(options: Any, encoder: Encoder) -> Callable[[Work], Encoded]:
        """What a worker does with a block."""

    def encoded(self, stream: Stream, workers: int, stack: ExitStack) -> Iterator[Encoded]:
        """Every block in order."""
        if workers == 1:
            return map(self.work(self.options, self.encoder), stream.work())
        return in_processes(stream, partial(_in_process, self.work, self.options), workers, stack)


def _in_process(work: Callable[[Any, Encoder], Callable[[Work], Encoded]], options: Any) -> Callable[[Work], Encoded]:
    return work(options, encoder_in_worker(options.tokenizer, options.fast))


def run_job(
    job: Job,
    inputs: Sequence[Path],
    prefix: str,
    *,
    workers: int = 1,
    overwrite: bool = False,
    part: Part | None = None,
    resume: bool = False,
    log_interval: int = 0,
    bar: bool = False,
    say: Callable[[str], None] = print,
) -> Counts:
    """Make the datasets; what came of the records.

    Args:
        inputs: files, as :func:`megatron_lite.text.inputs.expand_inputs` gives them.
        prefix: of the journal.
        workers: threads or processes that tokenize.
        overwrite: replace outputs that are there.
        part: only this share of the input; datasets of all parts, merged in order, are that of the whole.
        resume: go on where an earlier run stopped, if one did; and when this one stops, leave what a later one needs.
        log_interval: documents between lines of progress; 0: none.
        bar: a progress bar in place of lines.
        say: prints a line.

    Raises:
        AlreadyComplete: with ``resume`` and without ``overwrite``, where the outputs are there.
        BadInput: a bad record, a worker that died, or no document at all (a part may be empty); no output is left.
        FileExistsError: the output is there and ``overwrite`` is off; with ``resume``, one that this run would not have made.
        ValueError: nothing of this kind to resume, or standard input.
        OSError: the output cannot be written; none is left.
    """
    if resume and STANDARD_INPUT in map(str, inputs):
        raise ValueError("--resume cannot go on with standard input, of which nothing is known: give files")
    whole, files = shares(inputs, job.reading, part), _files(inputs)
    if part is not None and not whole:
        say(
            f"note: part {part[0]}/{part[1]} holds no input: packed files are cut only where an index is beside them, as `data clean` "
            "writes it (a smaller --shard-size makes more files)"
        )
    identity = {"inputs": files, "part": part and list(part), **job.identity}
    journal = Journal(prefix, identity, keep=resume)
    finished = journal.find() if resume else None
    discarded = 0 if resume else journal.kept()
    complete = finished is not None and finished.complete
    records = {output: job.record(output, inputs, part) for output in job.outputs}
    if resume and not overwrite and not journal.found and all(prefix_paths(p)[1].exists() for p in job.outputs):
        there = [found_complete(output, inputs, job.recorded, records[output], job.mask, job.called) for output in job.outputs]
        raise AlreadyComplete("\n".join(there))
    for output in () if overwrite or complete else job.outputs:
        refuse_existing(output, with_mask=job.mask)  # before a journal is begun
    total = Counts()
    with ExitStack() as stack:
        with interrupts_held():
            journal.open()
            stack.callback(journal.end)
            if discarded:
                say(f"note: {discarded:,} documents that an earlier run had kept are made again; --resume goes on after them")
            if finished is not None and complete:
                say(f"going on after {finished.counts.documents:,} documents, which are all: the outputs get their names")
                for output in job.outputs:
                    publish_left(output, with_mask=job.mask)
                journal.end(done=True)
                return finished.counts
            states = finished.outputs if finished is not None else []
            writers = []
            for writer in job.writers(states, records, overwrite=overwrite, empty=part is not None, keep=resume):
                stack.callback(writer.abort)  # does nothing once it has been finished
                writers.append(writer)
        left = whole if finished is None else after(whole, finished.place)
        size, taken = sum(s.size for s in whole), 0
        if finished is not None:
            total, taken = finished.counts, finished.taken
            say(f"going on after {total.documents:,} documents")
        elif resume:
            say("beginning at the start: no earlier run has kept anything")
        progress = stack.enter_context(closing(Progress(size, total, taken, say, log_interval, bar)))
        source = read(left, job.reading)
        if STANDARD_INPUT not in map(str, inputs):  # a thread that waits for the terminal could not be ended
            source = ahead(source, _AHEAD, stack)
        first = next(source, None)
        job.begin(None if first is None else first[1], say)
        stream = Stream(source if first is None else chain([first], source), job.reading)
        results = stack.enter_context(closing(told(job.encoded(stream, workers, stack), stream.oldest, say)))
        taken = _write_all(results, stream, writers, journal, progress, total, taken, say)
        if not total.documents and part is None:
            what = [f"no {job.called} were written: {called(inputs)} of {max(total.bytes, size):,} bytes"]
            raise BadInput("; ".join(what + total.skipped()))
        job.check(total)
        if changed := {*map(tuple, _files(inputs))} - {*map(tuple, files)}:
            raise BadInput(f"{min(changed)[0]} has changed while it was read")
        outputs = [writer for writer in writers if writer.prefix in job.outputs]
        _publish(outputs, journal, Finished(Place(len(inputs), 0), taken, total, []), keep=resume)
    return total


def _write_all(
    results: Iterator[Encoded],
    stream: Stream,
    writers: Sequence[IndexedWriter],
    journal: Journal,
    progress: Progress,
    total: Counts,
    taken: int,
    say: Callable[[str], None],
) -> int:
    """Write what workers made, in order, add to the counts, and write down what is finished; bytes taken at the end.

    Ctrl-C and SIGTERM wait for the end of a block, and what is finished then is written down too.
    """
    written_down, when = total.bytes, monotonic()
    place: Place | None = None  # behind what was written

    def write_down(place: Place) -> None:
        journal.add(Finished(place, taken, total, [writer.state() for writer in writers]))

    try:
        for encoded in results:
            with interrupts_held():
                share, block = stream.given.popleft()
                if encoded.failure is not None:
                    number = encoded.failure.number + stream.numbers_before(share)
                    raise BadInput(f"{block.file}:{number}: {encoded.failure.what}")
                if total.bytes - written_down >= _FINISHED_BYTES or monotonic() - when >= _FINISHED_SECONDS:
                    write_down(place_of(share.file, block))
                    written_down, when = total.bytes, monotonic()
                for writer, column in zip(writers, encoded.columns, strict=True):
                    writer.add_documents(column.tokens, column.lengths, column.sequences)
                total.add(encoded.counts)
                taken, place = share.taken(block), Place(share.file, end_of(block))
                progress.show(total, taken)
    except KeyboardInterrupt:
        with interrupts_held():
            if journal.keep and place is not None:
                if stream.given:  # the next block, perhaps of the next file
                    place = place_of(stream.given[0][0].file, stream.given[0][1])
                write_down(place)
                say(f"kept: {total.documents:,} documents")
        raise
    return taken


def _files(inputs: Sequence[Path]) -> list[list[Any]]:
    """Name, size and time of change of each."""
    return [[str(p), s.st_size, s.st_mtime_ns] for p in inputs if p.is_file() and (s := p.stat())]


def in_order(pool: Executor, function: Callable[[Any], Any], items: Iterable[Any], most: int) -> Iterator[Any]:
    """The results in the order of the items, up to ``most`` of which wait or are worked on."""
    waiting: deque[Future[Any]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def ahead(items: Iterator[T], most: int, stack: ExitStack) -> Iterator[T]:
    """The items in order, up to ``most`` of them taken ahead by a thread; what ``items`` raises comes after those before it."""
    pool = ThreadPoolExecutor(1)
    stack.callback(pool.shutdown, cancel_futures=True)
    return takewhile(lambda item: item is not None, in_order(pool, lambda _: next(items, None), repeat(None), most))


def in_processes(
    stream: Stream, make: Callable[[], Callable[[Work], Encoded]], workers: int, stack: ExitStack
) -> Iterator[Encoded]:
    """Every block in order, by worker processes; ``make`` is called in each."""
    pool = stack.enter_context(OrderedPool(workers, make))
    try:
        yield from pool.map(stream.work())
    except WorkerFailed as error:
        raise BadInput(f"{error}; nothing was written") from None
    except WorkerDied as error:
        at = [stream.at(*given) for given in stream.given if isinstance(error.item, Work) and given[1] is error.item.block]
        what = f" in {at[0]}" if at else ""
        hint = " Out of memory? Fewer --workers need less." if "SIGKILL" in error.worker else ""
        raise BadInput(f"{error.worker}{what}; nothing was written.{hint}") from None


def _publish(writers: Sequence[IndexedWriter], journal: Journal, finished: Finished, keep: bool) -> None:
    """All outputs or none: those of other keys are taken back when one cannot be renamed, or left to the run that goes on."""
    published: list[IndexedWriter] = []
    try:
        with interrupts_held():
            try:
                for writer in writers:
                    writer.complete()
                journal.add(finished)
                for writer in writers:
                    writer.publish()
                    published.append(writer)
            except BaseException:
                for writer in () if keep else published:
                    remove_dataset(writer.prefix)
                raise
            journal.end(done=True)
    except KeyboardInterrupt:
        if len(published) < len(writers):  # else it came when everything was done
            raise
