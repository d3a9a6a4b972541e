"""The tables of steps in ``docs/cleaning.md``, and of the bounds of a language in ``docs/cleaning-rules.md``, written from the code.

``python -m megatron_lite.clean.document_steps`` writes them; a test compares.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any, get_origin

from megatron_lite.clean.config import STEPS, step_class
from megatron_lite.clean.step import CorpusStep
from megatron_lite.clean.steps.languages import LANGUAGES, Bounds
from megatron_lite.config.document import default_text, field_help
from megatron_lite.config.flags import field_kinds
from megatron_lite.config.values import describe

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


def bounds_text() -> str:
    """A row for each bound of a language, with its value in three of them."""
    texts, codes = field_help(Bounds), ("en", "zh", "ja")
    lines = [f"| bound | {' | '.join(codes)} | what |", "|---" * (2 + len(codes)) + "|"]
    for f in dataclasses.fields(Bounds):
        values = [getattr(LANGUAGES[code].bounds, f.name) for code in codes]
        cells = [", ".join(f"{n}: {share:g}" for n, share in v) if isinstance(v, tuple) else f"{v:,}" for v in values]
        lines.append("| " + " | ".join([f"`{f.name}`", *cells, texts[f.name].replace("``", "`")]) + " |")
    return "\n".join([*lines, ""])


PAGES = {"docs/cleaning.md": steps_text, "docs/cleaning-rules.md": bounds_text}


def document(page: str, text: str) -> str:
    """The page with the text as it is now."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{text}\n{_END}{after}"


if __name__ == "__main__":
    for name, written in PAGES.items():
        path = Path(name)
        path.write_text(document(path.read_text(encoding="utf-8"), written()), encoding="utf-8")
        sys.stdout.write(f"{name} written\n")
