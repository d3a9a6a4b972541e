"""From JSON lines to an indexed dataset.

The parent reads blocks of whole lines and writes; workers parse and tokenize (:mod:`megatron_lite.text.pool`).
Blocks come back in order, so the output is the same bytes for any number of workers. What a record is, and which lines
are bad, says :mod:`megatron_lite.text.records`. A bad one ends the run with file, line, reason and its first 80
characters, or is counted by reason (``--skip-bad``); a text that the tokenizer refuses makes its record bad.

A record in which a text is empty, only white space, or without a single token is *empty*: it is skipped for all keys,
so that the outputs of several keys stay aligned, and counted.

A worker that raises or dies ends the run; nothing stands under the final names before everything is complete.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import regex

from megatron_lite.data.index_format import prefix_paths
from megatron_lite.data.index_writer import IndexedWriter
from megatron_lite.data.locked_file import interrupts_held
from megatron_lite.text.pool import OrderedPool, WorkerDied, WorkerFailed
from megatron_lite.text.records import BadInput, BadRecord, blocks, excerpt, numbered_lines, parse_line
from megatron_lite.text.tokenizer import Tokenizer

SENTENCE_END = regex.compile(
    r"(?<=[.!?][\"')\]]*)\s+(?=\p{Lu}|\p{N}|[\"'(\[])"  # Latin script: a mark, white space, a capital
    r"|(?<=[。！？][”」』）]*)(?![。！？”」』）])"  # Chinese, Japanese: a mark, its quotes  # noqa: RUF001
)


@dataclass(frozen=True)
class Options:
    """What a worker needs to turn lines into ids; sent to the workers.

    Attributes:
        tokenizer: builds the tokenizer, e.g. ``partial(build_tokenizer, "NullTokenizer", vocab_size=100)``.
        keys: of the texts in a record; an output each.
        append_eod: end each document with the end-of-document id.
        split_sentences: each sentence is a sequence of its document; white space between sentences is dropped.
        skip_bad: leave bad records out and count them.
    """

    tokenizer: Callable[[], Tokenizer]
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    skip_bad: bool = False


@dataclass
class Counts:
    """What became of the records."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    empty: int = 0
    holds_eod: int = 0  # texts that themselves encode to the end-of-document token
    bad: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        """Add another's numbers."""
        for name in ("documents", "tokens", "bytes", "empty", "holds_eod"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.bad.update(other.bad)


@dataclass(frozen=True)
class Lines:
    """A block of whole lines of a file."""

    file: str
    first: int
    data: bytes


@dataclass
class Block:
    """What a worker makes of a block of lines: for each key the ids, int64, and each document's sequence lengths."""

    counts: Counts
    tokens: list[np.ndarray] = field(default_factory=list)
    lengths: list[list[list[int]]] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class _Record:
    number: int  # of its line
    line: bytes
    texts: list[str]

    def pieces(self, split: bool) -> list[list[str]]:
        """For each text the strings that become its sequences."""
        return [[s for s in SENTENCE_END.split(t) if s.strip()] if split else [t] for t in self.texts]


Sequences = list[list[int]]  # ids of the sequences of one document


def encode_block(tokenizer: Tokenizer, options: Options, lines: Lines) -> Block:
    """Parse and tokenize a block. A record that ends the run gives a block with ``error`` alone."""
    block = Block(Counts(bytes=len(lines.data)))

    def refuse(number: int, line: bytes, why: BadRecord) -> None:
        if not options.skip_bad:
            raise BadInput(f"{lines.file}:{number}: {why}: {excerpt(line)}")
        block.counts.bad[why.reason] += 1

    try:
        records = []
        for number, line in numbered_lines(lines.first, lines.data):
            try:
                texts = parse_line(line, options.keys)
            except BadRecord as why:
                refuse(number, line, why)
                continue
            if all(text.strip() for text in texts):
                records.append(_Record(number, line, texts))
            else:
                block.counts.empty += 1
        documents = []
        for record, found in zip(records, _encode(tokenizer, options, lines.file, records), strict=True):
            if isinstance(found, BadRecord):
                refuse(record.number, record.line, found)
            elif all(found):
                documents.append(found)
            else:
                block.counts.empty += 1
    except BadInput as error:
        return Block(block.counts, error=str(error))
    _pack(block, tokenizer, options, documents)
    return block


def _encode(
    tokenizer: Tokenizer, options: Options, file: str, records: list[_Record]
) -> list[list[Sequences] | BadRecord]:
    """For each record its texts' sequences (without empty ones), or why the tokenizer refuses it."""
    pieces = [record.pieces(options.split_sentences) for record in records]
    try:
        encoded = iter(tokenizer.encode_batch([s for texts in pieces for text in texts for s in text]))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # compiled tokenizers panic with a BaseException of their own
        return [_encode_one(tokenizer, file, r, p) for r, p in zip(records, pieces, strict=True)]  # to know which it is
    return [[_without_empty([next(encoded) for _ in text]) for text in texts] for texts in pieces]


def _encode_one(
    tokenizer: Tokenizer, file: str, record: _Record, pieces: list[list[str]]
) -> list[Sequences] | BadRecord:
    try:
        return [_without_empty(tokenizer.encode_batch(text)) for text in pieces]
    except (KeyboardInterrupt, SystemExit):
        raise
    except ValueError as error:
        return BadRecord("the tokenizer cannot encode the text", f" ({error})")
    except BaseException as error:
        what = f"the tokenizer failed ({type(error).__name__}: {error})"
        raise BadInput(f"{file}:{record.number}: {what}: {excerpt(record.line)}") from None


def _without_empty(sequences: Sequences) -> Sequences:
    return [s for s in sequences if s]


def _pack(block: Block, tokenizer: Tokenizer, options: Options, documents: list[list[Sequences]]) -> None:
    """Append the end of each document, and put ids and lengths of each key in one piece."""
    block.counts.documents = len(documents)
    for column in range(len(options.keys)):
        lengths, parts = [], []
        for document in (texts[column] for texts in documents):
            block.counts.holds_eod += any(tokenizer.eod_id in s for s in document)
            if options.append_eod:
                document[-1] = [*document[-1], tokenizer.eod_id]
            lengths.append([len(s) for s in document])
            parts += document
        total = sum(map(sum, lengths))
        block.tokens.append(np.fromiter(chain.from_iterable(parts), dtype=np.int64, count=total))
        block.lengths.append(lengths)
        block.counts.tokens += total


def worker_function(options: Options) -> Callable[[Lines], Block]:
    """What a worker process does with a block; builds the tokenizer."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # of the tokenizers package: processes are the parallelism
    return partial(encode_block, options.tokenizer(), options)


def preprocess(
    inputs: Sequence[Path],
    output_prefix: str,
    options: Options,
    *,
    workers: int = 1,
    overwrite: bool = False,
    log_interval: int = 0,
    say: Callable[[str], None] = print,
) -> Counts:
    """Tokenize files into ``PREFIX_KEY_document.bin/.idx/.meta.json``, one pair per key.

    Raises:
        BadInput: a bad record, a worker that died, or no document at all; no output is left.
        FileExistsError: the output is there and ``overwrite`` is off.
        ValueError: a tokenizer that cannot be used, or a key given twice.
        OSError: the output cannot be written; none is left.
    """
    if len(set(options.keys)) != len(options.keys):
        raise ValueError(f"--json-keys {' '.join(options.keys)}: each key once, since each has an output of its own")
    tokenizer = options.tokenizer()  # before any work: a tokenizer without an end token is refused here
    total, started, said = Counts(), time.monotonic(), 0
    with ExitStack() as stack:
        writers: list[IndexedWriter] = []
        with interrupts_held():
            for key in options.keys:
                writer = IndexedWriter(
                    f"{output_prefix}_{key}_document",
                    vocab_size=tokenizer.vocab_size,
                    eod_id=tokenizer.eod_id if options.append_eod else None,
                    tokenizer=tokenizer.fingerprint,
                    overwrite=overwrite,
                )
                stack.callback(writer.abort)  # does nothing once it has been finished
                writers.append(writer)
        for block in _encoded(inputs, tokenizer, options, workers, stack):
            if block.error is not None:
                raise BadInput(block.error)
            _store(writers, block)
            total.add(block.counts)
            if log_interval and total.documents - said >= log_interval:
                said = total.documents
                seconds = time.monotonic() - started
                say(f"{said} documents, {said / seconds:.0f} documents/s, {total.bytes / 1e6 / seconds:.2f} MB/s")
        if not total.documents:
            raise BadInput(
                f"no documents were written: {len(inputs)} file(s) of {total.bytes} bytes held {total.empty} empty and "
                f"{sum(total.bad.values())} bad records"
            )
        published = False
        try:
            with interrupts_held():
                _publish(writers)
                published = True
        except KeyboardInterrupt:
            if not published:  # else it came when everything was done
                raise
    return total


def _encoded(
    inputs: Sequence[Path], tokenizer: Tokenizer, options: Options, workers: int, stack: ExitStack
) -> Iterator[Block]:
    """Every block in order."""
    work = (Lines(str(path), line, data) for path in inputs for line, data in blocks(path))
    if workers == 1:
        yield from (encode_block(tokenizer, options, lines) for lines in work)
        return
    pool = stack.enter_context(OrderedPool(workers, partial(worker_function, options)))
    try:
        yield from pool.map(work)
    except WorkerFailed as error:
        raise BadInput(f"{error}; nothing was written") from None
    except WorkerDied as error:
        what = ""
        if isinstance(lines := error.item, Lines):
            what = f" in lines {lines.first} to {lines.first + lines.data.rstrip().count(bytes([10]))} of {lines.file}"
        hint = " Out of memory? Fewer --workers need less." if "SIGKILL" in error.worker else ""
        raise BadInput(f"{error.worker}{what}; nothing was written.{hint}") from None


def _store(writers: Sequence[IndexedWriter], block: Block) -> None:
    for writer, tokens, lengths in zip(writers, block.tokens, block.lengths, strict=True):
        start = 0
        for document in lengths:
            size = sum(document)
            writer.add_document(tokens[start : start + size], document)
            start += size


def _publish(writers: Sequence[IndexedWriter]) -> None:
    """All outputs or none: those of other keys are taken back when one cannot be completed."""
    published: list[IndexedWriter] = []
    try:
        for writer in writers:
            writer.finish()
            published.append(writer)
    except BaseException:
        for writer in published:
            for path in reversed(prefix_paths(writer.prefix)):
                path.unlink(missing_ok=True)
        raise


def summary(counts: Counts, seconds: float) -> str:
    """What happened, for people."""
    size = f"{counts.bytes / 1e6:.1f} MB" if counts.bytes >= 1e5 else f"{counts.bytes:,} bytes"
    lines = [f"{counts.documents:,} documents, {counts.tokens:,} tokens from {size} in {seconds:.1f} s"]
    skipped = [("empty", "", counts.empty), *(("bad", f": {reason}", n) for reason, n in counts.bad.most_common())]
    lines += [f"{n:,} {kind} {'record was' if n == 1 else 'records were'} skipped{why}" for kind, why, n in skipped if n]
    if counts.holds_eod:
        lines.append(
            f"{counts.holds_eod} texts hold the end-of-document token themselves: "
            "--sample-order megatron sees a border there"
        )
    return "\n".join(lines)
