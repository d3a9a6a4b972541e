"""Values of configuration fields: from plain data (YAML, JSON) and back, with types checked.

Flags are converted by tyro; files and saved configurations come as plain data and pass through :func:`convert`. Nothing
is guessed: a number where text belongs is an error. Two kindnesses: ``6e-5``, which YAML 1.1 reads as text, is a
number where a number belongs, and a single value stands for a list of one.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import re
import types
import typing
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

_UNITS: Mapping[str, int] = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\Z")


def whole_amount(text: str) -> int:
    """``"250B"`` as a number; K, M, B, T are powers of 1,000. Raises ValueError unless it is whole and not negative."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text, flags=re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not an amount such as 0, 2048 or 1.5B (K, M, B, T are powers of 1000)")
    amount = Fraction(match[1]) * _UNITS[match[2].upper()]
    if amount.denominator != 1:
        raise ValueError(f"{text!r} is not whole")
    return int(amount)


def describe(kind: Any) -> str:
    """A type in words: ``a whole number``, ``one of full, selective``."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(a) for a in args if a is not type(None))
    if origin is typing.Literal:
        return "one of " + ", ".join(str(a) for a in args)
    if origin is tuple:
        if args[-1:] == (Ellipsis,):
            return f"a list, each {describe(args[0])}"
        return f"{len(args)} values, each {describe(args[0])}"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def convert(value: Any, kind: Any) -> Any:
    """``value`` (plain data) as a value of type ``kind``.

    Raises:
        ValueError: it is none; the text is only ``expected ...``, the caller knows the place.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        for option in sorted(args, key=lambda a: a is str):  # text last: it would swallow numbers
            try:
                return convert(value, option)
            except ValueError:
                continue
        raise ValueError(f"expected {describe(kind)}")
    if origin is typing.Literal:
        if any(type(value) is type(a) and value == a for a in args):
            return value
        raise ValueError(f"expected {describe(kind)}")
    if origin is tuple:
        return _convert_tuple(value, args, kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _convert_dataclass(value, kind)
    return _convert_scalar(value, kind)


def _convert_tuple(value: Any, args: tuple[Any, ...], kind: Any) -> tuple[Any, ...]:
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    kinds = [args[0]] * len(items) if args[-1:] == (Ellipsis,) else list(args)
    if value is None or len(kinds) != len(items):
        raise ValueError(f"expected {describe(kind)}")
    if kinds[:1] == [str]:  # weights of a blend may be written as numbers
        items = [str(i) if isinstance(i, (int, float)) and not isinstance(i, bool) else i for i in items]
    try:
        return tuple(convert(i, k) for i, k in zip(items, kinds, strict=True))
    except ValueError:
        raise ValueError(f"expected {describe(kind)}") from None


def _convert_dataclass(value: dict[str, Any], kind: Any) -> Any:
    hints = typing.get_type_hints(kind)
    fields = {f.name for f in dataclasses.fields(kind) if f.init}
    unknown = sorted(set(value) - fields)
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is no field of {kind.__name__}: expected {', '.join(sorted(fields))}")
    return kind(**{name: convert(v, hints[name]) for name, v in value.items()})


def _convert_scalar(value: Any, kind: Any) -> Any:
    if kind is type(None):
        matches = value is None
    elif kind is float:
        if isinstance(value, str) and NUMBER.match(value):
            value = float(value)
        matches = isinstance(value, (int, float)) and not isinstance(value, bool)
        value = float(value) if matches else value
    elif kind is int:
        matches = isinstance(value, int) and not isinstance(value, bool)
    elif isinstance(kind, type) and issubclass(kind, enum.Enum) and isinstance(value, str):
        matches, value = value in kind.__members__, kind.__members__.get(value)
    elif isinstance(kind, type) and issubclass(kind, pathlib.PurePath) and isinstance(value, str):
        matches, value = True, kind(value)
    else:
        matches = isinstance(value, typing.get_origin(kind) or kind)
    if not matches:
        raise ValueError(f"expected {describe(kind)}")
    return value


def plain(value: Any) -> Any:
    """A configuration value as plain data: what YAML and JSON can hold, and :func:`convert` takes back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, pathlib.PurePath):
        return str(value)
    return value
