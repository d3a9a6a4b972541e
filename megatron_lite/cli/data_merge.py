"""``megatron-lite data merge``: several datasets as one, document after document.

Joining the outputs of all parts of ``data preprocess --part i/n``, in order, gives what one run would have written, byte for
byte. Loss masks are joined too.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from glob import escape, glob, has_magic
from pathlib import Path

from megatron_lite.cli.corpus import status_of, strict
from megatron_lite.config.exit_codes import DONE


def run(argv: Sequence[str]) -> int:
    """The subcommand."""
    parser = argparse.ArgumentParser(
        "megatron-lite data merge", description="Join datasets into one, in the order given."
    )
    text = "a dataset, or a directory or a pattern of datasets: in the order of their names, part2 before part10"
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help=text)
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="of the dataset to write")
    parser.add_argument("--overwrite", action="store_true", help="replace outputs that are there")
    args = strict(parser, argv)
    from megatron_lite.data.index_format import mask_prefix, prefix_paths
    from megatron_lite.data.parts import merge

    def join() -> str:
        found = joined_prefixes(args.prefixes)
        out = args.output_prefix
        if Path(out).resolve() in (Path(p).resolve() for p in found):
            raise ValueError(f"--output-prefix {out} is one of the datasets to join")
        with_mask = [p for p in found if prefix_paths(mask_prefix(p))[1].exists()]
        if with_mask and len(with_mask) < len(found):
            without = next(p for p in found if p not in with_mask)
            raise ValueError(f"{with_mask[0]} has a loss mask and {without} has none: they cannot be one dataset")
        meta = merge(found, out, overwrite=args.overwrite, masks=bool(with_mask))
        joined = [*found[:20], *(["..."] if len(found) > 20 else [])]
        return f"{out}: {meta.documents:,} documents, {meta.tokens:,} tokens of {len(found)} datasets: {', '.join(joined)}"

    return status_of(lambda: (DONE, join()))


def joined_prefixes(names: Sequence[str]) -> list[str]:
    """Prefixes in order; a directory or a pattern stands for the datasets that it names. Raises ValueError for one without any."""
    from megatron_lite.data.index_format import MASK_SUFFIX, prefix_of, prefix_paths

    found: list[str] = []
    for name in names:
        prefix, is_directory = prefix_of(name), Path(name).is_dir()
        if not is_directory and (not has_magic(name) or prefix_paths(prefix)[1].exists()):
            found.append(prefix)
            continue
        pattern = os.path.join(escape(name), "*") if is_directory else prefix
        files = [path for suffix in (".bin", ".idx") for path in glob(pattern + suffix, recursive=True)]
        inside = {prefix_of(path) for path in files}
        inside -= {p for p in inside if p.endswith(MASK_SUFFIX) and p.removesuffix(MASK_SUFFIX) in inside}
        if not inside:
            what = "a directory without a dataset" if is_directory else "no dataset matches"
            raise ValueError(f"{name}: {what} (.idx)")
        found += sorted(inside, key=_by_numbers)
    return found


def _by_numbers(name: str) -> tuple[list[str | int], str]:
    """So that part2 comes before part10; names that are equal but for zeros in front, by themselves."""
    words = re.split(r"(\d+)", name)
    return [int(word) if i % 2 else word for i, word in enumerate(words)], name
