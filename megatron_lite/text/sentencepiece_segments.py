"""Remembering the ids of segments of text for a SentencePiece BPE model, by the compiled helper (csrc/segments.cpp).

Such a model merges neighbours into pieces, over a whole text. Where no piece of the vocabulary has one character followed
by another, no merge crosses a place between the two, and the ids of a text are those of its segments, cut at all such
places. Text outside of ASCII is normalised by the sentencepiece package; for text in ASCII it is asked once what it does
with each character and with runs of spaces, and the helper does the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_lite.ops.library import index_module

MARK = "\u2581"  # of a space
Arrays = tuple[np.ndarray, np.ndarray]  # ids back to back, and how many each text has
_DELETED = 0xFF


def by_segments(model: Any, ask: Callable[[list[str]], Any]) -> Callable[[list[str]], Arrays] | None:
    """Ids of texts by way of their segments, or None where that cannot be done.

    Args:
        model: a ``SentencePieceProcessor`` with byte fallback.
        ask: (ids, lengths) of texts that are normalised already.
    """
    helper, rules = index_module()[0], _ascii_rules(model)
    every = range(model.vocab_size())
    pieces = [
        model.id_to_piece(i) for i in every if not (model.is_control(i) or model.is_unknown(i) or model.is_byte(i))
    ]
    if helper is None or rules is None:
        return None
    segments = helper.Segments(*rules, pieces)
    if any(segments.normalised(text) != model.normalize(text) for text in _ascii_texts()):
        return None
    used = set().union(*pieces)
    apart = next((chr(code) for code in range(1, 32) if chr(code) not in used), None)
    apart_id = model.piece_to_id(f"<0x{ord(apart):02X}>") if apart else -1

    def ask_at_once(unknown: Sequence[str]) -> Arrays:
        """Ask for many segments in one text, with a character between them that is in no piece."""
        text = apart.join(unknown) if apart else ""
        if apart and text.count(apart) == len(unknown) - 1:  # it is in no segment
            ids, _ = ask([text])
            borders = np.flatnonzero(ids == apart_id)
            if len(borders) == len(unknown) - 1:
                return np.delete(ids, borders), np.diff(borders, prepend=-1, append=len(ids)) - 1
        ids, lengths = ask(list(unknown))
        return ids, lengths

    def encode(texts: list[str]) -> Arrays:
        wide = [i for i, text in enumerate(texts) if not text.isascii()]
        if wide:
            texts = list(texts)
            for i, text in zip(wide, model.normalize([texts[i] for i in wide]), strict=True):
                texts[i] = text
        batch = segments.split(texts)
        unknown = batch.unknown
        asked = ask_at_once(unknown) if unknown else (np.zeros(0, np.uint32), np.zeros(0, np.int64))
        found: Arrays = segments.join(batch, *asked)
        return found

    return encode


def _ascii_rules(model: Any) -> tuple[bytes, bool, bool] | None:
    """(what each character becomes, whether runs of spaces are one, whether a mark comes first), or None if it is otherwise."""
    first = model.normalize("a").removesuffix("a")
    table = bytearray()
    for code in range(128):
        became = model.normalize(f"a{chr(code)}a").removeprefix(first)[1:-1]
        became = " " if became == MARK else became
        if len(became) > 1 or not became.isascii():
            return None
        table.append(ord(became) if became else _DELETED)
    again = all(byte == _DELETED or table[byte] == byte for byte in table)
    if first not in ("", MARK) or not again:
        return None
    return bytes(table), model.normalize("a  a").count(MARK) == model.normalize("a a").count(MARK), first == MARK


def _ascii_texts() -> list[str]:
    rng = random.Random(0)
    some = "".join(map(chr, range(128))) + " \n\t" * 30
    return ["", " ", "  ", "\n", *("".join(rng.choices(some, k=rng.randint(1, 20))) for _ in range(500))]
