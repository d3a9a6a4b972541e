"""Byte-pair tokenizers that come as ranks: tiktoken files and GPT-2's ``vocab.json`` with ``merges.txt``.

Both cut the text by a regular expression and then merge pairs of neighbouring pieces, the earliest learned pair first
(Sennrich et al. 2016, over bytes as in GPT-2). The tiktoken package does it for ranks. GPT-2's ids need not follow the
order of its merges, so that pair of files is read here: a piece of text is looked up in a bounded cache, and merged
when it is new, in time n log n, since the web has "words" of a megabyte. Text is text: a special token's spelling
inside a document is encoded as ordinary characters.
"""

from __future__ import annotations

import base64
import heapq
import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import regex

from megatron_lite.text.tokenizer import fingerprint, read_file

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
CACHED_PIECE = 64  # characters; longer ones are rarely seen again
LONGEST_SPACE = 100_000  # the tiktoken package's matcher runs out of stack in a run of a million white-space characters
_SPACE = regex.compile(r"\s+")


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character for each byte: its own where it prints, else one from U+0100 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


class Gpt2BpeTokenizer:
    """GPT-2's pair of files. The end-of-document token is GPT-2's ``<|endoftext|>``, unless another is named."""

    def __init__(self, vocab_file: str | None, merge_file: str | None, eod_token: str | None = None) -> None:
        vocab_bytes, merge_bytes = read_file(vocab_file, "--vocab-file"), read_file(merge_file, "--merge-file")
        self.vocabulary = _read_vocabulary(vocab_file, vocab_bytes)
        self.merges = _read_merges(merge_file, merge_bytes)
        self._ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        self.vocab_size = max(self.vocabulary.values()) + 1
        end = eod_token or "<|endoftext|>"
        if end not in self.vocabulary:
            raise ValueError(f"--vocab-file {vocab_file} has no {end!r}: name its end of document with --eod-token")
        self.eod_id = self.vocabulary[end]
        self.fingerprint = fingerprint("gpt2", vocab_bytes, merge_bytes, str(self.eod_id).encode())
        self._alphabet = byte_alphabet()
        self._bytes = {c: b for b, c in self._alphabet.items()}
        self._texts = {i: t for t, i in self.vocabulary.items()}
        self._pattern = regex.compile(GPT2_PATTERN)
        self._cached = lru_cache(maxsize=1 << 18)(self._merge)

    def _merge(self, piece: str) -> tuple[int, ...]:
        """Ids of one piece of text between two cuts: merge the pair of lowest rank, the leftmost of equals."""
        parts = [self._alphabet[b] for b in piece.encode()]
        count = len(parts)
        after, before = list(range(1, count + 1)), list(range(-1, count - 1))  # neighbours that are left
        heap = [(rank, i) for i, pair in enumerate(pairwise(parts)) if (rank := self._ranks.get(pair)) is not None]
        heapq.heapify(heap)
        while heap:
            rank, i = heapq.heappop(heap)
            j = after[i]
            if not parts[i] or j == count or self._ranks.get((parts[i], parts[j])) != rank:
                continue  # one of the two has been merged since
            parts[i] += parts[j]
            parts[j] = ""
            after[i] = after[j]
            if after[i] < count:
                before[after[i]] = i
            for left, right in ((before[i], i), (i, after[i])):
                if left >= 0 and right < count and (new := self._ranks.get((parts[left], parts[right]))) is not None:
                    heapq.heappush(heap, (new, left))
        try:
            return tuple(self.vocabulary[p] for p in parts if p)
        except KeyError as e:
            raise ValueError(
                f"the vocabulary has no entry for {e.args[0]!r}, which the merges produce: "
                "--vocab-file and --merge-file do not belong together"
            ) from None

    def encode(self, text: str) -> list[int]:
        pieces = self._pattern.findall(text)
        return [i for p in pieces for i in (self._cached(p) if len(p) <= CACHED_PIECE else self._merge(p))]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        data = bytearray()
        for i in ids:
            text = self._texts.get(int(i), "\ufffd")
            if all(c in self._bytes for c in text):
                data += bytes(self._bytes[c] for c in text)
            else:
                data += text.encode()
        return data.decode("utf-8", errors="replace")


def _read_vocabulary(path: str | None, data: bytes) -> dict[str, int]:
    """Text -> id. Raises ValueError naming the file."""
    try:
        ids = json.loads(data)
    except ValueError as e:
        raise ValueError(f"--vocab-file {path} is not JSON: {e}") from None
    if not isinstance(ids, dict) or not ids or any(type(i) is not int or i < 0 for i in ids.values()):
        raise ValueError(f"--vocab-file {path} is not an object that gives each token its id")
    if len(set(ids.values())) != len(ids):
        raise ValueError(f"--vocab-file {path} gives two tokens the same id")
    return ids


