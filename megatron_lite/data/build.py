"""The training, validation and test datasets of a run, and what to say about them.

Everything that can be wrong is found before anything is trained: missing or broken files, sources too short for one
sample, ids outside the vocabulary, an end-of-document id that is not the tokenizer's, an empty training split. All of
it goes into one list of problems, the same on every rank, since every rank looks at the same files. An empty
validation or test split is no problem but a notice: there is no such evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.config.problem import Problem
from megatron_lite.config.schema_io import DataConfig
from megatron_lite.data.access import Access
from megatron_lite.data.blend import BlendedDataset, MegatronBlend, WindowsBlend, normalised
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.megatron_order import MegatronDataset
from megatron_lite.data.mock import MockDataset
from megatron_lite.data.packing import PackedDataset
from megatron_lite.data.row import Dataset
from megatron_lite.data.sources import (
    Source,
    agreed_eod,
    open_all,
    parse_sources,
    tokenizer_notices,
    vocabulary_problems,
)
from megatron_lite.data.splits import SPLIT_NAMES, parse_split, split_ranges
from megatron_lite.data.stream import TokenStream
from megatron_lite.data.windows import WindowDataset

TITLES = {"train": "training", "valid": "validation", "test": "test"}
SURPLUS = 0.005  # members of a megatron blend hold this much more than their share
_LISTED = 20


@dataclass
class Datasets:
    """What a run reads.

    Attributes:
        train, valid, test: None where there is none, or none was asked for.
        eod_id: the end-of-document id, of the tokenizer or the data; None when neither tells.
        summary: lines for the start-up text: documents, tokens, samples, epochs of each split.
        notices: what is worth knowing and no problem.
        problems: what must be changed before the run can start.
    """

    train: Dataset | None = None
    valid: Dataset | None = None
    test: Dataset | None = None
    eod_id: int | None = None
    summary: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def build_datasets(
    data: DataConfig,
    *,
    asked: tuple[int, int, int],
    seed: int,
    vocab_size: int | None = None,
    eod_id: int | None = None,
    fingerprint: str | None = None,
    access: Access | None = None,
) -> Datasets:
    """Open and check everything that ``data`` names.

    Args:
        asked: samples asked of training, validation, test
            (:func:`megatron_lite.data.megatron_order.samples_asked`); 0: not needed.
        seed: of the sample order.
        vocab_size: true vocabulary size of the model.
        eod_id, fingerprint: of the tokenizer, where there is one.
        access: how token files are read.
    """
    if data.mock_data:
        return _mock(data, asked, seed, vocab_size, eod_id)
    result = Datasets()
    groups = _groups(data, result.problems)
    opened, found = open_all((s.prefix for sources, _ in groups.values() for s in sources), access)
    result.problems += found
    result.eod_id, found = agreed_eod(opened, eod_id)
    result.problems += found + vocabulary_problems(opened, vocab_size)
    result.notices += tokenizer_notices(opened, fingerprint)
    result.problems += _order_problems(data, opened)
    without_end = [
        name for name, d in opened.items() if d.meta is not None and d.meta.eod_id is None and d.loss_mask is None
    ]
    if without_end and not result.problems:
        names = ", ".join(without_end[:3]) + (" and others" if len(without_end) > 3 else "")
        result.notices.append(f"tokenized without --append-eod: {names}; the model does not learn where a text ends")
    if result.eod_id is None and not result.problems:
        result.problems += _eod_needed(data)
    if result.problems:
        return result
    for index, name in enumerate(SPLIT_NAMES):
        if name in groups and asked[index]:
            parts = _parts(name, index, *groups[name], opened)
            builder = _Split(name, data, asked[index], seed, vocab_size, result)
            setattr(result, name, builder.build(parts))
        elif asked[index] and name != "train":
            result.notices.append(f"no {TITLES[name]} data were given: no {TITLES[name]} loss")
    return result


def _mock(
    data: DataConfig, asked: tuple[int, int, int], seed: int, vocab_size: int | None, eod_id: int | None
) -> Datasets:
    result = Datasets(eod_id=eod_id, summary=["data: made up (--mock-data), endless"])
    try:
        for name, count in zip(SPLIT_NAMES, asked, strict=True):
            if count:
                made = MockDataset(vocab_size or 0, data.seq_length, seed, split=name, eod_id=eod_id)
                result.eod_id = made.eod_id
                setattr(result, name, made)
    except ValueError as error:
        result.problems.append(Problem(str(error)))
    return result


def _groups(data: DataConfig, problems: list[Problem]) -> dict[str, tuple[list[Source], tuple[float, ...] | None]]:
    """For each split its sources, and the fractions that divide them (None: all of them is the split's)."""
    own = {name: entries for name in SPLIT_NAMES if (entries := getattr(data, f"{name}_data_path"))}
    if data.data_path and own:
        flags = ", ".join(f"--{name}-data-path" for name in own)
        problems.append(
            Problem(f"--data-path beside {flags}", rule="either one source that --split divides, or their own")
        )
    elif not data.data_path and not own:
        problems.append(Problem("there is no data", nearest="--data-path PREFIX, or --mock-data"))
    groups: dict[str, tuple[list[Source], tuple[float, ...] | None]] = {}
    try:
        if data.data_path:
            fractions = parse_split(data.split)
            groups = dict.fromkeys(SPLIT_NAMES, (parse_sources(data.data_path), fractions))
        for name, entries in own.items():
            groups[name] = (parse_sources(entries, f"--{name}-data-path"), None)
    except ValueError as error:
        problems.append(Problem(str(error)))
    return groups


def _order_problems(data: DataConfig, opened: dict[str, IndexedDataset]) -> list[Problem]:
    """What the megatron order cannot do: it finds documents by end tokens, which end every turn of a conversation."""
    if data.sample_order != "megatron":
        return []
    found = []
    if data.packing != "windows":
        what = f"--packing {data.packing} with --sample-order megatron, which cuts rows out of shuffled documents"
        found.append(Problem(what, nearest="--sample-order windows"))
    masked = [name for name, d in opened.items() if d.loss_mask is not None]
    if masked:
        what = f"--sample-order megatron reads no loss masks: {', '.join(masked[:3])}"
        found.append(Problem(what, nearest="--sample-order windows, with --packing best-fit for conversations"))
    return found


def _eod_needed(data: DataConfig) -> list[Problem]:
    """Options that need the end-of-document id, when nobody knows it."""
    nearest = "a tokenizer, or data with a .meta.json that tells it"
    found = []
    if data.eod_mask_loss:
        found.append(Problem("--eod-mask-loss needs the end-of-document id, and nothing tells it", nearest=nearest))
    if data.sample_order == "megatron" and data.document_mask:
        what = "--sample-order megatron finds documents by the end-of-document id, and nothing tells it"
        found.append(Problem(what, nearest=f"{nearest}; or --document-mask off"))
    return found


@dataclass(frozen=True)
class _Part:
    """A split's share of one source. ``number`` is the source's place on the command line."""

    number: int
    source: Source
    stream: TokenStream


def _parts(
    name: str,
    index: int,
    sources: Sequence[Source],
    fractions: Any,
    opened: dict[str, IndexedDataset],
) -> list[_Part]:
    parts = []
    for number, source in enumerate(sources):
        dataset = opened[source.prefix]
        part = split_ranges(fractions, len(dataset))[index] if fractions else range(len(dataset))
        parts.append(_Part(number, source, TokenStream(dataset, part, f"{source.prefix} ({TITLES[name]})")))
    return parts


class _Split:
    """Builds one split; what it finds goes into ``result``."""

    def __init__(
        self, name: str, data: DataConfig, asked: int, seed: int, vocab_size: int | None, result: Datasets
    ) -> None:
        self.name, self.title, self.data, self.asked, self.seed = name, TITLES[name], data, asked, seed
        self.vocab_size, self.result = vocab_size, result
        self.places: dict[int, int] = {}  # of sources that are packed: tokens and padding of an epoch's rows

    def build(self, parts: list[_Part]) -> Dataset | None:
        """The dataset, or None after a problem or a notice."""
        usable = self._usable(parts)
        if not usable:
            return None
        weighted = usable[0].source.weight is not None
        if self.data.sample_order == "megatron":
            dataset = self._megatron(usable, weighted)
        else:
            try:
                members = [self._member(p) for p in usable]
            except ValueError as error:  # documents without a target
                self.result.problems.append(Problem(str(error)))
                return None
            dataset = members[0] if len(members) == 1 else BlendedDataset(members, WindowsBlend(self._weights(usable)))
        self._summarise(usable)
        return dataset

    def _member(self, part: _Part) -> WindowDataset | PackedDataset:
        stream, size = part.stream, self.data.seq_length
        if self.data.packing == "windows":
            return WindowDataset(stream, size, self.seed, salt=part.number, vocab_size=self.vocab_size)
        padding = self.result.eod_id or 0
        packed = PackedDataset(
            stream, size, self.seed, salt=part.number, vocab_size=self.vocab_size, padding_id=padding
        )
        self.result.summary.append(f"{stream.name}: {packed.describe()}")
        self.places[part.number] = len(packed) * size
        return packed

    def _usable(self, parts: list[_Part]) -> list[_Part]:
        """The parts that are drawn from and long enough."""
        drawn = [p for p in parts if p.source.weight != 0]
        windows = self.data.packing == "windows"
        needed = self.data.seq_length + 1 if windows else 2
        usable = [p for p in drawn if p.stream.num_tokens >= needed]
        short = [p for p in drawn if p.stream.num_tokens < needed]
        if not usable and not any(p.stream.num_tokens for p in drawn):
            shares = f" (--split {self.data.split})" if self.data.data_path else ""
            sequences = sum(len(p.stream.dataset) for p in parts)
            if self.name == "train":
                what = f"the training split is empty{shares}"
                self.result.problems.append(
                    Problem(what, f"{sequences} sequences in {len(parts)} sources", "", "another --split")
                )
            else:
                self.result.notices.append(f"the {self.title} split is empty{shares}: no {self.title} loss")
            return []
        rule = f"one sample takes --seq-length + 1 = {needed} tokens" if windows else "one sample takes 2 tokens"
        if self.name == "train" and short and (not usable or short[0].source.weight is not None):
            for p in short[:5]:
                what = f"{p.stream.name} is too short for one sample"
                nearest = f"--seq-length {p.stream.num_tokens - 1}" if p.stream.num_tokens > 1 else "leave it out"
                self.result.problems.append(Problem(what, f"{p.stream.num_tokens} tokens", rule, nearest))
            return []
        if short:
            listed = ", ".join(f"{p.source.prefix} ({p.stream.num_tokens} tokens)" for p in short[:3])
            more = f" and {len(short) - 3} more" if len(short) > 3 else ""
            end = "left out" if usable else f"no {self.title} loss"
            self.result.notices.append(f"too short for one {self.title} sample, {end}: {listed}{more}; {rule}")
        return usable

    def _weights(self, parts: list[_Part]) -> list[float]:
        """As given, or else the tokens of each."""
        return [p.stream.num_tokens if p.source.weight is None else p.source.weight for p in parts]

    def _megatron(self, parts: list[_Part], weighted: bool) -> Dataset:
        if len(parts) == 1 and not weighted:
            return self._megatron_member(parts[0], self.asked)
        if not weighted:
            members = [self._megatron_member(p, None) for p in parts]
            lengths = [len(m) for m in members]
            if self.asked <= sum(lengths):
                return BlendedDataset(members, MegatronBlend(normalised(lengths), self.asked))
            self.result.notices.append(
                f"{self.asked} {self.title} samples asked of {sum(lengths)} in one epoch of sources without weights: they "
                "are repeated in proportion to their lengths (Megatron-LM would run out of data)"
            )
            weights = normalised(lengths)
        else:
            weights = normalised(self._weights(parts))
        counts = [math.ceil(self.asked * w) for w in weights.tolist()]
        members = [self._megatron_member(p, math.ceil(c * (1 + SURPLUS))) for p, c in zip(parts, counts, strict=True)]
        return BlendedDataset(members, MegatronBlend(normalised(weights.tolist()), sum(counts)))

    def _megatron_member(self, part: _Part, asked: int | None) -> MegatronDataset:
        stream, eod_id = part.stream, self.result.eod_id if self.data.document_mask else None
        return MegatronDataset(
            stream.dataset, stream.part, self.data.seq_length, asked, self.seed,
            eod_id=eod_id, vocab_size=self.vocab_size, name=stream.name,
        )  # fmt: skip

    def _summarise(self, parts: list[_Part]) -> None:
        weights = normalised(self._weights(parts)).tolist()
        tokens = [p.stream.num_tokens for p in parts]
        documents = sum(p.stream.num_documents for p in parts)
        places = [self.places.get(p.number, p.stream.num_tokens) for p in parts]
        epochs = [self.asked * w * self.data.seq_length / t for w, t in zip(weights, places, strict=True)]
        whole = self.asked * self.data.seq_length / sum(places)
        sources = "" if len(parts) == 1 else f" in {len(parts)} sources"
        self.result.summary.append(
            f"{self.title}: {documents:,} documents, {sum(tokens):,} tokens{sources}; {self.asked:,} samples of "
            f"{self.data.seq_length:,} tokens are {_epochs(whole)} ({self.data.sample_order} order)"
        )
        if len(parts) > 1 and self.name == "train":
            for p, w, e in list(zip(parts, weights, epochs, strict=True))[:_LISTED]:
                text = f"{p.stream.num_documents:,} documents, {p.stream.num_tokens:,} tokens, {_epochs(e)}"
                self.result.summary.append(f"  {100 * w:.3g}% {p.source.prefix}: {text}")
            if len(parts) > _LISTED:
                self.result.summary.append(f"  and {len(parts) - _LISTED} more; up to {_epochs(max(epochs))}")


def _epochs(number: float) -> str:
    return f"{number:.3g} epochs" if number >= 0.01 else "less than 0.01 epochs"
