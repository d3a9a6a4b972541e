"""The table of steps in ``docs/cleaning.md``, written from the steps themselves.

``python -m megatron_lite.clean.document_steps`` writes it; a test compares.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any, get_origin

from megatron_lite.clean.config import STEPS, step_class
from megatron_lite.clean.step import CorpusStep
from megatron_lite.config.document import default_text, field_help
from megatron_lite.config.flags import field_kinds
from megatron_lite.config.values import describe

PATH = "docs/cleaning.md"
_BEGIN = "<!-- Written by `python -m megatron_lite.clean.document_steps`; a test keeps it current. -->\n"
_END = "<!-- end of what is written -->\n"


def _default(f: dataclasses.Field[Any]) -> str:
    if f.default is dataclasses.MISSING:
        return "required" if f.default_factory is dataclasses.MISSING else "-"
    return default_text(f.default) if f.default != "" else "-"


def steps_text() -> str:
    """A section for each step: what it is, what kind, its options."""
    lines: list[str] = []
    for name in STEPS:
        kind = step_class(name)
        about = (inspect.getdoc(sys.modules[kind.__module__]) or "").split("\n\n")[0].replace("``", "`")
        where = "Compares documents with each other" if issubclass(kind, CorpusStep) else "One document at a time"
        lines += [f"### `{name}`", "", f"{' '.join(about.split())} *{where}.*", ""]
        texts, kinds = field_help(kind.Options), field_kinds(kind.Options)
        lines += ["| option | value | default | what |", "|---|---|---|---|"]
        for f in dataclasses.fields(kind.Options):
            value = "a table" if kinds[f.name] is dict or get_origin(kinds[f.name]) is dict else describe(kinds[f.name])
            cells = (f"`{f.name}`", value, _default(f), texts[f.name].replace("``", "`"))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def document(page: str) -> str:
    """The page with the steps as they are."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{steps_text()}\n{_END}{after}"


if __name__ == "__main__":
    path = Path(PATH)
    path.write_text(document(path.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PATH} written\n")
