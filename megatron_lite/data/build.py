"""The training, validation and test datasets of a run, and what to say about them.

Everything that can be wrong is found before anything is trained: missing or broken files, sources too short for one
sample, ids outside the vocabulary, an end-of-document id that is not the tokenizer's, an empty training split. All of
it goes into one list of problems, the same on every rank, since every rank looks at the same files. An empty
validation or test split is no problem but a notice: there is no such evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_lite.config.problem import ConfigError, Problem
from megatron_lite.config.schema_io import DataConfig
from megatron_lite.data.access import Access
from megatron_lite.data.blend import BlendedDataset
from megatron_lite.data.curriculum import Curriculum, ShorterRows, load_curriculum
from megatron_lite.data.indexed import IndexedDataset, TokenStream
from megatron_lite.data.mock import MockDataset
from megatron_lite.data.one_split import TITLES, Datasets, Part, Split
from megatron_lite.data.sources import (
    SPLIT_NAMES,
    Source,
    agreed_eod,
    open_all,
    other_tokenizers,
    parse_sources,
    parse_split,
    split_ranges,
    vocabulary_problems,
)
from megatron_lite.data.transform import TransformedRows, load_transform


def build_datasets(
    data: DataConfig,
    *,
    asked: tuple[int, int, int],
    seed: int,
    vocab_size: int | None = None,
    eod_id: int | None = None,
    fingerprint: str | None = None,
    tokenizer_flags: str = "",
    access: Access | None = None,
) -> Datasets:
    """Open and check everything that ``data`` names.

    Args:
        asked: samples asked of training, validation, test
            (:func:`megatron_lite.data.megatron_order.samples_asked`); 0: not needed.
        seed: of the sample order.
        vocab_size: true vocabulary size of the model.
        eod_id: of the tokenizer, where there is one.
        fingerprint, tokenizer_flags: of the tokenizer that gives ids their meaning, where there is one.
        access: how token files are read.
    """
    result = Datasets()
    groups = {} if data.mock_data else _groups(data, result.problems)
    drawn = [s.prefix for s in groups["train"][0]] if "train" in groups else None
    curriculum = _curriculum(data, drawn, result.problems)
    if data.mock_data:
        _mock(data, asked, seed, vocab_size, eod_id, result)
        return _finish(data, seed, vocab_size, result, curriculum)
    opened, found = open_all((s.prefix for sources, _ in groups.values() for s in sources), access)
    result.problems += found
    for name, d in opened.items():
        result.seen[name] = [d.num_documents, len(d), d.num_tokens, d.meta and d.meta.sha256_bin]
    result.masked = any(d.loss_mask is not None for d in opened.values())
    result.eod_id, found = agreed_eod(opened, eod_id)
    # Another tokenizer is one problem, not also an end-of-document id and a vocabulary that differ.
    other = other_tokenizers(opened, fingerprint, tokenizer_flags)
    result.problems += other or [*found, *vocabulary_problems(opened, vocab_size)]
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
            stages = curriculum if name == "train" else None
            builder = Split(name, data, asked[index], seed, vocab_size, result, stages)
            setattr(result, name, builder.build(parts))
        elif asked[index] and name != "train":
            result.notices.append(f"no {TITLES[name]} data were given: no {TITLES[name]} loss")
    return _finish(data, seed, vocab_size, result, curriculum)


def _curriculum(data: DataConfig, names: list[str] | None, problems: list[Problem]) -> Curriculum | None:
    """The schedule file of ``--curriculum``, whose weights are of the named sources."""
    if data.curriculum is None:
        return None
    what, weighted = f"--curriculum {data.curriculum} has weights of sources", []
    if data.mock_data:
        weighted.append(Problem(f"{what}, and --mock-data has none"))
    if data.sample_order == "megatron":
        rule = "the megatron order fixes its blend from the first sample to the last"
        weighted.append(Problem(f"{what}, with --sample-order megatron", "", rule, "--sample-order windows"))
    try:
        return load_curriculum(data.curriculum, data.seq_length, names, weighted=weighted)
    except ConfigError as error:
        problems += error.problems
        return None


def _finish(
    data: DataConfig, seed: int, vocab_size: int | None, result: Datasets, curriculum: Curriculum | None
) -> Datasets:
    """What is done to training rows, whichever dataset they are from."""
    train = result.train
    if train is None or result.problems:
        return result
    result.blend = train if isinstance(train, BlendedDataset) else None
    result.curriculum = curriculum
    if curriculum is not None:
        result.facts["curriculum"] = curriculum.as_data()
        result.summary += [f"curriculum {curriculum.name}:", *curriculum.describe()]
        train = ShorterRows(train, curriculum)
    if data.transform is not None:
        try:
            transform = load_transform(data.transform)
        except ValueError as error:
            result.problems.append(Problem(str(error)))
            return result
        result.facts["transform"] = {"name": transform.name, "code": transform.digest}
        result.summary.append(f"every training row passes through {transform.name}")
        train = TransformedRows(train, transform, seed, vocab_size)
    result.train = train
    return result


def _mock(
    data: DataConfig,
    asked: tuple[int, int, int],
    seed: int,
    vocab_size: int | None,
    eod_id: int | None,
    result: Datasets,
) -> None:
    result.eod_id = eod_id
    result.summary.append("data: made up (--mock-data), endless")
    try:
        for name, count in zip(SPLIT_NAMES, asked, strict=True):
            if count:
                made = MockDataset(vocab_size or 0, data.seq_length, seed, split=name, eod_id=eod_id)
                result.eod_id = made.eod_id
                setattr(result, name, made)
    except ValueError as error:
        result.problems.append(Problem(str(error)))


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


def _parts(
    name: str,
    index: int,
    sources: Sequence[Source],
    fractions: Any,
    opened: dict[str, IndexedDataset],
) -> list[Part]:
    parts = []
    for number, source in enumerate(sources):
        dataset = opened[source.prefix]
        part = split_ranges(fractions, len(dataset))[index] if fractions else range(len(dataset))
        parts.append(Part(number, source, TokenStream(dataset, part, f"{source.prefix} ({TITLES[name]})")))
    return parts
