"""From text to an indexed dataset.

The parent reads blocks of the input (:mod:`.inputs`, in a thread of its own), workers parse and tokenize them
(:mod:`.encode`; threads with the fast tokenizer, else processes, :mod:`.pool`), and the parent writes what comes back in
order, so the output is the same bytes for any number of workers. What a record is, and which lines are bad, says
:mod:`.records`. A bad one ends the run with file, line, reason and its first 80 characters, or is counted by reason
(``--skip-bad``); a text that the tokenizer refuses makes its record bad.

A record in which a text is empty, only white space, or without a single token is *empty*: it is skipped for all keys,
so that the outputs of several keys stay aligned, and counted.

A worker that raises or dies ends the run; nothing stands under the final names before everything is complete. What is
finished is written down as the run goes (:mod:`.journal`), and a killed run goes on from there on request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from megatron_lite.data.index_writer import IndexedWriter, WriterState, publish_left, refuse_existing, remove_dataset
from megatron_lite.data.locked_file import interrupts_held
from megatron_lite.text.ahead import ahead
from megatron_lite.text.encode import (
    SENTENCE_END,
    Counts,
    Encoded,
    Options,
    Work,
    bad_input,
    encode_block,
    texts_of,
    worker_function,
)
from megatron_lite.text.inputs import STANDARD_INPUT, Block, InputOptions, Lines, called
from megatron_lite.text.journal import Finished, Identity, Journal
from megatron_lite.text.pool import OrderedPool, WorkerDied, WorkerFailed
from megatron_lite.text.progress import Progress
from megatron_lite.text.records import BadInput
from megatron_lite.text.shares import Part, Place, Share, after, numbers_before, place_of, read, shares
from megatron_lite.text.tokenizer import Tokenizer, flags_of
from megatron_lite.text.tokenizer_fast import Encoder, NotFast, encoder_of

__all__ = ["SENTENCE_END", "Counts", "Options", "preprocess", "summary"]

_FINISHED_BYTES = 1 << 28  # of input, after which the finished part is written down
_COMPARED = 10_000  # one of so many records is compared with the reference tokenizer
_TRIED = 1 << 16  # characters of the input's start that the fast tokenizer is tried on
_SHARING = 4  # threads with one encoder that remembers words
_AHEAD = 8  # blocks that are read before they are asked for


@dataclass
class _Input:
    """The blocks of a run in order, and where those that the workers have began."""

    blocks: Iterator[tuple[Share, Block]]
    options: InputOptions
    given: deque[tuple[Share, Block]] = field(default_factory=deque)

    def work(self) -> Iterator[Work]:
        """What workers get."""
        earlier = compared = 0  # records of earlier files, and those that are to be compared
        last: tuple[int, Block] | None = None
        for share, block in self.blocks:
            if last is not None and (last[0], last[1].file) != (share.file, block.file):
                ended = last[1]
                earlier += ended.first - 1 + (ended.data.count(b"\n") if isinstance(ended, Lines) else len(ended))
            due = (earlier + block.first - 1) // _COMPARED - compared
            compared += due
            last = (share.file, block)
            self.given.append((share, block))
            yield Work(block, due)

    def numbers_before(self, share: Share) -> int:
        """What to add to the numbers of lines in blocks of a share."""
        return numbers_before(share, self.options)


def preprocess(
    inputs: Sequence[Path],
    output_prefix: str,
    options: Options,
    *,
    reading: InputOptions | None = None,
    workers: int = 1,
    overwrite: bool = False,
    part: Part | None = None,
    resume: bool = False,
    log_interval: int = 0,
    bar: bool = False,
    say: Callable[[str], None] = print,
) -> Counts:
    """Tokenize files into ``PREFIX_KEY_document.bin/.idx/.meta.json``, one pair per key.

    Args:
        inputs: files, as :func:`megatron_lite.text.inputs.expand_inputs` gives them.
        output_prefix: PREFIX.
        options: what is done to the texts.
        reading: how files are read; the keys are those of ``options``.
        workers: threads or processes that tokenize.
        overwrite: replace outputs that are there.
        part: only this share of the input; datasets of all parts, merged in order, are that of the whole.
        resume: go on where an earlier run stopped, if one did; and when this one stops, leave what a later one needs.
        log_interval: documents between lines of progress; 0: none.
        bar: a progress bar in place of lines.
        say: prints a line.

    Raises:
        BadInput: a bad record, a worker that died, or no document at all (a part may be empty); no output is left.
        FileExistsError: the output is there and ``overwrite`` is off.
        ValueError: a tokenizer that cannot be used, a key given twice, or nothing of this kind to resume.
        OSError: the output cannot be written; none is left.
    """
    if len(set(options.keys)) != len(options.keys):
        raise ValueError(f"--json-keys {' '.join(options.keys)}: each key once, since each has an output of its own")
    tokenizer = options.tokenizer()  # before any work: a tokenizer without an end token is refused here
    reading = replace(reading or InputOptions(), keys=options.keys)
    whole = shares(inputs, reading, part)
    outputs = [f"{output_prefix}_{key}_document" for key in options.keys]
    identity = _identity(inputs, options, reading, tokenizer, part)
    journal = Journal(output_prefix, identity, keep=resume)
    finished = journal.find() if resume else None
    complete = finished is not None and finished.complete
    for output in () if overwrite or complete else outputs:
        refuse_existing(output)  # before a journal is begun
    total = Counts()
    with ExitStack() as stack:
        with interrupts_held():
            journal.open()
            stack.callback(journal.end)
            if finished is not None and complete:
                for output in outputs:
                    publish_left(output)
                journal.end(done=True)
                return finished.counts
            states = finished.outputs if finished is not None else [None] * len(outputs)
            make = partial(IndexedWriter, overwrite=overwrite, empty=part is not None, keep=resume)
            writers = _writers(stack, make, outputs, states, tokenizer, options.append_eod)
        left = whole if finished is None else after(whole, finished.place)
        progress = stack.enter_context(Progress(sum(s.size for s in whole), say, log_interval, bar))
        if finished is not None:
            total = finished.counts
            progress.resume(total, finished.taken)
            say(f"going on after {total.documents:,} documents")
        source = read(left, reading)
        if STANDARD_INPUT not in map(str, inputs):  # a thread that waits for the terminal could not be ended
            source = stack.enter_context(closing(ahead(source, _AHEAD)))
        encoder, source = _encoder(tokenizer, options, source, say)
        stream = _Input(source, reading)
        written_down, taken = total.bytes, 0
        for encoded in _encoded(stream, encoder, replace(options, fast=encoder.is_fast), workers, stack):
            share, block = stream.given.popleft()
            if encoded.failure is not None:
                raise bad_input(block.file, encoded.failure, stream.numbers_before(share))
            if total.bytes - written_down >= _FINISHED_BYTES:
                states_now = [writer.state() for writer in writers]
                journal.add(Finished(place_of(share.file, block), taken, total, states_now))
                written_down = total.bytes
            for writer, column in zip(writers, encoded.columns, strict=True):
                writer.add_documents(column.tokens, column.lengths, column.sequences)
            total.add(encoded.counts)
            taken = _taken(whole, share, block)
            progress.show(total, taken)
        if not total.documents and part is None:
            raise _nothing_written(inputs, max(total.bytes, sum(s.size for s in whole)), total)
        if changed := [path for path, *facts in _files(inputs) if [path, *facts] not in identity["inputs"]]:
            raise BadInput(f"{changed[0]} has changed while it was read")
        _publish(writers, journal, Finished(Place(len(inputs), 0), taken, total, []), keep=resume)
    return total


def _nothing_written(inputs: Sequence[Path], size: int, total: Counts) -> BadInput:
    return BadInput(
        f"no documents were written: {called(inputs)} of {size:,} bytes held {total.empty} empty "
        f"and {sum(total.bad.values())} bad records"
        + "".join(f"; {n} bad: {why}" for why, n in total.bad.most_common())
    )


def _files(inputs: Sequence[Path]) -> list[list[Any]]:
    """Name, size and time of change of each."""
    return [[str(p), s.st_size, s.st_mtime_ns] for p in inputs if p.is_file() and (s := p.stat())]


def _identity(
    inputs: Sequence[Path], options: Options, reading: InputOptions, tokenizer: Tokenizer, part: Part | None
) -> Identity:
    """What decides the output."""
    files = _files(inputs)
    named = {"part": part and list(part), "tokenizer": tokenizer.fingerprint, "json_keys": list(options.keys)}
    flags = {name: getattr(options, name) for name in ("append_eod", "split_sentences", "skip_bad")}
    return {"inputs": files, **named, **flags, "encoding": reading.encoding, "separator": reading.separator}


def _writers(
    stack: ExitStack,
    make: Callable[..., IndexedWriter],
    outputs: Sequence[str],
    states: Sequence[WriterState | None],
    tokenizer: Tokenizer,
    append_eod: bool,
) -> list[IndexedWriter]:
    """A writer for each output, from its state on; the stack aborts them."""
    writers: list[IndexedWriter] = []
    for output, state in zip(outputs, states, strict=True):
        writer = make(
            output,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id if append_eod else None,
            tokenizer=tokenizer.fingerprint,
            tokenizer_flags=flags_of(tokenizer),
            resume=state,
        )
        stack.callback(writer.abort)  # does nothing once it has been finished
        writers.append(writer)
    return writers


def _encoder(
    tokenizer: Tokenizer, options: Options, source: Iterator[tuple[Share, Block]], say: Callable[[str], None]
) -> tuple[Encoder, Iterator[tuple[Share, Block]]]:
    """The fast form of the tokenizer, if it is proved on the first block; and all blocks."""
    encoder, first = Encoder(tokenizer), next(source, None)
    if options.fast:
        try:
            encoder = encoder_of(tokenizer, texts_of(first[1], options, _TRIED) if first else [])
        except NotFast as why:
            say(f"note: tokenizing by the reference library, which is slower: {why}")
    return encoder, source if first is None else chain([first], source)


def _encoded(stream: _Input, encoder: Encoder, options: Options, workers: int, stack: ExitStack) -> Iterator[Encoded]:
    """Every block in order."""
    if encoder.is_fast and not options.split_sentences:
        yield from _in_threads(stream, encoder, options, workers, stack)
        return
    if workers == 1:
        yield from (encode_block(encoder, options, work) for work in stream.work())
        return
    pool = stack.enter_context(OrderedPool(workers, partial(worker_function, options)))
    try:
        yield from pool.map(stream.work())
    except WorkerFailed as error:
        raise BadInput(f"{error}; nothing was written") from None
    except WorkerDied as error:
        what = f" in {_numbers(stream, error.item.block)}" if isinstance(error.item, Work) else ""
        hint = " Out of memory? Fewer --workers need less." if "SIGKILL" in error.worker else ""
        raise BadInput(f"{error.worker}{what}; nothing was written.{hint}") from None


def _in_threads(
    stream: _Input, encoder: Encoder, options: Options, workers: int, stack: ExitStack
) -> Iterator[Encoded]:
    """As processes would, without the cost of sending: nearly all of the fast path runs outside of the interpreter's lock."""
    sharing = _SHARING if encoder.remembers else 1
    encoders: list[Encoder | None] = [encoder, *[None] * ((workers - 1) // sharing)]
    turns: SimpleQueue[int] = SimpleQueue()
    for number in range(workers):
        turns.put(number // sharing)

    def encode(work: Work) -> Encoded:
        turn = turns.get()
        try:
            own = encoders[turn] = encoders[turn] or encoder_of(encoder.tokenizer, prove=False)
            return encode_block(own, options, work)
        finally:
            turns.put(turn)

    pool = ThreadPoolExecutor(workers)
    stack.callback(pool.shutdown, cancel_futures=True)
    waiting: deque[Future[Encoded]] = deque()
    for work in stream.work():
        waiting.append(pool.submit(encode, work))
        if len(waiting) > 2 * workers:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _numbers(stream: _Input, block: Block) -> str:
    """Which lines a block holds, for people."""
    if not isinstance(block, Lines):
        return f"documents {block.first} to {block.first + len(block) - 1} of {block.file}"
    first = block.first + next((stream.numbers_before(share) for share, given in stream.given if given is block), 0)
    return f"lines {first} to {first + block.data.rstrip().count(bytes([10]))} of {block.file}"


def _taken(whole: Sequence[Share], share: Share, block: Block) -> int:
    """Bytes on the disk that have been read when a block has been."""
    before = sum(s.size for s in whole if s.file < share.file)
    own = next(s for s in whole if s.file == share.file)
    begin = own.start if isinstance(block, Lines) else 0
    return before + min(own.size, max(0, block.taken - begin))


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


def summary(counts: Counts, seconds: float) -> str:
    """What happened, for people."""
    size = f"{counts.bytes / 1e6:.1f} MB" if counts.bytes >= 1e5 else f"{counts.bytes:,} bytes"
    lines = [f"{counts.documents:,} documents, {counts.tokens:,} tokens from {size} in {seconds:.1f} s"]
    skipped = [("empty", "", counts.empty), *(("bad", f": {reason}", n) for reason, n in counts.bad.most_common())]
    lines += [
        f"{n:,} {kind} {'record was' if n == 1 else 'records were'} skipped{why}" for kind, why, n in skipped if n
    ]
    if counts.compared:
        lines.append(
            f"{counts.compared:,} texts on the way were compared with the reference tokenizer, with the same ids"
        )
    if counts.holds_eod:
        lines.append(
            f"{counts.holds_eod} texts hold the end-of-document token themselves: "
            "--sample-order megatron sees a border there"
        )
    return "\n".join(lines)
