"""Byte-pair tokenizers that come as ranks: tiktoken files and GPT-2's ``vocab.json`` with ``merges.txt``.

Both cut the text by a regular expression and then merge pairs of neighbouring pieces, the earliest learned pair first
(Sennrich et al. 2016, over bytes as in GPT-2); the tiktoken package does it for ranks, and the tokenizers package for GPT-2's
pair of files. Text is text: a special token's spelling inside a document is encoded as ordinary characters.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from megatron_lite.text.tokenizer import Tokenizer, fingerprint, read_file

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
LONGEST_SPACE = 100_000  # the tiktoken package's matcher runs out of stack in a run of a million white-space characters
_SPACE = re.compile(r"\s+")


class Gpt2BpeTokenizer(Tokenizer):
    """GPT-2's pair of files. The end-of-document token is GPT-2's ``<|endoftext|>``, unless another is named.

    Attributes:
        content: the same as a ``tokenizer.json``.
    """

    def __init__(self, vocab_file: str | None, merge_file: str | None, eod_token: str | None = None) -> None:
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers

        vocab_bytes, merge_bytes = read_file(vocab_file, "--vocab-file"), read_file(merge_file, "--merge-file")
        vocabulary, merges = _read_vocabulary(vocab_file, vocab_bytes), _read_merges(merge_file, merge_bytes)
        end = eod_token or "<|endoftext|>"
        if end not in vocabulary:
            raise ValueError(f"--vocab-file {vocab_file} has no {end!r}: name its end of document with --eod-token")
        try:
            self._library = Library(models.BPE(vocabulary, merges, unk_token=end))
        except Exception as e:  # the library raises plain Exception
            raise ValueError(f"--vocab-file {vocab_file} and --merge-file {merge_file}: {e}") from None
        self._library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._library.decoder = decoders.ByteLevel()
        self.content: str = self._library.to_str()
        made = {*pre_tokenizers.ByteLevel.alphabet(), *map("".join, merges)}
        self.special = {t: i for t, i in vocabulary.items() if t not in made}
        self.vocab_size, self.eod_id = max(vocabulary.values()) + 1, vocabulary[end]
        self.fingerprint = fingerprint("gpt2", vocab_bytes, merge_bytes, str(self.eod_id).encode())

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = [e.ids for e in self._library.encode_batch_fast(list(texts))]
        for text, ids in zip(texts, found, strict=True):
            if self.eod_id in ids:  # the library gives it for a byte that is no token, and nothing else does
                raise ValueError(f"--vocab-file has no token for a byte of {text[:80]!r}")
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._library.decode(list(ids), skip_special_tokens=False))


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


class TiktokenTokenizer(Tokenizer):
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
