"""De-duplication of whole documents, lines or paragraphs by hash: what the Bloom filter and the exact set have in common.

A unit (document, line or paragraph) is reduced to the 128 bits of XXH3, which are the same on every machine; two units
are duplicates when these bits are equal. (Among 10^12 different units, the chance that any two of them have the same
128 bits is about 10^-15.) The first unit of the corpus stays, every later one goes. The hash also says which of the
buckets a unit belongs to, so all its duplicates meet in one bucket.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megatron_lite.clean.step import CorpusOptions, CorpusStep, Document, missing_packages
from megatron_lite.clean.steps.taken_out import without

KEY = np.dtype([("number", "<u8"), ("bucket", "<u2"), ("unit", "<u4"), ("hash", "<u8", 2)])
SEPARATORS = {"document": "", "line": "\n", "paragraph": "\n\n"}


@dataclass(frozen=True)
class SeenOptions(CorpusOptions):
    """Options of de-duplication by hash."""

    unit: Literal["document", "line", "paragraph"] = "document"
    """What is compared and dropped: document, line, or paragraph (separated by an empty line)."""
    min_length: int = 10
    """Characters that a line or paragraph must have to be compared; a shorter one ("}", "Yes.") always stays."""
    ignore_case: bool = False
    """Compare in lower case."""
    ignore_whitespace: bool = False
    """Compare with each run of white space as one space. White space around a line or paragraph never counts."""


class Seen(CorpusStep):
    """Base of the steps that remember hashes. A subclass holds the hashes of each bucket.

    Lines and paragraphs are dropped from their document, with the blank lines that would stand together or at its ends then; the
    document itself goes when nothing but white space stays.
    """

    key_dtype = KEY

    def __init__(self, options: SeenOptions) -> None:
        super().__init__(options)
        self._separator = SEPARATORS[options.unit]

    @abstractmethod
    def seen(self, bucket: int, hashes: Iterable[int]) -> list[bool]:
        """Whether each hash (128 bits, signed) was there before; afterwards all are."""

    def keys(self, documents: Sequence[Document]) -> np.ndarray:
        from xxhash import xxh3_128_digest

        counts: list[int] = []  # of the units of each document that are compared
        units: list[int] = []
        texts: list[str] = []
        least = self.options.min_length
        for document in documents:
            before = len(units)
            if self.options.unit == "document":
                units.append(0)
                texts.append(self._compared(document.text))
            else:
                some = list(map(str.strip, document.text.split(self._separator)))
                if self.options.ignore_whitespace or self.options.ignore_case:
                    some = list(map(self._compared, some))
                compared = [unit for unit, text in enumerate(some) if len(text) >= least]
                units += compared
                texts += map(some.__getitem__, compared)
            counts.append(len(units) - before)
        keys = np.zeros(len(units), KEY)
        keys["number"] = np.repeat(np.array([document.number for document in documents], "<u8"), counts)
        keys["unit"] = units
        keys["hash"] = np.frombuffer(b"".join(map(xxh3_128_digest, map(str.encode, texts))), "<u8").reshape(-1, 2)
        keys["bucket"] = keys["hash"][:, 0] % np.uint64(self.buckets)
        return keys

    def _compared(self, text: str) -> str:
        """A unit, without white space around it where it is a part of a document, as it is compared."""
        if self.options.ignore_whitespace:
            text = " ".join(text.split())
        return text.lower() if self.options.ignore_case else text

    def decide(self, bucket: int, keys: np.ndarray) -> np.ndarray:
        low, high = keys["hash"][:, 0].tolist(), keys["hash"][:, 1].astype(np.int64).tolist()
        return np.array(self.seen(bucket, [a << 64 | b for a, b in zip(high, low, strict=True)]), bool)

    def apply(self, document: Document, units: np.ndarray) -> None:
        if self.options.unit == "document":
            document.dropped = "seen before"
            return
        self.count(f"{self.options.unit}s seen before", len(units))
        taken = dict.fromkeys(sorted(units.tolist()))
        lines = document.text.split("\n")
        if self.options.unit == "paragraph":
            begin, of_lines = 0, dict[int, None]()
            for unit, part in enumerate(document.text.split(self._separator)):
                end = begin + part.count("\n") + 1
                if unit in taken:
                    of_lines |= dict.fromkeys(range(begin, end))
                begin = end + 1  # an empty line lies between
            taken = of_lines
        text = without(lines, taken)
        if text.strip():
            document.text = text
        else:
            document.dropped = f"every {self.options.unit} was seen before"

    def settings(self) -> dict[str, Any]:
        """What must be equal for hashes to be comparable."""
        options = self.options
        line = {} if options.unit == "document" else {"min_length": options.min_length}
        names = ("unit", "ignore_case", "ignore_whitespace")
        return {
            "step": self.name,
            "hash": "xxh3_128",
            "buckets": self.buckets,
            **line,
            **{n: getattr(options, n) for n in names},
        }

    @staticmethod
    def problems(options: Any) -> list[str]:
        found = []
        if options.min_length < 1:
            found.append(f"min_length: {options.min_length} must be at least 1")
        return found + missing_packages("xxhash")
