"""Byte-pair tokenizers that come as ranks: tiktoken files and GPT-2's ``vocab.json`` with ``merges.txt``.

Both cut the text by a regular expression and then merge pairs of neighbouring pieces, the earliest learned pair first
(Sennrich et al. 2016, over bytes as in GPT-2). The tiktoken package does it for ranks. GPT-2's ids need not follow the
order of its merges, so that pair of files is read here: a piece of text is looked up in a bounded cache, and merged when
it is new. Text is text: a special token's spelling inside a document is encoded as ordinary characters.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import regex

from megatron_lite.data.tokenizer import fingerprint, read_file

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TIKTOKEN_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
JSON_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")  # the first of the 1,000 reserved ids
JSON_RESERVED = 1000


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character for each byte: its own where it prints, else one from U+0100 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


class Gpt2BpeTokenizer:
    """GPT-2's pair of files. The end-of-document token is ``<|endoftext|>`` where the vocabulary has it, as GPT-2's does."""

    def __init__(self, vocab_file: str | None, merge_file: str | None, eod_token: str | None = None) -> None:
        vocab_bytes, merge_bytes = read_file(vocab_file, "--vocab-file"), read_file(merge_file, "--merge-file")
        try:
            self._ids: dict[str, int] = json.loads(vocab_bytes)
        except ValueError as e:
            raise ValueError(f"--vocab-file {vocab_file} is not JSON: {e}") from None
        lines = merge_bytes.decode("utf-8").split("\n")
        pairs = [tuple(line.split(" ")) for line in lines if line.strip() and not line.startswith("#version")]
        bad = next((p for p in pairs if len(p) != 2), None)
        if bad is not None:
            raise ValueError(f"--merge-file {merge_file}: a line is not two pieces apart by a space: {' '.join(bad)!r}")
        self._ranks = {pair: rank for rank, pair in enumerate(pairs)}
        self.vocab_size = max(self._ids.values()) + 1
        end = eod_token or "<|endoftext|>"
        if end not in self._ids:
            raise ValueError(f"--vocab-file {vocab_file} has no {end!r}: name its end-of-document token with --eod-token")
        self.eod_id = self._ids[end]
        self.fingerprint = fingerprint("gpt2", vocab_bytes, merge_bytes, str(self.eod_id).encode())
        self._alphabet = byte_alphabet()
        self._bytes = {c: b for b, c in self._alphabet.items()}
        self._texts = {i: t for t, i in self._ids.items()}
        self._pattern = regex.compile(GPT2_PATTERN)
        self._piece = lru_cache(maxsize=1 << 18)(self._merge)

    def _merge(self, piece: str) -> tuple[int, ...]:
        """Ids of one piece of text between two cuts."""
        parts = [self._alphabet[b] for b in piece.encode("utf-8", errors="surrogatepass")]
        while len(parts) > 1:
            ranked = [(self._ranks.get(pair, len(self._ranks)), i) for i, pair in enumerate(zip(parts, parts[1:], strict=False))]
            rank, i = min(ranked)
            if rank == len(self._ranks):
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        try:
            return tuple(self._ids[p] for p in parts)
        except KeyError as e:
            raise ValueError(f"the vocabulary has no entry for {e.args[0]!r}, which the merges produce: the two files do not belong together") from None

    def encode(self, text: str) -> list[int]:
        return [i for piece in self._pattern.findall(text) for i in self._piece(piece)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        data = bytearray()
        for i in ids:
            text = self._texts[int(i)]
            if all(c in self._bytes for c in text):
                data += bytes(self._bytes[c] for c in text)
            else:
                data += text.encode()
        return data.decode("utf-8", errors="replace")


class TiktokenTokenizer:
    """Ranks for the tiktoken package, in either of two file forms.

    ``.json``: a list of ``{rank, token_bytes, token_str}`` as Megatron-LM takes it; 1,000 ids are reserved before the
    ranks, ``</s>`` (id 2) among them ends a document. Any other file: lines of ``base64 rank``; it declares no special
    token, so ``--eod-token`` has to name one; it gets the first free id, or is written ``TEXT=ID``.
    """

    def __init__(
        self, path: str | None, pattern: str | None, vocab_size: int | None = None, eod_token: str | None = None
    ) -> None:
        import tiktoken

        data = read_file(path, "--tokenizer-model")
        assert path is not None
        if pattern not in TIKTOKEN_PATTERNS:
            raise ValueError(f"--tiktoken-pattern is {pattern or 'not given'}: give v1 or v2, how text is cut before merging")
        ranks, special, end = _from_json(path, data, vocab_size) if path.endswith(".json") else _from_lines(path, data, eod_token)
        if eod_token is not None and path.endswith(".json"):
            if eod_token not in special:
                raise ValueError(f"--eod-token {eod_token!r} is none of the special tokens {', '.join(JSON_SPECIAL)}")
            end = special[eod_token]
        self._encoding: Any = tiktoken.Encoding("file", pat_str=TIKTOKEN_PATTERNS[pattern], mergeable_ranks=ranks, special_tokens=special)
        self.vocab_size = max(max(ranks.values()), max(special.values())) + 1
        self.eod_id = end
        self.fingerprint = fingerprint("tiktoken", data, pattern.encode(), str(self.vocab_size).encode(), str(end).encode())

    def encode(self, text: str) -> list[int]:
        return list(self._encoding.encode_ordinary(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._encoding.decode([int(i) for i in ids]))


def _from_json(path: str, data: bytes, vocab_size: int | None) -> tuple[dict[bytes, int], dict[str, int], int]:
    try:
        entries = json.loads(data)
        tokens = [(int(e["rank"]), base64.b64decode(e["token_bytes"])) for e in entries]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"--tokenizer-model {path} is not a list of rank and token_bytes: {e}") from None
    wrong = next((i for i, (rank, _) in enumerate(tokens) if rank != i), None)
    if wrong is not None:
        raise ValueError(f"--tokenizer-model {path}: entry {wrong} has rank {tokens[wrong][0]}; ranks must count up from 0")
    size = min(vocab_size or 1 << 17, len(tokens) + JSON_RESERVED)
    ranks = {token: rank + JSON_RESERVED for rank, token in tokens[: size - JSON_RESERVED]}
    special = {name: i for i, name in enumerate(JSON_SPECIAL)}
    special |= {f"<SPECIAL_{i}>": i for i in range(len(JSON_SPECIAL), JSON_RESERVED)}
    return ranks, special, special["</s>"]


def _from_lines(path: str, data: bytes, eod_token: str | None) -> tuple[dict[bytes, int], dict[str, int], int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f"--tokenizer-model {path}:{number}: not a line of `base64 rank`: {line[:80]!r}") from None
    if eod_token is None:
        raise ValueError(f"{path} declares no end-of-document token: name it with --eod-token TEXT, or TEXT=ID")
    text, equals, number_text = eod_token.rpartition("=")
    if equals and text and number_text.isdigit():
        return ranks, {text: int(number_text)}, int(number_text)
    end = max(ranks.values()) + 1
    return ranks, {eod_token: end}, end
