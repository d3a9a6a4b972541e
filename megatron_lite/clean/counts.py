"""What is counted while documents pass, and how counts of blocks, stages and parts become one.

All of it adds up in any grouping: sums, and for samples the documents with the lowest hashes, so that the same documents
are shown whatever the workers and parts were. Of very many sources those with the lowest hashes are told apart, for the same reason.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from megatron_lite.clean.config import StepConfig
from megatron_lite.clean.documents import Bad
from megatron_lite.clean.step import Document
from megatron_lite.text.records import excerpt

SAMPLES = 8  # dropped documents that the report shows for each step
_SHOWN = 400  # characters of them
BAD_SAMPLES = 5  # bad records that the report shows for each reason: the first ones
SOURCES = 10_000  # that are told apart, or the counts of one source for each document would fill the memory
OTHERS = "all other sources"


@dataclass
class Flow:
    """Documents and characters into and out of a step."""

    documents_in: int = 0
    documents_out: int = 0
    characters_in: int = 0
    characters_out: int = 0

    def add(self, other: Flow) -> None:
        """Add another's numbers."""
        self.documents_in += other.documents_in
        self.documents_out += other.documents_out
        self.characters_in += other.characters_in
        self.characters_out += other.characters_out


@dataclass(frozen=True, order=True)
class Sample:
    """A dropped document that the report shows.

    Attributes:
        hash: keyed by the step; the lowest are kept.
        number: of the document.
        source, reason, text, detail: as of the document, its text cut.
    """

    hash: str
    number: int
    source: str
    reason: str
    text: str
    detail: str

    @staticmethod
    def of(document: Document, step: str) -> Sample:
        """A document dropped by ``step``."""
        digest = blake2b(document.number.to_bytes(8, "little"), key=step.encode()[:64], digest_size=8).hexdigest()
        reason, text = document.dropped or "", document.text[:_SHOWN]
        return Sample(digest, document.number, document.source, reason, text, document.detail)


@dataclass(frozen=True, order=True)
class BadSample:
    """A bad record that the report shows.

    Attributes:
        number, place, reason, detail: as of :class:`~megatron_lite.clean.documents.Bad`.
        text: its beginning.
    """

    number: int
    place: str
    reason: str
    detail: str
    text: str


def _bins(data: dict[str, int]) -> Counter[int]:
    return Counter({int(b): n for b, n in data.items()})


@dataclass
class StepCounts:
    """What one step did.

    Attributes:
        flows: source -> in and out.
        reasons: reason -> documents dropped.
        by_source, by_language: source, or code ("unknown" where there is none) -> the same of its documents.
        done: what else it did -> how often.
        lengths_in: bin -> documents that came in; bin b holds texts of 2**(b-1) to 2**b - 1 characters.
        lengths_dropped: the same of those dropped.
        samples: of dropped documents, the lowest hashes first.
        notes: what the step noted.
    """

    flows: dict[str, Flow] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    by_source: dict[str, Counter[str]] = field(default_factory=dict)
    by_language: dict[str, Counter[str]] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    lengths_in: Counter[int] = field(default_factory=Counter)
    lengths_dropped: Counter[int] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    notes: Any = None

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> StepCounts:
        """From what :func:`~megatron_lite.config.values.plain` made of one."""
        return cls(
            {source: Flow(**flow) for source, flow in data["flows"].items()},
            Counter(data["reasons"]),
            {source: Counter(reasons) for source, reasons in data["by_source"].items()},
            {code: Counter(reasons) for code, reasons in data["by_language"].items()},
            Counter(data["done"]),
            _bins(data["lengths_in"]),
            _bins(data["lengths_dropped"]),
            [Sample(**sample) for sample in data["samples"]],
            data["notes"],
        )

    def came(self, documents: Sequence[Document]) -> None:
        """Count documents that reach the step."""
        for document in documents:
            length = len(document.text)
            flow = self.flows.setdefault(document.source, Flow())
            flow.documents_in += 1
            flow.characters_in += length
            self.lengths_in[length.bit_length()] += 1

    def left(self, documents: Sequence[Document], step: str) -> tuple[list[Document], list[Document]]:
        """Count what became of the documents that came; (kept, dropped)."""
        kept, dropped = [], []
        for document in documents:
            if document.dropped is None and (not document.text or document.text.isspace()):
                document.dropped = "nothing left"
            if document.dropped is None:
                flow = self.flows[document.source]
                flow.documents_out += 1
                flow.characters_out += len(document.text)
                kept.append(document)
            else:
                self.reasons[document.dropped] += 1
                self.by_source.setdefault(document.source, Counter())[document.dropped] += 1
                self.by_language.setdefault(document.language or "unknown", Counter())[document.dropped] += 1
                self.lengths_dropped[len(document.text).bit_length()] += 1
                self.samples.append(Sample.of(document, step))
                dropped.append(document)
        self.samples = heapq.nsmallest(SAMPLES, self.samples)
        return kept, dropped

    def add(self, other: StepCounts, step: StepConfig) -> None:
        """Add another's numbers; the step merges its notes."""
        for source, flow in other.flows.items():
            self.flows.setdefault(source, Flow()).add(flow)
        self.reasons.update(other.reasons)
        for mine, others in ((self.by_source, other.by_source), (self.by_language, other.by_language)):
            for name, reasons in others.items():
                mine.setdefault(name, Counter()).update(reasons)
        self.done.update(other.done)
        self.lengths_in.update(other.lengths_in)
        self.lengths_dropped.update(other.lengths_dropped)
        self.samples = heapq.nsmallest(SAMPLES, [*self.samples, *other.samples])
        if other.notes is not None:
            kind: Any = step.kind
            both = self.notes is not None
            self.notes = kind.merge_notes(step.options, self.notes, other.notes) if both else other.notes


