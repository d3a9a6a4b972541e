"""The *windows* order: a permuted grid of windows over the stream of a corpus.

An epoch cuts the stream of T tokens, in file order, into windows of S + 1 tokens that start at ``offset + k * S``
(neighbours share one token, the last target of one being the first input of the next) and visits them in a keyed
permutation. Each epoch has its own offset and its own permutation, so no epoch sees the same rows as another. All of it
is computed per row: no array of documents or samples exists, start-up does not depend on the size of the corpus, and
a resumed run knows its place from the number of consumed samples alone.

Sample j counts through the epochs: epoch 0 has the samples [0, n0), epoch 1 [n0, n0 + n1), and so on.
"""

from __future__ import annotations

import threading

import numpy as np

from megatron_lite.data.indexed import TokenStream, check_ids, within
from megatron_lite.data.permutation import Permutation, key64, mix64_array
from megatron_lite.data.row import Row

_BLOCK = 64  # epochs between the ones whose first sample is kept


class WindowDataset:
    """Rows of a token stream in the windows order.

    Args:
        stream: the tokens.
        seq_length: S.
        seed: of offsets and permutations.
        salt: tells the members of a blend apart, so that one file given twice is not read in step.
        vocab_size: rows with ids outside the vocabulary are refused; None: not checked.

    Raises:
        ValueError: the stream is too short for one window.
    """

    endless = True

    def __init__(
        self, stream: TokenStream, seq_length: int, seed: int, *, salt: int = 0, vocab_size: int | None = None
    ) -> None:
        if stream.num_tokens < seq_length + 1:
            raise ValueError(
                f"{stream.name}: {stream.num_tokens} tokens are too few for one sample: a sequence length of {seq_length} "
                f"takes {seq_length + 1}"
            )
        self.stream, self.seq_length, self.vocab_size = stream, seq_length, vocab_size
        self._offset_key = key64("offset", seed, salt)
        self._order_key = (seed, salt)
        self._lock = threading.Lock()
        self._firsts = np.zeros(1, dtype=np.int64)  # first sample of epochs 0, _BLOCK, 2 * _BLOCK, ... as far as known
        self._epoch = self._find_epoch(0)

    def __len__(self) -> int:
        return int(self._epoch_sizes(0, 1)[0])

    def row(self, j: int) -> Row:
        """Sample j."""
        _, start = self.locate(j)
        stop = start + self.seq_length + 1
        stored = self.stream.raw(start, stop)
        tokens = stored.astype(np.int64)
        if self.vocab_size is not None and not within(stored, self.vocab_size):
            check_ids(tokens, self.vocab_size, f"{self.stream.name}: sample {j}, tokens {start} to {stop}")
        borders = self.stream.document_starts(start + 1, stop)
        starts = np.zeros(len(borders) + 1, dtype=np.int64)
        np.subtract(borders, start, out=starts[1:])
        return Row(tokens, starts, j, self.stream.loss_mask(start + 1, stop))

    def locate(self, j: int) -> tuple[int, int]:
        """Epoch of sample j, and where its window starts in the stream."""
        epoch, first, size, offset, order = self._epoch
        if not first <= j < first + size:
            assert j >= 0, j
            epoch, first, size, offset, order = self._epoch = self._find_epoch(j)
        return epoch, offset + order(j - first) * self.seq_length

    def _find_epoch(self, j: int) -> tuple[int, int, int, int, Permutation]:
        """(epoch, its first sample, its number of samples, its offset, its order) for sample j."""
        with self._lock:
            while self._firsts[-1] <= j:
                known = len(self._firsts) - 1
                sizes = self._epoch_sizes(known * _BLOCK, 2 * known * _BLOCK + _BLOCK).reshape(-1, _BLOCK).sum(axis=1)
                self._firsts = np.concatenate((self._firsts, self._firsts[-1] + np.cumsum(sizes)))
            firsts = self._firsts
        block = int(np.searchsorted(firsts, j, side="right")) - 1
        sizes = self._epoch_sizes(block * _BLOCK, (block + 1) * _BLOCK)
        ends = firsts[block] + np.cumsum(sizes)
        inside = int(np.searchsorted(ends, j, side="right"))
        epoch, size = block * _BLOCK + inside, int(sizes[inside])
        order = Permutation(size, key64("order", *self._order_key, epoch))
        return epoch, int(ends[inside]) - size, size, int(self._offsets(epoch, epoch + 1)[0]), order

    def _offsets(self, start: int, stop: int) -> np.ndarray:
        """Offsets of epochs [start, stop): uniform in [0, min(S, T - S)), int64."""
        bound = np.uint64(min(self.seq_length, self.stream.num_tokens - self.seq_length))
        h = mix64_array(np.arange(start, stop, dtype=np.uint64), self._offset_key)
        half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
        return (((h >> half) * bound + (((h & low) * bound) >> half)) >> half).astype(np.int64)  # (h * bound) >> 64

    def _epoch_sizes(self, start: int, stop: int) -> np.ndarray:
        """Windows in epochs [start, stop), int64."""
        return (self.stream.num_tokens - 1 - self._offsets(start, stop)) // self.seq_length
