"""Drift: whether a corpus still looks like a reference, in three numbers of its documents.

Length (bytes of UTF-8), compression ratio (bytes for each byte that zlib makes of them: repetition) and entropy of the
tokens (bits; by default the tokens are bytes, and it is called byte entropy) are compared by the two-sample Kolmogorov-Smirnov
statistic D, the largest distance between the two distribution functions: 0 is none, 1 is all. The threshold is on D. The
probability p of the usual test asks whether the difference can be chance; with millions of documents it never is, and p is 0
however small the difference. Chance alone makes D 1.95 * sqrt(1/n + 1/m) once in a thousand comparisons, 0.04 for samples of 5,000:
where D is above the threshold and not above that, there are too few documents to tell.

Samples are fixed: of each corpus the documents whose text has the smallest keyed hashes. They do not depend on order,
workers or parts, and the same document is taken again when it comes back.

What these numbers do not see: the order of words, what a text says, in which language of a script it is, a fault in one document of a
hundred. A corpus whose words were shuffled inside its documents has not moved.

As a step of a pipeline (``drift``) it drops nothing; put at the end, it says in the report what moved. A profile (the numbers
of a sample, ``megatron-lite data drift --save-profile``) serves as a reference without its corpus.
"""

from __future__ import annotations

import hashlib
import heapq
import importlib.util
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_lite.clean.config import Keys
from megatron_lite.clean.documents import read_block
from megatron_lite.clean.step import Document, Facts, LocalStep
from megatron_lite.text.blocks import InputOptions
from megatron_lite.text.inputs import check_options, expand_inputs, open_input

PROFILE = ".drift.json"
SAME, MOVED, TOO_FEW = "same", "moved", "too few documents"
BYTES = "bytes"  # the tokens when no tokenizer is given
_KEY = b"megatron-lite drift sample"
Row = tuple[int, float, float, float]  # hash, and the features
Tokens = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class DriftOptions:
    """Options of the step ``drift``."""

    reference: str
    """What to compare with: a file of a corpus, or a profile (``.drift.json``)."""
    text_key: str = "text"
    """Field of the reference's records that holds the text."""
    threshold: float = 0.1
    """Largest D that is no drift."""
    sample: int = 5000
    """Documents of each corpus that are compared."""


@dataclass(frozen=True)
class Moved:
    """The comparison of one feature.

    Attributes:
        feature: one of :func:`feature_names`.
        d: the statistic.
        reference, new: medians.
    """

    feature: str
    d: float
    reference: float
    new: float


class Sample:
    """The documents of a corpus with the smallest hashes.

    Args:
        size: how many.
        tokens: ids of a text, for the entropy; None: its bytes.
    """

    def __init__(self, size: int, tokens: Tokens | None = None) -> None:
        self.size, self.tokens = size, tokens
        self.rows: list[Row] = []  # whatever was among the smallest when it came
        self.keys: list[int] = []  # a heap: minus the smallest hashes so far, the largest of them first

    def add(self, text: str) -> None:
        """Look at a document."""
        data = text.encode("utf-8")
        key = int.from_bytes(hashlib.blake2b(data, digest_size=7, key=_KEY).digest(), "big")
        if not data or (len(self.keys) == self.size and key >= -self.keys[0]):
            return
        (heapq.heappush if len(self.keys) < self.size else heapq.heapreplace)(self.keys, -key)
        self.rows.append((key, *features(data, self.tokens(text) if self.tokens is not None else None)))

    def take(self) -> list[Row]:
        """The rows since the last call that can be of the sample."""
        rows, self.rows = smallest(self.rows, self.size), []
        return rows


def smallest(rows: Iterable[Row], size: int) -> list[Row]:
    """The rows with the smallest hashes, in their order."""
    return heapq.nsmallest(size, rows)


def features(data: bytes, tokens: Sequence[int] | None = None) -> tuple[float, float, float]:
    """Length (bytes), compression ratio, entropy of the tokens (bits) of a text that is not empty.

    Args:
        data: the text in UTF-8.
        tokens: its ids; None: the bytes are the tokens.
    """
    ids = np.frombuffer(data, dtype=np.uint8) if tokens is None else np.asarray(tokens, dtype=np.int64)
    _, counts = np.unique(ids, return_counts=True)
    shares = counts / max(1, counts.sum())
    entropy = float(-(shares * np.log2(shares)).sum())
    return float(len(data)), len(data) / len(zlib.compress(data, 6)), max(0.0, entropy)


def feature_names(named: str) -> tuple[str, str, str]:
    """What the features are called where ``named`` are the tokens."""
    return "length", "compression ratio", "byte entropy" if named == BYTES else "token entropy"


def chance(reference: int, new: int) -> float:
    """The D that samples of these sizes from one corpus reach once in a thousand comparisons (Smirnov 1948)."""
    return 1.95 * math.sqrt(1 / reference + 1 / new)


def finding(moved: Moved, threshold: float, by_chance: float) -> tuple[str, str]:
    """(:data:`MOVED`, :data:`TOO_FEW` or :data:`SAME`, what is said about it)."""
    if moved.d <= threshold:
        return SAME, ""
    medians = f"(median {moved.reference:.4g} in the reference, {moved.new:.4g} now)"
    if moved.d > by_chance:
        return MOVED, f"drift: {moved.feature} moved, D {moved.d:.3f} is above {threshold:.3g} {medians}"
    told = f"D {moved.d:.3f} is above {threshold:.3g}, but chance alone makes it up to {by_chance:.3g} {medians}"
    return TOO_FEW, f"drift: too few documents to tell whether {moved.feature} moved: {told}"


