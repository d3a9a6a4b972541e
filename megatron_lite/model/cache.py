"""Keys and values of the tokens already seen, for generation.

One cache serves one batch of rows that all have the same number of tokens in it. A forward pass over n new tokens of
every row appends to each block's keys and values; the caller advances the length once the pass is done. Training never
makes one.
"""

from __future__ import annotations

import torch


class KVCache:
    """Keys and values of up to ``max_length`` tokens of each row, for every block that asks.

    Attributes:
        max_length: tokens a row can hold.
        length: tokens every row holds now (host integer).
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self._store: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def blocks(self) -> int:
        """How many blocks have put their keys and values into it."""
        return len(self._store)

    def append(self, block: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add new tokens of one block and return all of them so far.

        Args:
            block: index of the block.
            key, value: [rows, n, kv_heads, head_dim] of the n new tokens.

        Returns:
            key and value, [rows, length + n, kv_heads, head_dim], views of the store.

        Raises:
            ValueError: the rows would be longer than ``max_length``.
        """
        end = self.length + key.shape[1]
        if end > self.max_length:
            raise ValueError(f"{end} tokens do not fit a key/value cache made for {self.max_length}: make it longer")
        if block not in self._store:
            shape = (key.shape[0], self.max_length, *key.shape[2:])
            self._store[block] = (key.new_empty(shape), value.new_empty(shape))
        keys, values = self._store[block]
        keys[:, self.length : end] = key
        values[:, self.length : end] = value
        return keys[:, :end], values[:, :end]

    def advance(self, tokens: int) -> None:
        """Count ``tokens`` new tokens of every row as seen; called once per forward pass, after it."""
        self.length += tokens
