"""Texts on which two implementations of a tokenizer would differ, if they do.

What goes wrong between implementations of the same tokenizer: the class of a rare code point (a letter, a mark, a
number, white space?), how runs of white space are cut, contractions, special tokens spelled in a text, tokens that no
merge reaches, composition of characters, very long words. Everything is made from Unicode's tables, the tokenizer's
vocabulary and a fixed seed.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator
from functools import cache

import numpy as np

from megatron_lite.text.tokenizer import Tokenizer

_PLANES = range(0x40000)  # of the code points above, 0xE0000 to 0xE01EF are assigned and the last two planes private
_TAGS = range(0xE0000, 0xE0200)
_PRIVATE = 0xF0000
_FIRST_UNASSIGNED = 0x378  # of all; a character at that place is not to be expected
_UNIFORM = ((0x3400, 0x9FFF), (0xAC00, 0xD7A3), (0x17000, 0x18AFF), (0x20000, 0x33FFF))  # ideographs, Hangul syllables
_EVERY = 61  # of those, one in so many is tried
_VOCABULARY = 1500  # tokens that are tried
_SPACES = " \n\r\t\x0b\x0c\x1c\x85\u00a0\u1680\u2003\u2028\u202f\u3000\u200b\u200d\ufeff"
_MARKS = "\u0301\u0327\u0323\u0304\u093c\u094d\u0e33\u3099\u1161\u11a8\ufe0f\u20e3\U0001f3fd"
_OTHERS = "aZ\u00e9\u00c9\u017f\u0130\u4eca\u5929\uac00\u1100\ufb01\u1e9b\u0660\u00bd\u2167\u20ac\U0001f600\U0001d7d8,.'\u2019-_/0129"
_HARD = (
    "I'm you'RE he'LL DON'T we'Ve 'tis o'clock it''s 's'S'",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9\U0001f1ea\U0001f1eb \u2764\ufe0f",
    "a\rb\r\rc\r\n\r\n d\n\r\n  e \t\tf\u00a0\u00a0g \u3000h\x00\x01\x7f",
    "   leading and trailing   ", "\n", " ", "  \n  \n", "x" * 20_000, "ab" * 8_000, " " * 3_000 + "a", "\n" * 3_000,
    "=-" * 4_000, "0" * 5_000, "e\u0301" * 4_000, "\u4eca\u5929" * 4_000, "1234567890.50,000e-10 0x1F 3\u00d74",
    "http://user@host.example:80/a/b?c=d&e=%20#f <tag attr='v'>&amp;</tag> snake_case CamelCaseHTTPServer",
)  # fmt: skip


@cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """For each code point, whether it is unassigned; the same for UTF-16 units, where a surrogate counts as unassigned."""
    table = np.ones(0x110000, dtype=bool)
    for codes in (_PLANES, _TAGS):
        table[codes.start : codes.stop] = np.array([*map(unicodedata.category, map(chr, codes))]) == "Cn"
    table[_PRIVATE:] = False
    units = table[:0x10000].copy()
    units[0xD800:0xE000] = True
    return table, units


def unassigned(text: str) -> bool:
    """Whether a text without lone surrogates holds a code point that Python's Unicode tables do not know."""
    table, units = _tables()
    written = np.frombuffer(text.encode("utf-16-le"), dtype="<u2")
    if not units[written[written >= _FIRST_UNASSIGNED]].any():
        return False
    return bool(table[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")].any())


def hard_texts(tokenizer: Tokenizer) -> list[str]:
    """About 300,000 characters of them, the rarest first."""
    texts = list(_rare_code_points())
    rng = random.Random(0)
    mixed = _SPACES * 2 + _MARKS + _OTHERS
    texts += ["".join(rng.choices(mixed, k=rng.randint(1, 24))) for _ in range(800)]
    texts += ["".join(rng.choices(_SPACES[:9] + "a1.'", k=rng.randint(1, 12))) for _ in range(400)]
    size = tokenizer.vocab_size
    last = [tokenizer.decode([i]) for i in range(max(0, size - 50), size)]  # those that were added
    for special in (*last, *[*tokenizer.special][:50], "<s>", "</s>", "<unk>", "<0x0A>", "<|endoftext|>", "\u2581"):
        texts += [special, f"a{special}b {special} {special}{special}\n {special} \n.", special[:-1], special.upper()]
    texts += _HARD
    step = max(1, size // _VOCABULARY)
    return texts + [text for i in range(0, size, step) if (text := tokenizer.decode([i]))]


def _rare_code_points() -> Iterator[str]:
    """Every assigned code point (of ideographs and Hangul syllables some), in the places where its class decides."""
    table, _ = _tables()
    codes = np.flatnonzero(~table[: max(_TAGS) + 1])
    codes = codes[(codes < 0xD800) | (codes > 0xDFFF)]
    for first, last in _UNIFORM:
        inside = (codes >= first) & (codes <= last)
        codes = codes[~inside | (codes % _EVERY == 0)]
    private = (codes >= 0xE000) & (codes < 0xF900)
    characters = [chr(c) for c in codes[~private | (codes % _EVERY == 0)]]
    for start in range(0, len(characters), 64):
        yield "\n".join(f"{c}'s {c}1a" for c in characters[start : start + 64])
