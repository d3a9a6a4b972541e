"""What ``--data-path`` names: prefixes, weights, whether the files fit the tokenizer; and how ``--split`` divides each."""

from __future__ import annotations

import math
import re
import resource
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megatron_lite.config.problem import Problem
from megatron_lite.data.access import Access
from megatron_lite.data.blend import check_weights
from megatron_lite.data.index_format import MASK_SUFFIX, DatasetMeta
from megatron_lite.data.indexed import IndexedDataset, open_mask

SPLIT_NAMES = ("train", "valid", "test")
_SCAN_UP_TO = 1 << 26  # tokens in all; files without .meta.json beyond that have their ids checked row by row


@dataclass(frozen=True)
class Source:
    """One entry of a blend.

    Attributes:
        prefix: path without suffix.
        weight: as given, or None when the blend has no weights.
    """

    prefix: str
    weight: float | None = None


def parse_sources(entries: Sequence[str], flag: str = "--data-path") -> list[Source]:
    """``PREFIX``, ``WEIGHT PREFIX`` pairs, or several ``PREFIX`` as sources.

    Raises:
        ValueError: weights and prefixes do not alternate, or weights are negative or all zero.
    """
    numbers = [_number(entry) for entry in entries]
    if len(entries) < 2 or numbers[0] is None:
        if any(n is not None for n in numbers[1:]):
            raise ValueError(f"{flag} {' '.join(entries)}: give WEIGHT PREFIX pairs, or prefixes only")
        return [Source(entry) for entry in entries]
    weights = numbers[0::2]
    if len(entries) % 2 or any(w is None for w in weights):
        raise ValueError(f"{flag} {' '.join(entries)}: weights and prefixes do not alternate; give WEIGHT PREFIX pairs")
    try:
        check_weights([w for w in weights if w is not None])
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
    return [Source(prefix, weight) for weight, prefix in zip(weights, entries[1::2], strict=True)]


def open_all(prefixes: Iterable[str], access: Access | None = None) -> tuple[dict[str, IndexedDataset], list[Problem]]:
    """Every dataset once, several at a time (opening waits for the file system); and what is wrong with them."""
    unique = list(dict.fromkeys(prefixes))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # shells allow 1,024, and a map keeps its file open too
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opened: dict[str, IndexedDataset] = {}
    problems: list[Problem] = []

    def attempt(prefix: str) -> IndexedDataset | str:
        try:
            dataset = IndexedDataset(prefix, access)
            dataset.loss_mask = open_mask(dataset)
        except (OSError, ValueError) as error:
            return str(error) if prefix in str(error) else f"{prefix}: {error}"
        if prefix.endswith(MASK_SUFFIX) and dataset.dtype.itemsize == 1:  # its ids would be 0 and 1
            dataset.close()
            return f"{prefix} is a loss mask: give the tokens, {prefix.removesuffix(MASK_SUFFIX)}"
        if dataset.dtype.kind == "f":  # the format has such files; as ids they would be rounded without a word
            dataset.close()
            return f"{prefix}.bin holds {dataset.dtype.name} numbers, not token ids"
        return dataset

    with ThreadPoolExecutor(min(8, max(1, len(unique))), thread_name_prefix="open") as pool:
        for prefix, found in zip(unique, pool.map(attempt, unique), strict=True):
            if isinstance(found, str):
                problems.append(Problem(found))
            else:
                opened[prefix] = found
    return opened, problems


def agreed_eod(datasets: Mapping[str, IndexedDataset], eod_id: int | None) -> tuple[int | None, list[Problem]]:
    """The end-of-document id: the tokenizer's, which every dataset that knows one must share, else the datasets'."""
    known = {
        prefix: d.meta.eod_id for prefix, d in datasets.items() if d.meta is not None and d.meta.eod_id is not None
    }
    if eod_id is not None:
        wrong = [f"{prefix} {found}" for prefix, found in known.items() if found != eod_id]
        if not wrong:
            return eod_id, []
        numbers = f"tokenizer {eod_id}; {', '.join(wrong[:5])}"
    elif len(set(known.values())) <= 1:
        return next(iter(known.values()), None), []
    else:
        numbers = ", ".join(f"{prefix} {found}" for prefix, found in list(known.items())[:5])
    what = "the data end their documents with different ids" + (" than the tokenizer" if eod_id is not None else "")
    rule = "one end-of-document id in the tokenizer and in all of the data"
    nearest = "tokenize the data with the tokenizer of this run" if eod_id is None else (
        "tokenize the data with the tokenizer of this run; or name none, give --vocab-size, and the data's id is taken"
    )
    return eod_id, [Problem(what, numbers, rule, nearest)]


