"""The step ``perplexity``: keeps documents that a language model finds neither too likely nor too unlikely.

The measure is bits per byte of UTF-8, not perplexity per token: its bounds mean the same for every tokenizer. Bounds are a
band for each language. From below, since text that a model foretells is boilerplate and repetition; "perplexity below
100", without a language, a tokenizer or a lower bound, keeps that and drops good text (2^(bits per byte * bytes per token)
is the perplexity per token). English prose has about 0.8 to 1.3 bits per byte for a good model, 2 and more for a small one:
score a sample first and place the band by the report's quantiles and histogram.

Scorers: a KenLM file (Heafield 2011), whose package is installed by hand, over words, or over the pieces of a SentencePiece
model as CCNet does (Wenzek et al. 2019, arXiv:1911.00359); or a small model that this project has trained.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lite.clean.step import NO_BOUNDS, NO_LANGUAGE, Document, Facts, LocalStep

CHECKPOINT = "checkpoint:"
ANY = "any"
_WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\s\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")
_FINE = 100  # bins that are counted, for each bit per byte
_SHOWN = 10  # of them in a bin of the histogram
_QUANTILES = (5, 25, 50, 75, 95)  # percent

Bins = dict[str, int]  # number of a fine bin (a text, as JSON has it) -> documents


@dataclass(frozen=True)
class PerplexityOptions:
    """Options of the step ``perplexity``."""

    scorer: str
    """``checkpoint:DIR``, where DIR is the ``--save`` of a run of this project, or a KenLM file (.arpa, .bin). ``{language}`` in
    the name of a KenLM file stands for the code of each language of ``bands``."""
    bands: dict[str, list[float]] = field(default_factory=dict)
    """Least and largest bits per byte of a language, as in ``en: [0.6, 1.6]``; the language ``any`` is all others. Documents
    of a language without a band pass and are counted. Empty: nothing is dropped, the report shows quantiles and a histogram."""
    sentencepiece: str = ""
    """SentencePiece model whose pieces the KenLM file was made from, ``{language}`` as above; empty: words between spaces,
    Chinese and Japanese by character."""
    first_characters: int = 4096
    """Only the beginning of a longer text is scored."""


class Perplexity(LocalStep):
    """See the head of this file."""

    name = "perplexity"
    Options = PerplexityOptions

    def __init__(self, options: PerplexityOptions) -> None:
        super().__init__(options)
        self.bands = {code: (float(low), float(high)) for code, (low, high) in options.bands.items()}
        self.scorers = _scorers(options, self.bands)
        self.bins: dict[str, Counter[str]] = {}

    def apply(self, documents: Sequence[Document]) -> None:
        """Drop what is outside of its band."""
        for document in documents:
            code = document.language if document.language in self.bands else ANY
            scorer = self.scorers.get(code, self.scorers.get(ANY))
            band = self.bands.get(code, (0.0, math.inf) if not self.bands else None)
            if band is None or scorer is None:
                self.count(NO_BOUNDS if document.language else NO_LANGUAGE)
                continue
            text = document.text[: self.options.first_characters]
            score = scorer(text) / len(text.encode("utf-8"))
            self.bins.setdefault(document.language or "unknown", Counter())[str(int(score * _FINE))] += 1
            if score < band[0]:
                document.dropped, document.detail = "too few bits per byte", f"bands.{code}: {score:.4g} < {band[0]:g}"
            elif score > band[1]:
                document.dropped, document.detail = "too many bits per byte", f"bands.{code}: {score:.4g} > {band[1]:g}"

    def take_notes(self) -> dict[str, Bins] | None:
        """Documents of each language in each fine bin of bits per byte."""
        bins, self.bins = self.bins, {}
        return {code: dict(found) for code, found in bins.items()} or None

    @staticmethod
    def merge_notes(options: Any, left: dict[str, Bins], right: dict[str, Bins]) -> dict[str, Bins]:
        """Sums."""
        sums = {code: Counter(left.get(code, {})) + Counter(right.get(code, {})) for code in sorted({*left, *right})}
        return {code: {n: bins[n] for n in sorted(bins, key=int)} for code, bins in sums.items()}

    @staticmethod
    def facts(options: Any, notes: dict[str, Bins] | None) -> Facts:
        """Quantiles and histograms of bits per byte."""
        facts = Facts()
        for code, bins in sorted((notes or {}).items()):
            counts = Counter({int(n): documents for n, documents in bins.items()})
            for percent in _QUANTILES:
                facts.numbers[f"bits per byte, {code}: {percent}% of the documents have at most"] = _quantile(counts, percent)
            shown: Counter[int] = Counter()
            for n, documents in counts.items():
                shown[n // _SHOWN] += documents
            facts.histograms[f"bits per byte, {code}"] = {
                f"{n * _SHOWN / _FINE:.1f}": shown[n] for n in range(min(shown), max(shown) + 1)
            }
        return facts

    @staticmethod
    def problems(options: PerplexityOptions) -> list[str]:
        """Bands that are none, a package or file that is missing."""
        found = []
        for code, band in options.bands.items():
            numbers = isinstance(band, list) and all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in band)
            if not numbers or len(band) != 2 or not 0 <= band[0] < band[1]:
                found.append(f"bands.{code} {band!r}: expected [least, largest] bits per byte, as in [0.6, 1.6]")
        if options.first_characters < 1:
            found.append(f"first_characters {options.first_characters}: at least 1")
        if options.scorer.startswith(CHECKPOINT):
            if problem := _checkpoint_problem(options.scorer.removeprefix(CHECKPOINT)):
                found.append(f"scorer {options.scorer}: {problem}")
            if options.sentencepiece:
                found.append("sentencepiece: only with a KenLM file; a checkpoint has a tokenizer of its own")
        elif importlib.util.find_spec("kenlm") is None:
            found.append(f"scorer {options.scorer}: KenLM files need the package kenlm: pip install kenlm")
        if "{language}" in options.scorer and (not options.bands or ANY in options.bands):
            found.append(f"scorer {options.scorer}: {{language}} needs a band for each language, and none for '{ANY}'")
        return found

    @staticmethod
    def files(options: PerplexityOptions) -> Sequence[str]:
        """KenLM files and SentencePiece models."""
        if options.scorer.startswith(CHECKPOINT):
            return []
        names = [options.scorer, *([options.sentencepiece] if options.sentencepiece else [])]
        return sorted({name.replace("{language}", code) for name in names for code in options.bands or [ANY]})

    @staticmethod
    def needs_language(options: PerplexityOptions) -> bool:
        """Where a language has a band of its own."""
        return bool(set(options.bands) - {ANY})


def _quantile(counts: Counter[int], percent: int) -> float:
    """Bits per byte, to a fine bin, that so many of a hundred documents have at most."""
    wanted, below, n = percent * counts.total(), 0, 0
    for n in sorted(counts):
        below += counts[n]
        if 100 * below >= wanted:
            break
    return (n + 1) / _FINE


def _checkpoint_problem(directory: str) -> str:
    """What is wrong with the directory of a checkpoint; empty: nothing."""
    from megatron_lite.checkpoint.manifest import find_checkpoint

    if not os.path.isdir(directory):
        return f"{directory or 'no name'} is no directory; give the --save of a run"
    try:
        return "" if find_checkpoint(Path(directory)) else f"{directory} holds no checkpoint; give the --save of a run"
    except ValueError as error:
        return str(error)


def _scorers(options: PerplexityOptions, bands: Mapping[str, object]) -> dict[str, Callable[[str], float]]:
    """Language, or ``any`` -> function that gives a text's bits."""
    if options.scorer.startswith(CHECKPOINT):
        from megatron_lite.train.score import CheckpointScorer

        return {ANY: CheckpointScorer(Path(options.scorer.removeprefix(CHECKPOINT))).bits}
    if "{language}" not in options.scorer:
        return {ANY: KenlmScorer(options.scorer, options.sentencepiece).bits}
    return {
        code: KenlmScorer(options.scorer.replace("{language}", code), options.sentencepiece.replace("{language}", code)).bits
        for code in bands
    }


class KenlmScorer:
    """Scores texts line by line with a KenLM file.

    Args:
        path: .arpa or .bin.
        sentencepiece: model whose pieces are its words, or "".
    """

    def __init__(self, path: str, sentencepiece: str) -> None:
        self.model: Any = importlib.import_module("kenlm").Model(path)  # installed by hand, known to no type checker
        self.pieces: Any = None
        if sentencepiece:
            import sentencepiece as library

            self.pieces = library.SentencePieceProcessor(model_file=sentencepiece)

    def bits(self, text: str) -> float:
        """Minus the binary logarithm of the text's probability."""
        total = 0.0
        for line in text.split("\n"):
            if line.strip():
                words = self.pieces.encode(line, out_type=str) if self.pieces is not None else _WORDS.findall(line)
                total -= self.model.score(" ".join(words), bos=True, eos=True)
        return total * math.log2(10)