def _read_merges(path: str | None, data: bytes) -> list[tuple[str, str]]:
    """Pairs in the order in which they were learned. Raises ValueError naming the file."""
    try:
        lines = data.decode("utf-8").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as e:
        raise ValueError(f"--merge-file {path} is no text: {e}") from None
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#version"):
            continue
        words = line.split(" ")
        if len(words) != 2 or not all(words):
            raise ValueError(f"--merge-file {path}:{number}: not two pieces apart by a space: {line[:80]!r}")
        pairs.append((words[0], words[1]))
    return pairs


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
            what = f"--tiktoken-pattern is {pattern or 'not given'}"
            raise ValueError(f"{what}: give v1 or v2, how text is cut before merging")
        if path.endswith(".json"):
            ranks, special, end = _from_json(path, data, vocab_size, eod_token)
        else:
            ranks, special, end = _from_lines(path, data, eod_token)
        missing = [b for b in range(256) if bytes([b]) not in ranks]
        if missing:
            raise ValueError(
                f"--tokenizer-model {path} has no token for {len(missing)} of the 256 single bytes "
                f"(0x{missing[0]:02x}, ...): not every text could be encoded"
            )
        self.ranks, self.pattern, self.special = ranks, pattern, special
        self._encoding: Any = tiktoken.Encoding(
            "file", pat_str=TIKTOKEN_PATTERNS[pattern], mergeable_ranks=ranks, special_tokens=special
        )
        self.vocab_size = max(max(ranks.values()), max(special.values())) + 1
        self.eod_id = end
        self.fingerprint = fingerprint(
            "tiktoken", data, pattern.encode(), str(self.vocab_size).encode(), str(end).encode()
        )

    def encode(self, text: str) -> list[int]:
        return [i for part in _cut_long_space(text) for i in self._encoding.encode_ordinary(part)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        data = bytearray()
        for i in ids:
            try:
                data += self._encoding.decode_single_token_bytes(int(i))
            except KeyError:
                data += "\ufffd".encode()
        return data.decode("utf-8", errors="replace")


def has_long_space(text: str) -> bool:
    """Whether a text is encoded in parts for its runs of white space."""
    return len(text) > LONGEST_SPACE and len(_cut_long_space(text)) > 1


def _cut_long_space(text: str) -> list[str]:
    """The text in parts, so that no run of white space in a part is longer than ``LONGEST_SPACE``."""
    if len(text) <= LONGEST_SPACE:
        return [text]
    cuts = [0]
    for run in _SPACE.finditer(text):
        cuts += range(run.start() + LONGEST_SPACE, run.end(), LONGEST_SPACE)
    return [text[a:b] for a, b in pairwise([*cuts, len(text)])]


Read = tuple[dict[bytes, int], dict[str, int], int]  # ranks, special tokens, id of the one that ends a document


def _from_json(path: str, data: bytes, vocab_size: int | None, eod_token: str | None) -> Read:
    try:
        entries = json.loads(data)
        tokens = [(int(e["rank"]), base64.b64decode(e["token_bytes"], validate=True)) for e in entries]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"--tokenizer-model {path} is not a list of rank and token_bytes: {e}") from None
    wrong = next((i for i, (rank, _) in enumerate(tokens) if rank != i), None)
    if wrong is not None:
        what = f"entry {wrong} has rank {tokens[wrong][0]}; ranks must count up from 0"
        raise ValueError(f"--tokenizer-model {path}: {what}")
    size = min(vocab_size or 1 << 17, len(tokens) + JSON_RESERVED)
    ranks = {token: rank + JSON_RESERVED for rank, token in tokens[: max(0, size - JSON_RESERVED)]}
    special = {name: i for i, name in enumerate(JSON_SPECIAL)}
    special |= {f"<SPECIAL_{i}>": i for i in range(len(JSON_SPECIAL), JSON_RESERVED)}
    end = eod_token or "</s>"
    if end not in special:
        raise ValueError(f"--eod-token {end!r} is none of the special tokens {', '.join(JSON_SPECIAL)}")
    return ranks, special, special[end]


def _from_lines(path: str, data: bytes, eod_token: str | None) -> Read:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f"--tokenizer-model {path}:{number}: not a line of `base64 rank`: {line[:80]!r}") from None
    if not eod_token:
        raise ValueError(f"{path} declares no end-of-document token: name it with --eod-token TEXT, or TEXT=ID")
    text, equals, number_text = eod_token.rpartition("=")
    end = max(ranks.values(), default=-1) + 1
    if equals and text and number_text.isdecimal():
        end, eod_token = int(number_text), text
        taken = next((token for token, rank in ranks.items() if rank == end), None)
        if taken is not None:
            free = max(ranks.values()) + 1
            raise ValueError(f"--eod-token {text}={end}: id {end} is the token {taken!r}; {free} is free")
    return ranks, {eod_token: end}, end
