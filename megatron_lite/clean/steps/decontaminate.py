"""The step ``decontaminate``: finds text of benchmarks by n-grams, and drops the document or cuts the place.

After GPT-3 (Brown et al. 2020, arXiv:2005.14165, appendix C): a document that shares 13 words in a row with a benchmark is
contaminated; shorter benchmark texts count with all their words, if these are at least 8. Ideographs and kana are words of
their own; of a benchmark text that is mostly made of them 20 in a row must be shared (12 at least), since 13 characters are
about 8 words. For comparing, words are in lower case and in Unicode's NFKC form, and marks and spaces do not matter; the
text itself is not changed but where it is cut.

The memory is of the size of the benchmarks: about 10 bytes for each of their words. N-grams are compared by 64-bit hashes:
with a million of them, a document of a thousand words is wrongly taken for contaminated once in 10^10 documents.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from megatron_lite.clean.step import Document, LocalStep

_CJK = "\u3005-\u3007\u303b\u3041-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
_UNIT = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
_BASE = np.uint64(0x9E3779B97F4A7C15)  # of the polynomials; odd, so that no power of it vanishes modulo 2^64


@dataclass(frozen=True)
class DecontaminateOptions:
    """Options of the step ``decontaminate``."""

    benchmarks: tuple[str, ...]
    """Files of benchmarks: JSON lines (``.jsonl``, ``.json``, ``.ndjson``; ``keys``), else plain text in UTF-8, each line a text."""
    keys: tuple[str, ...] = ("question", "answer", "text")
    """Fields of the JSON lines that hold text, or lists of texts; a line must have one of them."""
    action: Literal["drop", "cut"] = "drop"
    """``cut`` takes the shared words out with ``margin`` characters on both sides, and what is left between two places that
    is shorter than ``margin``; a document with more than ``max_cuts`` places is dropped (GPT-3: 200 and 10)."""
    words: int = 13
    """Words in a row that a document shares with a benchmark."""
    min_words: int = 8
    """Shorter benchmark texts are not looked for."""
    characters: int = 20
    """Ideographs and kana in a row, of benchmark texts that are mostly made of them."""
    min_characters: int = 12
    """Shorter benchmark texts of that kind are not looked for."""
    margin: int = 200
    """Characters around a place that are cut with it."""
    max_cuts: int = 10
    """Places in a document."""


class Decontaminate(LocalStep):
    """See the head of this file."""

    name = "decontaminate"
    Options = DecontaminateOptions

    def __init__(self, options: DecontaminateOptions) -> None:
        super().__init__(options)
        grams = [_Grams() for _ in options.benchmarks]
        self.by_length: dict[int, _Table] = {}
        found: dict[int, list[tuple[int, int]]] = {}  # length of the n-gram -> (hash, number of the benchmark)
        for number, path in enumerate(options.benchmarks):
            for text in read_benchmark(path, options.keys):
                grams[number].add(text, options)
            for length, hashes in grams[number].by_length.items():
                found.setdefault(length, []).extend((h, number) for h in hashes)
        for length, pairs in sorted(found.items()):
            self.by_length[length] = _Table(pairs)

    def apply(self, documents: Sequence[Document]) -> None:
        """Drop, or cut."""
        for document in documents:
            places = self.places(document.text)
            if not places:
                continue
            names = sorted({Path(self.options.benchmarks[number]).name for _, _, number in places})
            for name in names:
                self.count(f"documents with text of {name}")
            if self.options.action == "drop":
                document.dropped = f"text of the benchmark {names[0]}"
            else:
                self._cut(document, places)

    def places(self, text: str) -> list[tuple[int, int, int]]:
        """Where benchmarks are in a text: (first character, character after the last, number of the benchmark)."""
        units = _unit_hashes(text)
        hits = []
        for length, table in self.by_length.items():
            hits += [(at, at + length, number) for at, number in table.find(_hashes(units, length))]
        if not hits:
            return []
        spans = [m.span() for m in _UNIT.finditer(text)]
        return sorted((spans[begin][0], spans[end - 1][1], number) for begin, end, number in hits)

    def _cut(self, document: Document, places: list[tuple[int, int, int]]) -> None:
        margin = self.options.margin
        merged: list[list[int]] = []
        for begin, end, _ in places:
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        if len(merged) > self.options.max_cuts:
            document.dropped = f"text of benchmarks in more than {self.options.max_cuts} places"
            return
        parts, at = [], 0
        for begin, end in [*merged, [len(document.text) + margin, 0]]:
            part = document.text[at : max(at, begin - margin)].strip()
            if len(part) >= margin:
                parts.append(part)
            at = end + margin
        self.count("places cut", len(merged))
        document.text = "\n\n".join(parts)

    @staticmethod
    def problems(options: DecontaminateOptions) -> list[str]:
        """Numbers out of range, benchmarks that cannot be read."""
        found = [] if options.benchmarks else ["benchmarks: name at least one file"]
        for what in ("words", "characters"):
            least, most = getattr(options, f"min_{what}"), getattr(options, what)
            if not 1 <= least <= most:
                found.append(f"min_{what} {least} and {what} {most}: the first is at least 1 and not above the second")
        if options.margin < 0 or options.max_cuts < 1:
            found.append(f"margin {options.margin} and max_cuts {options.max_cuts}: at least 0 and 1")
        for path in options.benchmarks:
            if os.path.isfile(path):
                try:
                    texts = list(read_benchmark(path, options.keys))
                    if not any(_length(_UNIT.findall(text), options) for text in texts):
                        least = f"{options.min_words} words, or {options.min_characters} characters of Chinese or Japanese"
                        found.append(f"{path}: no text in it" + (f" that has {least}: there is nothing to look for" if texts else ""))
                except ValueError as error:
                    found.append(str(error))
        return found

    @staticmethod
    def files(options: DecontaminateOptions) -> Sequence[str]:
        """The benchmarks."""
        return options.benchmarks


def read_benchmark(path: str, keys: Sequence[str]) -> Iterator[str]:
    """The texts of a benchmark file.

    Raises:
        ValueError: file, line and what is wrong with it.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError:
                raise ValueError(f"{path}:{number}: not UTF-8: {line[:80]!r}") from None
            if not text:
                continue
            if not path.endswith((".jsonl", ".json", ".ndjson")):
                yield text
                continue
            try:
                record = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error.msg}): {text[:80]}") from None
            given = [record[key] for key in keys if key in record] if isinstance(record, dict) else []
            if not given:
                raise ValueError(f"{path}:{number}: none of the fields {', '.join(keys)}: {text[:80]}")
            for value in given:
                for item in value if isinstance(value, list) else [value]:
                    if not isinstance(item, str):
                        raise ValueError(f"{path}:{number}: expected text or a list of texts: {text[:80]}")
                    yield item


