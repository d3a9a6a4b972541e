"""The labelled documents of tests/data/cleaning, and precision and recall of a step on them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent / "data/cleaning"
BENCHMARK = HERE / "benchmark.jsonl"
Labels = dict[str, Any]


def labelled() -> list[Labels]:
    """All documents with their labels; what the labels mean stands in make.py."""
    return [json.loads(line) for line in (HERE / "documents.jsonl").read_text(encoding="utf-8").splitlines()]


def maker() -> ModuleType:
    """The module that makes the files."""
    sys.path.insert(0, str(HERE))
    try:
        import make
    finally:
        sys.path.remove(str(HERE))
    return make


def measured(what: str, documents: Sequence[Labels], wanted: AbstractSet[str], got: AbstractSet[str]) -> tuple[float, float]:
    """(precision, recall) of the documents (their ids) that were got, printed as a row of a table."""
    inside = {d["id"] for d in documents}
    wanted, got = wanted & inside, got & inside
    precision, recall = len(wanted & got) / max(1, len(got)), len(wanted & got) / max(1, len(wanted))
    print(f"{what:<24} {len(inside):>4} documents, {len(wanted):>4} wanted: precision {precision:.3f}, recall {recall:.3f}")
    return precision, recall
