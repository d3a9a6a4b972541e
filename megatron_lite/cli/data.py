"""``megatron-lite data SUB ...``: everything that is done to a corpus before training.

A subcommand is ``cli/data_SUB.py`` with ``run(argv) -> int``, imported only when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from megatron_lite.config.exit_codes import CONFIGURATION, DONE
from megatron_lite.config.problem import nearest_name

SUBCOMMANDS: dict[str, str] = {
    "preprocess": "tokenize text into an indexed dataset (tools/preprocess_data.py)",
    "inspect": "totals, lengths and first ids of datasets",
    "head": "documents of a dataset as text again",
    "verify": "read datasets to the end and compare checksums",
    "merge": "join datasets into one, such as those of --part 0/n to n-1/n",
    "split": "cut a dataset into parts by documents or tokens",
    "clean": "clean text by the steps of a YAML file: rules, de-duplication, masking",
    "drift": "whether a corpus has moved away from another one, and in what",
    "index": "orders of samples and copies of a run's data, made ahead of its start",
    "chat": "conversations into token files with a loss mask, for fine-tuning",
}


def usage() -> str:
    """The text of ``--help``."""
    width = max(map(len, SUBCOMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {what}" for name, what in SUBCOMMANDS.items())
    return f"usage: megatron-lite data SUB [OPTIONS]\n\nsubcommands (each with --help):\n{listed}\n"


def run(argv: Sequence[str]) -> int:
    """Run a subcommand; returns the exit status."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return DONE if argv else CONFIGURATION
    name = argv[0]
    if name not in SUBCOMMANDS:
        nearest = nearest_name(name, SUBCOMMANDS)
        raise ValueError(
            f"unknown subcommand data {name}: "
            + (f"did you mean {nearest}?" if nearest else f"known are {', '.join(SUBCOMMANDS)}")
        )
    if name == "preprocess":
        from megatron_lite.cli.preprocess import main

        return main(argv[1:])
    return int(importlib.import_module(f"megatron_lite.cli.data_{name}").run(argv[1:]))
