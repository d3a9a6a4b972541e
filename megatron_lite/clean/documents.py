"""Documents: made from the records of input files, and written as lines.

Two forms of lines: *output*, the line that a document came from, or where it has changed its JSON object anew, and *spool*,
what one stage leaves for the next: what the object does not hold, a tab, and the output line. Where orjson cannot hold a
value (a whole number of more than 64 bits, NaN) the standard library reads and writes it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from megatron_lite.clean.config import Keys
from megatron_lite.clean.step import LINE_BITS, NO_SOURCE, Document
from megatron_lite.text.inputs import Block, Lines
from megatron_lite.text.records import BadInput, BadRecord, numbered_lines, parse_line, refusal


@dataclass
class Records:
    """What a block of input held.

    Attributes:
        documents: with a text that is not blank.
        read: source -> records, blank ones included.
        empty: records whose text is blank.
        bad: reason -> records that are none.
    """

    documents: list[Document] = field(default_factory=list)
    read: Counter[str] = field(default_factory=Counter)
    empty: int = 0
    bad: Counter[str] = field(default_factory=Counter)


def read_block(file: int, block: Block, base: int, keys: Keys, skip_bad: bool) -> Records:
    """The records of a block of the ``file``-th input; ``base`` records of it come before the numbers of the block.

    Raises:
        BadInput: a bad record, when these are not to be skipped.
    """
    found = Records()
    for number, line, record in _records(block, keys):
        if isinstance(record, BadRecord):
            if not skip_bad:
                raise BadInput(f"{block.file}:{number}: {refusal(record, line)}")
            found.bad[record.reason] += 1
            continue
        text = record[keys.text_key]
        source = record.get(keys.source_key) if keys.source_key else block.file
        if not isinstance(source, str):
            source = NO_SOURCE
        found.read[source] += 1
        if not text or text.isspace():
            found.empty += 1
            continue
        found.documents.append(
            Document(text, file << LINE_BITS | base + number, source, record, _language(record, keys), line=line)
        )
    return found


def _records(block: Block, keys: Keys) -> Iterator[tuple[int, bytes, dict[str, Any] | BadRecord]]:
    """(number, its line, its object or what is wrong) of the records of a block.

    The line is empty where it does not hold the object as it is, and the start of what there is of a bad record.
    """
    if isinstance(block, Lines):
        for number, line in numbered_lines(block.first, block.data):
            try:
                yield number, *_record(line, keys.text_key)
            except BadRecord as why:
                yield number, line, why
        return
    refused = {bad.index: bad for bad in block.refused}
    for index, text in enumerate(block.columns[block.keys.index(keys.text_key)]):
        number = block.first + index
        if index in refused:
            yield number, refused[index].start, refused[index].why
        else:
            others = {} if block.records is None else block.records[index]
            yield number, b"", {keys.text_key: text, **others}


def _record(line: bytes, text_key: str) -> tuple[bytes, dict[str, Any]]:
    """(the line, its object with a text under ``text_key``); no line where the object had to be changed. Raises BadRecord."""
    try:
        record = orjson.loads(line)
        if isinstance(record, dict) and isinstance(record.get(text_key), str) and not _rounded(record):
            return line.strip(), record
    except orjson.JSONDecodeError:
        pass
    (text,) = parse_line(line, [text_key])  # or says what is wrong
    record = json.loads(line)
    line = line.strip() if record[text_key] == text else b""
    record[text_key] = text
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecord("a lone surrogate, which is no text") from None
    return line, record


def _loads(line: bytes) -> Any:
    """The object of an output line."""
    try:
        value = orjson.loads(line)
        return json.loads(line) if _rounded(value) else value
    except orjson.JSONDecodeError:
        return json.loads(line)


def _rounded(value: Any) -> bool:
    """Whether a value may hold a whole number that orjson, which has 64 bits for it, read as a float."""
    kind = type(value)
    if kind is str or kind is int:
        return False
    if kind is float:
        return abs(value) >= 2.0**63
    if kind is dict:
        return any(map(_rounded, value.values()))
    return kind is list and any(map(_rounded, value))


def _language(record: dict[str, Any], keys: Keys) -> str | None:
    """The code that a record gives (``zh`` of ``zh-CN``); None: none, or not a code."""
    value = record.get(keys.language_key) if keys.language_key else None
    code = re.split("[-_]", value)[0].lower() if isinstance(value, str) else ""
    return code if code.isascii() and code.isalpha() and len(code) in (2, 3) else None


def _dump(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def output_line(document: Document, keys: Keys) -> bytes:
    """The line (without its newline, as everywhere here) that a document came from, or its record anew when it has changed."""
    changed = _changes(document, keys)
    return document.line if document.line and not changed else _dump({**document.record, **changed})


def _changes(document: Document, keys: Keys) -> dict[str, Any]:
    """The fields of a document that are others than those of its record."""
    changed: dict[str, Any] = {}
    if document.text != document.record.get(keys.text_key):
        changed[keys.text_key] = document.text
    if keys.language_key and document.language != _language(document.record, keys):
        changed[keys.language_key] = document.language
    return changed


def dropped_line(document: Document, keys: Keys, step: str) -> bytes:
    """The record of a dropped document as the step saw it, with the reason and the step."""
    return _dump({**document.record, **_changes(document, keys), "dropped": document.dropped, "step": step})


def spool_line(document: Document, keys: Keys) -> bytes:
    """A document for the next stage."""
    return orjson.dumps([document.number, document.source, document.language]) + b"\t" + output_line(document, keys)


def read_spool(data: bytes, keys: Keys) -> list[Document]:
    """The documents of whole spool lines."""
    documents = []
    for spooled in data.removesuffix(b"\n").split(b"\n"):
        head, _, line = spooled.partition(b"\t")
        number, source, language = orjson.loads(head)
        record = _loads(line)
        documents.append(Document(record[keys.text_key], number, source, record, language, line=line))
    return documents


def spooled_numbers(data: bytes) -> tuple[int, int]:
    """Numbers of the first and the last document of whole spool lines."""
    begin = data.rfind(b"\n", 0, len(data) - 1) + 1
    first, last = (orjson.loads(data[at : data.index(b"\t", at)])[0] for at in (0, begin))
    return first, last
