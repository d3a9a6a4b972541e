"""Makes ``documents.jsonl`` and ``benchmark.jsonl``, the labelled documents on which the steps of cleaning are measured.

    python tests/data/cleaning/make.py

Each line of ``documents.jsonl`` is a document with its labels:

    id          its name
    text        as it comes in
    language    ISO 639-1, or null: nobody can tell
    kind        "prose", "code", "html", "noise" or "contaminated"
    quality     "keep" or "drop", by the quality rules at their default options (after normalising, for HTML)
    reason      the rule that drops it, or null
    duplicate_of, near_duplicate_of     id of the earlier document, or null
    private     list of [kind, string]: "mail", "ip", "phone" found in the text
    expect, unexpected    strings that the normalised text must and must not hold
    benchmark   id of the line of benchmark.jsonl that it gives away, or null

Everything follows from a seed; a test says that the files are what this makes.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from broken import BROKEN, CODE, HTML, NOISE, PRIVATE
from control_zh import CONTROL
from sentences import QUESTIONS, SENTENCES, SLOTS

HERE = Path(__file__).parent
LABELS: dict[str, Any] = {
    "kind": "prose",
    "quality": "keep",
    "reason": None,
    "duplicate_of": None,
    "near_duplicate_of": None,
    "private": [],
    "expect": [],
    "unexpected": [],
    "benchmark": None,
}


def fill(sentence: str, language: str, rng: random.Random) -> str:
    """A sentence with its slots filled."""
    slots = {name: rng.choice(values) for name, values in SLOTS.get(language, {}).items()}
    return sentence.format(year=rng.randint(1820, 2020), many=rng.randint(30, 900) * 10, small=rng.randint(3, 14), **slots)


def prose(language: str, rng: random.Random, sentences: int) -> str:
    """Sentences in keyed order, in paragraphs of about three."""
    chosen = rng.sample(SENTENCES[language], min(sentences, len(SENTENCES[language])))
    space = "" if language in ("zh", "ja") else " "
    parts: list[str] = []
    for number, sentence in enumerate(chosen):
        parts += [fill(sentence, language, rng), "\n" if number % 3 == 2 and number + 1 < len(chosen) else space]
    return "".join(parts).rstrip()


class Maker:
    """Collects documents."""

    def __init__(self) -> None:
        self.rng = random.Random("cleaning fixture")
        self.documents: list[dict[str, Any]] = []

    def add(self, name: str, text: str, language: str | None, **labels: Any) -> None:
        assert labels.keys() <= LABELS.keys(), labels
        self.documents.append({"id": name, "text": text, "language": language, **LABELS, **labels})

    def good(self) -> None:
        """Prose of every language, and the Chinese control set."""
        for language, count, sentences in (("en", 44, 7), ("zh", 36, 7), ("ja", 30, 6)):
            for n in range(count):
                self.add(f"{language}-{n}", prose(language, self.rng, sentences), language)
        for language in ("de", "fr", "es", "ru", "ko", "fi"):
            for n in range(2):
                self.add(f"{language}-{n}", prose(language, self.rng, 10), language)
        for n, text in enumerate(CONTROL):
            self.add(f"control-{n}", text, "zh")

    def copies(self) -> None:
        """Exact duplicates, and near ones: a word or a character changed here and there."""
        for n, source in enumerate(("en-3", "en-11", "zh-2", "zh-9", "ja-1", "ja-7", "control-1", "de-0")):
            found = next(d for d in self.documents if d["id"] == source)
            self.add(f"copy-{n}", found["text"], found["language"], duplicate_of=source)
        changes = {"en": ("the ", "that "), "zh": ("的", "之"), "ja": ("の", "な")}
        for language, sources in (("en", range(20, 28)), ("zh", range(12, 20)), ("ja", range(10, 16))):
            old, new = changes[language]
            for n in sources:
                text = next(d["text"] for d in self.documents if d["id"] == f"{language}-{n}")
                changed = text.replace(old, new, 1).rstrip("。.") + ("." if language == "en" else "。")
                changed += {"en": " Read more here.", "zh": "（完）", "ja": "（終わり）"}[language]
                self.add(f"near-{language}-{n}", changed, language, near_duplicate_of=f"{language}-{n}")

    def others(self) -> None:
        """What a rule drops, code, HTML, private data."""
        for n, (reason, language, text) in enumerate(BROKEN):
            kind = "noise" if language is None else "prose"
            self.add(f"broken-{n}", text, language, kind=kind, quality="drop", reason=reason)
        for n, (reason, text) in enumerate(CODE):
            self.add(f"code-{n}", text, None, kind="code", quality="drop" if reason else "keep", reason=reason)
        for n, text in enumerate(NOISE):
            self.add(f"noise-{n}", text, None, kind="noise")
        for n, (language, text, expect, unexpected) in enumerate(HTML):
            self.add(f"html-{n}", text, language, kind="html", expect=expect, unexpected=unexpected)
        for n, (language, text, private) in enumerate(PRIVATE):
            self.add(f"private-{n}", text + prose(language, self.rng, 6), language, private=private)

    def contaminated(self) -> list[dict[str, str]]:
        """Questions of a benchmark; documents that hold some of them, and documents that share a few words with others."""
        questions = []
        for n, (language, question, answer) in enumerate(QUESTIONS):
            questions.append({"id": f"q{n}", "question": question, "answer": answer})
            head, _, tail = prose(language, self.rng, 9).partition("\n")
            if n < 9:  # letters in another case are the same words
                text = f"{head}\n{question.upper() if n == 3 else question}\n{tail}"
                self.add(f"leak-{n}", text, language, kind="contaminated", benchmark=f"q{n}")
            else:  # half a question is none
                half = question[:58] if language == "en" else question[:17]
                self.add(f"part-{n}", f"{head}\n{half}{'.' if language == 'en' else '。'}\n{tail}", language)
        return questions


def made() -> dict[str, str]:
    """Text of each file of the fixture."""
    maker = Maker()
    maker.good()
    maker.copies()
    maker.others()
    questions = maker.contaminated()
    assert len({d["id"] for d in maker.documents}) == len(maker.documents)

    def lines(rows: list[dict[str, Any]]) -> str:
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    return {"documents.jsonl": lines(maker.documents), "benchmark.jsonl": lines(questions)}


if __name__ == "__main__":
    for name, text in made().items():
        (HERE / name).write_text(text, encoding="utf-8")
        print(name, len(text.splitlines()), "lines")
