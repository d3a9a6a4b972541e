"""The records of JSON lines: numbered lines, and the texts of one.

Rules that do not depend on the machine or on where a record stands:

* A record is an object with a text under every key that is asked for, a string or a list of strings (its paragraphs, as
  archives of lm_dataformat have them); anything else is *bad*.
* Lines end with a newline (a carriage return before it is white space) and are UTF-8 whatever the locale; bytes that
  are not, and lone surrogates, are bad. A byte-order mark at the start of a line is ignored. Blank lines are not
  records.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
NOT_DECODABLE = "bytes that are not text in the input's encoding"
NOT_UTF8 = "bytes that are not UTF-8, which is the encoding of this kind of file"
PARAGRAPHS = "\n\n"  # between the strings of a text that is a list
_OF_CHAT = frozenset({"messages", "conversations", "prompt", "instruction"})
_SHOWN = 80  # characters of a bad record that an error shows


class BadInput(ValueError):
    """Input that cannot be used; the text names file, line and reason."""


class BadRecord(ValueError):
    """A line that is no record.

    Attributes:
        reason: what is wrong, in words that many bad lines have in common.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason + detail)
        self.reason = reason


class MissingKey(BadRecord):
    """A record without a key that is asked for.

    Attributes:
        chat: it looks like a conversation.
    """

    def __init__(self, key: str, record: dict[str, Any]) -> None:
        there = ", ".join(map(str, list(record)[:8])) or "none"
        super().__init__(f"no key {key!r}", f" (its keys: {excerpt(there.encode('utf-8', 'replace'))})")
        self.chat = not _OF_CHAT.isdisjoint(record)


def numbered_lines(first_line: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, line) of the lines that are not blank, without their byte-order mark."""
    for number, line in enumerate(data.split(b"\n"), first_line):
        line = line.removeprefix(BYTE_ORDER_MARK)
        if line.strip():
            yield number, line


def count_lines(data: bytes, start: int = 0, stop: int | None = None) -> int:
    """Newlines in a part of some bytes; in less than half the time of ``bytes.count``, which looks at them one by one."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8)[start:stop] == ord("\n")))


def parse_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """The texts of a record. Raises BadRecord."""
    record = parse_object(line)
    return [text_of(record, key) for key in keys]


def parse_object(line: bytes) -> dict[str, Any]:
    """The object of a line. Raises BadRecord.

    What orjson refuses is read again by the standard library, which takes more (NaN, whole numbers of any size, lone
    surrogates) and says what is wrong.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        record = _parse_leniently(line)
    if isinstance(record, list):
        raise BadRecord("an array, not an object (JSON lines have one object per line)")
    if not isinstance(record, dict):
        raise BadRecord(f"{_kind(record)}, not an object")
    return record


def _parse_leniently(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"), parse_int=_number)
    except UnicodeDecodeError as e:
        place = len(line[: e.start].decode("utf-8")) + 1
        raise BadRecord(NOT_DECODABLE, f" (character {place} of the line)") from None
    except json.JSONDecodeError as e:
        raise BadRecord("not one JSON value", f" ({e.msg.removesuffix(' at')} at character {e.colno})") from None
    except RecursionError:
        raise BadRecord("nested too deeply") from None


def _number(digits: str) -> int | float:
    """A whole number; of more digits than Python reads, as many other readers have it: infinite."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


def text_of(record: dict[str, Any], key: str) -> str:
    """The text under a key; a list of strings is its paragraphs. Raises BadRecord."""
    if key not in record:
        raise MissingKey(key, record)
    text = record[key]
    if isinstance(text, list) and text and all(isinstance(part, str) for part in text):
        text = PARAGRAPHS.join(text)
    if not isinstance(text, str):
        raise not_a_string(key, text)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecord(f"the value of {key!r} holds a lone surrogate, which is no text") from None
    return text


def not_a_string(key: str, value: Any) -> BadRecord:
    """Why a value cannot be a text."""
    return BadRecord(f"the value of {key!r} is {_kind(value)}, not a string")


def _kind(value: Any) -> str:
    """JSON's word for a value."""
    if value is None:
        return "null"
    names = {str: "a string", list: "an array", dict: "an object", bool: "a boolean"}
    return names.get(type(value), "a number")


def refusal(why: BadRecord, line: bytes, key_flag: str = "") -> str:
    """What ends a run at a bad record: the reason, what can be done, and the start of the record.

    ``key_flag``: what names the keys of the texts, if the user can.
    """
    remedy = "--skip-bad leaves such records out"
    if isinstance(why, MissingKey) and key_flag:
        remedy = f"{key_flag} names another one; {remedy}"
        remedy = f"of conversations `megatron-lite data chat` makes data; {remedy}" if why.chat else remedy
    if why.reason == NOT_DECODABLE:
        encoding = _likely_encoding(line)
        remedy = (f"--encoding {encoding} may be right" if encoding else "--encoding names another one") + f"; {remedy}"
    return f"{why}; {remedy}: {excerpt(line)}"


def _likely_encoding(line: bytes) -> str | None:
    """What the bytes of a line that is not UTF-8 look like: UTF-16, or GB18030 when it makes common Chinese of them."""
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    try:
        wide = [c for c in line.decode("gb18030") if not c.isascii()]
    except UnicodeDecodeError:
        return None
    common = sum(0xA1 <= c.encode("gb18030")[0] <= 0xD7 for c in wide)  # punctuation and the first level of GB 2312
    return "gb18030" if wide and common >= 0.9 * len(wide) else None


def excerpt(line: bytes) -> str:
    """The start of a line, fit for a terminal."""
    text = line.decode("utf-8", errors="replace")[:_SHOWN]
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)
