"""``megatron-lite data head``: documents of a dataset as text again, by the tokenizer that made it."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence

from megatron_lite.cli.corpus import any_name_prints
from megatron_lite.cli.tokenizer_flags import add_tokenizer_flags, tokenizer_options
from megatron_lite.config.exit_codes import DONE


def run(argv: Sequence[str]) -> int:
    """The subcommand."""
    parser = argparse.ArgumentParser("megatron-lite data head", description="Show documents of a dataset.")
    parser.add_argument("prefix", metavar="PREFIX", help="of the dataset")
    parser.add_argument("-n", "--documents", type=int, default=5, metavar="N", help="how many (default: 5)")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="I", help="the first of them (default: 0)")
    text = "show so many tokens of each (default: 200); 0: all"
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help=text)
    parser.add_argument("--json", action="store_true", help="a JSON object on each line: document, tokens, ids, text")
    add_tokenizer_flags(parser.add_argument_group("tokenizer (without one, ids are shown)"), None)
    args = parser.parse_args(argv)
    any_name_prints()
    from megatron_lite.data.index_format import prefix_of
    from megatron_lite.data.indexed import IndexedDataset
    from megatron_lite.text.tokenizer import build_tokenizer

    tokenizer = None
    if args.tokenizer_type is not None:
        tokenizer = build_tokenizer(args.tokenizer_type, **tokenizer_options(args))
    elif any(value is not None for value in tokenizer_options(args).values()):
        raise ValueError("the tokenizer's files are given, and not --tokenizer-type")
    try:
        dataset = IndexedDataset(prefix_of(args.prefix))
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    with contextlib.closing(dataset):
        if not 0 <= args.first < max(1, dataset.num_documents) or args.documents < 0 or args.tokens < 0:
            raise ValueError(
                f"--from {args.first} -n {args.documents}: there are {dataset.num_documents} documents, from 0"
            )
        made_by = dataset.meta.tokenizer if dataset.meta else None
        if tokenizer is not None and made_by not in (None, tokenizer.fingerprint):
            print(f"note: {dataset.prefix} was made with another tokenizer than this one", file=sys.stderr)
        for number in range(args.first, min(dataset.num_documents, args.first + args.documents)):
            start, stop = (dataset.start_of(int(dataset.documents[d])) for d in (number, number + 1))
            ids = dataset.read(start, min(stop, start + args.tokens) if args.tokens else stop).tolist()
            decoded = None if tokenizer is None else tokenizer.decode(ids)
            if args.json:
                print(
                    json.dumps(
                        {"document": number, "tokens": stop - start, "ids": ids, "text": decoded}, ensure_ascii=False
                    )
                )
                continue
            print(f"--- document {number}: {stop - start:,} tokens")
            print(decoded if decoded is not None else " ".join(map(str, ids)))
            if len(ids) < stop - start:
                print(f"... {stop - start - len(ids):,} more tokens")
    return DONE
