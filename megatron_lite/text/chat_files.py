"""From files of conversations to the two pairs of files of a fine-tuning set: tokens, and which of them the loss counts.

Files are streamed: the parent reads blocks of JSON lines and writes, workers render and tokenize; blocks come back in order, so
the output is the same bytes for any number of workers. A bad record ends the run with its file, line, reason and first
80 characters, or is counted by reason (``--skip-bad``). A good one that trains nothing, or is too long, is dropped by rule
and counted by rule. The mask is published before the tokens: there are never tokens whose mask is still to come.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_lite.data.index_format import mask_prefix
from megatron_lite.data.index_writer import IndexedWriter
from megatron_lite.data.locked_file import interrupts_held
from megatron_lite.text.chat import ChatEncoder, Conversation, Example, Keys, conversation_of
from megatron_lite.text.chat_template import CLOSE, OPEN, Rendered, Templates, load_templates
from megatron_lite.text.inputs import InputOptions, Lines, called, open_input
from megatron_lite.text.pool import OrderedPool, WorkerDied, WorkerFailed
from megatron_lite.text.records import BadInput, BadRecord, excerpt, numbered_lines, parse_object
from megatron_lite.text.tokenizer import HuggingFaceTokenizer
from megatron_lite.text.tokenizer_fast import NotFast, encoder_of

EMPTY, NO_ANSWER, NOTHING, TOO_LONG = (
    "without messages",
    "without an assistant's turn",
    "without a token that the loss counts",
    "longer than a row",
)
_TRIED = 16  # conversations that the fast tokenizer is tried on at the start
_MARKS = re.compile(rb"\xef\xb7[\x90\x91]|\\u[fF][dD][dD][01]")  # OPEN or CLOSE, perhaps


@dataclass(frozen=True)
class ChatOptions:
    """What a worker needs; sent to the workers.

    Attributes:
        tokenizer: builds the tokenizer.
        directory: where its template is looked for; template: ``--chat-template``, before that.
        now: what the template's ``strftime_now`` reads.
        keys: of prompt-and-answer records.
        most_tokens: of a conversation, S + 1; None: any.
        too_long: what becomes of longer ones.
        skip_bad: leave bad records out and count them.
        fast: use the fast form of the tokenizer, which has been proved equal.
    """

    tokenizer: Callable[[], HuggingFaceTokenizer]
    directory: Path
    template: Path | None
    now: datetime
    keys: Keys = Keys()
    most_tokens: int | None = None
    too_long: Literal["drop", "truncate"] = "drop"
    skip_bad: bool = False
    fast: bool = True

    def templates(self) -> Templates:
        """The template of the tokenizer, compiled."""
        return load_templates(self.directory, self.template, self.now)


@dataclass
class ChatCounts:
    """What became of the records.

    Attributes:
        conversations, tokens, bytes: stored conversations and tokens; bytes read.
        counted: tokens that the loss counts.
        turns, ended: of the assistant; those that end with a special token.
        truncated: conversations cut to a row.
        tools: conversations with tools that the template does not read.
        dropped, bad: by rule, by reason.
    """

    conversations: int = 0
    tokens: int = 0
    bytes: int = 0
    counted: int = 0
    turns: int = 0
    ended: int = 0
    truncated: int = 0
    tools: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)

    def add(self, other: ChatCounts) -> None:
        """Add another's numbers."""
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)


@dataclass
class ChatBlock:
    """What a worker makes of a block: ids int32 and mask uint8 of all conversations, and their lengths; or an error."""

    counts: ChatCounts
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    mask: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    error: str | None = None


