"""Made-up documents that a model can learn, for ``--mock-data``: a run without any file.

A row is cut out of nothing: sample j is a function of (seed, j). Documents in it count through the vocabulary by a step
of their own (7, 10, 13, 16, ...: two tokens tell the step, the rest follows), end with the end-of-document id and have
lengths spread around an eighth of the row, so packing, masks and borders are all exercised, and the loss falls
within tens of steps.
"""

from __future__ import annotations

import numpy as np

from megatron_lite.data.permutation import key64, mix64_array
from megatron_lite.data.row import Row

_MAX_STEP = 8


class MockDataset:
    """Endless rows of made-up documents.

    Args:
        vocab_size: ids are below it; at least 2.
        seq_length: S.
        seed: of everything; a split's name keeps validation apart from training.
        eod_id: end-of-document id; default: the last of the vocabulary. No other token has it.
    """

    endless = True

    def __init__(
        self, vocab_size: int, seq_length: int, seed: int, *, split: str = "train", eod_id: int | None = None
    ) -> None:
        if vocab_size < 2:
            raise ValueError(f"--mock-data needs a vocabulary of at least 2 ids, not {vocab_size}: give --vocab-size")
        eod_id = vocab_size - 1 if eod_id is None else eod_id
        if not 0 <= eod_id < vocab_size:
            raise ValueError(f"end-of-document id {eod_id} is outside the vocabulary of {vocab_size} ids")
        self.vocab_size, self.seq_length, self.eod_id = vocab_size, seq_length, eod_id
        self._key = key64("mock", split, seed)
        self._mean = max(2, seq_length // 8)

    def __len__(self) -> int:
        return 1 << 40  # no row comes twice before

    def row(self, j: int) -> Row:
        """Sample j."""
        assert 0 <= j < len(self), j
        length = self.seq_length + 1
        most = length // 2 + 1  # a document has two tokens or more
        draws = mix64_array(np.arange(3 * most, dtype=np.uint64) + np.uint64(j << 22), self._key)
        lengths = (2 + draws[:most] % np.uint64(2 * self._mean - 1)).astype(
            np.int64
        )  # 2 ... 2 * mean, mean + 1 on average
        starts = np.cumsum(lengths) - lengths
        count = int(np.searchsorted(starts, length))
        starts, lengths = starts[:count], lengths[:count]
        lengths[-1] = max(lengths[-1], length - starts[-1])
        first = (draws[most : most + count] % np.uint64(self.vocab_size - 1)).astype(np.int64)
        step = 1 + (draws[2 * most : 2 * most + count] % np.uint64(_MAX_STEP)).astype(np.int64)
        document = np.repeat(np.arange(count), lengths)[:length]
        place = np.arange(length) - starts[document]
        tokens = (first[document] + place * step[document]) % (self.vocab_size - 1)
        tokens += tokens >= self.eod_id
        ends = starts + lengths - 1
        tokens[ends[ends < length]] = self.eod_id
        return Row(tokens, starts, j)
