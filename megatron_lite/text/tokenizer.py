"""Text to token ids and back, for every kind of tokenizer file that Megatron-LM's flags name.

One interface over five kinds: Hugging Face ``tokenizer.json``, SentencePiece, tiktoken files, GPT-2's ``vocab.json``
with ``merges.txt`` and a null tokenizer. Two rules hold for all of them:

*The end-of-document token is the tokenizer's own.* There is no default text such as ``<|endoftext|>``: a tokenizer that
declares none is refused until ``--eod-token`` names one, since a wrong or missing border is seen by no shape check.

*``encode`` gives a document without its end, and all of it.* A tokenizer whose post-processor adds an end token gets it
taken off again (and a begin token that is the same token too), so that preprocessing adds exactly one; a limit on the
length that stands in the file is not followed.

A special token's spelling inside a text is text, except for Hugging Face's files, which make it the special token as
their library does; preprocessing counts the documents in which that gives an end of document.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

END_NAMES = ("eos_token", "eod_token")


class Tokenizer(ABC):
    """What the rest of the program needs of a tokenizer.

    Attributes:
        vocab_size: number of ids; every id is below it.
        eod_id: the end-of-document id.
        fingerprint: a digest of the files and options that decide the ids.
        flags: the command line that means this tokenizer, if :func:`build_tokenizer` made it.
        begin: ids that ``encode`` puts before each document.
        special: the special tokens that a chat template can write, by their spelling.
    """

    vocab_size: int
    eod_id: int
    fingerprint: str
    flags: str | None = None
    begin: Sequence[int] = ()
    special: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of one document, without the end-of-document token. ValueError for a text that cannot be encoded."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several documents."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids; bytes that are no UTF-8 become U+FFFD; an id of no token is no error."""


def fingerprint(kind: str, *contents: bytes) -> str:
    """A digest of what decides a tokenizer's ids."""
    digest = hashlib.sha256(kind.encode())
    for content in contents:
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def read_file(path: str | None, flag: str) -> bytes:
    """The bytes of a tokenizer file. Raises ValueError naming the flag."""
    if path is None:
        raise ValueError(f"this tokenizer type needs {flag}")
    try:
        return Path(path).read_bytes()
    except OSError as e:
        local = "; only local files are read, nothing is downloaded" if isinstance(e, FileNotFoundError) else ""
        raise ValueError(f"{flag} {path}: {e.strerror}{local}") from None


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``, or a directory that holds one; never remote code."""

    def __init__(self, path: str | None, eod_token: str | None = None) -> None:
        from tokenizers import Tokenizer as Fast

        file = Path(path or "")
        if path is not None and file.is_dir():
            file /= "tokenizer.json"
        data = read_file(None if path is None else str(file), "--tokenizer-model")
        try:
            self.content = data.decode("utf-8")
            self._fast: Any = Fast.from_str(self.content)
        except Exception as e:  # the library raises plain Exception with its parser's message
            raise ValueError(f"--tokenizer-model {file} is not a tokenizer.json: {e}") from None
        self.directory = file.parent
        self._fast.no_truncation()
        self._fast.no_padding()
        self.vocab_size = max(self._fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special = {t.content: i for i, t in self.added_tokens().items() if t.special}
        self.eod_id = self._find_end(file, eod_token)
        self.fingerprint = fingerprint("hf", data, str(self.eod_id).encode())

    def _find_end(self, file: Path, eod_token: str | None) -> int:
        declared = eod_token or _declared_end(file.parent)
        if declared is None:
            raise ValueError(
                f"{file} declares no end-of-document token (no eos_token in a tokenizer_config.json beside it; "
                f"special tokens: {', '.join([*self.special][:8]) or 'none'}): name it with --eod-token"
            )
        end = self._fast.token_to_id(declared)
        if end is None:
            raise ValueError(f"the end-of-document token {declared!r} is not in {file}: name another with --eod-token")
        return int(end)

    def _ids(self, encoding: Any) -> list[int]:
        """Ids without what the post-processor added that is the end token; one in the text itself stays."""
        ids: list[int] = encoding.ids
        if self.eod_id not in ids:
            return ids
        pairs = zip(ids, encoding.special_tokens_mask, strict=True)  # the mask marks what was added, not what was read
        return [i for i, added in pairs if not (added and i == self.eod_id)]

    def encode(self, text: str) -> list[int]:
        return self._ids(self._fast.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._ids(e) for e in self._fast.encode_batch_fast(list(texts))]

    def added_tokens(self) -> dict[int, Any]:
        """The library's records of tokens that are found before the text is cut: ``content``, ``special``, ``lstrip``, ..."""
        return dict(self._fast.get_added_tokens_decoder())

    def encodings(self, texts: Sequence[str]) -> list[Any]:
        """The library's own records of texts to which nothing is added: ``ids``, ``token_to_chars``."""
        return list(self._fast.encode_batch(list(texts), add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._fast.decode(list(ids), skip_special_tokens=False))


def read_config(path: Path) -> dict[str, Any]:
    """What a file of JSON beside a tokenizer says; nothing where there is none. Raises ValueError."""
    try:
        config = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, OSError) as e:
        raise ValueError(f"{path} is not JSON: {e}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not an object but {type(config).__name__}")
    return config


