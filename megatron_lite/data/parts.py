"""Datasets made of datasets: one cut into parts at borders of documents, or several joined, with their loss masks.

Joining the parts in order gives the whole's tokens and index back byte for byte. Memory does not grow with the size of either, and each
output appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_lite.data.index_format import DatasetMeta, mask_prefix
from megatron_lite.data.index_writer import IndexedWriter, refuse_existing, remove_dataset
from megatron_lite.data.indexed import IndexedDataset, open_mask

By = Literal["documents", "tokens"]
_FACTS = {  # of .meta.json, that outputs take over, and what it means where one is not said
    "eod_id": "no end of document",
    "tokenizer": "no tokenizer",
    "vocab_size": "no vocabulary size",
    "tokenizer_flags": "no flags",
}


def part_ranges(dataset: IndexedDataset, shares: Sequence[float], by: By) -> list[range]:
    """The documents of each part, in order.

    Borders are the running sum of the shares, times the number of documents (rounded half to even) or of tokens (the
    nearest document border, the earlier of two).

    Raises:
        ValueError: shares that are none, or a part without documents.
    """
    if not shares or not all(share > 0 for share in shares) or sum(shares) == float("inf"):
        raise ValueError(f"shares {', '.join(map(str, shares))}: each a number above 0")
    sums = list(accumulate(shares))
    inner = [total / sums[-1] for total in sums[:-1]]
    if by == "documents":
        borders = [round(share * dataset.num_documents) for share in inner]
    else:
        borders = [_nearest(dataset, share * dataset.num_tokens) for share in inner]
    ranges = [range(a, b) for a, b in pairwise([0, *borders, dataset.num_documents])]
    if not all(ranges):
        counts = ", ".join(str(len(r)) for r in ranges[:20])
        raise ValueError(
            f"{dataset.prefix} has {dataset.num_documents} documents, which make parts of {counts}: none may be empty"
        )
    return ranges


def divide(
    prefix: str, outs: Sequence[str], shares: Sequence[float], by: By, *, overwrite: bool = False
) -> list[range]:
    """Write a dataset's parts, with those of its loss mask if it has one; the documents of each.

    Raises:
        FileExistsError: an output is there; no part is written then.
        ValueError: the index is damaged; see :func:`part_ranges`.
        OSError: an output cannot be written; none is left.
    """
    assert len(outs) == len(shares)
    with contextlib.closing(IndexedDataset(prefix)) as dataset:
        _check_index(dataset)
        mask = open_mask(dataset)
        masked = mask is not None
        ranges = part_ranges(dataset, shares, by)
        if any(Path(out).resolve() == Path(prefix).resolve() for out in outs):
            raise ValueError(f"{prefix} is one of the outputs itself: give another --output-prefix")
        for out in () if overwrite else outs:
            refuse_existing(out)
        facts = {"dtype": dataset.dtype} | {name: getattr(dataset.meta, name, None) for name in _FACTS}
        done: list[str] = []
        seen = {name: hashlib.sha256() for name in (prefix, mask_prefix(prefix))}
        try:
            for out, part in zip(outs, ranges, strict=True):
                _write([(prefix, part)], out, facts, overwrite, masked, seen)
                done.append(out)
            _check_tokens(dataset, seen[prefix])
            if mask is not None:
                _check_tokens(mask, seen[mask_prefix(prefix)])
        except BaseException:
            for out in done:
                remove_dataset(out)
                remove_dataset(mask_prefix(out))
            raise
    return ranges


def merge(
    prefixes: Sequence[str | Path], out: str | Path, *, overwrite: bool = False, masks: bool = False
) -> DatasetMeta:
    """Join datasets into one, document after document; with ``masks``, their loss masks too.

    End-of-document id, tokenizer and vocabulary size of those that have a ``.meta.json`` must agree, and are recorded when
    all have one; so are the tokenizer's flags where they agree. All parts of one run have together the record of the whole.
    Some of the datasets may be empty.

    Raises:
        ValueError: an index is damaged, nothing to join, no document in any of them, different dtypes, different ids or
            tokenizers, or of the parts of a run one is missing, there twice or out of order.
        FileExistsError: the output is there and ``overwrite`` is off.
    """
    if not prefixes:
        raise ValueError(f"nothing to join into {out}")
    facts: dict[str, dict[object, str]] = {name: {} for name in ("dtype", *_FACTS)}
    described, documents = True, 0
    records: list[tuple[str, dict[str, Any]]] = []
    for prefix in map(str, prefixes):
        with contextlib.closing(IndexedDataset(prefix)) as dataset:
            facts["dtype"].setdefault(dataset.dtype, prefix)
            described, documents = described and dataset.meta is not None, documents + dataset.num_documents
            for name in _FACTS if dataset.meta is not None else ():
                facts[name].setdefault(getattr(dataset.meta, name), prefix)
            if dataset.meta is not None and dataset.meta.made_of is not None:
                records.append((prefix, dataset.meta.made_of))
    _check_parts(records)
    if not documents:
        raise ValueError(f"nothing to join into {out}: no document is in any of the {len(prefixes)} datasets")
    if len(facts["tokenizer_flags"]) > 1:
        facts["tokenizer_flags"] = {}
    for name, values in facts.items():
        if len(values) > 1:
            said = {_FACTS[name] if value is None else value: prefix for value, prefix in values.items()}
            listed = ", ".join(f"{value} in {prefix}" for value, prefix in said.items())
            hint = "; one was made with --append-eod and one without" if name == "eod_id" and None in values else ""
            raise ValueError(f"datasets of different {name} cannot be joined: {listed}{hint}")
    common = {name: next(iter(values), None) for name, values in facts.items() if described or name == "dtype"}
    of_whole = [{**record, "part": None} for _, record in records]
    of_one_run = len(records) == len(prefixes) and all(record == of_whole[0] for record in of_whole)
    if of_one_run and (len(records) == 1 or all(record["part"] for _, record in records)):
        common["made_of"] = of_whole[0]
    return _write([(str(prefix), None) for prefix in prefixes], str(out), common, overwrite, masks)


def _check_parts(records: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Raises ValueError where of the parts of a run one is missing, there twice or out of order. Each record with its prefix.

    The names of the input may differ: each part may have read a copy of its own.
    """
    runs: dict[str, list[tuple[int, str]]] = {}
    for prefix, record in records:
        if record.get("part"):
            index, parts = record["part"]
            run = {**record, "part": parts, "names_and_sizes": None}
            runs.setdefault(json.dumps(run, sort_keys=True), []).append((index, prefix))
    for key, found in runs.items():
        parts, indices = json.loads(key)["part"], [index for index, _ in found]
        if indices == list(range(parts)):
            continue
        missing = [f"part {i}/{parts}" for i in range(parts) if i not in {*indices}]
        twice = [f"part {i}/{parts} is {' and '.join(p for j, p in found if j == i)}" for i in range(parts) if indices.count(i) > 1]
        order = [f"{p} (part {i}/{parts})" for i, p in found]
        wrong = f"missing {'is' if len(missing) == 1 else 'are'} {', '.join(missing[:20])}" if missing else "; ".join(twice[:20])
        wrong = wrong or f"they are out of order: {', '.join(order[:20])}"
        raise ValueError(f"{found[0][1]} is one of {parts} parts of a run, which are joined all, once each and in order; {wrong}")


