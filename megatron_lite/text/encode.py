"""What a preprocessing worker does: a block of input becomes ids, and what has to be known about them.

The work of a document in Python is a few dictionary look-ups; tokens are only ever in arrays. The ids of a key's texts
lie back to back; empty documents are taken out, ends of documents put in and ids narrowed to the type of the file by
operations on the whole block.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import orjson
import regex

from megatron_lite.data.index_format import choose_dtype
from megatron_lite.text.blocks import Block, Lines
from megatron_lite.text.records import BadRecord, excerpt, numbered_lines, parse_line, refusal
from megatron_lite.text.tokenizer import Tokenizer
from megatron_lite.text.tokenizer_fast import Encoder, FastDiffers, Ids, encoder_of, flat, surrounded

SENTENCE_END = regex.compile(
    r"(?<=[.!?][\"')\]]*)\s+(?=\p{Lu}|\p{N}|[\"'(\[])"  # Latin script: a mark, white space, a capital
    r"|(?<=[。！？][”」』）]*)(?![。！？”」』）])"  # Chinese, Japanese: a mark, its quotes  # noqa: RUF001
    r"|\n\s*\n"  # a paragraph
)
EMPTY = "empty"  # why a record is dropped
_REASONS, _OTHER = 100, "(others)"  # so many are counted by name: some hold words of the data
_LONG = 200_000  # characters; a longer text is not compared with the reference, which would take its time


@dataclass(frozen=True)
class Options:
    """What a worker needs to turn lines into ids; sent to the workers.

    Attributes:
        tokenizer: builds the tokenizer, e.g. ``partial(build_tokenizer, "NullTokenizer", vocab_size=100)``.
        keys: of the texts in a record; an output each.
        append_eod: end each document with the end-of-document id.
        split_sentences: each sentence is a sequence of its document; white space between sentences is dropped.
        skip_bad: leave bad records out and count them.
        fast: use the fast form of the tokenizer where it is proved equal.
    """

    tokenizer: Callable[[], Tokenizer]
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    skip_bad: bool = False
    fast: bool = True

    def output(self, prefix: str, key: str) -> str:
        """The prefix of a key's dataset, named as by Megatron-LM."""
        return f"{prefix}_{key}_{'sentence' if self.split_sentences else 'document'}"


@dataclass
class Counts:
    """What became of the records.

    Attributes:
        documents, tokens: written.
        bytes: of JSON lines, or characters of texts that came as such.
        holds_eod: texts that themselves encode to the end-of-document token.
        compared: texts whose ids were compared with the reference's.
        counted: tokens that the loss counts (this and what follows is of conversations).
        turns, ended: of the assistant; those that end with a special token.
        truncated: conversations cut to a row.
        tools: conversations with tools that the template does not read.
        spells: conversations with a message that spells a special token.
        looked, missing: answers of conversations that were looked for in their text, and those that were not found.
        coded_twice: conversations with arguments of a tool that were written as a string inside JSON.
        unread, unread_inside: keys of conversations that are not read, and of messages in them.
        dropped, bad: records that were left out, by rule and on request, by reason.
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    holds_eod: int = 0
    compared: int = 0
    counted: int = 0
    turns: int = 0
    ended: int = 0
    truncated: int = 0
    tools: int = 0
    spells: int = 0
    looked: int = 0
    missing: int = 0
    coded_twice: int = 0
    unread: Counter[str] = field(default_factory=Counter)
    unread_inside: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        """Add another's numbers."""
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                own = getattr(self, name)
                for reason, number in value.items():
                    own[reason if reason in own or len(own) < _REASONS else _OTHER] += number
            else:
                setattr(self, name, getattr(self, name) + value)

    @property
    def size(self) -> str:
        """The bytes, for people."""
        return f"{self.bytes / 1e6:,.1f} MB" if self.bytes >= 1e5 else f"{self.bytes:,} bytes"

    def skipped(self) -> list[str]:
        """A line for each reason for which records are not in the output."""
        reasons = (("dropped", self.dropped), ("bad", self.bad))
        return [f"{n:,} {kind}: {why}" for kind, found in reasons for why, n in found.most_common() if n]


@dataclass(frozen=True)
class Work:
    """A block of input, and how many of its texts are to be compared with the reference."""

    block: Block
    compare: int = 0


@dataclass(frozen=True)
class Column:
    """The documents of one key: ids in the type of the file, sequence lengths and sequences of each document (None: one)."""

    tokens: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray | None


@dataclass(frozen=True)
class Failure:
    """What ends a run: line (or document) of the block's file, and why."""

    number: int
    what: str


