"""What quality rules need to know of a language: its words, end marks, stop words and bounds, each with its source.

The rules that became common (Gopher's, C4's) were made for English: applied to Chinese, where a sentence is one "word" and
ends with "。", they drop everything. So each language has a row of its own here; one without a row passes every rule that
depends on a language, and is counted. Two kinds of languages are told apart:

* words stand between spaces; a word is a run without spaces, without the marks around it;
* ``by_character`` (Chinese, Japanese): each ideograph and kana is a word, and so is a run of other letters and digits.
  Marks are no words.

Sources:

* [Gopher] Rae et al. 2021, arXiv:2112.11446, section A.1.1 and table A1: bounds for English.
* [C4] Raffel et al. 2020, arXiv:1910.10683, section 2.2: lines that end with an end mark.
* [FineWeb] Penedo et al. 2024, arXiv:2406.17557: at least 12% of the lines end with a mark, instead of cutting lines.
* [FineWeb-2] Penedo et al. 2025, arXiv:2506.20920, ``configs/*.yml`` of its repository: bounds and stop words of each
  language, fitted to it. Its words are those of segmenters. For Chinese and Japanese n words are taken as 1.6 n characters
  (5, 8 and 10 words: 8, 13 and 16), since its shares of text in n-grams do not change with the unit.
* [ChineseWebText] Chen et al. 2023, arXiv:2311.01149: at least 30% Chinese characters.
* [Swallow] Okazaki et al. 2024, arXiv:2404.17733: at least half of a Japanese text in Japanese characters; the shares of
  the most frequent n-grams, by character. Both shares are taken of the words here, where a Latin word is one: of the
  characters, technical Chinese full of names in Latin letters has less than 30%.

Lower bounds of length: Gopher's 50 words, by character 50 characters; ChineseWebText takes 200, Swallow 400 (``bounds`` of
the step sets them). Where FineWeb-2's bound would lose plain prose under our definition of a word (Spanish dialogue has
words shorter than 4 letters on average, Vietnamese writes its syllables apart), ours is the wider one. Korean writes particles
together with their words, so its stop words are our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

Grams = tuple[tuple[int, float], ...]  # (n, largest share of the characters)

_TOP: Grams = ((2, 0.20), (3, 0.18), (4, 0.16))  # [Gopher]; by character [Swallow] has the same
_DUPLICATE: Grams = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))  # [Gopher]


@dataclass(frozen=True)
class Bounds:
    """The bounds of a language; shares are between 0 and 1."""

    min_words: int = 50
    """Words of a document; by character its characters."""
    max_words: int = 100_000
    """The same from above."""
    min_word_length: float = 3.0
    """Mean characters of a word; 0: none, and there is none by character."""
    max_word_length: float = 10.0
    """The same from above."""
    min_alphabetic: float = 0.8
    """Share of words with a letter."""
    min_stop_words: int = 2
    """Words that are stop words of the language, each as often as it stands there."""
    min_sentence_lines: float = 0.12
    """Share of lines that end with an end mark or are as long as a sentence (``line_words``)."""
    line_words: int = 12
    """A line of so many words counts as a sentence without a mark: verse, subtitles."""
    min_script: float = 0.0
    """Share of the words that are characters of the script of the language (ideographs, for Japanese kana too)."""
    top_ngrams: Grams = _TOP
    """Largest share of the text in the most frequent n-gram, for each n: ``[[2, 0.2], [3, 0.18]]`` in a file."""
    duplicate_ngrams: Grams = _DUPLICATE
    """Largest share of the text in n-grams that were there before, for each n."""


@dataclass(frozen=True)
class Language:
    """A row of the table.

    Attributes:
        code: ISO 639-1.
        end_marks: characters that a line of prose ends with, closing quotes and brackets among them.
        stop_words: in lower case.
        by_character: see above.
        kana: kana belong to its script, besides ideographs.
    """

    code: str
    end_marks: str
    stop_words: frozenset[str]
    bounds: Bounds
    by_character: bool = False
    kana: bool = False


_LATIN_MARKS = ".!?\"'”’»…)"
_CJK_MARKS = "。！？…；.!?;\"'”’」』）)》】】．｡"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _grams(*shares: float) -> Grams:
    """FineWeb-2's shares for n from 5 to 10."""
    return tuple(zip(range(5, 11), shares, strict=True))


def _top(*shares: float) -> Grams:
    return tuple(zip(range(2, 5), shares, strict=True))


