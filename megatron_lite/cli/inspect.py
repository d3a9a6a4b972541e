"""``megatron-lite inspect PATH``: what is in a checkpoint or a dataset.

PATH is a directory of checkpoints (``--save`` of a run), the directory of one step, or the prefix of a dataset.
Exit status: 0, or 1 where the checkpoint is not complete or ``--verify`` has found damage.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lite.config.exit_codes import DONE
from megatron_lite.data.index_format import prefix_of

DAMAGED = 1


def run(argv: Sequence[str]) -> int:
    """The subcommand."""
    parser = argparse.ArgumentParser("megatron-lite inspect", description="What is in a checkpoint or a dataset.")
    parser.add_argument("path", metavar="PATH", help="directory of checkpoints, of one step, or prefix of a dataset")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--verify", action="store_true", help="read everything and compare checksums")
    args = parser.parse_args(argv)
    if not args.path.strip():
        parser.error("PATH is an empty text: give a directory of checkpoints, of one step, or the prefix of a dataset")
    path = Path(args.path)
    found, lines, good = _dataset(path, args.verify) if _is_dataset(path) else _checkpoint(path, args.verify)
    print(json.dumps(found, indent=1) if args.json else lines)
    return DONE if good else DAMAGED


def _is_dataset(path: Path) -> bool:
    return not path.is_dir() and any(Path(prefix_of(path) + suffix).exists() for suffix in (".bin", ".idx"))


def _checkpoint(path: Path, verify: bool) -> tuple[dict[str, Any], str, bool]:
    from megatron_lite.checkpoint import describe as room
    from megatron_lite.checkpoint.manifest import list_steps

    if not path.is_dir():
        raise ValueError(
            f"{path}: neither a directory of checkpoints nor the prefix of a dataset ({path}.bin, {path}.idx)"
        )
    if room.is_step_directory(path):
        found = room.describe(path, checksums=verify)
        return found, room.text(found), found["complete"] and not found["problems"]
    if not list_steps(path):
        raise ValueError(f"{path} holds no checkpoint")
    found = room.describe_root(path, checksums=verify)
    newest = found["newest"]
    return found, room.text_root(found), newest is not None and not newest["problems"]


def _dataset(path: Path, verify: bool) -> tuple[dict[str, Any], str, bool]:
    from megatron_lite.data.describe import describe

    try:
        found = describe(prefix_of(path), checksums=verify)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    return found, dataset_text(found), not found["problems"]


def dataset_text(found: dict[str, Any]) -> str:
    """A dataset's description for people."""
    lines = [
        f"dataset {found['prefix']}",
        f"  {found['documents']:,} documents, {found['sequences']:,} sequences, {found['tokens']:,} tokens "
        f"of {found['dtype']} ({found['bytes']:,} bytes)",
        f"  tokens of a document: {found['shortest']:,} to {found['longest']:,}, mean {found['mean']:,.1f}; "
        f"{found['empty_documents']:,} empty",
    ]
    lines += [f"    {tokens:>15} tokens: {count:,}" for tokens, count in found["lengths"].items()]
    if found["meta"] is None:
        lines.append("  no .meta.json: end-of-document id, tokenizer and vocabulary size are not known")
    else:
        shown = ("eod_id", "vocab_size", "largest_id", "tokenizer")
        lines.append("  " + ", ".join(f"{name} {found['meta'][name]}" for name in shown))
    if found["loss_mask"] is not None:
        counted = found["loss_tokens"]
        share = "" if counted is None else f" ({counted:,}, {counted / max(1, found['tokens']):.1%})"
        lines.append(f"  which tokens the loss counts: {found['loss_mask']}{share}")
    for number, document in enumerate(found["first_documents"]):
        more = " ..." if document["tokens"] > len(document["ids"]) else ""
        lines.append(f"  document {number}: {' '.join(map(str, document['ids']))}{more}")
    return "\n".join(lines + [f"  DAMAGED: {problem}" for problem in found["problems"]])
