"""What is wrong with a configuration, in a form that people can act on.

A :class:`Problem` has four parts: what, the numbers, the rule, and the nearest valid values. Checks return lists of
them, so that one start tells everything; :class:`ConfigError` carries the list to the command line, which prints it
without a traceback and exits with code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        what: the finding in one sentence, with the flag's name.
        numbers: the actual numbers that collide, e.g. ``"world size 3, tp 2"``.
        rule: the rule they break.
        nearest: the nearest valid values, or what to do.
    """

    what: str
    numbers: str = ""
    rule: str = ""
    nearest: str = ""

    def __str__(self) -> str:
        lines = [self.what]
        for label, text in (("numbers", self.numbers), ("rule", self.rule), ("try", self.nearest)):
            if text:
                lines.append(f"      {label + ':':<9}{text}")
        return "\n".join(lines)


class ConfigError(ValueError):
    """A configuration that cannot be run; ``problems`` lists everything that is wrong with it."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        super().__init__(format_problems(self.problems))


def format_problems(problems: Sequence[Problem]) -> str:
    """The list as the text that the user sees."""
    if not problems:
        return "no problems"
    head = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n".join([f"{head} in the configuration:", *(f"  {i}. {p}" for i, p in enumerate(problems, 1))])


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``, or None if none is like it (dashes in front do not count)."""
    by_text = {k.lstrip("-"): k for k in known}
    found = difflib.get_close_matches(name.lstrip("-"), by_text, n=1, cutoff=0.6)
    return by_text[found[0]] if found else None


def nearest_divisors(value: int, of: int) -> list[int]:
    """The divisors of ``of`` next to ``value``: the largest not above it and the smallest above it."""
    divisors = [d for d in range(1, of + 1) if of % d == 0]
    below = [d for d in divisors if d <= value]
    above = [d for d in divisors if d > value]
    return below[-1:] + above[:1]


def nearest_multiples(value: int, unit: int) -> list[int]:
    """The positive multiples of ``unit`` next to ``value``: not above it, and above it."""
    below = value // unit * unit
    return ([below] if below > 0 else []) + [below + unit]


def either(values: Sequence[object]) -> str:
    """``a or b``."""
    return " or ".join(str(v) for v in values)
