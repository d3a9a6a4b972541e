"""The step ``quality``: drops documents by the rules that became common, with a reason in words.

Gopher's rules (Rae et al. 2021, arXiv:2112.11446, section A.1.1 and table A1), C4's (Raffel et al. 2020, arXiv:1910.10683,
section 2.2), and shares of symbols, digits and addresses. What depends on a language is looked up in its row
(languages.py, where the sources of all bounds are). Where the language is unknown (a text that is too short to tell) the
script may tell the row: Han alone is judged as Chinese, kana as Japanese, Hangul as Korean. Any other document whose language
is unknown, or has no row, passes those rules and is counted. So the step belongs after ``language``. Text is never changed,
except by ``cut_lines``.

A bound of 1 (of a share) or 0 (of a minimum) turns its rule off.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.clean.step import NO_BOUNDS, NO_LANGUAGE, Document, LocalStep
from megatron_lite.clean.steps.languages import LANGUAGES, Bounds, Language
from megatron_lite.clean.steps.quality_lines import cut_lines, javascript_lines
from megatron_lite.clean.steps.quality_measures import Measures, Pieces, class_table, measurer
from megatron_lite.clean.steps.word_list import read_words, word_patterns
from megatron_lite.config.values import convert

_ADDRESS = re.compile(r"(?:https?://|www\.)[!-~]+")
_HAN = r"\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_KANA, _HANGUL = r"\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\uff66-\uff9d", r"\uac00-\ud7a3"
_OTHER_LETTER = re.compile(rf"[^\W\d_{_HAN}{_KANA}{_HANGUL}]")
_SCRIPTS = (("ja", re.compile(f"[{_KANA}]")), ("ko", re.compile(f"[{_HANGUL}]")), ("zh", re.compile(f"[{_HAN}]")))
_SHARES = ("min_alphabetic", "min_sentence_lines", "min_script")  # of the bounds of a language
_ANY = Language("", "", frozenset(), Bounds(top_ngrams=(), duplicate_ngrams=()))  # counts what no language is needed for


@dataclass(frozen=True)
class QualityOptions:
    """Options of the step ``quality``. Shares are between 0 and 1."""

    bounds: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Bounds of a language that differ from its row, as in ``zh: {min_words: 200}``; docs/cleaning-rules.md has their names."""
    word_list: str = ""
    """File of words or phrases, one a line: a document with one of them is dropped (C4), whatever its language. Words of scripts
    without spaces (Chinese, Japanese, Thai ...) are found anywhere, others as whole words; small and large letters are the same."""
    cut_lines: bool = False
    """Before the other rules, cut lines as C4 does: those without an end mark, with fewer than 5 words (8 characters by
    character), or that speak of JavaScript, cookies or terms of use; and drop what has fewer than 3 sentences left. Loses
    verse, lists and titles."""
    min_characters: int = 1
    """Characters of any language, spaces apart."""
    max_characters: int = 0
    """The same from above; 0: none."""
    max_hash_signs: float = 0.1
    """Hash signs for each word (Gopher)."""
    max_ellipses: float = 0.1
    """Ellipses for each word (Gopher)."""
    max_bullet_lines: float = 0.9
    """Share of lines that begin with a bullet (Gopher)."""
    max_ellipsis_lines: float = 0.3
    """Share of lines that end with an ellipsis (Gopher)."""
    max_duplicate_lines: float = 0.3
    """Share of lines that were there before in the document (Gopher)."""
    max_duplicate_line_characters: float = 0.2
    """Their share of the characters (Gopher)."""
    max_duplicate_paragraphs: float = 0.3
    """Share of paragraphs that were there before in the document (Gopher)."""
    max_duplicate_paragraph_characters: float = 0.2
    """Their share of the characters (Gopher)."""
    lorem_ipsum: bool = True
    """Drop documents with "lorem ipsum" (C4)."""
    curly_bracket: bool = True
    """Drop documents with a curly bracket, which is code (C4). Turn it off for a corpus that holds code."""
    max_javascript_lines: float = 0.3
    """Share of lines that speak of JavaScript (C4 cuts such lines)."""
    max_symbols: float = 0.25
    """Share of characters that are neither letters, digits nor punctuation."""
    max_digits: float = 0.5
    """Share of characters that are digits."""
    max_addresses: float = 0.2
    """Share of characters in addresses of pages (http, https, www)."""


