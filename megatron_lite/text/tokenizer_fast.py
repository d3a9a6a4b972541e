"""The fast path of tokenizing: the gigatoken package, where it gives the ids of the reference tokenizer.

The classes of :mod:`.tokenizer` are the reference, they say what the ids are. gigatoken reads the same files, cuts text
by hand-written scanners in place of regular expressions and remembers the ids of what it has seen, tens of times
faster. It is used where it is proved equal (:func:`encoder_of`): on texts made to be hard (:mod:`.tokenizer_probes`)
and on documents at the start of the input. What is known to differ is given to the reference, document by document:

* code points that Unicode has not assigned (by Python's tables): the libraries' tables are of different years, and a
  new letter is a letter only to the newer ones;
* runs of white space that the tiktoken package cannot match in one piece.

For SentencePiece, text outside of ASCII is normalised by the sentencepiece package itself, since gigatoken (as the
tokenizers package) applies the rules to one grapheme at a time and SentencePiece to the longest match; and what has been
seen is remembered by a helper of our own (:mod:`.sentencepiece_segments`), as gigatoken does it for other kinds.
"""

from __future__ import annotations

import json
import os
import tempfile
from base64 import b64encode
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_lite.data.locked_file import interrupts_held
from megatron_lite.text.sentencepiece_segments import by_segments
from megatron_lite.text.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from megatron_lite.text.tokenizer_bpe import Gpt2BpeTokenizer, TiktokenTokenizer, has_long_space
from megatron_lite.text.tokenizer_probes import hard_texts, unassigned

_MOST_REMEMBERED = 1 << 28  # bytes; with a quarter of it tokenizing takes a fourteenth more time


class Ids(NamedTuple):
    """Ids of several texts, back to back, and how many each has (int64)."""

    ids: np.ndarray
    lengths: np.ndarray

    def of(self, index: int) -> list[int]:
        """The ids of one text."""
        stop = int(self.lengths[: index + 1].sum())
        return self.ids[stop - int(self.lengths[index]) : stop].tolist()


class NotFast(Exception):
    """Why there is no fast path."""


class FastDiffers(Exception):
    """A text for which the fast path gives other ids than the reference.

    Attributes:
        index: of the text among those that were to be encoded.
    """

    def __init__(self, index: int, what: str) -> None:
        super().__init__(what)
        self.index = index


def flat(sequences: Sequence[Sequence[int]]) -> Ids:
    """Lists of ids, back to back."""
    lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
    return Ids(np.fromiter(chain.from_iterable(sequences), dtype=np.int64, count=int(lengths.sum())), lengths)


def surrounded(of: Ids, before: Sequence[int], after: Sequence[int]) -> Ids:
    """The ids of each text between some more."""
    more = len(before) + len(after)
    if not more or not len(of.lengths):
        return of
    lengths = of.lengths + more
    ends = np.cumsum(lengths)
    ids = np.empty(int(ends[-1]), dtype=of.ids.dtype)
    own = np.ones(len(ids), dtype=bool)
    for i, value in enumerate(before):
        ids[ends - lengths + i] = value
        own[ends - lengths + i] = False
    for i, value in enumerate(reversed(after)):
        ids[ends - 1 - i] = value
        own[ends - 1 - i] = False
    ids[own] = of.ids
    return Ids(ids, lengths)