@dataclass
class Encoded:
    """What a worker makes of a block: a column per key, or a failure alone."""

    counts: Counts
    columns: list[Column] = field(default_factory=list)
    failure: Failure | None = None


class Stop(Exception):
    """What ends a run: the number of its line, and what is wrong."""


class _Records(NamedTuple):
    """Records with something to tokenize: the number of each line (or document), what stands there, and its texts by key."""

    numbers: Sequence[int]
    starts: Sequence[bytes]
    columns: list[list[str]]

    def only(self, kept: Sequence[int]) -> _Records:
        """Some of them."""
        columns = [[texts[i] for i in kept] for texts in self.columns]
        return _Records([self.numbers[i] for i in kept], [self.starts[i] for i in kept], columns)


def encode_block(encoder: Encoder, options: Options, work: Work) -> Encoded:
    """Parse and tokenize a block."""
    found = Encoded(Counts())
    try:
        records = _records(work.block, options, found.counts)
        pieces = [_pieces(texts, options) for texts in records.columns]
        try:
            ids = [encoder.encode(texts) for texts, _ in pieces]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # compiled tokenizers panic with a BaseException of their own
            records = _encodable(encoder.tokenizer, options, records, found.counts)
            pieces = [_pieces(texts, options) for texts in records.columns]
            ids = [flat(encoder.tokenizer.encode_batch(texts)) for texts, _ in pieces]
        else:
            if work.compare and encoder.is_fast and records.numbers:
                for some, of_them in zip(pieces, ids, strict=True):
                    _compare(encoder, records, some, of_them, work.compare)
                    found.counts.compared += min(work.compare, len(some[0]))
    except Stop as stop:
        return Encoded(found.counts, failure=Failure(*stop.args))
    _pack(found, encoder.tokenizer, options, [(i, n) for i, (_, n) in zip(ids, pieces, strict=True)])
    return found


def refuse(skip_bad: bool, counts: Counts, number: int, line: bytes, why: BadRecord, key_flag: str = "") -> None:
    """A bad record is counted, or ends the run: raises Stop."""
    if not skip_bad:
        raise Stop(number, refusal(why, line, key_flag))
    counts.bad[why.reason] += 1


def _records(block: Block, options: Options, counts: Counts) -> _Records:
    """The records of a block; empty and bad ones are counted, or end the run."""
    found = _quickly(block, options.keys) if isinstance(block, Lines) else None
    if found is None:
        good = []
        for number, start, texts in _one_by_one(block, options.keys):
            if isinstance(texts, BadRecord):
                refuse(options.skip_bad, counts, number, start, texts, "--json-keys")
            else:
                good.append((number, start, texts))
        columns = [[texts[k] for _, _, texts in good] for k in range(len(options.keys))]
        found = _Records([number for number, _, _ in good], [start for _, start, _ in good], columns)
    counts.bytes += len(block.data) if isinstance(block, Lines) else sum(map(len, chain(*found.columns)))
    if all(all(texts) and not any(map(str.isspace, texts)) for texts in found.columns):
        return found
    keep = [i for i, texts in enumerate(zip(*found.columns, strict=True)) if all(t and not t.isspace() for t in texts)]
    counts.dropped[EMPTY] += len(found.numbers) - len(keep)
    return found.only(keep)


def _quickly(block: Lines, keys: Sequence[str]) -> _Records | None:
    """The records of a block in which every line is one, by the shortest way; None if one is blank, bad or unusual."""
    loads = orjson.loads
    lines = block.data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    try:
        if len(keys) == 1:
            key = keys[0]
            columns = [[loads(line)[key] for line in lines]]
        else:
            records = [loads(line) for line in lines]
            columns = [[record[key] for record in records] for key in keys]
    except (ValueError, TypeError, LookupError):
        return None
    if any({*map(type, texts)} != {str} for texts in columns):
        return None
    return _Records(range(block.first, block.first + len(lines)), lines, columns)


def _one_by_one(block: Block, keys: Sequence[str]) -> Iterator[tuple[int, bytes, list[str] | BadRecord]]:
    """(number, what stands there, its texts or what is wrong) of each record."""
    if isinstance(block, Lines):
        for number, line in numbered_lines(block.first, block.data):
            try:
                yield number, line, parse_line(line, keys)
            except BadRecord as why:
                yield number, line, why
        return
    refused = {bad.index: bad for bad in block.refused}
    columns = [block.columns[block.keys.index(key)] for key in keys]
    for index, texts in enumerate(zip(*columns, strict=True)):
        bad = refused.get(index)
        start = texts[0][:80].encode() if bad is None else bad.start
        yield block.first + index, start, list(texts) if bad is None else bad.why


