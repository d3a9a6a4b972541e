"""``tools/preprocess_data.py``: the flags of Megatron-LM's tool of this name, and what they do here.

Exit status: 0 done, 2 configuration or input, 1 the output could not be written, 130 interrupted (Ctrl-C or SIGTERM).
Except after 0, no output and no temporary file is left.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from megatron_lite.config.exit_codes import CONFIGURATION, DONE, ERROR
from megatron_lite.config.problem import nearest_name
from megatron_lite.text.tokenizer import READ_BY, build_tokenizer

INTERRUPTED = 128 + signal.SIGINT


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        "preprocess_data.py",
        description="Tokenize JSON lines into an indexed dataset for training.",
        allow_abbrev=False,
    )
    data = p.add_argument_group("input and output")
    text = ".jsonl or .json files (one object per line), also .gz, .bz2, .xz; patterns are expanded"
    data.add_argument("--input", nargs="+", required=True, metavar="FILE", help=text)
    text = "keys to tokenize, an output pair each (default: text)"
    data.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help=text)
    text = "outputs are PREFIX_KEY_document.bin, .idx and .meta.json"
    data.add_argument("--output-prefix", required=True, metavar="PREFIX", help=text)
    data.add_argument("--overwrite", action="store_true", help="replace outputs that are there")
    text = "leave bad records out and count them by reason (default: stop at the first)"
    data.add_argument("--skip-bad", action="store_true", help=text)
    tok = p.add_argument_group("tokenizer")
    text = "kind of tokenizer (default: GPT2BPETokenizer)"
    tok.add_argument("--tokenizer-type", choices=tuple(READ_BY), default="GPT2BPETokenizer", help=text)
    text = "tokenizer.json or its directory, SentencePiece .model, tiktoken file"
    tok.add_argument("--tokenizer-model", metavar="FILE", help=text)
    tok.add_argument("--vocab-file", metavar="FILE", help="GPT-2: vocab.json")
    tok.add_argument("--merge-file", metavar="FILE", help="GPT-2: merges.txt")
    tok.add_argument("--tiktoken-pattern", choices=("v1", "v2"), help="tiktoken: how text is cut before merging")
    text = "null tokenizer: number of ids, the last of which ends a document; tiktoken .json: cut the vocabulary"
    tok.add_argument("--vocab-size", type=int, help=text)
    text = "the end-of-document token, where the tokenizer's files do not say it"
    tok.add_argument("--eod-token", metavar="TEXT", help=text)
    tok.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    text = "store each sentence as a sequence of its document; white space between sentences is dropped"
    tok.add_argument("--split-sentences", action="store_true", help=text)
    run = p.add_argument_group("running")
    run.add_argument("--workers", type=int, default=1, help="tokenizing processes (default: 1)")
    text = "documents between progress lines (default: 10000)"
    run.add_argument("--log-interval", type=int, default=10000, help=text)
    text = "no effect here: the input is streamed, no partition files are made"
    run.add_argument("--partitions", type=int, default=1, help=text)
    run.add_argument("--keep-sequential-samples", action="store_true", help="no effect here: order is always kept")
    return p


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The flags; exits with 2 and the nearest known name at one that does not exist."""
    p = parser()
    args, unknown = p.parse_known_args(argv)
    for flag in unknown:
        nearest = nearest_name(flag.split("=")[0], (s for action in p._actions for s in action.option_strings))
        p.error(f"unknown argument {flag}" + (f": did you mean {nearest}?" if nearest else ""))
    if args.workers < 1:
        p.error(f"--workers {args.workers}: give at least 1")
    if not args.output_prefix.strip():
        p.error("--output-prefix is given an empty text: give a path such as data/corpus")
    return args


def without_effect(args: argparse.Namespace, tokenizer: dict[str, Any]) -> list[str]:
    """A line for each flag that was given and does nothing."""
    given = {"--partitions": args.partitions != 1, "--keep-sequential-samples": args.keep_sequential_samples}
    why = "has no effect: the input is streamed and order is always kept"
    lines = [f"{flag} {why}" for flag in given if given[flag]]
    for name, value in tokenizer.items():
        if value is not None and name not in READ_BY[args.tokenizer_type]:
            flag = "--tokenizer-model" if name == "model" else "--" + name.replace("_", "-")
            lines.append(f"{flag} has no effect with --tokenizer-type {args.tokenizer_type}")
    return lines


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit status."""
    args = arguments(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # whatever the locale: a name must not end a run
    terminate = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, terminate)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _run(args: argparse.Namespace) -> int:
    from megatron_lite.text.preprocess import Options, preprocess, summary
    from megatron_lite.text.records import expand_inputs

    tokenizer: dict[str, Any] = {
        "model": args.tokenizer_model,
        "vocab_file": args.vocab_file,
        "merge_file": args.merge_file,
        "tiktoken_pattern": args.tiktoken_pattern,
        "vocab_size": args.vocab_size,
        "eod_token": args.eod_token,
    }
    for line in without_effect(args, tokenizer):
        print(line, file=sys.stderr)
    options = Options(
        tokenizer=partial(build_tokenizer, args.tokenizer_type, **tokenizer),
        keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        split_sentences=args.split_sentences,
        skip_bad=args.skip_bad,
    )
    started = time.monotonic()
    try:
        counts = preprocess(
            expand_inputs(args.input),
            args.output_prefix,
            options,
            workers=args.workers,
            overwrite=args.overwrite,
            log_interval=args.log_interval,
            say=partial(print, flush=True),
        )
    except (ValueError, FileExistsError, FileNotFoundError, PermissionError) as e:
        print(f"error: {e}", file=sys.stderr)
        return CONFIGURATION
    except OSError as e:
        print(f"error: {e}; nothing was written", file=sys.stderr)
        return ERROR
    print(summary(counts, time.monotonic() - started))
    for key in options.keys:
        print(f"written: {args.output_prefix}_{key}_document (.bin, .idx, .meta.json)")
    return DONE
