"""``megatron-lite data split``: a dataset cut into several, at borders of documents; ``data merge`` joins them again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_lite.cli.corpus import status_of, strict
from megatron_lite.config.exit_codes import DONE


def run(argv: Sequence[str]) -> int:
    """The subcommand."""
    parser = argparse.ArgumentParser("megatron-lite data split", description="Cut a dataset into parts, in order.")
    parser.add_argument("prefix", metavar="PREFIX", help="of the dataset")
    text = "outputs are PREFIX_0-of-n, PREFIX_1-of-n, ... (.bin, .idx, .meta.json)"
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help=text)
    into = parser.add_mutually_exclusive_group(required=True)
    into.add_argument("--parts", type=int, metavar="N", help="so many equal parts")
    into.add_argument("--fractions", metavar="A,B,...", help="parts in these proportions, such as 98,1,1")
    text = "what the parts are measured in; none is cut inside a document (default: tokens)"
    parser.add_argument("--by", choices=("documents", "tokens"), default="tokens", help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace outputs that are there")
    args = strict(parser, argv)
    from megatron_lite.data.index_format import prefix_of
    from megatron_lite.data.parts import divide

    def cut() -> str:
        shares = [1.0] * args.parts if args.parts is not None else _numbers(args.fractions)
        if not shares:
            raise ValueError(f"--parts {args.parts}: at least 1")
        digits = len(str(len(shares) - 1))
        outs = [f"{args.output_prefix}_{i:0{digits}}-of-{len(shares)}" for i in range(len(shares))]
        ranges = divide(prefix_of(args.prefix), outs, shares, args.by, overwrite=args.overwrite)
        return "\n".join(
            f"{out}: documents {part.start:,} to {part.stop - 1:,}" for out, part in zip(outs, ranges, strict=True)
        )

    return status_of(lambda: (DONE, cut()))


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--fractions {text}: give numbers, such as 98,1,1") from None