def encode_block(encoder: ChatEncoder, options: ChatOptions, lines: Lines) -> ChatBlock:
    """Render and tokenize a block. A record that ends the run gives a block with ``error`` alone."""
    block = ChatBlock(ChatCounts(bytes=len(lines.data)))
    counts = block.counts

    def refuse(number: int, line: bytes, why: BadRecord) -> None:
        if not options.skip_bad:
            raise BadInput(f"{lines.file}:{number}: {why}: {excerpt(line)}")
        counts.bad[why.reason] += 1

    examples: list[Example] = []
    found: list[tuple[int, bytes, Conversation]] = []
    try:
        for number, line in numbered_lines(lines.first, lines.data):
            try:
                conversation = conversation_of(_parse(line), options.keys)
            except BadRecord as why:
                refuse(number, line, why)
                continue
            if not conversation.has_answer:
                counts.dropped[NO_ANSWER if conversation.messages else EMPTY] += 1
            else:
                found.append((number, line, conversation))
        try:
            encoded = encoder.encode([c for _, _, c in found])
        except ValueError as error:
            raise BadInput(f"{lines.file}:{lines.first}: {error}") from None
        for (number, line, conversation), example in zip(found, encoded, strict=True):
            if isinstance(example, BadRecord):
                refuse(number, line, example)
                continue
            unread = conversation.tools is not None and not encoder.templates.of(conversation.tools).reads_tools
            if kept := _by_rule(example, options, counts):
                examples.append(kept)
                counts.tools += unread
    except BadInput as error:
        return ChatBlock(counts, error=str(error))
    if examples:
        block.ids = np.concatenate([e.ids for e in examples]).astype(np.int32)
        block.mask = np.concatenate([e.mask for e in examples])
    block.lengths = np.array([len(e.ids) for e in examples], dtype=np.int64)
    counts.conversations, counts.tokens, counts.counted = len(examples), len(block.ids), int(block.mask.sum())
    counts.turns, counts.ended = sum(e.turns for e in examples), sum(e.ended for e in examples)
    return block


def _parse(line: bytes) -> dict[str, Any]:
    record = parse_object(line)
    if _MARKS.search(line) and any(mark in json.dumps(record, ensure_ascii=False) for mark in (OPEN, CLOSE)):
        raise BadRecord("U+FDD0 or U+FDD1, which Unicode keeps from texts")
    return record


def _by_rule(example: Example, options: ChatOptions, counts: ChatCounts) -> Example | None:
    """The example as it is stored, or None; counts what was done to it."""
    most = options.most_tokens
    if most is not None and len(example.ids) > most:
        if options.too_long == "drop":
            counts.dropped[TOO_LONG] += 1
            return None
        example = replace(example, ids=example.ids[:most], mask=example.mask[:most])
        if example.mask.any():
            counts.truncated += 1
    if not example.mask.any():
        counts.dropped[NOTHING] += 1
        return None
    return example


def worker_function(options: ChatOptions) -> Callable[[Lines], ChatBlock]:
    """What a worker process does with a block; builds tokenizer and template."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # of the tokenizers package: processes are the parallelism
    tokenizer = options.tokenizer()
    encoder = encoder_of(tokenizer, prove=False) if options.fast else None
    return partial(encode_block, ChatEncoder(tokenizer, options.templates(), encoder), options)


def prepare_chat(
    inputs: Sequence[Path],
    prefix: str,
    options: ChatOptions,
    *,
    workers: int = 1,
    encoding: str = "utf-8",
    overwrite: bool = False,
    log_interval: int = 0,
    say: Callable[[str], None] = print,
) -> ChatCounts:
    """Write ``PREFIX`` and ``PREFIX_loss_mask`` (.bin, .idx, .meta.json each).

    Raises:
        BadInput: a bad record, a worker that died, or nothing to write; no output is left.
        FileExistsError: the output is there and ``overwrite`` is off.
        ValueError: a tokenizer or template that cannot be used.
        OSError: the output cannot be written; none is left.
    """
    tokenizer = options.tokenizer()  # before any work
    options.templates()
    total, started, said = ChatCounts(), time.monotonic(), 0
    with ExitStack() as stack:
        with interrupts_held():
            # A mask without tokens is what a killed run left.
            mask = IndexedWriter(mask_prefix(prefix), dtype=np.uint8, overwrite=True)
            stack.callback(mask.abort)  # does nothing once it has been finished
            size, made_by = tokenizer.vocab_size, tokenizer.fingerprint
            tokens = IndexedWriter(prefix, vocab_size=size, tokenizer=made_by, overwrite=overwrite, mask=mask)
            stack.callback(tokens.abort)
        work = _lines(inputs, encoding)
        first = list(islice(work, 1))
        options = replace(options, fast=_proved(tokenizer, options, first, say))
        for block in _encoded(chain(first, work), options, workers, stack):
            if block.error is not None:
                raise BadInput(block.error)
            tokens.add_documents(block.ids, block.lengths)
            mask.add_documents(block.mask, block.lengths)
            total.add(block.counts)
            if log_interval and total.conversations - said >= log_interval:
                said = total.conversations
                speed = total.bytes / 1e6 / (time.monotonic() - started)
                say(f"{said:,} conversations, {total.tokens:,} tokens, {speed:.2f} MB/s")
        if not total.conversations:
            raise BadInput(f"no conversations were written: {called(inputs)} of {total.bytes:,} bytes\n{skipped(total)}".rstrip())
        with interrupts_held():
            tokens.finish()
    return total


def _proved(
    tokenizer: HuggingFaceTokenizer, options: ChatOptions, first: list[Lines], say: Callable[[str], None]
) -> bool:
    """Whether the tokenizer's fast form gives its ids: of texts made to be hard, and of the first conversations."""
    if not options.fast:
        return False
    encoder, texts = ChatEncoder(tokenizer, options.templates()), []
    for lines in first:
        for _, line in islice(numbered_lines(lines.first, lines.data), _TRIED):
            with contextlib.suppress(BadRecord):
                rendered = encoder.render(conversation_of(_parse(line), options.keys))
                texts += [rendered.text] if isinstance(rendered, Rendered) else []
    try:
        return encoder_of(tokenizer, texts).is_fast
    except NotFast as why:
        say(f"note: tokenizing by the reference library, which is slower: {why}")
        return False


