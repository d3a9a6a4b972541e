"""What quality rules look at in a text: counts of characters, words, lines, paragraphs and repeated n-grams.

:func:`measurer` gives the compiled form (csrc/text_measures.cpp) where it has been built, else :class:`Measurer`, which says
what each number means and counts the same, some thirty times slower.

What is a word, depends on the language (languages.py): a run without spaces, or by character an ideograph, a kana or a
run of other letters and digits. A line is what stands between line ends, without the spaces around it, if anything is
left; a paragraph is what stands between blank lines.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from megatron_lite.clean.steps.languages import Language
from megatron_lite.ops.library import index_module

BULLETS = "•‣◦▪■●○□◆◇★*-·・"
TABLE_SIZE = 0x20000  # code points beyond are ideographs for us
SYMBOL, SPACE, LETTER, DIGIT, MARK, PUNCTUATION, IDEOGRAPH, KANA = range(8)
_OF_CATEGORY = {"L": LETTER, "N": DIGIT, "M": MARK, "P": PUNCTUATION, "Z": SPACE}
_IDEOGRAPHS = ((0x3005, 0x3008), (0x303B, 0x303C), (0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00))
_KANA = ((0x3041, 0x30FB), (0x30FC, 0x3100), (0x31F0, 0x3200), (0xFF66, 0xFFA0))
_ELLIPSIS = re.compile(r"\.{3,}|…+")


class Pieces(NamedTuple):
    """Lines or paragraphs of a text; a copy is one that was there before."""

    number: int
    characters: int
    copies: int
    copied_characters: int


class Measures(NamedTuple):
    """Counts of one text. The first seven are characters of each class, spaces apart.

    Attributes:
        words: how many.
        word_characters: in words, without the marks around them.
        alphabetic: words with a letter.
        stop_words: words that are one, marks around them apart.
        hash_signs, ellipses: "#"; runs of three dots or more, or of ellipsis marks.
        bullet_lines, ellipsis_lines: lines that begin with a bullet, that end with an ellipsis.
        sentence_lines: lines that end with an end mark, or have many words.
        lines, paragraphs: see :class:`Pieces`.
        top: characters in all places of the most frequent n-gram, for each n; of equally frequent ones the longest; 0 when
            none is there twice. Places that overlap count twice. By character a word of several letters counts as one.
        duplicate: characters in n-grams that were there before, for each n, overlaps once; by character as above.
    """

    symbols: int
    letters: int
    digits: int
    marks: int
    punctuation: int
    ideographs: int
    kana: int
    words: int
    word_characters: int
    alphabetic: int
    stop_words: int
    hash_signs: int
    ellipses: int
    bullet_lines: int
    ellipsis_lines: int
    sentence_lines: int
    lines: Sequence[int]
    paragraphs: Sequence[int]
    top: Sequence[int]
    duplicate: Sequence[int]

    @property
    def characters(self) -> int:
        """All but spaces."""
        return sum(self[:7])


def class_table() -> np.ndarray:
    """The class of each code point below :data:`TABLE_SIZE`, uint8. What Unicode does not name counts as a symbol."""
    table = np.zeros(TABLE_SIZE, dtype=np.uint8)
    for code in range(TABLE_SIZE):
        category = unicodedata.category(chr(code))
        table[code] = MARK if category == "Cf" else _OF_CATEGORY.get(category[0], SYMBOL)
    for code in range(0x2000):
        if chr(code).isspace():
            table[code] = SPACE
    for ranges, kind in ((_IDEOGRAPHS, IDEOGRAPH), (_KANA, KANA)):
        for begin, end in ranges:
            table[begin:end] = kind
    return table


def spellings(word: str) -> set[str]:
    """A stop word as it may be written."""
    return {word, word.capitalize(), word.upper()}


class Measurer:
    """Measures texts of one language, in Python.

    Args:
        language: its row.
        table: of :func:`class_table`.
    """

    def __init__(self, language: Language, table: np.ndarray) -> None:
        self.language, self.bounds = language, language.bounds
        self.table = table.tobytes()
        self.stop_words = set().union(*map(spellings, language.stop_words)) if language.stop_words else set()

    def measure(self, text: str) -> Measures:
        """The counts of a text."""
        lines: list[str] = []
        paragraphs: list[list[str]] = [[]]
        for raw in text.split("\n"):
            line = self._strip(raw, lambda kind: kind != SPACE)
            if line:
                lines.append(line)
                paragraphs[-1].append(line)
            elif paragraphs[-1]:
                paragraphs.append([])
        classes = Counter(self._class(c) for line in lines for c in line)
        words = [self._words(line) for line in lines]
        flat = [word for some in words for word in some]
        inner = [self._strip(word, self._of_a_word) for word in flat]
        joined = ["\n".join(some) for some in paragraphs if some]
        sizes = [len(p) - p.count("\n") for p in joined]
        size: Callable[[str], int] = (lambda _: 1) if self.language.by_character else len
        return Measures(
            symbols=classes[SYMBOL],
            letters=classes[LETTER],
            digits=classes[DIGIT],
            marks=classes[MARK],
            punctuation=classes[PUNCTUATION],
            ideographs=classes[IDEOGRAPH],
            kana=classes[KANA],
            words=len(flat),
            word_characters=sum(map(len, inner)),
            alphabetic=sum(any(self._class(c) in (LETTER, IDEOGRAPH, KANA) for c in word) for word in flat),
            stop_words=sum(word in self.stop_words for word in inner),
            hash_signs=sum(line.count("#") for line in lines),
            ellipses=sum(len(_ELLIPSIS.findall(line)) for line in lines),
            bullet_lines=sum(line[0] in BULLETS for line in lines),
            ellipsis_lines=sum(line.endswith(("…", "...")) for line in lines),
            sentence_lines=sum(
                line[-1] in self.language.end_marks or len(some) >= self.bounds.line_words
                for line, some in zip(lines, words, strict=True)
            ),
            lines=_pieces(lines, [len(line) for line in lines]),
            paragraphs=_pieces(joined, sizes),
            top=[_top(flat, size, n) for n, _ in self.bounds.top_ngrams],
            duplicate=[_duplicate(flat, size, n) for n, _ in self.bounds.duplicate_ngrams],
        )

    def _class(self, character: str) -> int:
        code = ord(character)
        return self.table[code] if code < TABLE_SIZE else IDEOGRAPH

    @staticmethod
    def _of_a_word(kind: int) -> bool:
        return kind in (LETTER, DIGIT, MARK, IDEOGRAPH, KANA)

    def _strip(self, text: str, keep: Callable[[int], bool]) -> str:
        begin, end = 0, len(text)
        while begin < end and not keep(self._class(text[begin])):
            begin += 1
        while end > begin and not keep(self._class(text[end - 1])):
            end -= 1
        return text[begin:end]

    def _words(self, line: str) -> list[str]:
        words, run = [], ""
        for c in line:
            kind = self._class(c)
            alone = self.language.by_character and kind in (IDEOGRAPH, KANA)
            inside = self._of_a_word(kind) and not alone if self.language.by_character else kind != SPACE
            if inside:
                run += c
                continue
            words += [run] if run else []
            words += [c] if alone else []
            run = ""
        return words + ([run] if run else [])


def _pieces(pieces: list[str], sizes: list[int]) -> Pieces:
    seen: set[str] = set()
    copied = []
    for piece, size in zip(pieces, sizes, strict=True):
        if piece in seen:
            copied.append(size)
        seen.add(piece)
    return Pieces(len(pieces), sum(sizes), len(copied), sum(copied))


def _grams(words: list[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[k:] for k in range(n)), strict=False))


def _top(words: list[str], size: Callable[[str], int], n: int) -> int:
    counts = Counter(_grams(words, n))
    most, longest = max(((times, sum(map(size, gram))) for gram, times in counts.items()), default=(1, 0))
    return most * longest if most > 1 else 0


def _duplicate(words: list[str], size: Callable[[str], int], n: int) -> int:
    seen: set[tuple[str, ...]] = set()
    covered: set[int] = set()
    for place, gram in enumerate(_grams(words, n)):
        if gram in seen:
            covered.update(range(place, place + n))
        seen.add(gram)
    return sum(size(words[i]) for i in covered)


def measurer(language: Language, table: np.ndarray) -> Callable[[str], Measures]:
    """The function that measures texts of a language."""
    compiled = index_module()[0]
    if compiled is None:
        return Measurer(language, table).measure
    bounds = language.bounds
    stop_words = sorted(set().union(*map(spellings, language.stop_words))) if language.stop_words else []
    measure = compiled.TextMeasures(
        table, language.end_marks, BULLETS, stop_words, language.by_character, bounds.line_words,
        [n for n, _ in bounds.top_ngrams], [n for n, _ in bounds.duplicate_ngrams],
    ).measure  # fmt: skip
    return lambda text: Measures._make(measure(text))
