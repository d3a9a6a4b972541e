"""A command line cut into flags and values, every flag looked up in the four lists.

This runs before tyro: it rewrites aliases into flags of ours, takes out what is accepted without effect, and refuses
what is not in this version, out of scope or unknown, all of it at once. What it leaves are flags of the schema, which
tyro converts. As in Megatron-LM, the last of repeated flags wins (the start says so), and ``_`` and ``-`` in names
are the same.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_lite.config import flags
from megatron_lite.config.flags import MANY, FieldFlag
from megatron_lite.config.problem import Problem, nearest_name
from megatron_lite.config.values import describe


@dataclass
class CommandLine:
    """What a command line says.

    Attributes:
        given: field flag -> its values as text (``["on"]`` or ``["off"]`` for a boolean), last one wins.
        accepted: flag -> why it has no effect.
        config_files: values of ``--config``, in order.
        help: ``--help`` was asked for.
        problems: everything wrong with it.
    """

    given: dict[str, list[str]] = field(default_factory=dict)
    accepted: dict[str, str] = field(default_factory=dict)
    config_files: list[str] = field(default_factory=list)
    help: bool = False
    problems: list[Problem] = field(default_factory=list)

    def tokens(self, fields: dict[str, FieldFlag]) -> list[str]:
        """The given flags as tyro reads them."""
        tokens: list[str] = []
        for flag, values in self.given.items():
            if fields[flag].is_bool:
                tokens.append(flag if values == ["on"] else fields[flag].negative)
            else:
                tokens += [flag, *values]
        return tokens


def cut(argv: Sequence[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """``argv`` as (flag, values) pairs, and the tokens before the first flag.

    ``--flag=value`` is ``--flag value``; in names ``_`` becomes ``-``.
    """
    pairs: list[tuple[str, list[str]]] = []
    stray: list[str] = []
    for token in argv:
        if token.startswith("--") or token == "-h":
            name, equals, value = token.partition("=")
            pairs.append(("--help" if token == "-h" else name.replace("_", "-"), [value] if equals else []))
        elif pairs:
            pairs[-1][1].append(token)
        else:
            stray.append(token)
    return pairs, stray


def peek(argv: Sequence[str], flag: str) -> list[str]:
    """All values given to one flag, before anything else is understood."""
    return [value for name, values in cut(argv)[0] if name == flag for value in values]


def read(argv: Sequence[str], model_config: type) -> CommandLine:
    """Look every flag up; ``model_config`` is the dataclass of the model that ``--model`` names."""
    fields = flags.field_flags(model_config)
    negatives = {f.negative: f for f in fields.values() if f.negative}
    line = CommandLine()
    pairs, stray = cut(argv)
    if stray:
        line.problems.append(Problem(f"{' '.join(stray)}: no flag takes this", rule="values follow a flag"))
    for flag, values in pairs:
        if flag == "--help":
            line.help = True
        elif flag == "--config":
            _count(line, flag, values, 1)
            line.config_files += values
        elif flag in flags.ABSENT and values != [] and all(v in flags.ABSENT[flag].harmless for v in values):
            if flag in fields:
                line.given[flag] = values
        elif flag in flags.ABSENT:
            what = flags.ABSENT[flag].what
            line.problems.append(Problem(f"{' '.join([flag, *values])} is not in this version: {what}"))
        elif flag in fields:
            _field(line, fields[flag], values)
        elif flag in negatives:
            if _count(line, flag, values, 0):
                _set(line, negatives[flag], ["off"])
        elif flag in flags.ALIASES:
            _alias(line, flag, values, fields)
        elif flag in flags.ACCEPTED:
            _accepted(line, flag, values)
        else:
            line.problems.append(_unknown(flag, model_config))
    return line


def _count(line: CommandLine, flag: str, values: list[str], expected: int) -> bool:
    """Whether the number of values is right; notes a problem if not."""
    if expected == MANY or len(values) == expected:
        return True
    takes = {0: "takes no value", 1: "takes one value"}.get(expected, f"takes {expected} values")
    line.problems.append(Problem(f"{' '.join([flag, *values])}: {flag} {takes}, {len(values)} given"))
    return False


def _field(line: CommandLine, field_flag: FieldFlag, values: list[str]) -> None:
    flag = field_flag.flag
    if field_flag.name in flags.ON_OFF and len(values) == 1:
        if values[0] in ("on", "off"):
            _set(line, field_flag, values)
        else:
            line.problems.append(Problem(f"{flag} {values[0]}: expected on or off"))
    elif _count(line, flag, values, field_flag.values):
        if any("_" in value and not re.sub(r"[\d_.eE+-]", "", value) for value in values) and not _takes_text(field_flag):
            what = f"{' '.join([flag, *values])}: expected {describe(field_flag.kind)}"
            line.problems.append(Problem(what, rule="numbers are written without _"))
        else:
            _set(line, field_flag, ["on"] if field_flag.is_bool else values)


def _takes_text(field_flag: FieldFlag) -> bool:
    """Whether a value may be a text (Python would read ``1_0`` as the number 10)."""
    kinds = {k for option in flags.options_of(field_flag.kind) for k in (option, *typing.get_args(option))}
    return str in kinds


def _set(line: CommandLine, field_flag: FieldFlag, values: list[str]) -> None:
    """Note a flag's values; what it said before has no effect."""
    flag = field_flag.flag
    before = line.given.pop(flag, None)
    if before is not None and before != values:
        earlier, later = (
            (flag if v == ["on"] else field_flag.negative) if field_flag.is_bool else " ".join([flag, *v])
            for v in (before, values)
        )
        line.accepted[earlier] = f"given again as {later}: the last one counts"
    line.given[flag] = values


def _alias(line: CommandLine, flag: str, values: list[str], fields: dict[str, FieldFlag]) -> None:
    alias = flags.ALIASES[flag]
    if not _count(line, flag, values, alias.values):
        return
    ours, _ = cut([token.format(*values) for token in alias.becomes])
    negatives = {f.negative: f for f in fields.values() if f.negative}
    for name, its in ours:
        if name in negatives:
            _set(line, negatives[name], ["off"])
        elif name in fields:
            _field(line, fields[name], its)
        else:
            line.problems.append(Problem(f"{flag} means {name}, which this model does not have"))


def _accepted(line: CommandLine, flag: str, values: list[str]) -> None:
    entry = flags.ACCEPTED[flag]
    if not _count(line, flag, values, entry.values):
        return
    if entry.only and values[0] not in entry.only:
        rule = f"{entry.reason}: only {' or '.join(entry.only)} is accepted"
        line.problems.append(Problem(f"{flag} {values[0]} is not supported", rule=rule))
        return
    line.accepted[flag] = entry.reason


def _unknown(flag: str, model_config: type) -> Problem:
    asked = flags.refused_as(flag)
    if asked:
        return Problem(f"{flag} is not supported: {asked}")
    nearest = flags.OTHER_NAMES.get(flag) or flags.ELSEWHERE.get(flag)
    nearest = nearest or nearest_name(flag, flags.known_flags(model_config))
    return Problem(f"unknown flag {flag}", nearest=nearest or "see --help for all flags")