def token_text(value: Any) -> str | None:
    """A token in such a file: its text, or an object that has it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _declared_end(directory: Path) -> str | None:
    configs = (read_config(directory / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    found = (token_text(config.get(key)) for config in configs for key in END_NAMES)
    return next(filter(None, found), None)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece ``.model``. ``add_bos``: begin each document with BOS, as Llama 2 does."""

    def __init__(self, path: str | None, eod_token: str | None = None, *, add_bos: bool = False) -> None:
        import sentencepiece

        self.data = data = read_file(path, "--tokenizer-model")
        try:
            if not data:
                raise RuntimeError("the file is empty")
            self.model = sentencepiece.SentencePieceProcessor(model_proto=data)
        except RuntimeError as e:
            raise ValueError(f"--tokenizer-model {path} is not a SentencePiece model: {e}") from None
        self.vocab_size = self.model.vocab_size()
        end = self.model.piece_to_id(eod_token) if eod_token else self.model.eos_id()
        if end < 0 or (eod_token and end == self.model.unk_id()):
            raise ValueError(
                f"{path} has no end-of-sequence piece ({eod_token or 'eos_id is -1'}): name one with --eod-token"
            )
        self.eod_id = int(end)
        control = filter(self.model.is_control, range(self.vocab_size))
        self.special = {self.model.id_to_piece(i): i for i in (*control, self.eod_id)}
        self.begin = [self.model.bos_id()] if add_bos else []
        if self.begin and self.begin[0] < 0:
            raise ValueError(
                f"{path} has no begin-of-sequence piece, which Llama2Tokenizer puts before each document: "
                "take --tokenizer-type SentencePieceTokenizer"
            )
        self.fingerprint = fingerprint("sentencepiece", data, str(add_bos).encode(), str(end).encode())

    def encode(self, text: str) -> list[int]:
        return [*self.begin, *self.model.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        unknown = self.model.unk_id()
        return str(self.model.decode([int(i) if 0 <= i < self.vocab_size else unknown for i in ids]))


class NullTokenizer(Tokenizer):
    """Text is numbers apart by spaces; the largest id ends a document (Megatron-LM adds one id for that)."""

    def __init__(self, vocab_size: int | None) -> None:
        if not vocab_size or vocab_size < 2:
            raise ValueError(
                "--tokenizer-type NullTokenizer needs --vocab-size, the number of ids; the largest ends a document"
            )
        self.vocab_size, self.eod_id = vocab_size, vocab_size - 1
        self.fingerprint = fingerprint("null", str(vocab_size).encode())

    def encode(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit()):
                raise ValueError("not numbers apart by spaces, which the null tokenizer reads")
            ids.append(int(word))
        if ids and max(ids) >= self.vocab_size:
            raise ValueError(f"id {max(ids)} is outside [0, {self.vocab_size}), the --vocab-size of the null tokenizer")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)


# Which options of build_tokenizer each kind reads, in the order in which it takes them.
READ_BY: dict[str, tuple[str, ...]] = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file", "eod_token"),
    "HuggingFaceTokenizer": ("model", "eod_token"),
    "SentencePieceTokenizer": ("model", "eod_token"),
    "GPTSentencePieceTokenizer": ("model", "eod_token"),
    "Llama2Tokenizer": ("model", "eod_token"),
    "TikTokenizer": ("model", "tiktoken_pattern", "vocab_size", "eod_token"),
    "NullTokenizer": ("vocab_size",),
}


