"""Changes fields of a JSON object where it stands: every byte of the others stays as it is.

Reading the object and writing it anew would not: ``1e400`` would be infinite, ``1.50`` 1.5, NaN null.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from json import JSONDecoder
from typing import Any

import orjson

_BEGIN = re.compile(r"\s*\{\s*")
_COLON = re.compile(r"\s*:\s*")
_COMMA = re.compile(r"\s*,?\s*")
_SCALAR = re.compile(r"[^,}\s]+")
_string = JSONDecoder().raw_decode  # (the string that begins somewhere, where it ends)
_NEXT = re.compile(r'["{}\[\]]')  # of what a list or an object holds


def with_fields(line: bytes, fields: Mapping[str, Any]) -> bytes:
    """The line with these fields: in the place of those that it has, the others at its end.

    Args:
        line: an object with a field or more, which a parser of JSON has read. A field that is there twice is changed twice.
        fields: values that orjson writes.
    """
    text = line.decode("utf-8")
    parts, done, left = [], 0, dict(fields)
    for name, begin, end in _values(text):
        if name in fields:
            parts += [text[done:begin], orjson.dumps(fields[name]).decode()]
            done = end
            left.pop(name, None)
    close = text.rindex("}")
    parts.append(text[done:close])
    for name, value in left.items():
        parts += [",", orjson.dumps(name).decode(), ":", orjson.dumps(value).decode()]
    return "".join([*parts, text[close:]]).encode("utf-8")


def _values(text: str) -> Iterator[tuple[str, int, int]]:
    """(name, begin, end) of the fields' values."""
    at = _after(_BEGIN, text, 0)
    while text[at] != "}":
        name, at = _string(text, at)
        begin = _after(_COLON, text, at)
        end = _end(text, begin)
        yield name, begin, end
        at = _after(_COMMA, text, end)


def _after(what: re.Pattern[str], text: str, at: int) -> int:
    found = what.match(text, at)
    assert found is not None, "the line is no JSON"
    return found.end()


def _end(text: str, at: int) -> int:
    """Where the value that begins at ``at`` ends. (Not by recursion: values may be nested deeper than Python's stack is.)"""
    if text[at] == '"':
        return _string(text, at)[1]
    if text[at] not in "{[":
        return _after(_SCALAR, text, at)
    depth = 0
    while True:
        mark = _NEXT.search(text, at)
        assert mark is not None, "the line is no JSON"
        at = mark.end()
        if mark[0] == '"':
            at = _string(text, at - 1)[1]
        else:
            depth += 1 if mark[0] in "{[" else -1
        if not depth:
            return at
