"""What a cleaning step is.

A pipeline is a list of steps from a YAML file. There are two kinds, and nothing else:

* A *local* step looks at documents one at a time: it changes their text, or drops them with a reason. It runs in worker
  processes, in any order.
* A *corpus* step decides by comparing documents with each other (de-duplication). Its first half, :meth:`CorpusStep.keys`,
  is local: for each document, the few bytes that the comparison needs. Its second half, :meth:`CorpusStep.decide`, sees
  those keys in the order of the corpus and says what to drop. Keys fall into a fixed number of buckets by their own
  bits, and each bucket is decided by itself, so the result depends neither on workers nor on parts: one part decides
  while it reads (the workers ask, one process answers, the workers drop); several parts write their keys to a file for
  each bucket, decide, and drop in a second pass.

The order of a corpus is (number of the input file, line), whatever part reads it. Blocks of documents are cut anywhere:
what a step counts and notes must not depend on where.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

LINE_BITS = 40  # of a document's number; the rest is the input file's
SAVED_BY = "saved-by"  # file in a directory that a corpus step saved (:mod:`.saved`)
NO_LANGUAGE = "documents without a language"  # counts of a step whose rules need one; told as a warning where they are most
NO_BOUNDS = "documents in a language without bounds"


def place_of(number: int) -> tuple[int, int]:
    """(number of the input file, from 0; line, from 1) of a document's number."""
    return number >> LINE_BITS, number & ((1 << LINE_BITS) - 1)


def place_name(number: int, inputs: Sequence[str]) -> str:
    """``file:line`` of a document's number."""
    file, line = place_of(number)
    return f"{inputs[file]}:{line}"


def missing_packages(*names: str) -> list[str]:
    """A complaint for each package that is not installed; for :meth:`Step.problems`."""
    return [f"needs the package {n}: pip install {n}" for n in names if importlib.util.find_spec(n) is None]


@dataclass(slots=True)
class Document:
    """A text on its way through the pipeline.

    Attributes:
        text: what the steps look at and change.
        number: its place in the corpus: ``file << LINE_BITS | line``, whatever part reads it.
        source: name under which the report counts it: the record's field ``source_key`` if that is a text or number, else the file's.
        record: its JSON object as it was read: with its text of then, and the other fields, which are carried through.
        line: the line of that object, which stands for the document as long as nothing changes; empty: there is none.
        language: ISO 639-1 code that the language step (or the record's field ``language_key``) gave it; None: unknown.
        dropped: None, or the reason in words that many documents share (``"too few words"``); the report knows the step.
        detail: what was measured, of this document alone (``"min_words: 12 < 50"``), where it was dropped and a step tells it.
    """

    text: str
    number: int = 0
    source: str = ""
    record: dict[str, Any] = field(default_factory=dict)
    language: str | None = None
    dropped: str | None = None
    detail: str = ""
    line: bytes = b""


