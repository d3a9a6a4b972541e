"""A tokenizer that needs no file: bytes are ids."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lite.text.tokenizer import Tokenizer


class Bytes(Tokenizer):
    """A tokenizer of bytes; 256 ends a document."""

    vocab_size, eod_id, fingerprint = 257, 256, "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")