def compare(reference: Sequence[Row], new: Sequence[Row], named: str = BYTES) -> list[Moved]:
    """The statistic of each feature; the most moved feature first. ``named`` are the tokens.

    Raises:
        ValueError: a sample is empty.
    """
    from scipy.stats import ks_2samp

    if not reference or not new:
        raise ValueError(f"nothing to compare: {len(reference)} documents in the reference, {len(new)} new ones")
    found = []
    for column, feature in enumerate(feature_names(named), 1):
        a, b = (np.array([row[column] for row in rows]) for rows in (reference, new))
        d = float(ks_2samp(a, b, method="asymp").statistic)
        found.append(Moved(feature, d, float(np.median(a)), float(np.median(b))))
    return sorted(found, key=lambda moved: -moved.d)


def check_reading(corpora: Sequence[str], reading: InputOptions) -> None:
    """Refuse options that fit no file of any of the corpora; profiles have none. Raises ValueError, OSError."""
    check_options(reading, [file for path in corpora if not path.endswith(PROFILE) for file in expand_inputs([path], "drift")])


def sample_of(
    path: str,
    size: int,
    reading: InputOptions,
    tokens: Tokens | None = None,
    named: str = BYTES,
    bad: Counter[str] | None = None,
) -> list[Row]:
    """The sample of a corpus (a file, pattern or directory), or of a profile; ``named`` says what ``tokens`` are.

    Bad records are counted in ``bad``, by reason.

    Raises:
        ValueError: a file that cannot be read, a profile of other samples, a bad record where they are not counted.
    """
    if path.endswith(PROFILE):
        return load_profile(path, size, named)
    sample, files = Sample(size, tokens), expand_inputs([path], "drift")
    check_options(replace(reading, separator=None), files)  # which fits the files of the other corpus perhaps
    for number, file in enumerate(files):
        for block in open_input(file, reading):
            records = read_block(number, block, 0, Keys(*reading.keys), bad is not None, "text_key (--text-key)")
            for document in records.documents:
                sample.add(document.text)
            if bad is not None:
                bad.update(found.why.reason for found in records.bad)
    return sample.take()


def save_profile(path: str, rows: Sequence[Row], size: int, named: str) -> None:
    """Write a sample: JSON with its numbers, no text. Raises ValueError: it is empty."""
    if not rows:
        raise ValueError("no document to make a profile of")
    Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    data = {"features": feature_names(named), "tokens": named, "size": size, "rows": rows}
    Path(path).write_text(json.dumps(data) + "\n", encoding="utf-8")


def load_profile(path: str, size: int, named: str) -> list[Row]:
    """Read one; its ``size`` smallest hashes.

    Raises:
        ValueError: it is none, or of a smaller sample, or of other tokens.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        rows = [(int(key), float(a), float(b), float(c)) for key, a, b, c in data["rows"]]
        same, has, tokens = data["features"] == list(feature_names(data["tokens"])), int(data["size"]), str(data["tokens"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no profile of a corpus ({error}): make one with data drift --save-profile") from None
    if not same or has < size:
        raise ValueError(f"{path} is a profile of {has} documents with {', '.join(data['features'])}: asked for is a sample of {size}")
    if tokens != named:
        give = "leave the tokenizer out" if tokens == BYTES else f"give {tokens}, or make a profile without a tokenizer"
        raise ValueError(f"{path} is a profile of the entropy of {'bytes' if tokens == BYTES else 'tokens'}: {give}")
    return smallest(rows, size)


class Drift(LocalStep):
    """See the head of this file."""

    name = "drift"
    Options = DriftOptions

    def __init__(self, options: DriftOptions) -> None:
        super().__init__(options)
        self.sample = Sample(options.sample)

    def apply(self, documents: Sequence[Document]) -> None:
        """Look at the documents; none changes."""
        for document in documents:
            self.sample.add(document.text)

    def take_notes(self) -> list[Row] | None:
        """Documents that can be of the sample."""
        return self.sample.take() or None

    @staticmethod
    def merge_notes(options: DriftOptions, left: list[Row], right: list[Row]) -> list[Row]:
        """The smallest hashes of both."""
        return smallest([tuple(row) for row in (*left, *right)], options.sample)  # type: ignore[misc]

    @staticmethod
    def facts(options: DriftOptions, notes: list[Row] | None) -> Facts:
        """D of each feature, and a warning for those above the threshold. (A bad record of the reference must not end a long run.)"""
        facts, bad = Facts(), Counter[str]()
        new = smallest([tuple(row) for row in notes or []], options.sample)  # type: ignore[misc]
        reference = sample_of(options.reference, options.sample, InputOptions((options.text_key,)), bad=bad)
        facts.numbers = {"documents compared, reference": len(reference), "documents compared, new": len(new)}
        facts.numbers.update({f"bad records of the reference: {reason}": n for reason, n in bad.items()})
        if not new or not reference:
            facts.warnings.append("one of the corpora is empty, nothing was compared")
            return facts
        for moved in compare(reference, new):
            facts.numbers[f"D of {moved.feature}"] = round(moved.d, 4)
            kind, told = finding(moved, options.threshold, chance(len(reference), len(new)))
            facts.warnings += [told.removeprefix("drift: ")] if kind != SAME else []  # a warning has its step's name
        return facts

    @staticmethod
    def problems(options: DriftOptions) -> list[str]:
        """Numbers out of range, the package."""
        found = []
        if not 0 < options.threshold < 1:
            found.append(f"threshold {options.threshold:g}: D is between 0 and 1")
        if options.sample < 10:
            found.append(f"sample {options.sample}: at least 10 documents")
        if importlib.util.find_spec("scipy") is None:
            found.append("the package scipy is not installed: pip install scipy")
        return found

    @staticmethod
    def files(options: DriftOptions) -> Sequence[str]:
        """The reference."""
        return [options.reference]
