"""A split of a dataset as one stream of tokens."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from megatron_lite.data.indexed import IndexedDataset


class TokenStream:
    """The sequences ``part`` of a dataset, back to back.

    Attributes:
        name: for messages.
        num_tokens, num_documents: of the part (a document that the part's borders cut counts).
    """

    def __init__(self, dataset: IndexedDataset, part: range, name: str = "") -> None:
        assert part.step == 1 and 0 <= part.start <= part.stop <= dataset.num_sequences, part
        self.dataset, self.part, self.name = dataset, part, name or dataset.prefix
        self._base = dataset.start_of(part.start)
        self.num_tokens = dataset.start_of(part.stop) - self._base if len(part) else 0
        first = bisect_right(dataset.documents, part.start)
        self.num_documents = bisect_right(dataset.documents, part.stop - 1) - first + 1 if len(part) else 0

    def raw(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as they are stored."""
        return self.dataset.raw(self._base + start, self._base + stop)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), int64."""
        return self.dataset.read(self._base + start, self._base + stop)

    def loss_mask(self, start: int, stop: int) -> np.ndarray | None:
        """Which of the tokens [start, stop) count as targets, uint8; None: all."""
        mask = self.dataset.loss_mask
        return None if mask is None else mask.raw(self._base + start, self._base + stop)

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Positions in [start, stop) at which a document starts, int64."""
        return self.dataset.document_starts(self._base + start, self._base + stop) - self._base


def within(tokens: np.ndarray, vocab_size: int) -> bool:
    """Whether all ids of a row, in the dtype in which they are stored, are in [0, vocab_size)."""
    if tokens.dtype.kind != "u":
        return not tokens.size or (int(np.minimum.reduce(tokens)) >= 0 and int(np.maximum.reduce(tokens)) < vocab_size)
    return not tokens.size or int(np.maximum.reduce(tokens)) < vocab_size


def check_ids(tokens: np.ndarray, vocab_size: int | None, where: str) -> None:
    """Refuse ids that the model has no embedding for.

    Args:
        tokens: int64.
        vocab_size: true vocabulary size, or None for no check.
        where: names the place in the message.
    """
    if vocab_size is None or not tokens.size:
        return
    if int(tokens.view(np.uint64).max()) >= vocab_size:  # as unsigned, a negative id is large
        bad = int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])
        raise ValueError(
            f"{where}: token id {bad}, but the model's vocabulary has {vocab_size} ids, 0 to {vocab_size - 1}: the data were "
            "tokenized with another tokenizer, or --vocab-size is too small"
        )
