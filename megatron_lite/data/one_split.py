"""One split of a run's data: its share of each source, their blend, and what to say about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.config.problem import Problem
from megatron_lite.config.schema_io import DataConfig
from megatron_lite.data.blend import BlendedDataset, MegatronBlend, WindowsBlend, normalised, tempered
from megatron_lite.data.curriculum import Curriculum, staged_blend
from megatron_lite.data.indexed import TokenStream
from megatron_lite.data.megatron_order import MegatronDataset
from megatron_lite.data.mix import Mix
from megatron_lite.data.packing import PackedDataset
from megatron_lite.data.row import Dataset
from megatron_lite.data.sources import Source
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
        mix: what training samples are drawn from; blend: the same, where there are several sources; curriculum: of them.
        facts: what decides about training rows besides files and flags: to be the same on all ranks and after a restart.
        seen: of each dataset the documents, sequences, tokens and checksum: to be the same on all ranks, whose nodes may
            have files of their own.
        masked: there are data with a loss mask.
    """

    train: Dataset | None = None
    valid: Dataset | None = None
    test: Dataset | None = None
    eod_id: int | None = None
    summary: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    mix: Mix | None = None
    blend: BlendedDataset | None = None
    curriculum: Curriculum | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, list[Any]] = field(default_factory=dict)
    masked: bool = False


@dataclass(frozen=True)
class Part:
    """A split's share of one source. ``number`` is the source's place on the command line."""

    number: int
    source: Source
    stream: TokenStream


