"""Rules of C4 (Raffel et al. 2020, arXiv:1910.10683, section 2.2) that look at single lines."""

from __future__ import annotations

from megatron_lite.clean.steps.languages import Language
from megatron_lite.clean.steps.taken_out import without

MIN_WORDS = 5  # of C4; and so many characters in a language by character:
MIN_CHARACTERS = 8  # 1.6 for each word, see languages.py
_NOTICES = ("javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


def javascript_lines(text: str) -> int:
    """Lines that speak of JavaScript."""
    if "cript" not in text and "CRIPT" not in text:
        return 0
    return sum("javascript" in line.lower() for line in text.split("\n"))


def cut_lines(text: str, language: Language) -> tuple[str, int, int]:
    """What is left of a text without lines that are no sentences.

    Returns:
        the text, the number of lines that were cut, and the number of end marks that end a sentence in
        what is left, at least one for each line.
    """
    lines, cut, sentences = text.split("\n"), dict[int, None](), 0
    for number, line in enumerate(lines):
        stripped = line.strip()
        if not stripped:
            continue
        long_enough = len(stripped) >= MIN_CHARACTERS if language.by_character else len(stripped.split()) >= MIN_WORDS
        ends = stripped[-1] in language.end_marks and not stripped.endswith(("...", "…"))
        lower = stripped.lower()
        stays = long_enough and ends and not any(notice in lower for notice in _NOTICES)
        if stays:
            sentences += max(1, _ends(stripped, language))
        else:
            cut[number] = None
    return without(lines, cut), len(cut), sentences


def _ends(line: str, language: Language) -> int:
    """Sentences of a line: end marks, those before a space only where words stand between spaces."""
    if language.by_character:
        return sum(line.count(mark) for mark in "。！？!?．｡")
    return sum(word[-1] in ".!?" for word in line.split())