class Encoder:
    """Ids of many texts at once, by the fast form of a tokenizer where there is one, else by the tokenizer itself.

    Args:
        tokenizer: the reference.
        fast: ids by gigatoken; :func:`encoder_of` gives it where it is proved.
        slow: whether a text has to be encoded by the reference all the same.
        remembers: threads gain by sharing it, although it serves one at a time: each word is met for the first time once.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        fast: Callable[[list[str]], Ids] | None = None,
        slow: Callable[[str], bool] = lambda text: False,
        remembers: bool = True,
    ) -> None:
        self.tokenizer, self._fast, self._slow, self.remembers = tokenizer, fast, slow, remembers

    @property
    def is_fast(self) -> bool:
        """Whether there is a fast path."""
        return self._fast is not None

    def encode(self, texts: list[str]) -> Ids:
        """Ids of the texts; whatever the reference raises."""
        if self._fast is None or not texts:
            return flat(self.tokenizer.encode_batch(texts))
        slow = [i for i, text in enumerate(texts) if not text.isascii() and self._slow(text)]
        if not slow:
            return self._fast(texts)
        return _mixed(texts, slow, lambda those: flat(self.tokenizer.encode_batch(those)), self._fast)

    def check(self, texts: Sequence[str], found: Ids, indices: Sequence[int]) -> None:
        """Compare some texts' ids with the reference. Raises FastDiffers."""
        wanted = self.tokenizer.encode_batch([texts[i] for i in indices])
        for index, ids in zip(indices, wanted, strict=True):
            fast = found.of(index)
            if ids != fast:
                at = next(
                    (k for k, (a, b) in enumerate(zip(ids, fast, strict=False)) if a != b), min(len(ids), len(fast))
                )
                raise FastDiffers(
                    index,
                    f"the fast tokenizer's ids differ from the reference's at token {at}: "
                    f"{fast[at : at + 3]} for {ids[at : at + 3]}",
                )


def encoder_of(tokenizer: Tokenizer, texts: Sequence[str] = (), prove: bool = True) -> Encoder:
    """The fast path of a tokenizer; for a kind that cannot have one, the tokenizer itself.

    Raises NotFast where gigatoken is missing, does not take this tokenizer, or gives other ids.

    Args:
        tokenizer: the reference.
        texts: of the corpus, to be compared besides those that are made to be hard.
        prove: compare. A worker takes what its parent has proved.
    """
    build = next((b for kind, b in _BUILDERS.items() if isinstance(tokenizer, kind)), None)
    if build is None:
        return Encoder(tokenizer)
    try:
        import gigatoken  # noqa: F401
    except ImportError as error:
        raise NotFast(f"the gigatoken package is not installed ({error}): pip install gigatoken") from None
    try:
        with interrupts_held():  # gigatoken imports packages at its first call, and goes on when that is interrupted
            encoder = build(tokenizer)
            if prove:
                compared = [*hard_texts(tokenizer), *texts]
                encoder.check(compared, encoder.encode(compared), range(len(compared)))
    except NotFast:
        raise
    except FastDiffers as error:
        raise NotFast(f"{error}, in {compared[error.index][:40]!r}") from None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # gigatoken's parsers raise many kinds, and panic with a BaseException
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise NotFast(f"gigatoken cannot take this tokenizer: {why}") from None
    return encoder


def encoder_for(tokenizer: Tokenizer, texts: Sequence[str], say: Callable[[str], None]) -> Encoder:
    """The fast path if it is proved; else the tokenizer itself, and that is said."""
    try:
        return encoder_of(tokenizer, texts)
    except NotFast as why:
        say(f"note: tokenizing by the reference library, which is slower: {why}")
        return Encoder(tokenizer)


def _mixed(
    texts: list[str], chosen: list[int], first: Callable[[list[str]], Ids], second: Callable[[list[str]], Ids]
) -> Ids:
    """Ids of the ``chosen`` texts by one function and of the others by another, in the order of the texts."""
    these = set(chosen)
    others = [i for i in range(len(texts)) if i not in these]
    lengths = np.zeros(len(texts), dtype=np.int64)
    pieces: list[Any] = [None] * len(texts)
    for indices, function in ((chosen, first), (others, second)):
        if indices:
            found = function([texts[i] for i in indices])
            lengths[indices] = found.lengths
            for i, piece in zip(indices, np.split(found.ids, np.cumsum(found.lengths)[:-1]), strict=True):
                pieces[i] = piece
    return Ids(np.concatenate(pieces), lengths)