_ROWS = (
    Language("en", _LATIN_MARKS, _words("the be to of and that have with"), Bounds()),
    Language(
        "zh",
        _CJK_MARKS,
        _words("的 年 在 月 是 和 日 了 於 為 有 被 人 中 为 他 与 與 后 後 也 而 由 一 不 我 这 這 你 之 以 其 着 就 来"),
        Bounds(
            max_words=500_000,
            min_word_length=0.0,
            max_word_length=0.0,
            min_alphabetic=0.735,
            min_sentence_lines=0.106,
            line_words=7,
            min_script=0.3,
            duplicate_ngrams=((8, 0.198), (13, 0.154), (16, 0.127)),
        ),
        by_character=True,
    ),
    Language(
        "ja",
        _CJK_MARKS,
        _words("の に を は た て が と で 年 し 月 れ さ"),
        Bounds(
            max_words=500_000,
            min_word_length=0.0,
            max_word_length=0.0,
            min_alphabetic=0.759,
            min_sentence_lines=0.167,
            line_words=10,
            min_script=0.5,
            duplicate_ngrams=((8, 0.307), (13, 0.248), (16, 0.223)),
        ),
        by_character=True,
        kana=True,
    ),
    Language(
        "ko",
        _LATIN_MARKS + "。",
        _words("이 그 저 것 수 등 및 는 은 을 를 있는 있다 한 할 하는 그는 그녀는 나는 우리 더 또 다시 가장 모든 다음"),
        Bounds(
            min_word_length=1.0,
            max_word_length=6.0,
            min_alphabetic=0.791,
            min_sentence_lines=0.062,
            top_ngrams=_top(0.282, 0.228, 0.185),
            duplicate_ngrams=_grams(0.201, 0.184, 0.168, 0.154, 0.140, 0.127),
        ),
    ),
    Language(
        "de",
        _LATIN_MARKS + "“«",
        _words("der und die in von im den des mit das er dem als wurde für"),
        Bounds(
            max_word_length=15.0,
            min_alphabetic=0.774,
            min_sentence_lines=0.0,
            top_ngrams=_top(0.169, 0.153, 0.137),
            duplicate_ngrams=_grams(0.141, 0.134, 0.126, 0.117, 0.108, 0.098),
        ),
    ),
    Language(
        "fr",
        _LATIN_MARKS,
        _words("de la le et à en des du les est un une il dans par au"),
        Bounds(
            min_word_length=2.0,
            max_word_length=11.0,
            min_sentence_lines=0.1,
            top_ngrams=_top(0.161, 0.149, 0.134),
            duplicate_ngrams=_grams(0.150, 0.141, 0.131, 0.121, 0.111, 0.100),
        ),
    ),
    Language(
        "es",
        _LATIN_MARKS,
        _words("de la en el y a que del los se por un con una las su"),
        Bounds(
            max_word_length=14.0,
            min_sentence_lines=0.12,
            top_ngrams=_top(0.077, 0.097, 0.112),
            duplicate_ngrams=_grams(0.152, 0.137, 0.123, 0.114, 0.107, 0.099),
        ),
    ),
    Language(
        "pt",
        _LATIN_MARKS,
        _words("de a e o em do da que um no uma com para na é foi"),
        Bounds(
            max_word_length=13.0,
            top_ngrams=_top(0.093, 0.117, 0.139),
            duplicate_ngrams=_grams(0.190, 0.172, 0.154, 0.142, 0.131, 0.120),
        ),
    ),
    Language(
        "it",
        _LATIN_MARKS,
        _words("di e il la in a del che è della un per nel con da i una"),
        Bounds(
            max_word_length=21.0,
            min_sentence_lines=0.025,
            top_ngrams=_top(0.198, 0.156, 0.133),
            duplicate_ngrams=_grams(0.144, 0.136, 0.127, 0.118, 0.109, 0.100),
        ),
    ),
    Language(
        "ru",
        _LATIN_MARKS,
        _words("в и на с года по году из был к не от что за для его как а он также до после"),
        Bounds(
            max_word_length=11.0,
            min_alphabetic=0.713,
            top_ngrams=_top(0.184, 0.164, 0.146),
            duplicate_ngrams=_grams(0.168, 0.156, 0.145, 0.133, 0.121, 0.109),
        ),
    ),
    Language(
        "ar",
        _LATIN_MARKS + "؟",
        _words("في من على إلى عام أن مع أو هو عن التي كان بين ما كانت هي بعد"),
        Bounds(
            min_word_length=2.0,
            max_word_length=9.0,
            min_alphabetic=0.787,
            top_ngrams=_top(0.197, 0.172, 0.146),
            duplicate_ngrams=_grams(0.165, 0.153, 0.142, 0.131, 0.120, 0.109),
        ),
    ),
    Language(
        "vi",
        _LATIN_MARKS,
        _words("là và của một được trong năm các có loài này đã người"),
        Bounds(
            min_word_length=2.0,
            max_word_length=11.0,
            top_ngrams=_top(0.223, 0.197, 0.171),
            duplicate_ngrams=_grams(0.178, 0.163, 0.150, 0.136, 0.124, 0.111),
        ),
    ),
)

LANGUAGES: Mapping[str, Language] = MappingProxyType({row.code: row for row in _ROWS})