def _pieces(texts: list[str], options: Options) -> tuple[list[str], np.ndarray | None]:
    """The strings that become sequences, and how many each text has (None: it is one)."""
    if not options.split_sentences:
        return texts, None
    cut = [[s for s in SENTENCE_END.split(text) if s.strip()] for text in texts]
    return [s for sentences in cut for s in sentences], np.array([len(s) for s in cut], dtype=np.int64)


Pieces = tuple[list[str], np.ndarray | None]


def _encodable(tokenizer: Tokenizer, options: Options, records: _Records, counts: Counts) -> _Records:
    """The records that the tokenizer takes, when it does not take all."""
    keep = []
    for i, (number, start, *texts) in enumerate(zip(records.numbers, records.starts, *records.columns, strict=True)):
        try:
            for text in texts:
                tokenizer.encode_batch(_pieces([text], options)[0])
            keep.append(i)
        except (KeyboardInterrupt, SystemExit):
            raise
        except ValueError as error:
            why = BadRecord("the tokenizer cannot encode the text", f" ({error})")
            refuse(options.skip_bad, counts, number, start, why)
        except BaseException as error:
            what = f"the tokenizer failed ({type(error).__name__}: {error})"
            raise Stop(number, f"{what}: {excerpt(start)}") from None
    return records.only(keep)


def _compare(encoder: Encoder, records: _Records, pieces: Pieces, ids: Ids, number: int) -> None:
    """Compare the ids of some texts with the reference's: those with the rarest characters."""
    texts, counts = pieces
    rarest = sorted(range(len(texts)), key=lambda i: (len(texts[i]) > _LONG, -ord(max(texts[i]))))[:number]
    try:
        encoder.check(texts, ids, rarest)
    except FastDiffers as error:
        at = error.index if counts is None else int(np.searchsorted(np.cumsum(counts), error.index, side="right"))
        what = f"{error}; run with --no-fast-tokenizer: {excerpt(records.starts[at])}"
        raise Stop(records.numbers[at], what) from None


def _pack(found: Encoded, tokenizer: Tokenizer, options: Options, columns: list[tuple[Ids, np.ndarray | None]]) -> None:
    """Take out documents without a token, append the ends, and narrow the ids."""
    sizes = [ids.lengths if pieces is None else _sums(ids.lengths, pieces) for ids, pieces in columns]
    keep = np.logical_and.reduce([size > 0 for size in sizes])
    found.counts.documents = int(keep.sum())
    found.counts.dropped[EMPTY] += len(keep) - found.counts.documents
    dtype = choose_dtype(tokenizer.vocab_size)
    for ((ids, lengths), pieces), size in zip(columns, sizes, strict=True):
        if not keep.all():
            ids = ids[np.repeat(keep, size)]
            lengths = lengths[keep if pieces is None else np.repeat(keep, pieces)]
            size, pieces = size[keep], None if pieces is None else pieces[keep]
        if pieces is not None:  # sentences without a token are no sequences
            pieces = _sums((lengths > 0).astype(np.int64), pieces)
            lengths = lengths[lengths > 0]
        ends = np.flatnonzero(ids == tokenizer.eod_id)
        found.counts.holds_eod += len(np.unique(np.searchsorted(np.cumsum(size), ends, side="right")))
        if not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) <= np.iinfo(dtype).max):
            ids = ids.astype(dtype)  # else the writer refuses them
        if options.append_eod:
            ids = surrounded(Ids(ids, size), (), (tokenizer.eod_id,)).ids
            lengths = lengths.copy()
            lengths[slice(None) if pieces is None else np.cumsum(pieces) - 1] += 1
        found.counts.tokens += len(ids)
        found.columns.append(Column(ids, lengths, pieces))


def _sums(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sums of runs of ``counts`` values; no run is empty."""
    return np.add.reduceat(values, np.cumsum(counts) - counts) if len(counts) else counts


def encoder_in_worker(make: Callable[[], Tokenizer], fast: bool) -> Encoder:
    """A worker process's own tokenizer, fast where the parent has proved it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # of the tokenizers package: processes are the parallelism
    return encoder_of(make(), prove=False) if fast else Encoder(make())


def texts_of(block: Block, keys: Sequence[str], most: int) -> list[str]:
    """Texts of a block, of about ``most`` characters in all, to try a tokenizer on; bad records are passed over."""
    texts: list[str] = []
    for _, _, found in _one_by_one(block, keys):
        if not isinstance(found, BadRecord):
            texts += [text for text in found if len(text) <= most]
            most -= sum(map(len, found))
        if most <= 0:
            break
    return texts
