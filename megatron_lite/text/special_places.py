"""Ids of the texts that chat templates write, and where in a text each special token is.

Nothing is added to a text: no begin or end token of the tokenizer's own. A special token is what the template wrote. Its spelling
inside a message is text, as everything in a message is, or whoever writes messages could end turns and begin others; the places
of such spellings are told with the text.

Files of Hugging Face make tokens of spellings themselves. Their fast form gives ids alone (:mod:`.tokenizer_fast`); there the
special tokens are looked for in the text, and each has to be the next one among the ids. Where that is not so, and for
tokenizers whose special tokens take in white space beside them, the reference library is asked, which keeps the places of all tokens.
Where a spelling is to be text, the library gets a tokenizer whose special tokens are spelled with characters that no text holds,
and the text with its true special tokens in this spelling, so that nothing else about the text changes.

All other kinds take spellings as text. There the text is cut at its special tokens, and each part is encoded by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import regex

from megatron_lite.text.records import BadRecord
from megatron_lite.text.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from megatron_lite.text.tokenizer_fast import Encoder, FastDiffers

_PRIVATE = range(0xF0000, 0xFFFFE)  # plane 15, of private use: a character for each special token


class Tokens(NamedTuple):
    """A text's tokens.

    Attributes:
        ids: int64.
        special: of each special token its index in ``ids``, and its first and last + 1 character; ascending.
    """

    ids: np.ndarray
    special: list[tuple[int, int, int]]


def named_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """What templates call ``eos_token`` and ``bos_token``, where it is not for a ``tokenizer_config.json`` to say."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return {}
    texts = {i: text for text, i in tokenizer.special.items()}
    begin = tokenizer.model.bos_id() if isinstance(tokenizer, SentencePieceTokenizer) else tokenizer.special.get("<s>", -1)
    found = {"eos_token": texts.get(tokenizer.eod_id), "bos_token": texts.get(begin)}
    return {name: text for name, text in found.items() if text is not None}


