"""From JSON lines to an indexed dataset.

The parent reads blocks of whole lines and writes; workers decode, parse and tokenize. Blocks come back in order, so the
output is the same bytes for any number of workers. Rules that do not depend on where a record stands in the file:

* A record is an object with a string under every key of ``--json-keys``; anything else is *bad*: an error with file,
  line, reason and the first 80 characters, or under ``--skip-bad`` counted by reason.
* Lines are UTF-8 whatever the locale; invalid bytes and lone surrogates are bad. A byte-order mark is ignored.
* A record in which a text is empty or only white space is *empty*: skipped for all keys, so that the outputs of several
  keys stay aligned, and counted.

A worker that raises or dies ends the run; nothing stands under the final names before everything is complete.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from glob import glob, has_magic
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

import numpy as np
import regex

from megatron_lite.data.index_writer import IndexedWriter
from megatron_lite.data.tokenizer import Tokenizer, build_tokenizer

OPENERS: dict[str, Callable[[Path], IO[bytes]]] = {
    ".jsonl": lambda p: open(p, "rb"),
    ".json": lambda p: open(p, "rb"),
    ".jsonl.gz": lambda p: gzip.open(p, "rb"),
    ".json.gz": lambda p: gzip.open(p, "rb"),
    ".jsonl.bz2": lambda p: bz2.open(p, "rb"),
    ".json.bz2": lambda p: bz2.open(p, "rb"),
    ".jsonl.xz": lambda p: lzma.open(p, "rb"),
    ".json.xz": lambda p: lzma.open(p, "rb"),
}  # fmt: skip
BLOCK_BYTES = 1 << 20
SENTENCE_END = regex.compile(r"(?<=[.!?][\"')\]]*)\s+(?=\p{Lu}|\p{N}|[\"'(\[])|(?<=[。！？]+[”」』）]*)")


@dataclass(frozen=True)
class Options:
    """What a worker needs to turn lines into ids."""

    tokenizer: Mapping[str, Any]  # arguments of build_tokenizer
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
    holds_eod: int = 0  # documents whose own text encodes to the end-of-document token
    bad: Counter[str] = field(default_factory=Counter)


@dataclass
class Block:
    """What a worker makes of one block of lines, for each key: ids of all documents, and the lengths of the sequences."""

    tokens: list[np.ndarray]
    lengths: list[list[list[int]]]
    counts: Counts
    error: str | None = None


class BadInput(ValueError):
    """A record that cannot be used; the text names file, line and reason."""


def expand_inputs(patterns: Sequence[str]) -> list[Path]:
    """Files that the arguments name (globs are expanded, in order of their names).

    Raises:
        ValueError: a pattern that matches nothing, a file that is not there, or a suffix that is not supported.
    """
    files: list[Path] = []
    for pattern in patterns:
        found = sorted(glob(pattern)) if has_magic(pattern) else [pattern]
        if not found:
            raise ValueError(f"--input {pattern}: no file matches")
        files += [Path(f) for f in found]
    for path in files:
        if not path.is_file():
            raise ValueError(f"--input {path}: no such file")
        if suffix_of(path) is None:
            raise ValueError(f"--input {path}: this kind of file is not read; supported are {', '.join(OPENERS)}")
    return files


def suffix_of(path: Path) -> str | None:
    """The supported suffix of a file name, or None."""
    return next((s for s in sorted(OPENERS, key=len, reverse=True) if path.name.endswith(s)), None)


def blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number of the first line, whole lines) of a file in pieces of about a megabyte."""
    suffix = suffix_of(path)
    assert suffix is not None
    line, rest = 1, b""
    with OPENERS[suffix](path) as f:
        try:
            while data := f.read(BLOCK_BYTES):
                data = rest + data
                cut = data.rfind(b"\n") + 1
                whole, rest = data[:cut], data[cut:]
                if whole:
                    yield line, whole
                    line += whole.count(b"\n")
        except (OSError, EOFError, lzma.LZMAError) as e:
            raise BadInput(f"{path}:{line}: the compressed file is damaged or cut off ({e})") from None
    if rest:
        yield line, rest


