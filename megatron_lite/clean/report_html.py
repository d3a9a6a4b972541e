"""The report of a cleaning run as one HTML file, without anything from outside; it holds every number of the JSON, with all digits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_SOURCES = 100  # rows of a table of sources that are seen at once

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .5rem 0 1.5rem }
th, td { padding: .15rem .7rem; text-align: left; border-bottom: 1px solid #ddd }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.bar { display: inline-block; height: .8rem; background: #4a7fb5; vertical-align: middle }
.warning { background: #fff3cd; padding: .5rem 1rem }
pre { white-space: pre-wrap; background: #f6f6f6; padding: .5rem; margin: .2rem 0 }
details { margin: .3rem 0 1rem }
"""

Cell = str | int | float | None


def as_html(report: dict[str, Any]) -> bytes:
    """The page of a report (:func:`~megatron_lite.clean.report.report_data`)."""
    body = ["<h1>Cleaning report</h1>"]
    body += [f'<p class="warning">{escape(warning)}</p>' for warning in report["warnings"]]
    records = report["records"]
    rows: list[tuple[Cell, ...]] = [(name, records[name]) for name in ("read", "documents", "empty")]
    rows += [(f"bad: {reason}", n) for reason, n in records["bad"].items()]
    body.append(_table(("records", "number"), rows))
    if records["bad_samples"]:
        body.append(_folded("the first bad records", _samples(records["bad_samples"])))
    body.append("<h2>Steps</h2>")
    rows = [_flow_row(step["step"], step["total"]) for step in report["steps"]]
    body.append(_table(_FLOW_HEAD, [*rows, _flow_row("all steps", report["total"])]))
    body += ["<h2>Sources</h2>", _sources(report["sources"])]
    body += ["<h2>Lengths of documents, characters</h2>", "<h3>read</h3>", _bars(report["lengths_in"])]
    body += ["<h3>kept</h3>", _bars(report["lengths_out"])]
    for step in report["steps"]:
        body += _step(step)
    body += ["<h2>What was run</h2>", _folded("inputs", _pre(report["inputs"])), _folded("pipeline", _pre(report["pipeline"]))]
    body.append(f"<p>{escape(report['format'])}, version {report['version']}</p>")
    head = f'<meta charset="utf-8"><title>Cleaning report</title><style>{_STYLE}</style>'
    return f"<!DOCTYPE html>\n<html><head>{head}</head><body>\n{chr(10).join(body)}\n</body></html>\n".encode(
        "utf-8", "replace"
    )


_FLOW_HEAD = (
    "", "documents in", "documents out", "documents kept", "characters in", "characters out", "characters kept",
)  # fmt: skip


def _flow_row(name: str, flow: Mapping[str, Any]) -> tuple[Cell, ...]:
    cells: list[Cell] = [name]
    for what in ("documents", "characters"):
        cells += [flow[f"{what}_in"], flow[f"{what}_out"], _share(flow[f"{what}_kept"])]
    return tuple(cells)


def _step(step: Mapping[str, Any]) -> list[str]:
    """The section of one step."""
    parts = [f"<h2>Step {escape(step['step'])}</h2>"]
    parts += [f'<p class="warning">{escape(warning)}</p>' for warning in step["warnings"]]
    if step["reasons"]:
        parts.append(_table(("dropped because", "documents"), list(step["reasons"].items())))
        for what in ("source", "language"):
            rows = [(name, why, n) for name, reasons in step[f"reasons_by_{what}"].items() for why, n in reasons.items()]
            parts.append(_folded(f"why, by {what}", _table((what, "dropped because", "documents"), rows)))
    if step["done"]:
        parts.append(_table(("what else it did", "times"), list(step["done"].items())))
    if step["facts"]:
        parts.append(_table(("fact", "value"), list(step["facts"].items())))
    for title, bins in step["histograms"].items():
        parts += [f"<h3>{escape(title)}</h3>", _bars(bins)]
    if step["lengths_dropped"]:
        parts += ["<h3>Lengths of what was dropped, characters</h3>", _bars(step["lengths_dropped"])]
    parts.append(_folded("lengths of what came, characters", _bars(step["lengths_in"])))
    parts.append(_folded("by source", _sources(step["sources"])))
    return [*parts, _folded("samples of what was dropped", _samples(step["samples"]))] if step["samples"] else parts


def _samples(samples: Sequence[Mapping[str, str]]) -> str:
    lines = []
    for sample in samples:
        place = f"{sample['place']} ({sample['source']})" if "source" in sample else sample["place"]
        why = f"<b>{escape(sample['reason'])}</b> {escape(sample['detail'])}"
        lines.append(f"<p>{escape(place)}: {why}</p><pre>{escape(sample['text'])}</pre>")
    return "\n".join(lines)


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>\n{content}\n</details>"


def _pre(values: Any) -> str:
    return f"<pre>{escape(json.dumps(values, indent=1, ensure_ascii=False))}</pre>"


def _sources(sources: Mapping[str, Mapping[str, Any]]) -> str:
    """The largest sources first, the smaller ones folded away."""
    largest = sorted(sources, key=lambda name: (-sources[name]["documents_in"], name))
    rows = [_flow_row(name, sources[name]) for name in largest]
    table = _table(_FLOW_HEAD, rows[:_SOURCES])
    rest = rows[_SOURCES:]
    return table + _folded(f"{len(rest):,} smaller sources", _table(_FLOW_HEAD, rest)) if rest else table


def _table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    lines = [
        "<table>",
        "<tr>" + "".join(f"<th{'' if i == 0 else _N}>{escape(h)}</th>" for i, h in enumerate(head)) + "</tr>",
    ]
    for row in rows:
        cells = (f"<td{'' if i == 0 else _N}>{escape(_text(cell))}</td>" for i, cell in enumerate(row))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</table>"])


_N = ' class="n"'


def _text(cell: Cell) -> str:
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)


def _share(share: float | None) -> str:
    """With the six digits that a share has in the JSON."""
    return "-" if share is None else f"{share:.4%}"


def _bars(bins: Mapping[str, int]) -> str:
    """A histogram."""
    most = max(bins.values(), default=0) or 1
    rows = [
        f'<tr><td class="n">{escape(label)}</td><td class="n">{n:,}</td>'
        f'<td><span class="bar" style="width: {20 * n / most:.2f}rem"></span></td></tr>'
        for label, n in bins.items()
    ]
    return "\n".join(["<table>", *rows, "</table>"])
