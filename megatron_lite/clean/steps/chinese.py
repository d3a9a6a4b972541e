"""Two ways of writing that Chinese corpora mix: full-width letters, and traditional or simplified characters.

Nothing here is on by default, and no mark of punctuation is lost: ``full_width: letters`` leaves them as they are, ``all``
writes the ASCII twin of those that have one. Japanese is never converted (many of its characters look traditional and
are not); a text of no known language counts as Chinese where it has Han characters and no kana.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_lite.clean.step import Document, LocalStep, missing_packages

_LETTERS = [*range(0xFF10, 0xFF1A), *range(0xFF21, 0xFF3B), *range(0xFF41, 0xFF5B)]
_ALL = [*range(0xFF01, 0xFF5F)]
_SHIFT = 0xFEE0  # from a full-width form to its ASCII twin (Unicode, Halfwidth and Fullwidth Forms)
_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff]")
_KANA = re.compile("[\u3041-\u3096\u30a1-\u30fa]")


@dataclass(frozen=True)
class ChineseOptions:
    """Options of ``chinese``."""

    full_width: Literal["keep", "letters", "all"] = "keep"
    """Write full-width letters and digits in ASCII; ``all``: marks too, and the ideographic space as a space."""
    convert: Literal["none", "t2s", "s2t", "tw2s", "s2tw", "tw2sp", "s2twp", "hk2s", "s2hk"] = "none"
    """Convert between traditional and simplified characters: a configuration of OpenCC (``pip install opencc``)."""


class Chinese(LocalStep):
    """See the module."""

    name = "chinese"
    Options = ChineseOptions

    def __init__(self, options: ChineseOptions) -> None:
        super().__init__(options)
        codes = {"keep": [], "letters": _LETTERS, "all": _ALL}[options.full_width]
        self._folded = {code: code - _SHIFT for code in codes}
        if options.full_width == "all":
            self._folded[0x3000] = 0x20
        self._wide = re.compile(f"[{''.join(map(chr, self._folded))}]+") if self._folded else None
        self._converter: Any = None
        if options.convert != "none":
            import opencc

            self._converter = opencc.OpenCC(options.convert)

    def apply(self, documents: Sequence[Document]) -> None:
        """Change the texts."""
        for document in documents:
            if self._wide is not None and self._wide.search(document.text):
                document.text = self._wide.sub(lambda found: found[0].translate(self._folded), document.text)
                self.count("texts with full-width forms folded")
            if self._converter is not None and is_chinese(document):
                converted = self._converter.convert(document.text)
                if converted != document.text:
                    self.count("texts converted")
                    document.text = converted

    @staticmethod
    def problems(options: ChineseOptions) -> list[str]:
        """OpenCC is missing where it is needed."""
        return missing_packages("opencc") if options.convert != "none" else []


def is_chinese(document: Document) -> bool:
    """Whether a document is Chinese, by its language, or by its characters where that is not known."""
    if document.language is not None:
        return document.language == "zh"
    return _HAN.search(document.text) is not None and _KANA.search(document.text) is None