class Split:
    """Builds one split; what it finds goes into ``result``."""

    def __init__(
        self,
        name: str,
        data: DataConfig,
        asked: int,
        seed: int,
        vocab_size: int | None,
        result: Datasets,
        curriculum: Curriculum | None = None,
    ) -> None:
        self.name, self.title, self.data, self.asked, self.seed = name, TITLES[name], data, asked, seed
        self.vocab_size, self.result, self.curriculum = vocab_size, result, curriculum
        self.cache = Path(data.data_cache_path) if data.data_cache_path else None
        self.places: dict[int, int] = {}  # of sources that are packed: tokens and padding of an epoch's rows

    def build(self, parts: list[Part]) -> Dataset | None:
        """The dataset, or None after a problem or a notice."""
        usable = self._usable(parts)
        if not usable:
            return None
        weighted = usable[0].source.weight is not None
        if self.data.sample_order == "megatron":
            dataset = self._megatron(usable, weighted or self.data.blend_temperature != 1)
        else:
            try:
                members = [self._member(p) for p in usable]
            except ValueError as error:  # documents without a target
                self.result.problems.append(Problem(str(error)))
                return None
            dataset = members[0] if len(members) == 1 else self._blended(usable, members)
        self._summarise(usable, dataset)
        if self.name == "train":
            names = dataset.names if isinstance(dataset, BlendedDataset) else [usable[0].source.prefix]
            weights = [float(w) for w in self._weights(usable)]
            self.result.mix = Mix(dataset, dict(zip(names, weights, strict=True)), self.curriculum)
        return dataset

    def _blended(self, parts: list[Part], members: Sequence[Dataset]) -> BlendedDataset:
        names, weights = [p.source.prefix for p in parts], self._weights(parts)
        blend = WindowsBlend(weights) if self.curriculum is None else staged_blend(self.curriculum, names, weights)
        return BlendedDataset(members, blend, names)

    def _member(self, part: Part) -> WindowDataset | PackedDataset:
        stream, size = part.stream, self.data.seq_length
        masked = stream.dataset.loss_mask is not None
        if self.data.packing == "windows":
            if masked:
                self.result.notices.append(
                    f"{stream.name}: windows cut conversations anywhere, answers may lose their question: --packing best-fit"
                )
            return WindowDataset(stream, size, self.seed, salt=part.number, vocab_size=self.vocab_size)
        padding = self.result.eod_id or 0
        packed = PackedDataset(
            stream, size, self.seed, salt=part.number, vocab_size=self.vocab_size, padding_id=padding,
            cache=self.cache, tell=self.result.summary.append,
        )  # fmt: skip
        self.result.summary.append(f"{stream.name}: {packed.describe()}")
        if masked and packed.plan.cut:
            self.result.notices.append(
                f"{stream.name}: {packed.plan.cut:,} of {packed.plan.documents:,} conversations are longer than a row and cut, answers "
                f"may lose their question: a longer --seq-length, or data chat --seq-length {size}, which leaves them out and counts them"
            )
        self.places[part.number] = len(packed) * size
        return packed

    def _usable(self, parts: list[Part]) -> list[Part]:
        """The parts that are drawn from and long enough."""
        drawn = [p for p in parts if p.source.weight != 0 or self._staged(p)]
        windows = self.data.packing == "windows"
        needed = self.data.seq_length + 1 if windows else 2
        usable = [p for p in drawn if p.stream.num_tokens >= needed]
        short = [p for p in drawn if p.stream.num_tokens < needed]
        if not usable and not any(p.stream.num_tokens for p in drawn):
            shares = f" (--split {self.data.split})" if self.data.data_path else ""
            sequences = sum(len(p.stream.dataset) for p in parts)
            if self.name == "train":
                what = f"the training split is empty{shares}"
                nearest = "another --split" if shares else "data with tokens"
                self.result.problems.append(Problem(what, f"{sequences} sequences in {len(parts)} sources", "", nearest))
            else:
                self.result.notices.append(f"the {self.title} split is empty{shares}: no {self.title} loss")
            return []
        rule = f"one sample takes --seq-length + 1 = {needed} tokens" if windows else "one sample takes 2 tokens"
        if self.name == "train" and short and (not usable or short[0].source.weight is not None or any(map(self._staged, short))):
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

    def _staged(self, part: Part) -> bool:
        """Whether a stage of the curriculum draws from a source by its name."""
        return self.curriculum is not None and self.curriculum.draws(part.source.prefix)

    def _weights(self, parts: list[Part]) -> list[float]:
        """As given, or else the tokens of each; to the power of 1 / temperature."""
        given = [p.stream.num_tokens if p.source.weight is None else p.source.weight for p in parts]
        return tempered(given, self.data.blend_temperature) if any(given) else given  # all 0: the stages have their own

    def _megatron(self, parts: list[Part], weighted: bool) -> Dataset:
        if len(parts) == 1 and not weighted:
            return self._megatron_member(parts[0], self.asked)
        names = [p.source.prefix for p in parts]
        if not weighted:
            members = [self._megatron_member(p, None) for p in parts]
            lengths = [len(m) for m in members]
            if self.asked <= sum(lengths):
                return BlendedDataset(members, self._megatron_blend(normalised(lengths), self.asked), names)
            self.result.notices.append(
                f"{self.asked} {self.title} samples asked of {sum(lengths)} in one epoch of sources without weights: they "
                "are repeated in proportion to their lengths (Megatron-LM would run out of data)"
            )
            weights = normalised(lengths)
        else:
            weights = normalised(self._weights(parts))
        counts = [math.ceil(self.asked * w) for w in weights.tolist()]
        members = [self._megatron_member(p, math.ceil(c * (1 + SURPLUS))) for p, c in zip(parts, counts, strict=True)]
        return BlendedDataset(members, self._megatron_blend(normalised(weights.tolist()), sum(counts)), names)

    def _megatron_blend(self, weights: np.ndarray, size: int) -> MegatronBlend:
        return MegatronBlend(weights, size, cache=self.cache, tell=self.result.summary.append)

    def _megatron_member(self, part: Part, asked: int | None) -> MegatronDataset:
        stream, eod_id = part.stream, self.result.eod_id if self.data.document_mask else None
        return MegatronDataset(
            stream.dataset, stream.part, self.data.seq_length, asked, self.seed,
            eod_id=eod_id, vocab_size=self.vocab_size, name=stream.name,
            cache=self.cache, tell=self.result.summary.append,
        )  # fmt: skip

    def _summarise(self, parts: list[Part], dataset: Dataset) -> None:
        tokens = [p.stream.num_tokens for p in parts]
        documents = sum(p.stream.num_documents for p in parts)
        places = [self.places.get(p.number, p.stream.num_tokens) for p in parts]
        whole = self.asked * self.data.seq_length / sum(places)
        sources = "" if len(parts) == 1 else f" in {len(parts)} sources"
        order = f"{self.data.sample_order} order" if self.data.packing == "windows" else f"{self.data.packing} packing"
        self.result.summary.append(
            f"{self.title}: {documents:,} documents, {sum(tokens):,} tokens{sources}; {self.asked:,} samples of "
            f"{self.data.seq_length:,} tokens are {_epochs(whole)} ({order})"
        )
        if self.name == "train" and isinstance(dataset, BlendedDataset):
            counts = list(dataset.consumed(self.asked).values())
            epochs = [n * self.data.seq_length / place for n, place in zip(counts, places, strict=True)]
            for p, n, e in list(zip(parts, counts, epochs, strict=True))[:_LISTED]:
                text = f"{p.stream.num_documents:,} documents, {p.stream.num_tokens:,} tokens, {_epochs(e)}"
                self.result.summary.append(f"  {100 * n / self.asked:.3g}% {p.source.prefix}: {n:,} samples; {text}")
            if len(parts) > _LISTED:
                self.result.summary.append(f"  and {len(parts) - _LISTED} more; up to {_epochs(max(epochs))}")


def _epochs(number: float) -> str:
    return f"{number:.3g} epochs" if number >= 0.01 else "less than 0.01 epochs"
