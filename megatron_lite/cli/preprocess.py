"""``tools/preprocess_data.py``: the flags of Megatron-LM's tool of this name, and what they do here."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

TOKENIZERS = (
    "GPT2BPETokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer",
    "TikTokenizer", "NullTokenizer",
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser("preprocess_data.py", description="Tokenize JSON lines into an indexed dataset for training.")
    data = p.add_argument_group("input and output")
    data.add_argument("--input", nargs="+", required=True, metavar="FILE", help=".jsonl or .json files (one object per line), also .gz, .bz2, .xz; globs are expanded")
    data.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to tokenize, an output pair each (default: text)")
    data.add_argument("--output-prefix", required=True, metavar="PREFIX", help="outputs are PREFIX_KEY_document.bin, .idx and .meta.json")
    data.add_argument("--overwrite", action="store_true", help="replace outputs that are there")
    data.add_argument("--skip-bad", action="store_true", help="leave bad records out and count them by reason (default: stop at the first)")
    tok = p.add_argument_group("tokenizer")
    tok.add_argument("--tokenizer-type", choices=TOKENIZERS, default="GPT2BPETokenizer", help="kind of tokenizer (default: GPT2BPETokenizer)")
    tok.add_argument("--tokenizer-model", metavar="FILE", help="tokenizer.json or its directory, SentencePiece .model, tiktoken file")
    tok.add_argument("--vocab-file", metavar="FILE", help="GPT-2: vocab.json")
    tok.add_argument("--merge-file", metavar="FILE", help="GPT-2: merges.txt")
    tok.add_argument("--tiktoken-pattern", choices=("v1", "v2"), help="tiktoken: how text is cut before merging")
    tok.add_argument("--vocab-size", type=int, help="null tokenizer: number of ids; tiktoken .json: cut the vocabulary to this")
    tok.add_argument("--eod-token", metavar="TEXT", help="the end-of-document token, where the tokenizer's files do not say it")
    tok.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    tok.add_argument("--split-sentences", action="store_true", help="store each sentence as a sequence of its document")
    run = p.add_argument_group("running")
    run.add_argument("--workers", type=int, default=1, help="tokenizing processes (default: 1)")
    run.add_argument("--log-interval", type=int, default=10000, help="documents between progress lines (default: 10000)")
    run.add_argument("--partitions", type=int, default=1, help="no effect here: the input is streamed, no partition files are made")
    run.add_argument("--keep-sequential-samples", action="store_true", help="no effect here: order is always kept")
    return p


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit code (0 done, 2 configuration or input)."""
    args = parser().parse_args(argv)
    from megatron_lite.data.preprocess import Options, expand_inputs, preprocess, summary

    if args.workers < 1:
        print(f"--workers {args.workers}: give at least 1", file=sys.stderr)
        return 2
    for flag, given in (("--partitions", args.partitions != 1), ("--keep-sequential-samples", args.keep_sequential_samples)):
        if given:
            print(f"{flag} has no effect: the input is streamed and order is always kept", file=sys.stderr)
    options = Options(
        tokenizer={
            "kind": args.tokenizer_type,
            "model": args.tokenizer_model,
            "vocab_file": args.vocab_file,
            "merge_file": args.merge_file,
            "tiktoken_pattern": args.tiktoken_pattern,
            "vocab_size": args.vocab_size,
            "eod_token": args.eod_token,
        },
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
            say=lambda text: print(text, flush=True),
        )
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(summary(counts, time.monotonic() - started))
    return 0