@dataclass
class Facts:
    """What a step adds to the report besides the counts that every step has.

    Attributes:
        numbers: name -> number or text.
        histograms: title -> label of a bin -> documents.
        warnings: sentences that people must see; also printed at the end of the run.
    """

    numbers: dict[str, int | float | str] = field(default_factory=dict)
    histograms: dict[str, dict[str, int]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class NoOptions:
    """Of a step without options."""


class Step(ABC):
    """What both kinds have in common.

    A step is built once in each process from its options. ``Options`` is a frozen dataclass, the one definition of what
    its YAML section may hold; the text under each field is its documentation.

    Attributes:
        name: of the step in the YAML file.
        counts: what it did besides dropping (``{"mail addresses": 3}``), summed for the report.
    """

    name: ClassVar[str]
    Options: ClassVar[type] = NoOptions

    def __init__(self, options: Any) -> None:
        self.options = options
        self.counts: dict[str, int] = {}

    def count(self, what: str, number: int = 1) -> None:
        """Add to a count."""
        if number:
            self.counts[what] = self.counts.get(what, 0) + number

    @staticmethod
    def problems(options: Any) -> list[str]:
        """What is wrong with options whose types are right, packages that are missing; told before anything is read."""
        return []

    @staticmethod
    def files(options: Any) -> Sequence[str]:
        """Files that the options name: they must be there, and a restart notices when one has changed."""
        return ()

    @staticmethod
    def needs_language(options: Any) -> bool:
        """Whether it looks up what to do in the language of a document."""
        return False


class LocalStep(Step):
    """Base of steps that look at one document at a time."""

    @abstractmethod
    def apply(self, documents: Sequence[Document]) -> None:
        """Change texts, or set ``dropped``. Documents that are already dropped are not passed in.

        A document whose text is blank afterwards is dropped by the pipeline ("nothing left").
        """

    def take_notes(self) -> Any:
        """What it noted about the documents since the last call, as plain data (JSON); None: nothing. Runs in workers."""
        return None

    @staticmethod
    def merge_notes(options: Any, left: Any, right: Any) -> Any:
        """Two notes as one. However the documents are grouped, the result is the same."""
        raise AssertionError("a step that takes notes merges them")

    @staticmethod
    def facts(options: Any, notes: Any) -> Facts:
        """What the notes of the whole corpus say (None: there were none); asked once, at the end."""
        return Facts()


@dataclass(frozen=True)
class CorpusOptions:
    """Options that every corpus step has."""

    against: str = ""
    """Directory that ``save`` of an earlier run wrote: what is there counts as seen before this corpus."""
    save: str = ""
    """Directory to write what was seen (with what ``against`` held), for corpora to come; must not be there yet."""


def bucket_path(directory: str, bucket: int) -> str:
    """The file of a bucket in the directory that ``against`` or ``save`` names."""
    return f"{directory}/bucket-{bucket:02d}"


class CorpusStep(Step):
    """Base of steps that compare documents with each other. ``Options`` is derived from :class:`CorpusOptions`.

    Attributes:
        buckets: how many there are.
        needs_barrier: it cannot decide while it reads: all keys come first, also with a single part.
        key_dtype: NumPy structured dtype of one key; its fields ``number`` (uint64, the document's) and ``bucket`` (uint16)
            are required, and ``unit`` (uint32, index of the line or paragraph in the document) where a part of it is dropped.
        scratch: directory that all processes and parts of a run share, set before the first :meth:`keys` or :meth:`decide`,
            kept by a restart and removed when the run is complete. A comparison that needs more than the keys (near
            de-duplication: the shingles) puts it there, into files of the step's own naming, before the keys are returned.
    """

    scratch: str = ""
    buckets: ClassVar[int] = 64
    needs_barrier: ClassVar[bool] = False
    key_dtype: np.dtype

    @abstractmethod
    def keys(self, documents: Sequence[Document]) -> np.ndarray:
        """Local half: the keys of some documents, in their order, each unit once. [keys] of ``key_dtype``; in workers."""

    @abstractmethod
    def decide(self, bucket: int, keys: np.ndarray) -> np.ndarray:
        """Corpus half: for the next keys of a bucket in the order of the corpus, which are duplicates. bool [keys].

        Without a barrier it is called with a few keys at a time; with one, or with several parts, once for each bucket
        with all its keys. A document with any duplicate key is dropped, or loses the units with duplicate keys.
        """

    @abstractmethod
    def apply(self, document: Document, units: np.ndarray) -> None:
        """Drop the document (set ``dropped``), or those units of it (sorted; empty where keys have no ``unit``)."""

    def bucket_facts(self, bucket: int) -> dict[str, float]:
        """For the report, when all keys of the bucket are decided; summed over buckets ("expected wrong drops")."""
        return {}

    @staticmethod
    def facts(options: Any, sums: dict[str, float]) -> Facts:
        """What the sums of :meth:`bucket_facts` say (warnings: a filter that holds too much); asked once, at the end."""
        return Facts({name: int(value) if float(value).is_integer() else value for name, value in sums.items()})

    def save(self, bucket: int, path: str) -> None:
        """Write what the decided keys of a bucket left to a file, for ``against`` of a later run."""
        raise AssertionError("a corpus step saves and loads its buckets")

    def load(self, bucket: int, path: str) -> None:
        """Begin a bucket with what another run saved; called before its first :meth:`decide`."""
        raise AssertionError("a corpus step saves and loads its buckets")

    def close(self, bucket: int) -> None:
        """The bucket is decided and saved: what it holds in memory may go."""