class Quality(LocalStep):
    """See the head of this file."""

    name = "quality"
    Options = QualityOptions

    def __init__(self, options: QualityOptions) -> None:
        super().__init__(options)
        table = class_table()
        self.languages = {code: _with_bounds(row, options.bounds.get(code, {})) for code, row in LANGUAGES.items()}
        self.measure: dict[str, Callable[[str], Measures]] = {code: measurer(row, table) for code, row in self.languages.items()}
        self.measure_any = measurer(_ANY, table)
        self.bad_words = word_patterns(read_words(options.word_list)) if options.word_list else []

    def apply(self, documents: Sequence[Document]) -> None:
        """Drop by the first rule that a document breaks."""
        for document in documents:
            language = self.languages.get(document.language or script_language(document.text))
            if language is None:
                self.count(NO_BOUNDS if document.language else NO_LANGUAGE)
            elif not document.language:
                self.count(f"documents of unknown language judged by their script, {language.code}")
            if self.options.cut_lines and language is not None:
                document.text, cut, sentences = cut_lines(document.text, language)
                self.count("lines cut", cut)
                if sentences < 3:
                    document.dropped, document.detail = "fewer than 3 sentences", _told("cut_lines", sentences, "<", 3)
                    continue
            document.dropped, document.detail = next(self.broken(document.text, language), (None, ""))

    def broken(self, text: str, language: Language | None) -> Iterator[tuple[str, str]]:
        """The rules that a text breaks, in words: each with the option, what was measured and the bound."""
        yield from self._words_of(text)
        counts = self.measure_any(text) if language is None else self.measure[language.code](text)
        characters, least, most = counts.characters, self.options.min_characters, self.options.max_characters
        if characters < least:
            yield "too few characters", _told("min_characters", characters, "<", least)
        elif most and characters > most:
            yield "too many characters", _told("max_characters", characters, ">", most)
        if characters:
            for name, rule, found, whole in _measured(text, counts, characters):
                bound = getattr(self.options, name)
                if found > bound * whole:
                    yield rule, _told(name, found, ">", bound, whole)
            if language is not None:
                yield from _language_bound(counts, language, characters)

    def _words_of(self, text: str) -> Iterator[tuple[str, str]]:
        options = self.options
        if options.curly_bracket and ("{" in text or "}" in text):
            yield "curly bracket", "curly_bracket"
        if options.lorem_ipsum and ("psum" in text or "PSUM" in text) and "lorem ipsum" in text.lower():
            yield "lorem ipsum", "lorem_ipsum"
        lower = text.lower() if self.bad_words else ""
        if (found := next(filter(None, (pattern.search(lower) for pattern in self.bad_words)), None)) is not None:
            yield "a word of the list", f"word_list: {found.group()}"

    @staticmethod
    def problems(options: QualityOptions) -> list[str]:
        """Bounds of unknown names or kinds, numbers that are no shares."""
        found = [f"bounds.{problem}" for problem in _bounds_problems(options.bounds)]
        for f in dataclasses.fields(options):
            value = getattr(options, f.name)
            if isinstance(value, float) and not 0 <= value <= 1:
                found.append(f"{f.name} {value:g}: a share, between 0 and 1")
            if f.name.endswith("characters") and isinstance(value, int) and value < 0:
                found.append(f"{f.name} {value}: 0 or more")
        if os.path.isfile(options.word_list):
            try:
                read_words(options.word_list)
            except ValueError as error:
                found.append(str(error))
        return found

    @staticmethod
    def files(options: QualityOptions) -> Sequence[str]:
        """The list of words."""
        return [options.word_list] if options.word_list else []

    @staticmethod
    def needs_language(options: QualityOptions) -> bool:
        """Its bounds are a language's."""
        return True


def script_language(text: str) -> str:
    """The language whose row judges a text of unknown language, by its script; empty: it has letters of others, or none."""
    if _OTHER_LETTER.search(text):
        return ""
    return next((code for code, script in _SCRIPTS if script.search(text)), "")


def _in_addresses(text: str) -> int:
    """Characters of addresses of pages."""
    if "://" not in text and "www." not in text:
        return 0
    return sum(len(match.group()) for match in _ADDRESS.finditer(text))


def _measured(text: str, counts: Measures, characters: int) -> Iterator[tuple[str, str, int, int]]:
    """(option, rule, what is found, of how many) of the rules that are a largest share."""
    lines, paragraphs = Pieces(*counts.lines), Pieces(*counts.paragraphs)
    yield "max_addresses", "too much of the text is addresses of pages", _in_addresses(text), characters
    yield "max_javascript_lines", "too many lines with javascript", javascript_lines(text), lines.number
    yield "max_symbols", "too much of the text is symbols", counts.symbols, characters
    yield "max_digits", "too much of the text is digits", counts.digits, characters
    yield "max_hash_signs", "too many hash signs", counts.hash_signs, counts.words
    yield "max_bullet_lines", "too many lines that begin with a bullet", counts.bullet_lines, lines.number
    yield "max_ellipsis_lines", "too many lines that end with an ellipsis", counts.ellipsis_lines, lines.number
    yield "max_ellipses", "too many ellipses", counts.ellipses, counts.words
    for what, pieces in (("line", lines), ("paragraph", paragraphs)):
        yield f"max_duplicate_{what}s", f"too many duplicate {what}s", pieces.copies, pieces.number
        rule = f"duplicate {what}s are too much of the text"
        yield f"max_duplicate_{what}_characters", rule, pieces.copied_characters, pieces.characters


