"""Ids of texts that spell special tokens, and where in a text each of these is.

Nothing is added to the texts: no begin or end token of the tokenizer's own. The fast form of the tokenizer gives ids
alone (:mod:`.tokenizer_fast`); there the special tokens are looked for in the text, and each has to be the next one among
the ids. Where that is not so, and for tokenizers whose special tokens take in white space beside them, the
reference library is asked, which keeps the places of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import regex

from megatron_lite.text.tokenizer import HuggingFaceTokenizer
from megatron_lite.text.tokenizer_fast import Encoder


class Tokens(NamedTuple):
    """A text's tokens.

    Attributes:
        ids: int64.
        special: of each special token its index in ``ids``, and its first and last + 1 character; ascending.
    """

    ids: np.ndarray
    special: list[tuple[int, int, int]]


class SpecialPlaces:
    """Tokenizes texts and finds their special tokens.

    Args:
        tokenizer: the reference.
        encoder: its fast form, where that is proved; None: the reference does it all.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer, encoder: Encoder | None) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens()
        self._special = {i for i, t in added.items() if t.special}
        self._is_added = np.zeros(tokenizer.vocab_size, dtype=bool)
        self._is_added[list(added)] = True
        self._ids = {t.content: i for i, t in added.items()}
        plain = not any(t.lstrip or t.rstrip or t.single_word for t in added.values())
        self._fast = encoder if encoder is not None and encoder.is_fast and plain and added else None
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = regex.compile("|".join(map(regex.escape, longest_first)))
        around, own = tokenizer.encode("a"), tokenizer.encodings(["a"])[0].ids
        self._before = next(i for i in range(len(around)) if around[i : i + len(own)] == own)
        self._after = len(around) - len(own) - self._before

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Ids and special tokens of each text.

        Raises:
            ValueError: the fast form gives other ids than the reference for the first of them.
        """
        if self._fast is None or not texts:
            return [self._found(e) for e in self.tokenizer.encodings(texts)]
        found = self._fast.encode(list(texts))
        stops = np.cumsum(found.lengths).tolist()
        results: list[Tokens | None] = []
        for text, length, stop in zip(texts, found.lengths.tolist(), stops, strict=True):
            ids = found.ids[stop - length + self._before : stop - self._after].astype(np.int64)
            results.append(self._matched(text, ids))
        (first,) = self.tokenizer.encodings(texts[:1])
        if results[0] is not None and results[0].ids.tolist() != first.ids:
            raise ValueError(f"the fast tokenizer gives other ids than the reference for {texts[0][:80]!r}")
        unmatched = [i for i, r in enumerate(results) if r is None]
        for i, encoding in zip(unmatched, self.tokenizer.encodings([texts[i] for i in unmatched]), strict=True):
            results[i] = self._found(encoding)
        return [r for r in results if r is not None]

    def _matched(self, text: str, ids: np.ndarray) -> Tokens | None:
        """The added tokens among the ids are those in the text, or None."""
        at = np.flatnonzero(self._is_added[ids])
        spans = [(m.start(), m.end(), self._ids[m.group()]) for m in self._pattern.finditer(text)]
        if ids[at].tolist() != [i for _, _, i in spans]:
            return None
        pairs = zip(at.tolist(), spans, strict=True)
        return Tokens(ids, [(token, start, stop) for token, (start, stop, i) in pairs if i in self._special])

    def _found(self, encoding: object) -> Tokens:
        ids = np.array(encoding.ids, dtype=np.int64)  # type: ignore[attr-defined]
        at = [i for i in np.flatnonzero(self._is_added[ids]).tolist() if int(ids[i]) in self._special]
        return Tokens(ids, [(i, *encoding.token_to_chars(i)) for i in at])  # type: ignore[attr-defined]
