"""Which names are those of files of text, in ``--data-path`` and in preprocessing."""

from __future__ import annotations

import os

LINES: tuple[str, ...] = (".jsonl", ".json", ".ndjson")
PLAIN = ".txt"
PACKINGS: tuple[str, ...] = (".gz", ".zst", ".bz2", ".xz")
PARQUET, DAT, TAR = ".parquet", ".dat.zst", ".jsonl.zst.tar"
SUPPORTED = f"{', '.join(LINES)}, {PLAIN} (each also with {', '.join(PACKINGS)}), {PARQUET}, {DAT}, {TAR}"


def kind_of(path: str) -> tuple[str, str] | None:
    """(kind: of LINES, PLAIN, PARQUET, DAT, TAR; packing: of PACKINGS or "") by a file's name; None: it is not read."""
    name = os.path.basename(path).lower()
    for kind in (TAR, DAT, PARQUET):
        if name.endswith(kind):
            return kind, ""
    packing = next((p for p in PACKINGS if name.endswith(p)), "")
    found = next((k for k in (*LINES, PLAIN) if name.removesuffix(packing).endswith(k)), None)
    return None if found is None else (found, packing)


def is_text_file(path: str) -> bool:
    """Whether an entry of ``--data-path`` is a file of text, and not a dataset's prefix."""
    return "://" not in path and kind_of(path) is not None
