"""Which names are those of files of text, in ``--data-path`` and in preprocessing."""

from __future__ import annotations

import os
from difflib import SequenceMatcher
from pathlib import Path
from typing import NamedTuple

LINES: tuple[str, ...] = (".jsonl", ".json", ".ndjson")
PLAIN = ".txt"
STANDARD_INPUT = "-"
PACKINGS: tuple[str, ...] = (".gz", ".zst", ".bz2", ".xz")
PARQUET, DAT, TAR = ".parquet", ".dat.zst", ".jsonl.zst.tar"
SUPPORTED = f"{', '.join(LINES)}, {PLAIN} (each also with {', '.join(PACKINGS)}), {PARQUET}, {DAT}, {TAR}"


class Name(NamedTuple):
    """What a file's name says: its kind (of LINES, PLAIN, PARQUET, DAT, TAR) and packing (of PACKINGS, or "")."""

    kind: str
    packing: str = ""


def name_of(path: str | Path) -> Name | None:
    """What a file is by its name; None: it is not read. Standard input is JSON lines."""
    if str(path) == STANDARD_INPUT:
        return Name(LINES[0])
    name = os.path.basename(path).lower()
    for found in (Name(TAR), Name(DAT, ".zst"), Name(PARQUET)):
        if name.endswith(found.kind):
            return found
    packing = next((p for p in PACKINGS if name.endswith(p)), "")
    kind = next((k for k in (*LINES, PLAIN) if name.removesuffix(packing).endswith(k)), None)
    return None if kind is None else Name(kind, packing)


def is_text_file(path: str) -> bool:
    """Whether an entry of ``--data-path`` is text, and not a dataset's prefix: a file, a pattern, or a directory without a dataset."""
    if path == STANDARD_INPUT or "://" in path:
        return False
    if name_of(path) is not None or not os.path.isdir(path) or os.path.exists(path.rstrip("/") + ".idx"):
        return name_of(path) is not None
    inside: list[str] = []
    for _, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside += names
    return any(map(name_of, inside)) and not any(name.endswith(".idx") for name in inside)


def near_prefixes(prefix: str) -> list[str]:
    """The datasets in the directory of a prefix that has none: longer names first, then those most like it; at most five."""
    folder = Path(prefix).parent
    there = [str(path).removesuffix(".idx") for path in folder.glob("*.idx")] if folder.is_dir() else []

    def place(name: str) -> tuple[bool, float, str]:
        return not name.startswith(prefix), -SequenceMatcher(None, os.path.basename(prefix), os.path.basename(name)).ratio(), name

    there = [name for name in there if name != prefix and not name.endswith("_loss_mask")]
    return sorted(there, key=place)[:5]
