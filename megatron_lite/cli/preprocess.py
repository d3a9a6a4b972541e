"""``tools/preprocess_data.py``: the flags of Megatron-LM's tool of this name, and what they do here.

Exit status: 0 done, 2 configuration or input, 1 the output could not be written, 130 interrupted (Ctrl-C or SIGTERM).
Except after 0, no output is left, and (but with ``--resume``) no temporary file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial

from megatron_lite.cli.corpus import (
    add_reading_flags,
    add_running_flags,
    at_least_one,
    check_prefix,
    left_by,
    running_options,
    status_of,
    strict,
)
from megatron_lite.cli.tokenizer_flags import add_tokenizer_flags, tokenizer_options, unread_options
from megatron_lite.config.exit_codes import DONE
from megatron_lite.config.text_files import SUPPORTED
from megatron_lite.text.tokenizer import build_tokenizer


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        "megatron-lite data preprocess",
        description="Tokenize text into an indexed dataset for training.",
    )
    data = p.add_argument_group("input and output")
    text = f"files, patterns, directories, or - for JSON lines from standard input; read are {SUPPORTED}"
    data.add_argument("--input", nargs="+", required=True, metavar="FILE", help=text)
    add_reading_flags(data)
    text = "keys to tokenize, an output pair each (default: text)"
    data.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help=text)
    text = "outputs are PREFIX_KEY_document.bin, .idx and .meta.json (PREFIX_KEY_sentence with --split-sentences)"
    data.add_argument("--output-prefix", required=True, metavar="PREFIX", help=text)
    data.add_argument("--overwrite", action="store_true", help="replace outputs that are there")
    text = "leave bad records out and count them by reason (default: stop at the first)"
    data.add_argument("--skip-bad", action="store_true", help=text)
    tok = p.add_argument_group("tokenizer")
    add_tokenizer_flags(tok)
    tok.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    text = "store each sentence as a sequence of its document; white space between sentences is dropped"
    tok.add_argument("--split-sentences", action="store_true", help=text)
    run = p.add_argument_group("running")
    add_running_flags(run)
    text = "no effect here: the input is streamed, no partition files are made"
    run.add_argument("--partitions", type=at_least_one, default=1, help=text)
    run.add_argument("--keep-sequential-samples", action="store_true", help="no effect here: order is always kept")
    return p


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The flags; exits with 2 and the nearest known name at one that does not exist."""
    p = parser()
    args = strict(p, argv)
    check_prefix(p, args.output_prefix, "corpus")
    return args


def without_effect(args: argparse.Namespace) -> list[str]:
    """A line for each flag that was given and does nothing."""
    given = {"--partitions": args.partitions != 1, "--keep-sequential-samples": args.keep_sequential_samples}
    why = "has no effect: the input is streamed and order is always kept"
    lines = [f"{flag} {why}" for flag in given if given[flag]]
    return lines + unread_options(args)


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit status."""
    args = arguments(argv)
    return status_of(partial(_run, args), left_by(args))


def _run(args: argparse.Namespace) -> tuple[int, str]:
    from megatron_lite.text.blocks import InputOptions
    from megatron_lite.text.inputs import check_options, expand_inputs, repeated
    from megatron_lite.text.preprocess import Options, preprocess, summary
    from megatron_lite.text.run import AlreadyComplete

    for line in without_effect(args):
        print(line, file=sys.stderr)
    options = Options(
        tokenizer=partial(build_tokenizer, args.tokenizer_type, **tokenizer_options(args)),
        keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        split_sentences=args.split_sentences,
        skip_bad=args.skip_bad,
        fast=not args.no_fast_tokenizer,
    )
    reading = InputOptions(options.keys, args.encoding, args.document_separator)
    files = expand_inputs(args.input)
    check_options(reading, files)
    if note := repeated(files):
        print(note, file=sys.stderr)
    started = time.monotonic()
    running = running_options(args)
    try:
        counts = preprocess(files, args.output_prefix, options, reading=reading, overwrite=args.overwrite, **running)
    except AlreadyComplete as done:
        return DONE, str(done)
    lines = [summary(counts, time.monotonic() - started)]
    lines += [f"written: {options.output(args.output_prefix, key)} (.bin, .idx, .meta.json)" for key in options.keys]
    return DONE, "\n".join(lines)
