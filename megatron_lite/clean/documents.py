"""Documents: made from the records of input files, and written as lines.

Two forms of lines: *output*, the line that a document came from, in which the fields that have changed are replaced, and
*spool*, what one stage leaves for the next: what the object does not hold, a tab, and the output line.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from megatron_lite.clean.config import DROPPED_FIELDS, Keys
from megatron_lite.clean.json_line import with_fields
from megatron_lite.clean.step import LINE_BITS, Document
from megatron_lite.text.blocks import Block, Lines
from megatron_lite.text.records import BadInput, BadRecord, numbered_lines, parse_object, refusal, text_of

READING = "reading"  # what stands for the step that dropped a bad record


@dataclass(frozen=True)
class Bad:
    """A record that is none.

    Attributes:
        number: its place, as a document's.
        place: file and line, for people.
        why: what is wrong.
        line: of it, or its start where it is no line.
    """

    number: int
    place: str
    why: BadRecord
    line: bytes

    @property
    def detail(self) -> str:
        """What is wrong in this one, besides the reason that many have in common."""
        return str(self.why).removeprefix(self.why.reason).strip()


@dataclass
class Records:
    """What a block of input held.

    Attributes:
        documents: with a text that is not blank.
        read: source -> records, blank ones included.
        empty: records whose text is blank.
        bad: records that are none.
    """

    documents: list[Document] = field(default_factory=list)
    read: Counter[str] = field(default_factory=Counter)
    empty: int = 0
    bad: list[Bad] = field(default_factory=list)


def read_block(file: int, block: Block, base: int, keys: Keys, skip_bad: bool, key_flag: str = "text_key") -> Records:
    """The records of a block of the ``file``-th input; ``base`` records of it come before the numbers of the block.

    Raises:
        BadInput: a bad record, when these are not to be skipped.
    """
    found = Records()
    for number, line, record in _records(block, keys):
        if isinstance(record, BadRecord):
            place = f"{block.file}:{number}"
            if not skip_bad:
                raise BadInput(f"{place}: {refusal(record, line, key_flag)}")
            found.bad.append(Bad(file << LINE_BITS | base + number, place, record, line))
            continue
        text = record[keys.text_key]
        source = _source(record, keys.source_key, block.file)
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

    The line is empty where there is none, and the start of what there is of a bad record.
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
    """(the line, its object), with a string under ``text_key``. Raises BadRecord."""
    record = parse_object(line)
    text, line = text_of(record, text_key), line.strip()
    if text is not record[text_key]:
        line, record[text_key] = with_fields(line, {text_key: text}), text
    return line, record


def _source(record: dict[str, Any], key: str, file: str) -> str:
    """The text or number of a record under ``source_key``; the file's name where there is none."""
    value = record.get(key) if key else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")  # without lone surrogates
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else file


def _language(record: dict[str, Any], keys: Keys) -> str | None:
    """The code that a record gives (``zh`` of ``zh-CN``); None: none, or not a code."""
    value = record.get(keys.language_key) if keys.language_key else None
    code = re.split("[-_]", value)[0].lower() if isinstance(value, str) else ""
    return code if code.isascii() and code.isalpha() and len(code) in (2, 3) else None


def _line(document: Document) -> bytes:
    """What a document came from; made of its record where that was not a line."""
    return document.line or orjson.dumps(document.record, default=_as_text)


def _as_text(value: Any) -> str:
    """What JSON has no form for: bytes."""
    return b64encode(value).decode()


def output_line(document: Document, keys: Keys) -> bytes:
    """The line (without its newline, as everywhere here) that a document came from, with the fields that have changed."""
    changed = _changes(document, keys)
    return with_fields(_line(document), changed) if changed else _line(document)


def _changes(document: Document, keys: Keys) -> dict[str, Any]:
    """The fields of a document that are others than those of its record."""
    changed: dict[str, Any] = {}
    if document.text != document.record.get(keys.text_key):
        changed[keys.text_key] = document.text
    if keys.language_key and document.language != _language(document.record, keys):
        changed[keys.language_key] = document.language
    return changed


def dropped_line(document: Document, keys: Keys, step: str, place: str) -> bytes:
    """The record of a dropped document as the step saw it, with the :data:`DROPPED_FIELDS`."""
    about = zip(DROPPED_FIELDS, (document.dropped, step, document.detail, place), strict=True)
    return with_fields(_line(document), {**_changes(document, keys), **dict(about)})


def bad_line(bad: Bad) -> bytes:
    """A bad record among the dropped documents, under ``line``; bytes of it that are not UTF-8 as ``\\xff``."""
    about = zip(DROPPED_FIELDS, (bad.why.reason, READING, bad.detail, bad.place), strict=True)
    return orjson.dumps({"line": bad.line.decode("utf-8", "backslashreplace"), **dict(about)})


def spool_line(document: Document, keys: Keys) -> bytes:
    """A document for the next stage."""
    return orjson.dumps([document.number, document.source, document.language]) + b"\t" + output_line(document, keys)


def read_spool(data: bytes, keys: Keys) -> list[Document]:
    """The documents of whole spool lines."""
    documents = []
    for spooled in data.removesuffix(b"\n").split(b"\n"):
        head, _, line = spooled.partition(b"\t")
        number, source, language = orjson.loads(head)
        record = parse_object(line)
        documents.append(Document(record[keys.text_key], number, source, record, language, line=line))
    return documents


def spooled_numbers(data: bytes) -> tuple[int, int]:
    """Numbers of the first and the last document of whole spool lines."""
    begin = data.rfind(b"\n", 0, len(data) - 1) + 1
    first, last = (orjson.loads(data[at : data.index(b"\t", at)])[0] for at in (0, begin))
    return first, last
