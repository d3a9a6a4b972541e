"""The flags that name a tokenizer, for commands without a run's configuration."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_lite.text.tokenizer import READ_BY, flag_of, kind_of


def add_tokenizer_flags(group: argparse._ArgumentGroup) -> None:
    """``--tokenizer-type`` and what names its files."""
    text = "kind of tokenizer (default: the one that the files are, by their names)"
    group.add_argument("--tokenizer-type", choices=tuple(READ_BY), help=text)
    text = "tokenizer.json or its directory, SentencePiece .model, tiktoken file"
    group.add_argument("--tokenizer-model", metavar="FILE", help=text)
    group.add_argument("--vocab-file", metavar="FILE", help="GPT-2: vocab.json")
    group.add_argument("--merge-file", metavar="FILE", help="GPT-2: merges.txt")
    group.add_argument("--tiktoken-pattern", choices=("v1", "v2"), help="tiktoken: how text is cut before merging")
    text = "null tokenizer: number of ids, the last of which ends a document; tiktoken .json: cut the vocabulary"
    group.add_argument("--vocab-size", type=int, help=text)
    text = "the end-of-document token, where the tokenizer's files do not say it"
    group.add_argument("--eod-token", metavar="TEXT", help=text)


def tokenizer_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of :func:`megatron_lite.text.tokenizer.build_tokenizer`, given or None."""
    return {
        "model": args.tokenizer_model,
        "vocab_file": args.vocab_file,
        "merge_file": args.merge_file,
        "tiktoken_pattern": args.tiktoken_pattern,
        "vocab_size": args.vocab_size,
        "eod_token": args.eod_token,
    }


def unread_options(args: argparse.Namespace) -> list[str]:
    """A line for each of them that was given and that the kind of tokenizer does not read. Raises ValueError: no kind can be told."""
    options = tokenizer_options(args)
    kind = args.tokenizer_type or kind_of(options)
    unread = [name for name, value in options.items() if value is not None and name not in READ_BY[kind]]
    return [f"{flag_of(name)} has no effect with --tokenizer-type {kind}" for name in unread]
