"""Packing without cuts: whole documents put together into rows, so that few are cut and little is padding.

A row has S + 1 tokens, the last of which is only a target. A document of n tokens has n - 1 targets: its last token, the
end token, is predicted, and predicts nothing. Rows hold whole documents; the rest of a row is padding, a segment of its
own without loss. A document of more than S + 1 tokens is cut into rows of S targets each, as windows are (neighbours share a
token, so no target is lost), and what is left of it is packed like a document. No other document is cut. A document of
one token has no target and is left out.

Which document goes where is *best fit decreasing* (Ding et al., *Fewer Truncations Improve Language Modeling*, 2024): the
longest first, each into the fullest row that has room for it. Documents of one length are placed together: those rows with
the same room, each taking as many as fit, are what best fit gives one document at a time. So the work is counted in
distinct lengths and not in documents, and NumPy packs millions of them in a second.

The plan depends on the lengths alone, so it can be kept in a file. Each epoch visits its rows in a keyed permutation
of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_lite.data.index_format import pieces
from megatron_lite.data.indexed import TokenStream, check_ids
from megatron_lite.data.order_cache import Arrays, cached_arrays
from megatron_lite.data.permutation import Permutation, key64
from megatron_lite.data.row import Row


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Put items into bins, best fit decreasing.

    Args:
        lengths: [items], integers in [1, capacity].
        capacity: of a bin.

    Returns:
        (int64 [items], the bin of each; number of bins). Items of one length keep their order.
    """
    key = np.dtype(np.uint16 if capacity < 1 << 16 else np.int64)  # NumPy sorts 16 bits in linear time
    order = np.argsort((capacity - lengths).astype(key), kind="stable")
    bins_in_order = np.empty(len(lengths), dtype=np.int64)
    counts = np.bincount(lengths, minlength=capacity + 1).tolist()
    room: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]  # bins by what is free in them, last in first out
    free = 0  # bit r: there is a bin with r free
    bins = at = 0
    for length in range(capacity, 0, -1):
        items = counts[length]
        while items:
            fitting = free >> length
            if fitting:
                r = length + (fitting & -fitting).bit_length() - 1  # the lowest bit
                some = room[r].pop()
                free ^= 0 if room[r] else 1 << r
            else:
                r = capacity
                some = np.arange(bins, bins - (-items // (r // length)))
                bins += len(some)
            each = r // length
            whole = min(len(some), items // each)
            part = items - whole * each if whole < len(some) else 0  # into one more, which does not get ``each``
            taken = whole * each + part
            bins_in_order[at : at + taken] = np.concatenate(
                (np.repeat(some[:whole], each), np.repeat(some[whole : whole + 1], part))
            )
            at, items = at + taken, items - taken
            for left, these in (
                (r, some[whole + (part > 0) :]),
                (r - each * length, some[:whole]),
                (r - part * length, some[whole : whole + (part > 0)]),
            ):
                if len(these) and left:
                    room[left].append(these)
                    free |= 1 << left
    result = np.empty_like(bins_in_order)
    result[order] = bins_in_order
    return result, bins


@dataclass(frozen=True)
class Plan:
    """Which pieces of a stream make which row.

    Attributes:
        begins: int64 [pieces], where in the stream each piece begins, row after row.
        lengths: int32 [pieces], its tokens.
        firsts: int64 [rows + 1], the first piece of each row.
        documents: packed.
        cut: documents among them that were longer than a row.
        left_out: documents of one token.
        padding: tokens of padding in all rows.
    """

    begins: np.ndarray
    lengths: np.ndarray
    firsts: np.ndarray
    documents: int
    cut: int
    left_out: int
    padding: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.firsts) - 1


def plan_rows(starts: np.ndarray, lengths: np.ndarray, seq_length: int) -> Plan:
    """Pack documents.

    Args:
        starts: int64 [documents], where each begins in the stream.
        lengths: int64 [documents], tokens of each, at least 1.
        seq_length: S.
    """
    targets = lengths - 1
    full = targets // seq_length  # rows that a document fills by itself
    rest = targets - full * seq_length
    number = int(full.sum())
    inside = np.arange(number, dtype=np.int64) - np.repeat(np.cumsum(full) - full, full)
    whole = np.repeat(starts, full) + seq_length * inside
    packed = np.flatnonzero(rest)
    sizes = rest[packed] + 1
    bins, rows = best_fit(sizes, seq_length + 1)
    order = np.argsort(bins, kind="stable")
    begins = (starts + full * seq_length)[packed][order]
    firsts = number + np.concatenate((np.zeros(1, np.int64), np.cumsum(np.bincount(bins, minlength=rows))))
    return Plan(
        begins=np.concatenate((whole, begins)),
        lengths=np.concatenate((np.full(number, seq_length + 1), sizes[order])).astype(np.int32),
        firsts=np.concatenate((np.arange(number, dtype=np.int64), firsts)),
        documents=int(np.count_nonzero(targets)),
        cut=int(np.count_nonzero(targets > seq_length)),
        left_out=int(np.count_nonzero(targets == 0)),
        padding=rows * (seq_length + 1) - int(sizes.sum()),
    )


def plan_stream(stream: TokenStream, seq_length: int) -> Plan:
    """Pack the documents of a stream (a document that the split cuts counts with what is in it)."""
    starts = stream.document_starts(0, stream.num_tokens)
    if len(starts) == 0 or starts[0] != 0:
        starts = np.concatenate((np.zeros(1, np.int64), starts))
    return plan_rows(starts, np.diff(starts, append=stream.num_tokens), seq_length)


def _kept(stream: TokenStream, seq_length: int, cache: Path | None, tell: Callable[[str], None]) -> Plan:
    """The plan of a stream, through a file where there is a cache."""
    if cache is None:
        return plan_stream(stream, seq_length)
    digest = hashlib.blake2b(digest_size=16)
    for _, borders in pieces(stream.dataset.documents):
        digest.update(borders.tobytes())
    key = {
        "order": "best-fit", "index": stream.dataset.index_digest, "documents": digest.hexdigest(),
        "part": [stream.part.start, stream.part.stop], "seq_length": seq_length,
    }  # fmt: skip

    def build() -> Arrays:
        plan = plan_stream(stream, seq_length)
        counts = np.array([plan.documents, plan.cut, plan.left_out, plan.padding], dtype=np.int64)
        return {"begins": plan.begins, "lengths": plan.lengths, "firsts": plan.firsts, "counts": counts}

    found = cached_arrays(cache / "orders" / Path(stream.dataset.prefix).name, key, build, tell)
    return Plan(found["begins"], found["lengths"], found["firsts"], *found["counts"].tolist())


class PackedDataset:
    """Rows of whole documents.

    Args:
        stream: the tokens.
        seq_length: S.
        seed: of the order of rows.
        salt: tells the members of a blend apart.
        vocab_size: rows with ids outside the vocabulary are refused; None: not checked.
        padding_id: the token that fills rows; it is in no loss, and no document sees it.
        cache: directory in which the plan is kept; None: it is made at each start.
        tell: gets a line about a kept plan that had to be made anew.

    Raises:
        ValueError: no document has two tokens.
    """

    endless = True

    def __init__(
        self,
        stream: TokenStream,
        seq_length: int,
        seed: int,
        *,
        salt: int = 0,
        vocab_size: int | None = None,
        padding_id: int = 0,
        cache: Path | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.stream, self.seq_length, self.vocab_size, self.padding_id = stream, seq_length, vocab_size, padding_id
        self.plan = _kept(stream, seq_length, cache, tell)
        if not self.plan.rows:
            raise ValueError(f"{stream.name}: no document has two tokens, and one token trains nothing")
        self._order_key = (seed, salt)
        self._epoch = (0, self._order(0))

    def __len__(self) -> int:
        return self.plan.rows

    def row(self, j: int) -> Row:
        """Sample j."""
        number = self.locate(j)
        plan, size = self.plan, self.seq_length + 1
        first, last = int(plan.firsts[number]), int(plan.firsts[number + 1])
        begins, lengths = plan.begins[first:last].tolist(), plan.lengths[first:last].tolist()
        tokens = np.full(size, self.padding_id, dtype=np.int64)
        mask = np.zeros(size, dtype=np.uint8)  # of tokens as targets: the first of a document is none
        starts, at = [], 0
        for begin, length in zip(begins, lengths, strict=True):
            tokens[at : at + length] = self.stream.raw(begin, begin + length)
            stored = self.stream.loss_mask(begin + 1, begin + length)
            mask[at + 1 : at + length] = 1 if stored is None else stored
            starts.append(at)
            at += length
        if at < size:
            starts.append(at)  # padding
        if self.vocab_size is not None:
            check_ids(tokens[:at], self.vocab_size, f"{self.stream.name}: sample {j}, tokens {begins[0]} and on")
        return Row(tokens, np.array(starts, dtype=np.int64), j, mask[1:])

    def locate(self, j: int) -> int:
        """The plan's row that is sample j."""
        assert j >= 0, j
        epoch, place = divmod(j, self.plan.rows)
        known, order = self._epoch
        if known != epoch:
            order = self._order(epoch)
            self._epoch = (epoch, order)
        return order(place)

    def _order(self, epoch: int) -> Permutation:
        return Permutation(self.plan.rows, key64("rows", *self._order_key, epoch))

    def describe(self) -> str:
        """What packing made of the documents."""
        plan = self.plan
        share = 100 * plan.padding / (plan.rows * (self.seq_length + 1))
        text = f"{plan.documents:,} documents packed into {plan.rows:,} rows, {share:.2g}% padding, {plan.cut:,} longer than a row cut"
        return text + (f", {plan.left_out:,} of one token left out" if plan.left_out else "")