def vocabulary_problems(datasets: Mapping[str, IndexedDataset], vocab_size: int | None) -> list[Problem]:
    """Datasets with ids that the model has no embedding for. Those without ``.meta.json`` are read, if not large."""
    if vocab_size is None:
        return []
    found, to_scan = [], _SCAN_UP_TO
    for prefix, dataset in datasets.items():
        if dataset.meta is None or dataset.meta.largest_id is None:
            to_scan -= dataset.num_tokens
            if to_scan < 0:
                continue
        largest = dataset.largest_id()
        if largest >= vocab_size:
            numbers = f"largest id {largest}, vocabulary {vocab_size}"
            rule = "every id is below the model's vocabulary size"
            nearest = f"the tokenizer that the data were made with; for a new model, --vocab-size {largest + 1}"
            found.append(Problem(f"{prefix} holds ids outside the vocabulary", numbers, rule, nearest))
    return found


def other_tokenizers(
    datasets: Mapping[str, IndexedDataset], fingerprint: str | None = None, flags: str = ""
) -> list[Problem]:
    """Datasets that were made by another tokenizer than the run's, or than each other.

    Args:
        datasets: those with a ``.meta.json`` that names a tokenizer are compared.
        fingerprint, flags: of the run's tokenizer; None: it has none, and takes ids as they are.
    """
    made = {p: d.meta for p, d in datasets.items() if d.meta is not None and d.meta.tokenizer is not None}
    if not made:
        return []
    if fingerprint is None:
        first = next(iter(made))
        other = [p for p in made if made[p].tokenizer != made[first].tokenizer]
        what, rule = "the data were made by different tokenizers", "one id means the same text everywhere"
        numbers = [f"{p}: {_flags_of(made[p])}" for p in [first, *other][:5]]
        nearest = "make all of them with one of these tokenizers"
    else:
        other = [p for p in made if made[p].tokenizer != fingerprint]
        what, rule = "the data were made by another tokenizer than this run's", "its ids would mean other text"
        numbers = [f"this run: {flags}", *(f"{p}: {_flags_of(made[p])}" for p in other[:5])]
        size = max(made[p].vocab_size or datasets[p].largest_id() + 1 for p in made)
        nearest = (
            "the flags of the data's tokenizer in place of the run's; or no tokenizer (nor --use-checkpoint-args) and "
            f"--vocab-size {size}: ids are taken as they are"
        )
    if not other:
        return []
    numbers += [f"and {len(other) - 5} more"] if len(other) > 5 else []
    return [Problem(what, "; ".join(numbers), rule, nearest)]


def _flags_of(meta: DatasetMeta) -> str:
    """The flags of the tokenizer that made a dataset, or its fingerprint."""
    return meta.tokenizer_flags or f"a tokenizer of fingerprint {meta.tokenizer}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def parse_split(text: str) -> tuple[float, float, float]:
    """``"969,30,1"`` as three fractions that sum to 1; missing ones are 0.

    Raises:
        ValueError: not one to three numbers, a negative one, none above zero.
    """
    try:
        shares = [float(part) for part in re.split(r"[,/]", text.strip())]
    except ValueError:
        shares = []
    good = 1 <= len(shares) <= 3 and all(math.isfinite(s) and s >= 0 for s in shares) and sum(shares) > 0
    if not good:
        raise ValueError(
            f"--split {text!r} is not a split: give one to three shares for training, validation and test, none negative "
            "and not all zero, such as 969,30,1"
        )
    shares += [0.0] * (3 - len(shares))
    total = shares[0] + shares[1] + shares[2]  # not sum(): it rounds differently from Python 3.12 on
    return shares[0] / total, shares[1] / total, shares[2] / total


def split_ranges(fractions: tuple[float, float, float], sequences: int) -> tuple[range, range, range]:
    """The sequences of each split: adjacent ranges that cover all of them once.

    Borders are the running float sum of the fractions times the number of sequences, rounded half to even (Megatron-LM's
    rule); the last split with a share ends with the last sequence.
    """
    borders = [0, *(round(total * float(sequences)) for total in accumulate(fractions))]
    last = max(i for i, fraction in enumerate(fractions) if fraction > 0)
    for i in range(last + 1, len(borders)):
        borders[i] = sequences
    assert all(a <= b for a, b in pairwise(borders)), borders
    return range(borders[0], borders[1]), range(borders[1], borders[2]), range(borders[2], borders[3])
