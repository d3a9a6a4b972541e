"""Changes fields of a JSON object where it stands: every byte of the others stays as it is.

Reading the object and writing it anew would not: ``1e400`` would be infinite, ``1.50`` 1.5, NaN null.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from json import JSONDecoder
from typing import Any

import orjson

# A field's name, and its value if that is a number, a word, or a string without escapes.
_FIELD = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*("[^"\\]*"|[^"{\[,}\s]+|)')
_NEXT = re.compile(r'["{}\[\]]')  # of what a list or an object holds
_value = JSONDecoder().raw_decode  # (the value that begins somewhere, where it ends)


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
    at = text.index("{") + 1
    while (field := _FIELD.match(text, at)) is not None:
        name = _value(field[1])[0] if "\\" in field[1] else field[1][1:-1]
        begin, at = field.span(2)
        at = at if at > begin else _end(text, begin)
        yield name, begin, at


def _end(text: str, at: int) -> int:
    """Where the value that begins at ``at`` ends."""
    try:
        return _value(text, at)[1]
    except (RecursionError, ValueError):  # nested deeper than Python's stack is, a number of more digits than Python reads
        depth = 0
    while True:
        mark = _NEXT.search(text, at)
        assert mark is not None, "the line is no JSON"
        at = mark.end()
        if mark[0] == '"':
            at = _value(text, at - 1)[1]
        else:
            depth += 1 if mark[0] in "{[" else -1
        if not depth:
            return at