class SpecialPlaces:
    """Tokenizes texts and finds their special tokens."""

    def __init__(self, encoder: Encoder) -> None:
        self.tokenizer = tokenizer = encoder.tokenizer
        self.special = tokenizer.special
        self._pattern = _any_of(self.special)
        self._library = tokenizer if isinstance(tokenizer, HuggingFaceTokenizer) else None
        self._fast = encoder if encoder.is_fast else None
        self._before, self._after = len(tokenizer.begin), 0
        if self._library is not None:
            added = self._library.added_tokens()
            self._added = {t.content: i for i, t in added.items()}
            self._added_pattern = _any_of(self._added)
            self._is_added = np.zeros(tokenizer.vocab_size, dtype=bool)
            self._is_added[list(added)] = True
            if any(t.lstrip or t.rstrip or t.single_word for t in added.values()):
                self._fast = None
            around, own = tokenizer.encode("a"), self._library.encodings(["a"])[0].ids
            self._before = next(i for i in range(len(around)) if around[i : i + len(own)] == own)
            self._after = len(around) - len(own) - self._before

    def encode(self, texts: Sequence[str], plain: Sequence[Sequence[int]] | None = None) -> list[Tokens | BadRecord]:
        """Ids and special tokens of each text.

        Args:
            plain: for each text, ascending, the places one behind the first character of spellings that are text.

        Raises:
            ValueError: a text that the tokenizer refuses.
            FastDiffers: the fast form gives other ids than the reference for the first of them.
        """
        plain = plain or [()] * len(texts)
        if self._library is None:
            return self._by_parts(texts, plain)
        own = [i for i, places in enumerate(plain) if not places]
        found: dict[int, Tokens | BadRecord] = dict(zip(own, self._whole([texts[i] for i in own]), strict=True))
        for i, places in enumerate(plain):
            if places:
                found[i] = self._respelled(texts[i], places)
        return [found[i] for i in range(len(texts))]

    def spelled(self, text: str, mark: str) -> str:
        """A text with a mark behind the first character of everything in it that spells a special token."""
        return self._spelled.sub(lambda found: found[0] + mark, text) if self._pattern.search(text) else text

    def without_special(self, text: str) -> str:
        """A text with a space for everything that spells a special token."""
        return self._pattern.sub(" ", text)  # type: ignore[no-any-return]

    @cached_property
    def _spelled(self) -> Any:
        several = [text for text in self.special if len(text) > 1]
        return regex.compile(rf"(?s)(?={_any_of(several).pattern}).")

    def true_special(self, text: str, plain: Sequence[int]) -> Iterator[Any]:
        """Matches of the special tokens that are not text."""
        if not plain:
            yield from self._pattern.finditer(text)
            return
        at, places = 0, set(plain)
        while found := self._pattern.search(text, at):
            if found.start() + 1 in places and len(found[0]) > 1:
                at = found.start() + 1
            else:
                yield found
                at = found.end()

    def _by_parts(self, texts: Sequence[str], plain: Sequence[Sequence[int]]) -> list[Tokens | BadRecord]:
        """Of tokenizers for which all spellings are text."""
        parts: list[str] = []
        cuts: list[list[Any]] = []
        for text, places in zip(texts, plain, strict=True):
            cuts.append(list(self.true_special(text, places)))
            borders = [0, *(at for cut in cuts[-1] for at in cut.span()), len(text)]
            parts += [text[a:b] for a, b in zip(borders[::2], borders[1::2], strict=True)]
        encoded = iter(self._ids_of(parts))
        results: list[Tokens | BadRecord] = []
        for own in cuts:
            pieces, special, length = [next(encoded)], [], 0
            for cut in own:
                length += len(pieces[-1])
                special.append((length, *cut.span()))
                pieces += [np.array([self.special[cut[0]]], dtype=np.int64), next(encoded)]
                length += 1
            results.append(Tokens(np.concatenate(pieces), special))
        return results

    def _ids_of(self, parts: Sequence[str]) -> list[np.ndarray]:
        """Ids of texts without special tokens, int64; of an empty one, none."""
        some = [part for part in parts if part]
        if self._fast is not None and some:
            ids, lengths = self._fast.encode(some)
            rows = np.split(ids.astype(np.int64), np.cumsum(lengths)[:-1])
        else:
            rows = [np.array(ids, dtype=np.int64) for ids in self.tokenizer.encode_batch(some)]
        of_some = iter(rows)
        return [next(of_some)[self._before :] if part else np.empty(0, np.int64) for part in parts]

    def _whole(self, texts: Sequence[str]) -> list[Tokens]:
        """Of texts in which every spelling is a special token, by the library."""
        assert self._library is not None
        if self._fast is None or not texts:
            return [self._found(e) for e in self._library.encodings(texts)]
        found = self._fast.encode(list(texts))
        stops = np.cumsum(found.lengths).tolist()
        results: list[Tokens | None] = []
        for text, length, stop in zip(texts, found.lengths.tolist(), stops, strict=True):
            ids = found.ids[stop - length + self._before : stop - self._after].astype(np.int64)
            results.append(self._matched(text, ids))
        (first,) = self._library.encodings(texts[:1])
        if results[0] is not None and results[0].ids.tolist() != first.ids:
            raise FastDiffers(0, f"the fast tokenizer gives other ids than the reference for {texts[0][:80]!r}")
        unmatched = [i for i, r in enumerate(results) if r is None]
        for i, encoding in zip(unmatched, self._library.encodings([texts[i] for i in unmatched]), strict=True):
            results[i] = self._found(encoding)
        return [r for r in results if r is not None]

    def _matched(self, text: str, ids: np.ndarray) -> Tokens | None:
        """The added tokens among the ids are those in the text, or None."""
        at = np.flatnonzero(self._is_added[ids])
        spans = [(m.start(), m.end(), m[0]) for m in self._added_pattern.finditer(text)]
        if ids[at].tolist() != [self._added[spelling] for _, _, spelling in spans]:
            return None
        pairs = zip(at.tolist(), spans, strict=True)
        return Tokens(ids, [(token, start, stop) for token, (start, stop, text) in pairs if text in self.special])

    def _found(self, encoding: Any) -> Tokens:
        ids = np.array(encoding.ids, dtype=np.int64)
        special = set(self.special.values())
        at = [i for i in np.flatnonzero(self._is_added[ids]).tolist() if int(ids[i]) in special]
        return Tokens(ids, [(i, *encoding.token_to_chars(i)) for i in at])

    def _respelled(self, text: str, plain: Sequence[int]) -> Tokens | BadRecord:
        if any(ord(c) in _PRIVATE for c in text):
            return BadRecord("characters of private use in a text that spells special tokens")
        library, spelling = self._private
        parts, at = [], 0
        for found in self.true_special(text, plain):
            parts += [text[at : found.start()], spelling[found[0]]]
            at = found.end()
        return self._found(library.encode("".join([*parts, text[at:]]), add_special_tokens=False))

    @cached_property
    def _private(self) -> tuple[Any, dict[str, str]]:
        """The library's tokenizer with other spellings of its special tokens, as long as their own; and these."""
        from tokenizers import Tokenizer as Library

        assert self._library is not None
        spelling = {text: chr(c) * len(text) for text, c in zip(self.special, _PRIVATE, strict=False)}
        content = json.loads(self._library.content)
        for token in content["added_tokens"]:
            token["content"] = spelling.get(token["content"], token["content"])
        model = content["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {spelling.get(text, text): i for text, i in model["vocab"].items()}
        else:  # a unigram model's
            model["vocab"] = [[spelling.get(text, text), score] for text, score in model["vocab"]]
        if model.get("unk_token") is not None:
            model["unk_token"] = spelling.get(model["unk_token"], model["unk_token"])
        library = Library.from_str(json.dumps(content | {"post_processor": None, "truncation": None, "padding": None}))
        return library, spelling


def _any_of(texts: Any) -> Any:
    """A pattern of texts, the longest first; without any it matches nothing."""
    longest_first = sorted(texts, key=len, reverse=True)
    return regex.compile("|".join(map(regex.escape, longest_first)) or r"(?!)")
