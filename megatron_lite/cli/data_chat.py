"""``megatron-lite data chat``: conversations to token files with a loss mask, for fine-tuning.

Exit status: as of ``data preprocess``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from megatron_lite.cli.corpus import add_running_flags, check_prefix, left_by, running_options, status_of, strict
from megatron_lite.cli.tokenizer_flags import add_tokenizer_flags, tokenizer_options, unread_options
from megatron_lite.config.exit_codes import DONE
from megatron_lite.text.chat_records import COMPLETION_KEYS, PROMPT_KEYS
from megatron_lite.text.chat_template import template_directory


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        "megatron-lite data chat",
        description="Conversations (JSON lines) to token files with a loss mask, for fine-tuning.",
    )
    data = p.add_argument_group("input and output")
    text = "files, patterns or directories of JSON lines: messages, conversations, or a prompt and its answer"
    data.add_argument("--input", nargs="+", required=True, metavar="FILE", help=text)
    text = "outputs are PREFIX and PREFIX_loss_mask (.bin, .idx, .meta.json)"
    data.add_argument("--output-prefix", required=True, metavar="PREFIX", help=text)
    data.add_argument("--overwrite", action="store_true", help="replace outputs that are there")
    data.add_argument("--encoding", default="utf-8", help="of the input (default: utf-8)")
    data.add_argument("--skip-bad", action="store_true", help="leave bad records out and count them by reason")
    data.add_argument("--prompt-key", metavar="KEY", help=f"key of the prompt (default: {', '.join(PROMPT_KEYS)})")
    text = f"key of the answer (default: {', '.join(COMPLETION_KEYS)})"
    data.add_argument("--completion-key", metavar="KEY", help=text)
    tok = p.add_argument_group("tokenizer and template")
    add_tokenizer_flags(tok)
    text = "Jinja template (default: the tokenizer's chat_template.jinja, or chat_template in tokenizer_config.json)"
    tok.add_argument("--chat-template", metavar="FILE", type=Path, help=text)
    text = "YYYY-MM-DD, for templates that write the date (default: today)"
    tok.add_argument("--date", metavar="DATE", type=_date, help=text)
    rows = p.add_argument_group("length")
    text = "the --seq-length of training: a conversation of more than S + 1 tokens is too long (default: none is)"
    rows.add_argument("--seq-length", type=int, metavar="S", help=text)
    text = "what becomes of one that is too long (default: drop)"
    rows.add_argument("--too-long", choices=("drop", "truncate"), default="drop", help=text)
    run = p.add_argument_group("running")
    add_running_flags(run)
    return p


def _date(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give YYYY-MM-DD") from None


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    p = parser()
    args = strict(p, argv)
    if args.seq_length is not None and args.seq_length < 1:
        p.error(f"--seq-length {args.seq_length}: give at least 1")
    check_prefix(p, args.output_prefix, "chat")
    return args


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    args = _arguments(argv)
    return status_of(partial(_run, args), left_by(args))


def _run(args: argparse.Namespace) -> tuple[int, str]:
    from megatron_lite.text.chat_files import ChatOptions, prepare_chat, summary
    from megatron_lite.text.chat_records import Keys
    from megatron_lite.text.inputs import expand_inputs, repeated
    from megatron_lite.text.run import AlreadyComplete
    from megatron_lite.text.tokenizer import build_tokenizer

    for line in unread_options(args):
        print(line, file=sys.stderr)
    options = ChatOptions(
        tokenizer=partial(build_tokenizer, args.tokenizer_type, **tokenizer_options(args)),
        directory=template_directory(args.tokenizer_model or args.vocab_file),
        template=args.chat_template,
        now=args.date or datetime.now(),
        keys=Keys(args.prompt_key, args.completion_key),
        most_tokens=None if args.seq_length is None else args.seq_length + 1,
        too_long=args.too_long,
        skip_bad=args.skip_bad,
        fast=not args.no_fast_tokenizer,
    )
    started = time.monotonic()
    files = expand_inputs(args.input)
    if note := repeated(files):
        print(note, file=sys.stderr)
    running = running_options(args)
    try:
        counts = prepare_chat(
            files, args.output_prefix, options, encoding=args.encoding, overwrite=args.overwrite, **running
        )
    except AlreadyComplete as done:
        return DONE, str(done)
    written = f"written: {args.output_prefix} and {args.output_prefix}_loss_mask (.bin, .idx, .meta.json)"
    return DONE, summary(counts, options, time.monotonic() - started) + "\n" + written
