"""The report as JSON and as Markdown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

MARKS = {"passed": "passed", "failed": "**failed**", "skipped": "skipped"}


def file_stem(report: dict[str, Any]) -> str:
    """For instance ``nvidia-h200-2026-03-01``."""
    device = re.sub(r"[^a-z0-9]+", "-", report["device"].lower()).strip("-")
    return f"{device}-{report['date'][:10]}"


def markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    facts = {
        "Device": report["device"],
        "Date": report["date"],
        "torch": f"{report['torch']} (CUDA {report['cuda']})",
        "Driver": report["driver"],
        "Python": report["python"],
        "Sources": report["sources"],
        "Time": f"{report['seconds']:.0f} s",
        "Command": f"`{report['command']}`",
    }
    lines = [f"# GPU check: {report['device']}, {report['date'][:10]}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items() if value]
    lines += ["", "| part | result | seconds | what it shows |", "|---|---|---:|---|"]
    for part in report["parts"]:
        lines.append(f"| {part['name']} | {MARKS[part['status']]} | {part['seconds']:.0f} | {part['title']} |")
    for part in report["parts"]:
        lines += ["", f"## {part['name']}: {part['status']}", ""]
        lines += [f"- {line}" for line in part["lines"]]
        if part.get("reason"):
            lines += [f"- {part['status']}: {part['reason']}"]
        if part.get("traceback"):
            lines += ["", "```", part["traceback"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


def write(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write both forms; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = file_stem(report)
    paths = [folder / f"{stem}.json", folder / f"{stem}.md"]
    paths[0].write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(report), encoding="utf-8")
    return paths
