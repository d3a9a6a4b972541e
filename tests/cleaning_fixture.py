"""The labelled documents of tests/data/cleaning, and precision and recall of a step on them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
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


def measured(what: str, documents: Iterable[Labels], wanted: Callable[[Labels], bool], got: Callable[[Labels], bool]) -> tuple[float, float]:
    """(precision, recall) of a yes or no about each document, printed as a row of a table."""
    pairs = [(wanted(d), got(d)) for d in documents]
    true = sum(a and b for a, b in pairs)
    precision = true / max(1, sum(b for _, b in pairs))
    recall = true / max(1, sum(a for a, _ in pairs))
    print(f"{what:<32} {len(pairs):>4} documents, {sum(a for a, _ in pairs):>4} wanted: precision {precision:.3f}, recall {recall:.3f}")
    return precision, recall