@dataclass
class StageCounts:
    """What one stage did in one part.

    Attributes:
        steps: position of a step in the pipeline -> its counts.
        read, empty: of the input, as of :class:`~megatron_lite.clean.documents.Records`.
        bad: reason -> records that are none.
        bad_samples: the first of them for each reason, in the order of the corpus.
        first, last: numbers of the documents that it wrote; None: there were none.
        lengths: of the output's documents, as ``lengths_in`` of a step; empty where the stage is not the last.
        decided: position of a corpus step that was decided while reading -> bucket -> what that gave
            (:meth:`~megatron_lite.clean.pipeline_keys.Decider.outcome`).
    """

    steps: dict[int, StepCounts] = field(default_factory=dict)
    read: Counter[str] = field(default_factory=Counter)
    empty: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    bad_samples: list[BadSample] = field(default_factory=list)
    first: int | None = None
    last: int | None = None
    lengths: Counter[int] = field(default_factory=Counter)
    decided: dict[int, dict[int, Any]] = field(default_factory=dict)

    def step(self, position: int) -> StepCounts:
        """The counts of a step."""
        return self.steps.setdefault(position, StepCounts())

    def add_bad(self, records: Sequence[Bad]) -> None:
        """Count bad records of a block of the input; nothing was counted before."""
        for bad in records:
            reason = bad.why.reason
            self.bad[reason] += 1
            if self.bad[reason] <= BAD_SAMPLES:
                self.bad_samples.append(BadSample(bad.number, bad.place, reason, bad.detail, excerpt(bad.line)))

    def add(self, other: StageCounts, steps: Sequence[StepConfig]) -> None:
        """Add what the next documents gave; ``steps`` are the pipeline's."""
        for position, counts in other.steps.items():
            self.step(position).add(counts, steps[position])
        self.read.update(other.read)
        self.empty += other.empty
        self.bad.update(other.bad)
        by_reason: dict[str, list[BadSample]] = {}
        for sample in (*self.bad_samples, *other.bad_samples):
            by_reason.setdefault(sample.reason, []).append(sample)
        self.bad_samples = sorted(s for samples in by_reason.values() for s in heapq.nsmallest(BAD_SAMPLES, samples))
        self.first = other.first if self.first is None else self.first
        self.last = self.last if other.last is None else other.last
        self.lengths.update(other.lengths)
        self.decided.update(other.decided)
        if max(len(self.read), *(len(counts.flows) for counts in self.steps.values()), 0) > 2 * SOURCES:
            self.fold_sources()

    def fold_sources(self) -> None:
        """Count all but :data:`SOURCES` sources together."""
        names = set(self.read).union(*(counts.flows for counts in self.steps.values())) - {OTHERS}
        kept = {OTHERS, *heapq.nsmallest(SOURCES, names, key=lambda name: (blake2b(name.encode(), digest_size=8).digest(), name))}
        for name in names - kept:
            if name in self.read:
                self.read[OTHERS] += self.read.pop(name)
            for counts in self.steps.values():
                if name in counts.flows:
                    counts.flows.setdefault(OTHERS, Flow()).add(counts.flows.pop(name))
                if name in counts.by_source:
                    counts.by_source.setdefault(OTHERS, Counter()).update(counts.by_source.pop(name))

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> StageCounts:
        """From what :func:`~megatron_lite.config.values.plain` made of one."""
        return cls(
            {int(position): StepCounts.from_data(counts) for position, counts in data["steps"].items()},
            Counter(data["read"]),
            data["empty"],
            Counter(data["bad"]),
            [BadSample(**sample) for sample in data["bad_samples"]],
            data["first"],
            data["last"],
            _bins(data["lengths"]),
            {
                int(position): {int(b): found for b, found in buckets.items()}
                for position, buckets in data["decided"].items()
            },
        )