WAYS = (
    "--tokenizer-model DIRECTORY (with tokenizer.json), a tokenizer.json, FILE.model (SentencePiece) or FILE.tiktoken; "
    "--vocab-file FILE --merge-file FILE (GPT-2); or, for data that are ids already, --tokenizer-type NullTokenizer --vocab-size N"
)


def kind_of(options: Mapping[str, Any]) -> str:
    """The kind of tokenizer that the files of some options are, where none is named. Raises ValueError."""
    model = options.get("model")
    if model is None:
        if options.get("vocab_file") or options.get("merge_file"):
            return "GPT2BPETokenizer"
        raise ValueError(f"no tokenizer is named: give {WAYS}")
    path = Path(model)
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return "HuggingFaceTokenizer"
        inside = sorted(file.name for file in path.iterdir())
        there = f"{', '.join(inside[:8])}{', ...' if len(inside) > 8 else ''}" if inside else "nothing"
        raise ValueError(f"--tokenizer-model {model}: a directory without tokenizer.json (in it: {there}); give {WAYS}")
    start = read_file(model, "--tokenizer-model")[:64].lstrip()
    kinds = {".model": "SentencePieceTokenizer", ".tiktoken": "TikTokenizer"}
    kinds[".json"] = "TikTokenizer" if start.startswith(b"[") else "HuggingFaceTokenizer"  # ranks are an array
    kind = kinds.get(path.suffix.lower())
    if kind is None:
        raise ValueError(f"--tokenizer-model {model}: its name does not say which kind it is; name it with --tokenizer-type")
    return kind


def build_tokenizer(kind: str | None, **options: str | int | None) -> Tokenizer:
    """The tokenizer that ``--tokenizer-type`` and its flags name.

    Args:
        kind: a key of ``READ_BY``; None: :func:`kind_of` the files.
        options: all that are named there; those that this kind does not read are ignored.

    Raises:
        ValueError: a missing flag, an unreadable file, or no end-of-document token.
    """
    from megatron_lite.text.tokenizer_bpe import Gpt2BpeTokenizer, TiktokenTokenizer

    kind = kind or kind_of(options)
    if kind not in READ_BY:
        raise ValueError(f"unknown tokenizer type {kind!r}: known are {', '.join(READ_BY)}")
    makers: dict[str, Callable[..., Tokenizer]] = {
        "GPT2BPETokenizer": Gpt2BpeTokenizer,
        "HuggingFaceTokenizer": HuggingFaceTokenizer,
        "Llama2Tokenizer": partial(SentencePieceTokenizer, add_bos=True),
        "TikTokenizer": TiktokenTokenizer,
        "NullTokenizer": NullTokenizer,
    }
    tokenizer = makers.get(kind, SentencePieceTokenizer)(*(options.get(name) for name in READ_BY[kind]))
    given = {name: str(options[name]) for name in READ_BY[kind] if options.get(name) is not None}
    files = {name: os.path.abspath(given[name]) for name in ("model", "vocab_file", "merge_file") if name in given}
    words = [word for name, value in (given | files).items() for word in (flag_of(name), value)]
    tokenizer.flags = shlex.join(["--tokenizer-type", kind, *words])
    return tokenizer


def flag_of(option: str) -> str:
    """The flag of an option of :func:`build_tokenizer`."""
    return "--tokenizer-model" if option == "model" else "--" + option.replace("_", "-")


def tokenizer_of(data: Any, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a run's data section (a ``DataConfig``)."""
    return build_tokenizer(
        data.tokenizer_type,
        model=data.tokenizer_model,
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
        tiktoken_pattern=data.tiktoken_pattern,
        vocab_size=vocab_size,
        eod_token=data.eod_token,
    )


def vocabulary_size(data: Any) -> int | None:
    """Vocabulary size of the tokenizer of a run's data section, or None where only ``--vocab-size`` can say it."""
    named = data.tokenizer_model or data.vocab_file
    if data.tokenizer_type == "NullTokenizer" or not named:
        return None
    return tokenizer_of(data).vocab_size