def _told(option: str, found: float, sign: str, bound: float, whole: int | None = None) -> str:
    """``max_symbols: 31 of 100 (0.31) > 0.25``."""
    share = "" if whole is None else f" of {whole:,} ({found / whole if whole else math.inf:.4g})"
    return f"{option}: {found:,}{share} {sign} {bound:,}"


def _language_bound(counts: Measures, language: Language, characters: int) -> Iterator[tuple[str, str]]:
    bounds, words, row = language.bounds, counts.words, f"bounds.{language.code}."
    if words < bounds.min_words:
        yield "too few words", _told(row + "min_words", words, "<", bounds.min_words)
    elif words > bounds.max_words:
        yield "too many words", _told(row + "max_words", words, ">", bounds.max_words)
    if not words:
        return
    mean = counts.word_characters / words
    if mean < bounds.min_word_length:
        yield "words too short on average", _told(row + "min_word_length", round(mean, 4), "<", bounds.min_word_length)
    elif bounds.max_word_length and mean > bounds.max_word_length:
        yield "words too long on average", _told(row + "max_word_length", round(mean, 4), ">", bounds.max_word_length)
    script = counts.ideographs + (counts.kana if language.kana else 0)
    if script < bounds.min_script * words:
        yield "too few words in the script of the language", _told(row + "min_script", script, "<", bounds.min_script, words)
    if counts.alphabetic < bounds.min_alphabetic * words:
        yield "too few words with a letter", _told(row + "min_alphabetic", counts.alphabetic, "<", bounds.min_alphabetic, words)
    if counts.stop_words < bounds.min_stop_words:
        yield "too few stop words", _told(row + "min_stop_words", counts.stop_words, "<", bounds.min_stop_words)
    found, lines = counts.sentence_lines, counts.lines[0]
    if found < bounds.min_sentence_lines * lines:
        yield "too few lines with an end mark", _told(row + "min_sentence_lines", found, "<", bounds.min_sentence_lines, lines)
    inside = words if language.by_character else characters
    for (n, share), found in zip(bounds.top_ngrams, counts.top, strict=True):
        if found > share * inside:
            yield f"a {n}-gram is too much of the text", _told(f"{row}top_ngrams, {n}", found, ">", share, inside)
    for (n, share), found in zip(bounds.duplicate_ngrams, counts.duplicate, strict=True):
        if found > share * inside:
            yield "n-grams that repeat are too much of the text", _told(f"{row}duplicate_ngrams, {n}", found, ">", share, inside)
            return


def _with_bounds(row: Language, changed: Mapping[str, Any]) -> Language:
    """A row with other bounds. Raises ValueError: one is of another type, or out of its range."""
    values: dict[str, Any] = {}
    for name, value in changed.items():
        default = getattr(row.bounds, name)
        values[name] = convert(value, tuple[tuple[int, float], ...] if isinstance(default, tuple) else type(default))
        grams = values[name] if isinstance(default, tuple) else ()
        shares = [share for _, share in grams] + ([values[name]] if name in _SHARES else [])
        if not all(0 <= share <= 1 for share in shares) or not all(n > 0 for n, _ in grams):
            raise ValueError("shares are between 0 and 1" + ", n is 1 or more" * bool(grams))
    return dataclasses.replace(row, bounds=dataclasses.replace(row.bounds, **values))


def _bounds_problems(bounds: Mapping[str, Any]) -> Iterator[str]:
    known = [f.name for f in dataclasses.fields(Bounds)]
    for code, changed in bounds.items():
        if code not in LANGUAGES:
            yield f"{code}: no row of the table, which has {', '.join(LANGUAGES)}"
        elif not isinstance(changed, dict):
            yield f"{code}: expected names and values of bounds"
        else:
            for name, value in changed.items():
                if name not in known:
                    yield f"{code}.{name}: unknown, expected one of {', '.join(known)}"
                    continue
                try:
                    _with_bounds(LANGUAGES[code], {name: value})
                except ValueError as error:
                    yield f"{code}.{name} {value!r}: {error}"
