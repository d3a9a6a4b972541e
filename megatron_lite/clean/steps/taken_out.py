"""What is left of a text when lines are taken out of it: tidy where they stood, and elsewhere as it was."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby


def without(lines: Iterable[tuple[str, bool]]) -> str:
    """The text of the lines that are not taken out.

    Lines that are taken out, and the blank ones beside and between them, leave one blank line if any of them was blank; at the
    beginning and the end of the text they leave nothing.

    Args:
        lines: each with whether it is taken out.
    """
    runs = [(gap, list(run)) for gap, run in groupby(lines, lambda line: line[1] or not line[0].strip())]
    kept: list[str] = []
    for place, (gap, run) in enumerate(runs):
        stays = [line for line, taken in run if not taken]
        if not gap or len(stays) == len(run):
            kept += stays
        elif stays and 0 < place < len(runs) - 1:
            kept.append("")
    return "\n".join(kept)