def _check_index(dataset: IndexedDataset) -> None:
    """Raises ValueError for an index whose damage only a pass over it shows; written anew it would look whole."""
    if wrong := dataset.problems():
        raise ValueError(f"{'; '.join(wrong)}: it is damaged")


def _check_tokens(dataset: IndexedDataset, seen: hashlib._Hash) -> None:
    """Raises ValueError for tokens that are not those of ``.meta.json``; their copies would have a checksum that matches."""
    if dataset.meta is not None and dataset.meta.sha256_bin not in (None, seen.hexdigest()):
        raise ValueError(f"{dataset.bin_name}: its sha256 is not the one in {dataset.prefix}.meta.json: it is damaged")


def _nearest(dataset: IndexedDataset, target: float) -> int:
    """The document that starts nearest to a position of the stream."""

    def start(document: int) -> int:
        return dataset.start_of(int(dataset.documents[document]))

    after = bisect_left(range(dataset.num_documents), target, key=start)
    return after - 1 if after and target - start(after - 1) <= start(after) - target else after


Piece = tuple[str, range | None]  # prefix and documents; None: all


def _write(
    pieces: Sequence[Piece],
    out: str,
    facts: Mapping[str, Any],
    overwrite: bool,
    masked: bool,
    seen: Mapping[str, hashlib._Hash] | None = None,
) -> DatasetMeta:
    """Publish pieces of datasets as one, with its mask; adds the tokens of a piece to ``seen`` of its prefix."""
    with contextlib.ExitStack() as stack:
        mask = None
        if masked:
            of_masks = [(mask_prefix(prefix), part) for prefix, part in pieces]
            mask = _copied(of_masks, mask_prefix(out), {"dtype": np.uint8}, overwrite, seen)
            stack.callback(mask.abort)  # does nothing once it has been finished
        return _copied(pieces, out, facts, overwrite, seen, mask).finish()


def _copied(
    pieces: Sequence[Piece],
    out: str,
    facts: Mapping[str, Any],
    overwrite: bool,
    seen: Mapping[str, hashlib._Hash] | None,
    mask: IndexedWriter | None = None,
) -> IndexedWriter:
    """The same, not yet published."""
    writer = IndexedWriter(out, **facts, overwrite=overwrite, mask=mask)
    try:
        for prefix, part in pieces:
            with contextlib.closing(IndexedDataset(prefix)) as dataset:
                digest = hashlib.sha256() if seen is None else seen[prefix]
                if part is None:
                    _check_index(dataset)
                writer.add_dataset(dataset, part, digest)
                if part is None:
                    _check_tokens(dataset, digest)
    except BaseException:
        writer.abort()
        raise
    return writer
