"""What a cleaning step is.

A pipeline is a list of steps from a YAML file. There are two kinds, and nothing else:

* A *local* step looks at documents one at a time: it changes their text, or drops them with a reason. It runs in worker
  processes, in any order.
* A *corpus* step decides by comparing documents with each other (de-duplication). Its first half, :meth:`CorpusStep.keys`,
  is local: for each document, the few bytes that the comparison needs. Its second half, :meth:`CorpusStep.decide`, sees
  those keys in the order of the corpus and says what to drop. Keys fall into a fixed number of buckets by their own
  bits, and each bucket is decided by itself, so the result depends neither on workers nor on parts: one part decides
  while it reads; several parts write their keys to a file for each bucket, decide, and drop in a second pass.

The order of a corpus is (number of the input file, line), whatever part reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

LINE_BITS = 40  # of a document's number; the rest is the input file's


@dataclass(slots=True)
class Document:
    """A text on its way through the pipeline.

    Attributes:
        text: what the steps look at and change.
        number: its place in the corpus: ``file << LINE_BITS | line``, whatever part reads it.
        source: name under which the report counts it (the input's ``source:``, else the file's name).
        record: the other fields of its JSON object, carried through unchanged.
        language: ISO 639-1 code that the language step (or the input's own field) gave it; None: unknown.
        dropped: None, or the reason in words that many documents share (``"quality: too few words"``).
    """

    text: str
    number: int = 0
    source: str = ""
    record: dict[str, Any] = field(default_factory=dict)
    language: str | None = None
    dropped: str | None = None


class LocalStep:
    """Base of steps that look at one document at a time.

    A step is built once in each worker from its options (``Options`` is a frozen dataclass, the one definition of what
    its YAML section may hold; the field's docstring is its documentation).

    Attributes:
        name: of the step's kind in the YAML file.
        counts: what it did besides dropping (``{"mail addresses masked": 3}``); summed over workers for the report.
    """

    name: ClassVar[str]
    Options: ClassVar[type]

    def __init__(self, options: Any) -> None:
        self.options = options
        self.counts: dict[str, int] = {}

    def apply(self, documents: Sequence[Document]) -> None:
        """Change texts, or set ``dropped``. Documents that are already dropped are not passed in."""
        raise NotImplementedError

    @staticmethod
    def problems(options: Any) -> list[str]:
        """What is wrong with options whose types are right; told before anything is read."""
        return []


class CorpusStep:
    """Base of steps that compare documents with each other.

    Attributes:
        name, Options: as of :class:`LocalStep`.
        key_dtype: NumPy structured dtype of one key; its fields ``number`` (uint64, the document's) and ``bucket`` (uint16)
            are required, and ``unit`` (uint32, index of the line or paragraph in the document) where a part of it is dropped.
        needs_barrier: it cannot decide while it reads: all keys come first, also with a single part.
    """

    name: ClassVar[str]
    Options: ClassVar[type]
    buckets: ClassVar[int] = 64
    needs_barrier: ClassVar[bool] = False
    key_dtype: np.dtype

    def __init__(self, options: Any) -> None:
        self.options = options
        self.counts: dict[str, int] = {}

    def keys(self, documents: Sequence[Document]) -> np.ndarray:
        """Local half: the keys of some documents, in their order. [keys] of ``key_dtype``; runs in workers."""
        raise NotImplementedError

    def decide(self, bucket: int, keys: np.ndarray) -> np.ndarray:
        """Corpus half: for the next keys of a bucket in the order of the corpus, which are duplicates. bool [keys]."""
        raise NotImplementedError

    def apply(self, document: Document, units: np.ndarray) -> None:
        """Drop the document, or those units (lines, paragraphs) of it."""
        raise NotImplementedError

    def save(self, directory: str) -> None:
        """Persist what the decided keys left (filters, indices), so that a later corpus is compared with this one."""

    def load(self, directory: str) -> None:
        """Begin with what another run left."""

    @staticmethod
    def problems(options: Any) -> list[str]:
        """As of :class:`LocalStep`."""
        return []
