"""What is left of a text when lines are taken out of it: tidy where they stood, and elsewhere as it was."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def without(lines: Sequence[str], taken: Collection[int]) -> str:
    """The text of the lines that are not taken out.

    Lines that are taken out, and the blank ones beside and between them, leave one blank line if any of them was blank; at the
    beginning and the end of the text they leave nothing.

    Args:
        taken: numbers of lines, from 0, ascending and quickly looked up.
    """
    kept: list[str] = []
    done = 0
    for first in taken:
        if first < done:
            continue
        last, blank = first + 1, False
        while first > done and not lines[first - 1].strip():
            first, blank = first - 1, True
        while last < len(lines) and (last in taken or not lines[last].strip()):
            last, blank = last + 1, blank or last not in taken
        kept += lines[done:first]
        if blank and first and last < len(lines):
            kept.append("")
        done = last
    return "\n".join(kept + list(lines[done:]))
