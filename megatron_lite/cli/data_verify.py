"""``megatron-lite data verify``: read datasets to the end and compare them with what ``.meta.json`` says.

Exit status: 0, or 2 where one is damaged or not there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_lite.cli.corpus import strict
from megatron_lite.config.exit_codes import CONFIGURATION, DONE


def run(argv: Sequence[str]) -> int:
    """The subcommand."""
    parser = argparse.ArgumentParser("megatron-lite data verify", description="Read datasets to the end; find damage.")
    text = "of a dataset; a directory stands for the datasets in it"
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help=text)
    args = strict(parser, argv)
    from megatron_lite.cli.data_merge import joined_prefixes
    from megatron_lite.data.describe import verify
    from megatron_lite.data.index_format import prefix_paths

    broken = False
    for prefix in joined_prefixes(args.prefixes):
        state = "DAMAGED"
        try:
            problems, notices = verify(prefix)
        except (OSError, ValueError) as error:
            problems, notices = [str(error)], []
            if isinstance(error, FileNotFoundError) and not any(path.exists() for path in prefix_paths(prefix)[:2]):
                state = "NOT THERE"
        broken = broken or bool(problems)
        print(f"{prefix}: {state if problems else 'good'}", flush=True)
        for line in [*problems, *notices]:
            print(f"  {line}", flush=True)
    return CONFIGURATION if broken else DONE
