"""``megatron-lite data inspect``: totals, lengths and first ids of datasets. (``megatron-lite inspect`` knows checkpoints too.)

Exit status: 0, or 2 where an index is damaged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from megatron_lite.cli.corpus import strict
from megatron_lite.config.exit_codes import CONFIGURATION, DONE


def run(argv: Sequence[str]) -> int:
    """The subcommand."""
    parser = argparse.ArgumentParser("megatron-lite data inspect", description="What is in datasets.")
    text = "of a dataset; a directory stands for the datasets in it"
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help=text)
    parser.add_argument(
        "--documents", type=int, default=3, metavar="N", help="show the ids of the first N (default: 3)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = strict(parser, argv)
    from megatron_lite.cli.data_merge import joined_prefixes
    from megatron_lite.cli.inspect import dataset_text
    from megatron_lite.data.describe import describe

    try:
        found = [describe(prefix, first=args.documents) for prefix in joined_prefixes(args.prefixes)]
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(map(dataset_text, found)))
        if len(found) > 1:
            documents, tokens = (sum(f[name] for f in found) for name in ("documents", "tokens"))
            print(f"together {documents:,} documents, {tokens:,} tokens")
    return CONFIGURATION if any(f["problems"] for f in found) else DONE