@functools.lru_cache(maxsize=1 << 17)
def _unit_hash(unit: str) -> int:
    """64 bits of a word as it is compared."""
    same = unicodedata.normalize("NFKC", unit).lower()
    return int.from_bytes(hashlib.blake2b(same.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _unit_hashes(text: str) -> np.ndarray:
    """Hashes of the words of a text: uint64 [words]."""
    units = _UNIT.findall(text)
    return np.fromiter(map(_unit_hash, units), dtype=np.uint64, count=len(units))


def _hashes(units: np.ndarray, length: int) -> np.ndarray:
    """Hashes of all n-grams of a length: uint64 [words - length + 1], polynomials in the words' hashes modulo 2^64."""
    total = np.zeros(max(0, len(units) - length + 1), dtype=np.uint64)
    for k in range(length):
        total = total * _BASE + units[k : k + len(total)]
    return total ^ (total >> np.uint64(29))


def _length(units: Sequence[str], options: DecontaminateOptions) -> int:
    """The length of the n-grams of a benchmark's text; 0: it is too short to be looked for."""
    of_characters = 2 * sum(re.match(f"[{_CJK}]", unit) is not None for unit in units) > len(units)
    least, most = (options.min_characters, options.characters) if of_characters else (options.min_words, options.words)
    length = min(most, len(units))
    return length if length >= least else 0


class _Grams:
    """N-grams of a benchmark by their length."""

    def __init__(self) -> None:
        self.by_length: dict[int, set[int]] = {}

    def add(self, text: str, options: DecontaminateOptions) -> None:
        """Take the n-grams of a text; one that is too short has none."""
        if length := _length(_UNIT.findall(text), options):
            self.by_length.setdefault(length, set()).update(_hashes(_unit_hashes(text), length).tolist())


class _Table:
    """Hashes of n-grams of one length and the benchmarks they are of; most others are refused by a look at one byte."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        hashes = np.array([h for h, _ in pairs], dtype=np.uint64)
        order = np.argsort(hashes, kind="stable")
        self.hashes = hashes[order]
        self.numbers = np.array([number for _, number in pairs], dtype=np.int32)[order]
        bits = max(10, (8 * len(pairs)).bit_length())
        self.shift = np.uint64(64 - bits)
        self.there = np.zeros(1 << bits, dtype=bool)
        self.there[self.hashes >> self.shift] = True

    def find(self, hashes: np.ndarray) -> Iterator[tuple[int, int]]:
        """(place, number of the benchmark) of those that are in the table."""
        places = np.flatnonzero(self.there[hashes >> self.shift])
        at = np.searchsorted(self.hashes, hashes[places])
        for place, found in zip(places.tolist(), at.tolist(), strict=True):
            while found < len(self.hashes) and self.hashes[found] == hashes[place]:
                yield place, int(self.numbers[found])
                found += 1
