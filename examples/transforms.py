"""Transforms of training rows for ``--transform``: fill-in-the-middle, and two that harm causal models.

``--transform`` names a function of a row and a random generator. Those here take the ids of a tokenizer besides, so a team binds
them in a module of its own, ``my_transforms.py``::

    from functools import partial
    from examples.transforms import fill_in_the_middle

    fim = partial(fill_in_the_middle, prefix_id=50001, suffix_id=50002, middle_id=50003, eod_id=50000)

and trains with ``--transform my_transforms:fim``. All of them work inside documents: none moves a token across a border, and
documents in which some target does not count (conversations) and padding stay as they are.

**Only fill-in-the-middle is a good idea for models that generate.** Masking tokens and shuffling sentences are taken from
training for understanding (BERT, BART). A causal model that is trained on them sees inputs that no use of it will show,
loses targets, and learns that sentences follow in no order. They are here since advice that circulates recommends them:
measure them on validation data, which transforms leave alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_lite.data.row import Row


def fill_in_the_middle(
    row: Row,
    generator: np.random.Generator,
    *,
    prefix_id: int,
    suffix_id: int,
    middle_id: int,
    eod_id: int,
    rate: float = 0.9,
    spm: float = 0.5,
) -> Row:
    """Documents as prefix, suffix, middle, so that a model learns to fill gaps (Bavarian et al. 2022, arXiv:2207.14255).

    A document is cut at two uniform places. PSM is ``<prefix> p <suffix> s <middle> m``; SPM is ``<prefix> <suffix> s <middle> p m``,
    the form in which prefix and middle stay together. Applied after documents are cut into rows (their *context level*), by
    tokens. A row keeps its length: a document's three sentinels take the place of its last three tokens, before its end token.

    Args:
        prefix_id, suffix_id, middle_id: the sentinels, tokens that no text has.
        eod_id: the end-of-document token, which stays the last of a document.
        rate: share of documents that are changed. spm: share of these that are SPM.
    """
    tokens, changed = row.tokens.copy(), []
    for start, stop in documents(row):
        end = stop - 1 if tokens[stop - 1] == eod_id else stop
        length = end - start - 3
        if length < 1 or generator.random() >= rate:
            continue
        text = row.tokens[start : start + length]
        a, b = sorted(generator.integers(0, length + 1, 2).tolist())
        prefix, middle, suffix = text[:a], text[a:b], text[b:]
        if generator.random() < spm:
            parts = [[prefix_id, suffix_id], suffix, [middle_id], prefix, middle]
        else:
            parts = [[prefix_id], prefix, [suffix_id], suffix, [middle_id], middle]
        tokens[start:end] = np.concatenate(parts)
        changed += [start, stop]
    return _with_borders(replace(row, tokens=tokens), changed)


def mask_tokens(row: Row, generator: np.random.Generator, *, mask_id: int, eod_id: int, rate: float = 0.15) -> Row:
    """Hide some inputs behind ``mask_id``; as targets they do not count. **Harms causal models**, see above."""
    hidden = (generator.random(len(row.tokens)) < rate) & (row.tokens != eod_id)
    counts = np.ones(len(row.tokens) - 1, dtype=np.uint8) if row.loss_mask is None else row.loss_mask.copy()
    counts[hidden[1:]] = 0
    return replace(row, tokens=np.where(hidden, mask_id, row.tokens), loss_mask=counts)


def shuffle_sentences(row: Row, generator: np.random.Generator, *, end_ids: Sequence[int], eod_id: int) -> Row:
    """The sentences of each document in another order; ``end_ids`` end one. **Harms causal models**, see above."""
    tokens, changed = row.tokens.copy(), []
    for start, stop in documents(row):
        end = stop - 1 if tokens[stop - 1] == eod_id else stop
        text = row.tokens[start:end]
        sentences = np.split(text, np.flatnonzero(np.isin(text, end_ids)) + 1)
        if len(sentences) > 1:
            tokens[start:end] = np.concatenate([sentences[i] for i in generator.permutation(len(sentences))])
            changed += [start, stop]
    return _with_borders(replace(row, tokens=tokens), changed)


def documents(row: Row) -> Iterator[tuple[int, int]]:
    """(start, stop) of the documents of a row, and of what its cuts leave of them, all of whose targets count."""
    borders = row.starts if row.cuts is None else np.union1d(row.starts, row.cuts)
    for start, stop in zip(borders.tolist(), [*borders[1:].tolist(), len(row.tokens)], strict=True):
        if row.loss_mask is None or row.loss_mask[start : stop - 1].all():
            yield start, stop


def _with_borders(row: Row, places: Sequence[int]) -> Row:
    """What is changed is not continued across a cut: there a document starts, whose first token is no target."""
    if row.cuts is None or not places:
        return row
    starts = np.union1d(row.starts, [p for p in places if p < len(row.tokens)]).astype(np.int64)
    return replace(row, starts=starts, cuts=np.setdiff1d(row.cuts, starts))
