"""The dirty inputs of ``tests/data/dirty`` (made by its ``make.py``) and what a reader must make of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.text.blocks import Block, InputOptions, Texts
from megatron_lite.text.records import BadRecord, numbered_lines, parse_line

FOLDER = Path(__file__).resolve().parent / "data" / "dirty"


@dataclass(frozen=True)
class Dirty:
    """A file and what is in it.

    Attributes:
        path: of the file.
        good: texts of good records in order, blank ones too. Where ``error`` is set: at most these come before it.
        bad: (number of the line or document, reason).
        error: part of the message that refuses the file, or None.
        options: fields of InputOptions that are not the default.
    """

    path: Path
    good: list[str]
    bad: list[tuple[int, str]]
    error: str | None
    options: dict[str, Any]


def _load() -> list[Dirty]:
    table = json.loads((FOLDER / "expected.json").read_text())
    return [
        Dirty(FOLDER / name, t["good"], [(n, why) for n, why in t["bad"]], t["error"], t["options"])
        for name, t in table.items()
    ]


ALL = _load()
EACH_DIRTY_FILE = pytest.mark.parametrize("dirty", ALL, ids=[d.path.name for d in ALL])


def documents(block: Block, keys: tuple[str, ...] = ("text",)) -> Iterator[tuple[int, list[str] | BadRecord]]:
    """The number of each document of a block, and its texts or why it is bad; the plainest way to read one."""
    if isinstance(block, Texts):
        refused = {r.index: r.why for r in block.refused}
        for index in range(len(block)):
            yield block.first + index, refused.get(index) or [column[index] for column in block.columns]
        return
    for number, line in numbered_lines(block.first, block.data):
        try:
            yield number, parse_line(line, keys)
        except BadRecord as why:
            yield number, why


def options_of(dirty: Dirty, **more: Any) -> InputOptions:
    return InputOptions(**{**dirty.options, **more})