class _Backend:
    """gigatoken's batch call on the calling thread, as arrays.

    It remembers every word that it has seen, so it is made anew when the process has grown by ``_MOST_REMEMBERED``. Threads
    may share it.
    """

    def __init__(self, make: Callable[[], Any], first_id: int = 0) -> None:
        self._make, self._first_id = make, first_id
        self._backend = make()
        self._limit = _resident() + _MOST_REMEMBERED

    def __call__(self, texts: list[str]) -> Ids:
        if _resident() > self._limit:
            self._backend = self._make()
            self._limit = max(self._limit, _resident() + _MOST_REMEMBERED // 4)
        if len(texts) == 1:
            ids = self._backend.encode(texts[0])  # a batch has a cost of its own
            return Ids(ids + np.uint32(self._first_id) if self._first_id else ids, np.array([len(ids)]))
        rows = self._backend.encode_batch(texts, parallel=False).layout
        ids, starts = np.asarray(rows.content.data), np.asarray(rows.offsets.data)
        return Ids(ids + np.uint32(self._first_id) if self._first_id else ids, np.diff(starts))


def _resident() -> int:
    """Bytes of memory that this process has; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _library_file(tokenizer: HuggingFaceTokenizer | Gpt2BpeTokenizer) -> Encoder:
    from gigatoken.gigatoken_rs import load_hf_json

    plain = _Backend(lambda: load_hf_json(tokenizer.content))
    own, whole = plain(["a"]).ids.tolist(), tokenizer.encode("a")  # what the post-processor puts around a text
    at = next((i for i in range(len(whole)) if whole[i : i + len(own)] == own), None)
    if at is None:
        raise NotFast("gigatoken's ids of a text are not among the reference's")
    before, after = whole[:at], whole[at + len(own) :]
    return Encoder(tokenizer, lambda texts: surrounded(plain(texts), before, after), unassigned)


def _tiktoken(tokenizer: TiktokenTokenizer) -> Encoder:
    from gigatoken.gigatoken_rs import BPETokenizer

    if tokenizer.pattern != "v2":
        raise NotFast(f"gigatoken does not know the pattern {tokenizer.pattern}")
    ranks = sorted(tokenizer.ranks.items(), key=lambda entry: entry[1])
    first = ranks[0][1]

    def load() -> Any:
        with tempfile.TemporaryDirectory() as folder:  # it reads files only, and ranks from 0
            path = os.path.join(folder, "ranks")
            with open(path, "wb") as file:
                file.writelines(b64encode(token) + b" %d\n" % (rank - first) for token, rank in ranks)
            return BPETokenizer.from_tiktoken(path, "nemotron", {})  # its name of the pattern that is v2 here

    return Encoder(tokenizer, _Backend(load, first), lambda text: unassigned(text) or has_long_space(text))


def _sentencepiece(tokenizer: SentencePieceTokenizer) -> Encoder:
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json
    from gigatoken.gigatoken_rs import load_hf_json

    model = tokenizer.model
    content = json.loads(sentencepiece_to_tokenizer_json(tokenizer.data))
    content["added_tokens"] = [t for t in content["added_tokens"] if not t["special"]]  # their spelling is text here
    pieces = range(model.vocab_size())
    never = {model.id_to_piece(i) for i in pieces if model.is_control(i) or model.is_unknown(i) or model.is_byte(i)}
    merges = content["model"]["merges"]
    content["model"]["merges"] = [m for m in merges if not never.intersection((*m, "".join(m)))]
    whole, bare = json.dumps(content), json.dumps({**content, "normalizer": None})
    normalised = _Backend(lambda: load_hf_json(bare))
    segmented = by_segments(model, normalised)
    if segmented is not None:
        return Encoder(
            tokenizer, lambda texts: surrounded(Ids(*segmented(texts)), tokenizer.begin, ()), remembers=False
        )
    ascii_only = _Backend(lambda: load_hf_json(whole))

    def encode(texts: list[str]) -> Ids:
        wide = [i for i, text in enumerate(texts) if not text.isascii()]
        if not wide:
            return surrounded(ascii_only(texts), tokenizer.begin, ())
        found = _mixed(texts, wide, lambda those: normalised(model.normalize(those)), ascii_only)
        return surrounded(found, tokenizer.begin, ())

    return Encoder(tokenizer, encode, remembers=False)


_BUILDERS: dict[type, Callable[[Any], Encoder]] = {
    HuggingFaceTokenizer: _library_file,
    Gpt2BpeTokenizer: _library_file,
    TiktokenTokenizer: _tiktoken,
    SentencePieceTokenizer: _sentencepiece,
}
