"""Quality rules and their table of languages, against the labelled documents and against their own definitions."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import pytest
from cleaning_fixture import HERE, Labels, labelled, maker, measured
from kernel_cases import need_kernels

from megatron_lite.clean.step import Document
from megatron_lite.clean.steps.languages import LANGUAGES
from megatron_lite.clean.steps.normalise import Normalise
from megatron_lite.clean.steps.quality import Quality, QualityOptions
from megatron_lite.clean.steps.quality_lines import cut_lines
from megatron_lite.clean.steps.quality_measures import Measurer, Measures, class_table, measurer
from megatron_lite.clean.steps.word_list import word_patterns
from megatron_lite.ops.library import index_module

PROSE = next(d["text"] for d in labelled() if d["id"] == "en-1").replace("\n", " ")  # 130 words


@pytest.fixture(scope="module")
def documents() -> list[Labels]:
    return labelled()


@pytest.fixture(scope="module")
def quality() -> Quality:
    return Quality(QualityOptions())


def reason(quality: Quality, text: str, language: str | None) -> str | None:
    """Why a text is dropped."""
    document = Document(text, language=language)
    quality.apply([document])
    return document.dropped


def dropped(quality: Quality, documents: list[Labels]) -> dict[str, str | None]:
    """The reason of each document, HTML normalised first."""
    inside = {d["id"]: Document(d["text"], language=d["language"]) for d in documents}
    Normalise(Normalise.Options()).apply([inside[d["id"]] for d in documents if d["kind"] == "html"])
    quality.apply(list(inside.values()))
    return {name: document.dropped for name, document in inside.items()}


def test_the_fixture_is_what_its_maker_makes(documents: list[Labels]) -> None:
    for name, text in maker().made().items():
        assert (HERE / name).read_text(encoding="utf-8") == text, f"run python {HERE}/make.py"
    kinds = Counter(d["kind"] for d in documents)
    languages = Counter(d["language"] for d in documents)
    assert len(documents) >= 200 and min(kinds["html"], kinds["code"]) >= 5
    assert min(languages["en"], languages["zh"], languages["ja"]) >= 30


def test_quality_on_the_labelled_documents(quality: Quality, documents: list[Labels]) -> None:
    got = dropped(quality, documents)
    for name, language in (("all", None), ("English", "en"), ("Chinese", "zh"), ("Japanese", "ja")):
        some = [d for d in documents if language in (None, d["language"])]
        precision, recall = measured(
            f"quality, {name}", some, {d["id"] for d in some if d["quality"] == "drop"}, {key for key, why in got.items() if why}
        )
        assert precision >= 0.98 and recall >= 0.95
    wrong = [(d["id"], d["reason"], got[d["id"]]) for d in documents if d["reason"] != got[d["id"]]]
    assert len(wrong) <= 2, wrong
    reasons = {d["reason"] for d in documents}
    assert len(reasons) > 20, "the fixture has documents for the rules"


def test_the_chinese_control_set_loses_nothing(quality: Quality, documents: list[Labels]) -> None:
    control = [d for d in documents if d["id"].startswith("control")]
    assert len(control) >= 15
    assert [(d["id"], r) for d in control if (r := reason(quality, d["text"], "zh")) is not None] == []
    english = [reason(quality, d["text"], "en") for d in control]
    assert english.count(None) <= 1, "as English, the rules drop Chinese: the rows differ"


def test_rows_keep_prose_of_their_language(quality: Quality, documents: list[Labels]) -> None:
    for code in ("de", "fr", "es", "ru", "ko"):
        some = [d["text"] for d in documents if d["language"] == code and d["quality"] == "keep"]
        assert some and all(reason(quality, text, code) is None for text in some), code


def test_what_was_measured_is_told_beside_the_rule() -> None:
    """The rule is of a few words that many documents share; the detail names the option, the value and the bound."""
    quality = Quality(QualityOptions(max_symbols=0.2))
    texts = ["ab+=|", "{", "word " * 3, "x" * 80 + " and" * 50, "天" * 60]
    some = [Document(text, language=code) for text, code in zip(texts, ("en", "en", "en", "en", "zh"), strict=True)]
    quality.apply([*some, Document("Kissa istuu.", language="fi")])
    assert [(d.dropped, d.detail) for d in some] == [
        ("too much of the text is symbols", "max_symbols: 3 of 5 (0.6) > 0.2"),
        ("curly bracket", "curly_bracket"),
        ("too few words", "bounds.en.min_words: 3 < 50"),
        ("a 2-gram is too much of the text", "bounds.en.top_ngrams, 2: 294 of 230 (1.278) > 0.2"),
        ("too few stop words", "bounds.zh.min_stop_words: 0 < 2"),
    ]


def test_a_language_without_a_row_passes_the_rules_of_languages(documents: list[Labels]) -> None:
    quality = Quality(QualityOptions())
    assert "fi" not in LANGUAGES
    short = "Kissa istuu."
    assert reason(quality, short, "fi") is None and reason(quality, short, None) is None
    assert reason(quality, short, "en") == "too few words"
    assert quality.counts == {"documents in a language without bounds": 1, "documents without a language": 1}
    assert reason(quality, "same\nsame\nsame", "fi") == "too many duplicate lines"  # no language is needed for that


def test_text_is_not_changed(quality: Quality, documents: list[Labels]) -> None:
    for d in documents:
        document = Document(d["text"], language=d["language"])
        quality.apply([document])
        assert document.text == d["text"]


@pytest.mark.parametrize(
    "options, text, language, expected",
    [
        ({"min_characters": 700}, PROSE, None, "too few characters"),
        ({"max_characters": 100}, PROSE, None, "too many characters"),
        ({"bounds": {"en": {"min_words": 1000}}}, PROSE, "en", "too few words"),
        ({"bounds": {"en": {"max_words": 20}}}, PROSE, "en", "too many words"),
        ({"bounds": {"en": {"min_words": 1000}}}, PROSE, "ru", "too few stop words"),  # other rows are as they were
        ({"curly_bracket": True}, PROSE + " {", None, "curly bracket"),
        ({"curly_bracket": False}, PROSE + " {", "en", None),
        ({"lorem_ipsum": False}, PROSE + " lorem ipsum", "en", None),
        ({"max_digits": 1.0}, "1234 " * 9, None, None),
        ({"max_digits": 0.99}, "1234 " * 9, None, "too much of the text is digits"),
    ],
)
def test_options(options: dict, text: str, language: str | None, expected: str | None) -> None:
    assert Quality.problems(QualityOptions(**options)) == []
    assert reason(Quality(QualityOptions(**options)), text, language) == expected


def test_bounds_hold_at_their_values() -> None:
    """Gopher: at least 50 words; a bound itself is inside."""
    words = PROSE.split()
    quality = Quality(QualityOptions(bounds={"en": {"top_ngrams": [], "duplicate_ngrams": []}}))
    assert reason(quality, " ".join(words[:49]) + ".", "en") == "too few words"
    assert reason(quality, " ".join(words[:50]) + ".", "en") is None
    lines = [f"line number {n} of the text has some words" for n in range(7)]
    quality = Quality(QualityOptions(max_duplicate_line_characters=1.0))
    assert reason(quality, "\n".join([*lines, *lines[:3]]), None) is None  # 3 of 10
    assert reason(quality, "\n".join([*lines, *lines[:4]]), None) == "too many duplicate lines"


def test_list_of_words(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("Badword\nbad words here\n坏词\nc++\n", encoding="utf-8")
    options = QualityOptions(word_list=str(path))
    assert Quality.problems(options) == [] and list(Quality.files(options)) == [str(path)]
    quality = Quality(options)
    zh = "这是一个很长的句子，里面的内容没有什么问题，大家都可以放心地阅读，不会有任何的麻烦。"
    zh += "我们在这里又写了一句话，为的是让它足够长，也让它有足够多的字。"
    assert reason(quality, zh, "zh") is None
    for language in ("zh", "ja", "fi", None):
        assert reason(quality, zh + "坏词。", language) == "a word of the list", language
    assert reason(quality, zh + "badword也在。", None) == "a word of the list"
    assert reason(quality, zh + "badwords不在。", None) is None
    for text in ("BADWORD", "bad words here", "in c++ too"):
        assert reason(quality, f"{PROSE} {text}.", "en") == "a word of the list", text
    for text in ("badwords", "bad words", "xbadword"):
        assert reason(quality, f"{PROSE} {text}.", "en") is None, text
    path.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in Quality.problems(options)[0]


def test_patterns_of_a_list_find_its_words() -> None:
    """Random words of a script with spaces, of one without, and of marks; the letters that may come first are many."""
    rng = random.Random(2)
    letters = "ab.^-]天ท" + "".join(chr(0x4E00 + n) for n in range(40))
    words = ["".join(rng.choices("ab.天ท", k=rng.randint(1, 4))) for _ in range(9)]
    words += ["".join(rng.choices(letters, k=2)) for _ in range(60)] + ["ท" + letter for letter in letters] + ["ทท"]
    words += ["bb" + letter for letter in letters]
    patterns = word_patterns(words)

    def free(word: str, text: str, at: int) -> bool:
        before, after = text[at - 1 : at] if at else "", text[at + len(word) :][:1]
        unspaced = letters[letters.index("天") :]
        return (word[0] in unspaced or before not in tuple("abc")) and (word[-1] in unspaced or after not in tuple("abc"))

    seen = 0
    for _ in range(4000):
        text = "".join(rng.choices(f"{'abc. 天ท' * 6}{letters}", k=rng.randint(0, 7)))
        wanted = any(text.startswith(word, at) and free(word, text, at) for word in words for at in range(len(text)))
        assert any(pattern.search(text) for pattern in patterns) == wanted, (words, text)
        seen += wanted
    assert 400 < seen < 3600


def test_cut_lines_as_c4() -> None:
    text = "Home | About | Contact\nThe boat left the harbour, “at last!”\n\nToo short.\n"
    text += "Please enable JavaScript to read this page now.\nIt goes on and on and on...\n"
    text += "By reading on you accept our Privacy Policy.\nThis page uses cookies to remember you.\n"
    left, cut, sentences = cut_lines(text, LANGUAGES["en"])
    assert left == "The boat left the harbour, “at last!”" and cut == 6 and sentences == 1
    left, cut, sentences = cut_lines("首页\n船离开了港口，没有人说话。风停了！\n上一页 下一页 返回首页", LANGUAGES["zh"])
    assert left == "船离开了港口，没有人说话。风停了！" and cut == 2 and sentences == 2
    quality = Quality(QualityOptions(cut_lines=True))
    document = Document("Menu\n" + PROSE.replace(". ", ".\n"), language="en")
    quality.apply([document])
    assert document.dropped is None and document.text == PROSE.replace(". ", ".\n") and quality.counts == {"lines cut": 1}
    assert reason(quality, "Only one line of text that has an end mark.", "en") == "fewer than 3 sentences"


def test_problems() -> None:
    for name, value in (("top_ngrams", [[0, 0.2]]), ("duplicate_ngrams", [[5, 20]]), ("min_script", 30), ("min_alphabetic", float("nan"))):
        assert "between 0 and 1" in Quality.problems(QualityOptions(bounds={"zh": {name: value}}))[0]
    found = Quality.problems(QualityOptions(max_digits=1.5, bounds={"xx": {}, "zh": {"min_word": 3}, "en": {"min_words": "many"}}))
    assert len(found) == 4
    assert "max_digits 1.5" in found[3] and "bounds.xx" in found[0] and "bounds.zh.min_word" in found[1] and "'many'" in found[2]


def test_sections_of_the_benchmark_need_no_arguments() -> None:
    bench = Path(__file__).resolve().parents[1] / "tools/bench"
    scripts = re.findall(r'\["(\w+\.py)"', (bench / "data.py").read_text(encoding="utf-8"))
    assert "quality.py" in scripts and len(scripts) >= 6
    for script in scripts:
        positional = re.findall(r'add_argument\(\s*"([^-"].*)', (bench / script).read_text(encoding="utf-8"))
        assert all('nargs="*"' in argument for argument in positional), (script, positional)


# ---- measures


def same(measures: Measures) -> tuple:
    """For comparing: lists and tuples alike."""
    return tuple(tuple(x) if not isinstance(x, int) else x for x in measures)


def test_compiled_measures_are_their_definitions(documents: list[Labels]) -> None:
    need_kernels()
    if index_module()[0] is None:
        pytest.skip("the helpers were built after this process had looked for them")
    table, rng = class_table(), random.Random(4)
    letters = "ab的の。…. \n\t#•-A1１é̀ｱ😀\u200b𠀀…の的a\n\n"
    texts = ["".join(rng.choices(letters, k=rng.randint(0, 150))) for _ in range(400)] + [d["text"] for d in documents[::7]]
    for code in ("en", "zh", "ja"):
        compiled, plain = measurer(LANGUAGES[code], table), Measurer(LANGUAGES[code], table).measure
        for text in texts:
            assert same(compiled(text)) == same(plain(text)), (code, text)


def test_measures_of_a_text() -> None:
    measure = Measurer(LANGUAGES["en"], class_table()).measure
    counts = measure("The cat... The cat!\n\n- one two\n- one two\nthe end of 3 (dogs)")
    assert counts.words == 15 and counts.stop_words == 4  # The, The, the, of
    assert counts.lines == (4, 56, 1, 9) and counts.paragraphs == (2, 56, 0, 0)
    assert counts.bullet_lines == 2 and counts.ellipses == 1 and counts.sentence_lines == 2  # "cat!" and "(dogs)"
    assert counts.alphabetic == 12 and counts.digits == 1 and counts.punctuation == 8
    assert counts.top[0] == 2 * len("one" + "two")  # of the three 2-grams that are there twice the longest
    assert counts.duplicate[0] == 0
    zh = Measurer(LANGUAGES["zh"], class_table()).measure("我们用 Python3 写程序，写程序。")
    assert zh.words == 10 and zh.ideographs == 9 and zh.word_characters == 16 and zh.sentence_lines == 1


def test_repeated_ngrams_are_counted_once() -> None:
    measure = Measurer(LANGUAGES["en"], class_table()).measure
    six = "a b c d e f"
    counts = measure(f"{six} {six} x")
    # all 5-grams and the 6-gram of the second half were there before; "b c d e f a" and others were not
    assert counts.duplicate[:3] == [6, 6, 0]
    assert measure("w " * 20).duplicate[0] == 19  # every word but the first is in a copy


def test_stop_words_are_words() -> None:
    for code, row in LANGUAGES.items():
        assert row.code == code and row.bounds.min_stop_words <= len(row.stop_words)
        assert all(word == word.lower() and not word[0].isspace() for word in row.stop_words)
        if row.by_character:
            assert all(len(word) == 1 for word in row.stop_words), code
