"""Lists of words that a document must not hold, as one pattern.

An alternation of thousands of words is slow in ``re``, which tries one after the other. Written as a tree of their letters
("ba(?:d|nd)"), a wrong letter ends the search at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any


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


def word_pattern(words: Iterable[str], *, whole: bool) -> re.Pattern[str] | None:
    """A pattern of any of the words, for text in lower case; None when there are none.

    Args:
        whole: only as whole words.
    """
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}  # a word ends here
    if not tree:
        return None
    pattern = _branches(tree)
    return re.compile(rf"(?<!\w){pattern}(?!\w)" if whole else pattern)


def _branches(node: dict[str, Any]) -> str:
    """A node of the tree as a pattern. Whole words need the longer branch tried first, so the end comes last."""
    options = [re.escape(letter) + _branches(below) for letter, below in sorted(node.items()) if letter]
    if not options:
        return ""
    ends = [""] if "" in node else []
    return options[0] if len(options) == 1 and not ends else f"(?:{'|'.join(options + ends)})"
