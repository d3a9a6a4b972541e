"""From files of conversations to the two pairs of files of a fine-tuning set: tokens, and which of them the loss counts.

Workers render and tokenize blocks of JSON lines, in a run as :mod:`.run` has it. A bad record ends the run with its file, line,
reason and first 80 characters, or is counted by reason (``--skip-bad``). A good one that trains nothing, or is too long, is
dropped by rule and counted by rule. The mask is published before the tokens: there are never tokens whose mask is still to come.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_lite.config.text_files import LINES, PACKINGS, TAR
from megatron_lite.data.index_format import choose_dtype
from megatron_lite.text.blocks import Block, InputOptions, Lines
from megatron_lite.text.chat import ChatEncoder, Example
from megatron_lite.text.chat_checks import named, no_end, refuse_header, told
from megatron_lite.text.chat_records import SPEAKERS, Conversation, Keys, conversation_of
from megatron_lite.text.chat_sandbox import CLOSE, OPEN, PLAIN
from megatron_lite.text.chat_template import Templates, load_templates
from megatron_lite.text.encode import Column, Counts, Encoded, Failure, Stop, Work, refuse
from megatron_lite.text.inputs import name_of, open_input
from megatron_lite.text.records import BadInput, BadRecord, numbered_lines, parse_object
from megatron_lite.text.run import Job, run_job
from megatron_lite.text.special_places import named_tokens
from megatron_lite.text.tokenizer import Tokenizer
from megatron_lite.text.tokenizer_fast import Encoder, FastDiffers

NO_MESSAGES, NO_ANSWER, EMPTY_ANSWER, NOTHING, TOO_LONG = (
    "without messages",
    "without an assistant's turn",
    "with an empty answer",
    "without a token that the loss counts",
    "longer than a row",
)
_TRIED = 16  # conversations that the fast tokenizer is tried on at the start
_MARKS = re.compile(rb"\xef\xb7[\x90-\x92]|\\u[fF][dD][dD][0-2]")  # of chat_template, perhaps


@dataclass(frozen=True)
class ChatOptions:
    """What a worker needs; sent to the workers.

    Attributes:
        tokenizer: builds the tokenizer.
        directory: where its template is looked for, if it has files; template: ``--chat-template``, before that.
        now: what the template's ``strftime_now`` reads.
        keys: of prompt-and-answer records.
        most_tokens: of a conversation, S + 1; None: any.
        too_long: what becomes of longer ones.
        skip_bad: leave bad records out and count them.
        fast: use the fast form of the tokenizer where it is proved equal.
    """

    tokenizer: Callable[[], Tokenizer]
    directory: Path | None
    template: Path | None
    now: datetime
    keys: Keys = Keys()
    most_tokens: int | None = None
    too_long: Literal["drop", "truncate"] = "drop"
    skip_bad: bool = False
    fast: bool = True

    def templates(self, tokenizer: Tokenizer | None = None) -> Templates:
        """The template of the tokenizer, compiled; without it special tokens may lack their names."""
        return load_templates(self.directory, self.template, self.now, named_tokens(tokenizer) if tokenizer else {})


def encode_block(encoder: ChatEncoder, options: ChatOptions, work: Work) -> Encoded:
    """Render and tokenize a block: a column of the mask, uint8, and one of ids."""
    counts = Counts(bytes=len(work.block.data))  # type: ignore[union-attr]
    try:
        examples = _examples(encoder, options, work.block, counts)  # type: ignore[arg-type]
    except Stop as stop:
        return Encoded(counts, failure=Failure(*stop.args))
    ids = np.concatenate([e.ids for e in examples]) if examples else np.empty(0, np.int64)
    mask = np.concatenate([e.mask for e in examples]) if examples else np.empty(0, np.uint8)
    lengths = np.array([len(e.ids) for e in examples], dtype=np.int64)
    counts.documents, counts.tokens, counts.counted = len(examples), len(ids), int(mask.sum())
    counts.turns, counts.ended = sum(e.turns for e in examples), sum(e.ended for e in examples)
    counts.spells = sum(e.spells for e in examples)
    counts.looked, counts.missing = sum(e.looked for e in examples), sum(e.missing for e in examples)
    counts.coded_twice = sum(e.coded_twice for e in examples)
    counts.unread_inside.update(key for e in examples for key in e.unread)
    ids = ids.astype(choose_dtype(encoder.vocab_size))
    return Encoded(counts, [Column(mask, lengths, None), Column(ids, lengths, None)])


def _examples(encoder: ChatEncoder, options: ChatOptions, lines: Lines, counts: Counts) -> list[Example]:
    """The conversations of a block that are stored. Raises Stop."""
    found: list[tuple[int, bytes, Conversation]] = []
    for number, line in numbered_lines(lines.first, lines.data):
        try:
            conversation = conversation_of(_parse(line), options.keys)
        except BadRecord as why:
            refuse(options.skip_bad, counts, number, line, why)
            continue
        counts.unread.update(conversation.unread)
        if not conversation.messages:
            counts.dropped[NO_MESSAGES] += 1
        elif not conversation.has_answer:
            counts.dropped[NO_ANSWER + _roles(conversation.unknown_roles)] += 1
        elif conversation.has_empty_answer:
            counts.dropped[EMPTY_ANSWER] += 1
        else:
            found.append((number, line, conversation))
    examples: list[Example] = []
    encoded = _encoded(encoder, found, hasty=not options.skip_bad)
    for (number, line, conversation), example in zip(found, encoded, strict=False):
        if isinstance(example, BadRecord):
            refuse(options.skip_bad, counts, number, line, example)
            continue
        unread = conversation.tools is not None and not encoder.templates.of(conversation.tools).reads_tools
        if kept := _by_rule(example, options, counts):
            examples.append(kept)
            counts.tools += unread
    return examples


def _roles(unknown: Sequence[str]) -> str:
    """What is added to a reason where the roles are why."""
    shown = ", ".join(role[:24] for role in unknown[:3]) + (", ..." if len(unknown) > 3 else "")
    small = ", in small letters" if any(role.lower() in SPEAKERS.values() for role in unknown) else ""
    return f" (roles {shown}; known are {', '.join(dict.fromkeys(SPEAKERS.values()))}{small})" if unknown else ""


def _encoded(encoder: ChatEncoder, found: Sequence[tuple[int, bytes, Conversation]], hasty: bool) -> list[Example | BadRecord]:
    """The conversations encoded together, or one by one where the tokenizer refuses a text of them."""
    try:
        return encoder.encode([c for _, _, c in found], hasty)
    except FastDiffers as error:
        raise Stop(found[0][0], f"{error}; run with --no-fast-tokenizer") from None
    except ValueError:
        pass
    results: list[Example | BadRecord] = []
    for _, _, conversation in found:
        try:
            results += encoder.encode([conversation])
        except ValueError as error:
            results.append(BadRecord("the tokenizer cannot encode the text", f" ({error})"))
    return results


def _parse(line: bytes) -> dict[str, Any]:
    record = parse_object(line)
    perhaps = (b"\\u" in line or b"\xef\xb7" in line) and _MARKS.search(line)
    if perhaps and any(mark in json.dumps(record, ensure_ascii=False) for mark in (OPEN, CLOSE, PLAIN)):
        raise BadRecord("U+FDD0, U+FDD1 or U+FDD2, which Unicode keeps from texts")
    return record


def _by_rule(example: Example, options: ChatOptions, counts: Counts) -> Example | None:
    """The example as it is stored, or None; counts what was done to it."""
    most = options.most_tokens
    if most is not None and len(example.ids) > most:
        if options.too_long == "drop":
            counts.dropped[TOO_LONG] += 1
            return None
        example = example.cut(most)
        if example.mask.any():
            counts.truncated += 1
    if not example.mask.any():
        counts.dropped[NOTHING] += 1
        return None
    return example


def prepare_chat(
    inputs: Sequence[Path], prefix: str, options: ChatOptions, *, encoding: str = "utf-8", **running: Any
) -> Counts:
    """Write ``PREFIX`` and ``PREFIX_loss_mask`` (.bin, .idx, .meta.json each).

    Args:
        running: see :func:`megatron_lite.text.run.run_job`, as for what it raises.

    Raises:
        ValueError: a tokenizer or template that cannot be used, or a file that is not JSON lines.
    """
    for path in inputs:
        name = name_of(path)
        if name is None or name.kind not in (*LINES, TAR):
            kinds = f"{', '.join(LINES)} (each also with {', '.join(PACKINGS)}), {TAR}"
            raise ValueError(f"{path}: conversations are read from JSON lines only: {kinds}")
    return run_job(_Chat(prefix, options, InputOptions(encoding=encoding)), inputs, prefix, **running)


class _Chat(Job):
    """The job of rendering and tokenizing conversations."""

    mask = True
    called = "conversations"

    def __init__(self, prefix: str, options: ChatOptions, reading: InputOptions) -> None:
        own = {"prompt_key": options.keys.prompt, "completion_key": options.keys.completion}
        super().__init__({prefix: "messages"}, reading, options, False, most_tokens=options.most_tokens, too_long=options.too_long, **own)
        templates = options.templates(self.tokenizer)
        for template in (templates.plain, templates.with_tools):
            refuse_header(template)
        dated = templates.plain.reads_date or templates.with_tools.reads_date
        self.identity |= {"template": templates.digest, "date": f"{options.now:%Y-%m-%d}" if dated else None}

    def texts(self, block: Block) -> list[str]:
        encoder, texts = ChatEncoder(self.encoder, self.options.templates(self.tokenizer)), []
        for _, line in islice(numbered_lines(1, block.data if isinstance(block, Lines) else b""), _TRIED):
            with contextlib.suppress(BadRecord):
                rendered = encoder.render(conversation_of(_parse(line), self.options.keys))
                if isinstance(rendered, BadRecord):
                    break
                texts.append(rendered.text)
        return texts

    def check(self, counts: Counts) -> None:
        """Raises BadInput where no answer is in the text."""
        if counts.looked and counts.missing == counts.looked:
            raise BadInput(f"no {self.called} were written: {'; '.join(told(counts))}")

    @staticmethod
    def work(options: ChatOptions, encoder: Encoder) -> Callable[[Work], Encoded]:
        return partial(encode_block, ChatEncoder(encoder, options.templates(encoder.tokenizer)), options)


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


def summary(counts: Counts, options: ChatOptions, seconds: float | None = None) -> str:
    """What happened, for people."""
    speed = "" if seconds is None else f" from {counts.size} in {seconds:.1f} s"
    lines = [
        f"{counts.documents:,} conversations, {counts.tokens:,} tokens{speed}",
        f"the loss counts {counts.counted:,} tokens ({100 * counts.counted / max(1, counts.tokens):.1f}%) of {counts.turns:,} turns",
        *counts.skipped(),
    ]
    if counts.truncated:
        lines.append(f"{counts.truncated:,} cut to {options.most_tokens:,} tokens")
    if counts.tools:
        lines.append(f"{counts.tools:,} with tools, which the template does not read")
    if counts.unread:
        lines.append(f"keys of records that are not read: {named(counts.unread)}")
    lines += told(counts)
    if counts.spells:
        lines.append(f"{counts.spells:,} with messages that spell special tokens, which are text there")
    if counts.ended < counts.turns:
        tokenizer = options.tokenizer()
        lines.append(no_end(options.templates(tokenizer).plain, tokenizer, counts.turns - counts.ended))
    if options.templates().plain.reads_date:
        lines.append(f"the template writes the date: {options.now:%Y-%m-%d} in all conversations (--date)")
    return "\n".join(lines)
