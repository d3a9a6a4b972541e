"""Lists of words that a document must not hold, as patterns.

An alternation of thousands of words is slow in ``re``, which tries one after the other. Written as a tree of their letters
("ba(?:d|nd)"), a wrong letter ends the search at once; where a thousand letters may come next, as in Chinese, they are parted in
four, and again, by what they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_lite.clean.steps.shingles import ALONE_RANGES

_ALONE_SET = "".join(f"{chr(first)}-{chr(last)}" for first, last in ALONE_RANGES)  # scripts without spaces between words
_ALONE = re.compile(f"[{_ALONE_SET}]")
_LETTER = rf"[^\W{_ALONE_SET}]"  # or digit, of a script with spaces
_MANY = 26  # branches that are tried one after the other


def read_words(path: str) -> list[str]:
    """Words or phrases of a file, one a line, in lower case; blank lines are passed over.

    Raises:
        ValueError: the file is not UTF-8, or there are no words.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"word_list {path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    words = [line.strip().lower() for line in lines if line.strip()]
    if not words:
        raise ValueError(f"word_list {path}: no words in it")
    return words


def word_patterns(words: Iterable[str]) -> list[re.Pattern[str]]:
    """Patterns that together find any of the words in text that is in lower case, of any language.

    A word begins and ends at a letter of a script with spaces only where no letter of such a script is beside it ("bad" is in
    "很bad的", not in "badly"); at a letter of Chinese, Japanese, Thai and their like anywhere.
    """
    trees: dict[str, dict[str, Any]] = {}
    for word in words:
        before = "" if _ALONE.match(word[0]) else f"(?<!{_LETTER})"
        after = "" if _ALONE.match(word[-1]) else f"(?!{_LETTER})"
        node = trees.setdefault(before, {})
        for piece in (*map(re.escape, word), after):
            node = node.setdefault(piece, {})
    return [re.compile(before + _branches(tree)) for before, tree in trees.items()]


def _branches(node: dict[str, Any]) -> str:
    """A node of the tree as a pattern."""
    return _one_of([(piece, piece + _branches(below)) for piece, below in sorted(node.items())])


def _one_of(options: list[tuple[str, str]]) -> str:
    """A pattern of several, each with the piece that it begins with."""
    letters = [option for option in options if 1 <= len(option[0]) <= 2]  # perhaps escaped; the others end words
    if len(letters) > _MANY:
        size = -(-len(letters) // 4)
        parts = [letters[at : at + size] for at in range(0, len(letters), size)]
        others = [option for option in options if not 1 <= len(option[0]) <= 2]
        options = [("", f"(?=[{''.join(piece for piece, _ in part)}]){_one_of(part)}") for part in parts] + others
    found = [pattern for _, pattern in options]
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})" if found else ""