def _encoded(work: Iterator[Lines], options: ChatOptions, workers: int, stack: ExitStack) -> Iterator[ChatBlock]:
    """Every block in order."""
    if workers == 1:
        yield from map(worker_function(options), work)
        return
    pool = stack.enter_context(OrderedPool(workers, partial(worker_function, options)))
    try:
        yield from pool.map(work)
    except WorkerFailed as error:
        raise BadInput(f"{error}; nothing was written") from None
    except WorkerDied as error:
        what = f" in lines {error.item.first} and on of {error.item.file}" if isinstance(error.item, Lines) else ""
        raise BadInput(f"{error.worker}{what}; nothing was written") from None


def _lines(inputs: Sequence[Path], encoding: str) -> Iterator[Lines]:
    for path in inputs:
        for block in open_input(path, InputOptions(encoding=encoding)):
            if not isinstance(block, Lines):
                raise BadInput(f"{path}: conversations are read from JSON lines only")
            yield block


def skipped(counts: ChatCounts) -> str:
    """A line for each reason for which records are not in the output."""
    lines = [f"{n:,} dropped: {why}" for why, n in counts.dropped.most_common()]
    return "\n".join(lines + [f"{n:,} bad: {why}" for why, n in counts.bad.most_common()])


def holds_conversations(path: Path) -> bool:
    """Whether the first record of a file is a conversation and not a text."""
    with contextlib.suppress(BadRecord, BadInput, ValueError):  # what is wrong with it, whoever reads it whole will say
        for block in open_input(path, InputOptions()):
            if not isinstance(block, Lines):
                return False
            for _, line in numbered_lines(block.first, block.data):
                record = parse_object(line)
                if "text" not in record:
                    conversation_of(record, Keys())
                    return True
                return False
    return False


def summary(counts: ChatCounts, options: ChatOptions, seconds: float | None = None) -> str:
    """What happened, for people."""
    speed = "" if seconds is None else f" in {seconds:.1f} s ({counts.bytes / 1e6 / seconds:.1f} MB/s)"
    lines = [
        f"{counts.conversations:,} conversations, {counts.tokens:,} tokens{speed}",
        f"the loss counts {counts.counted:,} tokens ({100 * counts.counted / counts.tokens:.1f}%) of {counts.turns:,} turns",
        *skipped(counts).splitlines(),
    ]
    if counts.truncated:
        lines.append(f"{counts.truncated:,} cut to {options.most_tokens:,} tokens")
    if counts.tools:
        lines.append(f"{counts.tools:,} with tools, which the template does not read")
    if counts.ended < counts.turns:
        lines.append(
            f"{counts.turns - counts.ended:,} turns do not end with a special token: if the template writes an end token "
            "behind a turn, it belongs into its {% generation %} block, or the model does not learn to stop"
        )
    if options.templates().plain.reads_date:
        lines.append(f"the template writes the date: {options.now:%Y-%m-%d} in all conversations (--date)")
    return "\n".join(lines)