def parse_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """The texts of a record. Raises ValueError with a short reason."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        raise ValueError(f"not UTF-8 (byte {e.start})") from None
    except json.JSONDecodeError as e:
        raise ValueError(f"not one JSON value: {e.msg} at character {e.colno}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(record, dict):
        kind = "an array (a file of JSON lines is needed: one object per line)" if isinstance(record, list) else type(record).__name__
        raise ValueError(f"not an object but {kind}")
    texts = []
    for key in keys:
        if key not in record:
            raise ValueError(f"no key {key!r}")
        text = record[key]
        if not isinstance(text, str):
            raise ValueError(f"the value of {key!r} is no text but {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"the value of {key!r} holds a lone surrogate, which is no text") from None
        texts.append(text)
    return texts


def encode_block(tokenizer: Tokenizer, options: Options, where: str, first_line: int, data: bytes) -> Block:
    """Tokenize a block of whole lines. A bad record ends the block with ``error`` unless it is to be skipped."""
    counts, texts = Counts(bytes=len(data)), [[] for _ in options.keys]  # type: list[list[str]]
    for number, line in enumerate(data.split(b"\n"), first_line):
        if not line.strip(b" \t\r\xef\xbb\xbf"):
            continue
        try:
            found = parse_line(line, options.keys)
        except ValueError as e:
            if options.skip_bad:
                counts.bad[str(e).split(" at character")[0].split(" (byte")[0]] += 1
                continue
            return Block([], [], counts, f"{where}:{number}: {e}: {line[:80].decode('utf-8', errors='replace')}")
        if not all(text.strip() for text in found):
            counts.empty += 1
            continue
        for column, text in zip(texts, found, strict=True):
            column.append(text)
    counts.documents = len(texts[0])
    result = Block([], [], counts)
    for column in texts:
        ids, lengths = _encode_texts(tokenizer, options, column, counts)
        result.tokens.append(ids)
        result.lengths.append(lengths)
    return result


def _encode_texts(tokenizer: Tokenizer, options: Options, texts: list[str], counts: Counts) -> tuple[np.ndarray, list[list[int]]]:
    pieces = [[t for t in SENTENCE_END.split(text) if t.strip()] if options.split_sentences else [text] for text in texts]
    encoded = iter(tokenizer.encode_batch([piece for document in pieces for piece in document]))
    arrays, lengths = [], []
    for document in pieces:
        sequences = [next(encoded) for _ in document]
        counts.holds_eod += any(tokenizer.eod_id in s for s in sequences)
        if options.append_eod:
            sequences[-1] = [*sequences[-1], tokenizer.eod_id]
        arrays.append(np.array([i for s in sequences for i in s], dtype=np.int64))
        lengths.append([len(s) for s in sequences])
        counts.tokens += arrays[-1].size
    return (np.concatenate(arrays) if arrays else np.empty(0, np.int64)), lengths


class _Worker:
    """State of a worker process: its tokenizer, built once (set by :func:`_start_worker`)."""

    tokenizer: Tokenizer
    options: Options


def _start_worker(options: Options) -> None:
    _Worker.options = options
    _Worker.tokenizer = build_tokenizer(**options.tokenizer)


def _work(where: str, first_line: int, data: bytes) -> Block:
    try:
        return encode_block(_Worker.tokenizer, _Worker.options, where, first_line, data)
    except Exception as e:  # the place is known here; the parent would only see a traceback of the library
        return Block([], [], Counts(), f"{where}: tokenizing the records from line {first_line} on failed: {type(e).__name__}: {e}")


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
        BadInput: a bad record, or no document at all; no output is left.
        FileExistsError: the output is there and ``overwrite`` is off.
        ValueError: a tokenizer that cannot be used.
    """
    tokenizer = build_tokenizer(**options.tokenizer)  # before any work: a tokenizer without an end token is refused here
    total, started = Counts(), time.monotonic()
    with ExitStack() as stack:
        writers = []
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
        said = 0
        for block in _encoded_blocks(inputs, tokenizer, options, workers, stack):
            if block.error is not None:
                raise BadInput(block.error)
            _store(writers, block)
            _add(total, block.counts)
            if log_interval and total.documents - said >= log_interval:
                said = total.documents
                seconds = time.monotonic() - started
                say(f"{total.documents} documents, {total.documents / seconds:.0f} documents/s, {total.bytes / 1e6 / seconds:.2f} MB/s")
        if not total.documents:
            raise BadInput(
                f"no documents were written: {len(inputs)} file(s) of {total.bytes} bytes held {total.empty} empty and "
                f"{sum(total.bad.values())} bad records"
            )
        for writer in writers:
            writer.finish()
    return total


def _encoded_blocks(
    inputs: Sequence[Path], tokenizer: Tokenizer, options: Options, workers: int, stack: ExitStack
) -> Iterator[Block]:
    """Every block in order, with up to three blocks a worker under way."""
    work = ((str(path), line, data) for path in inputs for line, data in blocks(path))
    if workers == 1:
        for where, line, data in work:
            yield encode_block(tokenizer, options, where, line, data)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (options,))
    stack.callback(pool.shutdown, wait=False, cancel_futures=True)
    under_way: deque[tuple[str, int, Future[Block]]] = deque()
    exhausted = False
    while under_way or not exhausted:
        while not exhausted and len(under_way) < 3 * workers:
            item = next(work, None)
            if item is None:
                exhausted = True
                break
            under_way.append((item[0], item[1], _submit(pool, item)))
        if under_way:
            where, line, future = under_way.popleft()
            try:
                yield future.result()
            except BrokenProcessPool:
                raise BadInput(
                    f"a worker process died (killed, or out of memory) around {where}:{line}; nothing was written. "
                    "Fewer --workers need less memory"
                ) from None


def _submit(pool: ProcessPoolExecutor, item: tuple[str, int, bytes]) -> Future[Block]:
    try:
        return pool.submit(_work, *item)
    except BrokenProcessPool as e:  # the pool broke after an earlier block: told when that one is taken
        broken: Future[Block] = Future()
        broken.set_exception(e)
        return broken


def _store(writers: Sequence[IndexedWriter], block: Block) -> None:
    for writer, tokens, lengths in zip(writers, block.tokens, block.lengths, strict=True):
        start = 0
        for document in lengths:
            size = sum(document)
            writer.add_document(tokens[start : start + size], document)
            start += size


def _add(total: Counts, part: Counts) -> None:
    for name in ("documents", "tokens", "bytes", "empty", "holds_eod"):
        setattr(total, name, getattr(total, name) + getattr(part, name))
    total.bad.update(part.bad)


def summary(counts: Counts, seconds: float) -> str:
    """What happened, for people."""
    lines = [f"{counts.documents} documents, {counts.tokens} tokens from {counts.bytes / 1e6:.1f} MB in {seconds:.1f} s"]
    if counts.empty:
        lines.append(f"{counts.empty} empty records were skipped")
    for reason, n in counts.bad.most_common():
        lines.append(f"{n} bad records were skipped: {reason}")
    if counts.holds_eod:
        lines.append(f"{counts.holds_eod} documents hold the end-of-document token in their own text: a border is seen there under --sample-order megatron")
    return "\n".join(lines)
