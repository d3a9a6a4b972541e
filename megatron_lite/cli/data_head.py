"""``megatron-lite data head``: documents of a dataset as text again, with what counts as a target in fine-tuning data.

The tokenizer is the one that ``.meta.json`` names, or the one that is given: its files are enough, since ``.meta.json``
has its fingerprint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_lite.cli.corpus import any_name_prints, strict
from megatron_lite.cli.tokenizer_flags import add_tokenizer_flags, tokenizer_options
from megatron_lite.config.exit_codes import DONE
from megatron_lite.text.tokenizer import READ_BY, Tokenizer, build_tokenizer

if TYPE_CHECKING:
    from megatron_lite.data.index_format import DatasetMeta


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser("megatron-lite data head", description="Show documents of a dataset.")
    p.add_argument("prefix", metavar="PREFIX", help="of the dataset")
    p.add_argument("-n", "--documents", type=int, default=5, metavar="N", help="how many (default: 5)")
    p.add_argument("--from", dest="first", type=int, default=0, metavar="I", help="the first of them (default: 0)")
    text = "show so many tokens of each (default: 200); 0: all"
    p.add_argument("--tokens", type=int, default=200, metavar="N", help=text)
    text = "a JSON object on each line: document, tokens, ids, text, and loss (0 or 1 for each id) where there is a mask"
    p.add_argument("--json", action="store_true", help=text)
    add_tokenizer_flags(p.add_argument_group("tokenizer (default: the one that made the dataset)"))
    return p


def run(argv: Sequence[str]) -> int:
    """The subcommand."""
    args = strict(parser(), argv)
    any_name_prints()
    from megatron_lite.data.describe import CLOSE, OPEN, marked
    from megatron_lite.data.index_format import prefix_of
    from megatron_lite.data.indexed import IndexedDataset, open_mask

    try:
        dataset = IndexedDataset(prefix_of(args.prefix))
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    with contextlib.closing(dataset):
        if not 0 <= args.first < max(1, dataset.num_documents) or args.documents < 0 or args.tokens < 0:
            raise ValueError(
                f"--from {args.first} -n {args.documents}: there are {dataset.num_documents} documents, from 0"
            )
        tokenizer, mask = _tokenizer(args, dataset.meta), open_mask(dataset)
        if mask is not None and not args.json:
            print(f"{OPEN}...{CLOSE}: tokens that count as targets")
        for number in range(args.first, min(dataset.num_documents, args.first + args.documents)):
            start, stop = (dataset.start_of(int(dataset.documents[d])) for d in (number, number + 1))
            end = min(stop, start + args.tokens) if args.tokens else stop
            ids = dataset.read(start, end).tolist()
            loss = None if mask is None else mask.read(start, end).tolist()
            if args.json:
                text = None if tokenizer is None else tokenizer.decode(ids)
                found = {"document": number, "tokens": stop - start, "ids": ids, "text": text}
                print(json.dumps(found | ({} if loss is None else {"loss": loss}), ensure_ascii=False))
                continue
            print(f"--- document {number}: {stop - start:,} tokens" + ("" if mask is None else f", {sum(loss or []):,} with loss"))
            print(marked(None if tokenizer is None else tokenizer.decode, ids, loss or [0] * len(ids)))
            if end < stop:
                print(f"... {stop - end:,} more tokens")
    return DONE


def _tokenizer(args: argparse.Namespace, meta: DatasetMeta | None) -> Tokenizer | None:
    """By the flags that are given, else by those of the dataset; None: ids are shown. Says what is worth a note."""
    made_by, flags = (meta.tokenizer, meta.tokenizer_flags) if meta else (None, None)
    given = {name: value for name, value in tokenizer_options(args).items() if value is not None}
    if args.tokenizer_type or given:
        kinds = [args.tokenizer_type] if args.tokenizer_type else [k for k in READ_BY if given.keys() <= {*READ_BY[k]}]
        found: list[Tokenizer] = []
        errors = ["no kind of tokenizer is named by these flags together"]
        for kind in kinds:
            try:
                found.append(build_tokenizer(kind, **given))
            except ValueError as error:
                errors.append(str(error))
        if not found:
            raise ValueError(errors[-1] if len(kinds) == 1 else f"{'; '.join(dict.fromkeys(errors[1:] or errors))}; give --tokenizer-type")
        tokenizer = next((t for t in found if t.fingerprint == made_by), found[0])
        if made_by not in (None, tokenizer.fingerprint):
            print(f"note: {args.prefix} was made with another tokenizer than this one", file=sys.stderr)
        return tokenizer
    why = "it is not said which tokenizer made the dataset"
    if flags is not None:
        try:
            named = parser().parse_args(["", *shlex.split(flags)])
            tokenizer = build_tokenizer(named.tokenizer_type, **tokenizer_options(named))
            if tokenizer.fingerprint == made_by:
                return tokenizer
            why = f"{flags} is not the tokenizer any more that made the dataset"
        except ValueError as error:
            why = str(error)
    print(f"note: ids are shown, since {why}; give --tokenizer-model", file=sys.stderr)
    return None
