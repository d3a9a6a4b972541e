"""Identification of languages, decontamination, perplexity, drift."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from cleaning_fixture import BENCHMARK, Labels, labelled, measured

from megatron_lite.clean.step import Document
from megatron_lite.clean.steps.decontaminate import Decontaminate, DecontaminateOptions
from megatron_lite.clean.steps.drift import (
    MOVED,
    SAME,
    TOO_FEW,
    Drift,
    DriftOptions,
    Moved,
    Sample,
    chance,
    compare,
    features,
    finding,
    sample_of,
)
from megatron_lite.clean.steps.language import CODES, Language, LanguageOptions, sample
from megatron_lite.clean.steps.perplexity import Perplexity, PerplexityOptions
from megatron_lite.cli.main import main
from megatron_lite.text.blocks import InputOptions


@pytest.fixture(scope="module")
def documents() -> list[Labels]:
    return labelled()


# ---- language


def test_language_on_the_labelled_documents(documents: list[Labels]) -> None:
    step = Language(LanguageOptions())
    got = {d["id"]: step.language_of(d["text"])[0] for d in documents}
    for code in ("en", "zh", "ja"):
        wanted, told = {d["id"] for d in documents if d["language"] == code}, {name for name, found in got.items() if found == code}
        precision, recall = measured(f"language {code}", documents, wanted, told)
        assert precision >= 0.99 and recall >= 0.95
    precision, recall = measured(
        "language told", documents, {d["id"] for d in documents if d["language"]}, {name for name, found in got.items() if found}
    )
    assert precision >= 0.99 and recall >= 0.97  # of noise and code nothing is said
    others = [d for d in documents if d["language"] in ("de", "fr", "es", "ru", "ko", "fi") and len(d["text"]) > 100]
    assert len(others) >= 12 and all(got[d["id"]] == d["language"] for d in others)


def test_language_step() -> None:
    step = Language(LanguageOptions(allow=("en", "zh")))
    texts = [
        "The boat left the harbour before sunrise, and nobody knew when it would be back.",
        "天还没亮，船就离开了港口，码头上没有人知道它什么时候回来。",
        "Das Boot verließ den Hafen vor Sonnenaufgang, und niemand wusste, wann es zurückkehren würde.",
        "ok ok",
        "THE BOAT LEFT THE HARBOUR BEFORE SUNRISE, AND NOBODY KNEW WHEN IT WOULD BE BACK.",
        "zxq wvk pqr 8273 vxzk qqq wkz 182 pzx kvw qxz",
    ]
    docs = [Document(text) for text in texts]
    step.apply(docs)
    assert [d.language for d in docs] == ["en", "zh", "de", None, "en", None]
    assert [d.dropped for d in docs] == [
        None, None, "another language", "language unknown: too short", None, "language unknown: the model is not sure",
    ]  # fmt: skip
    assert step.counts == {"language en": 2, "language zh": 1, "language de": 1, "language unknown": 2}
    lenient = [Document(text) for text in texts]
    Language(LanguageOptions(allow=("en", "zh"), keep_unknown=True)).apply(lenient)
    assert [d.dropped for d in lenient] == [None, None, "another language", None, None, None]
    anything = [Document(text) for text in texts]
    Language(LanguageOptions()).apply(anything)
    assert not any(d.dropped for d in anything)


def test_the_model_sees_beginning_middle_and_end() -> None:
    text = "a" * 500 + "b" * 500 + "c" * 500
    assert sample(text, 30) == f"{'a' * 10} {'b' * 10} {'c' * 10}" and sample("x\ny ", 30) == "x y"
    menu = "Startseite Über uns Aktuelles Impressum\n"
    story = "The boat left the harbour before sunrise, and nobody knew when it would be back. " * 30
    assert Language(LanguageOptions()).language_of(menu + story)[0] == "en"


def test_language_problems() -> None:
    found = Language.problems(LanguageOptions(allow=("EN", "german"), min_score=2.0, sample_bytes=5))
    assert len(found) == 4
    assert Language.problems(LanguageOptions(allow=("eng", "ceb", "zh"))) == [  # eng would drop all of English
        "allow 'eng': the model knows no such code; ISO 639 codes, as in en or zh"
    ]
    assert len(CODES) == 176


# ---- decontamination


def test_decontamination_on_the_labelled_documents(documents: list[Labels]) -> None:
    step = Decontaminate(DecontaminateOptions(benchmarks=(str(BENCHMARK),), keys=("question",)))
    inside = {d["id"]: Document(d["text"]) for d in documents}
    step.apply(list(inside.values()))
    precision, recall = measured(
        "decontamination", documents, {d["id"] for d in documents if d["benchmark"]}, {name for name, d in inside.items() if d.dropped}
    )
    assert precision == 1.0 and recall == 1.0
    assert inside["leak-0"].dropped == "text of the benchmark benchmark.jsonl"
    assert step.counts == {"documents with text of benchmark.jsonl": 9}


def test_ngrams_by_brute_force(tmp_path: Path) -> None:
    """Random texts of few words and characters, each way to write them."""
    rng = random.Random(5)
    vocabulary = ["a", "Ｃ", "天", "の"]
    path = tmp_path / "b.txt"
    lines = [rng.choices(vocabulary, k=rng.randint(1, 9)) for _ in range(3)]
    path.write_text("\n".join(" ".join(line) for line in lines), encoding="utf-8")
    options = DecontaminateOptions(benchmarks=(str(path),), words=4, min_words=2, characters=5, min_characters=3)
    assert Decontaminate.problems(options) == []
    step = Decontaminate(options)

    def grams() -> set[tuple[str, ...]]:
        found = set()
        for line in lines:
            units = [u.lower() if u != "Ｃ" else "c" for u in line]
            of_characters = 2 * sum(u in "天の" for u in units) > len(units)
            least, most = (3, 5) if of_characters else (2, 4)
            n = min(most, len(units))
            if n >= least:
                found |= {tuple(units[i : i + n]) for i in range(len(units) - n + 1)}
        return found

    known, seen = grams(), 0
    for _ in range(3000):
        units = rng.choices(["A", "c", "天", "の"], k=rng.randint(0, 30))
        text = "".join(u + rng.choice([" ", ", ", "\n"]) for u in units)
        flat = [u.lower() for u in units]
        wanted = any(tuple(flat[i : i + len(g)]) == g for g in known for i in range(len(flat)))
        assert bool(step.places(text)) == wanted, (text, known)
        seen += wanted
    assert seen > 100


def test_places_are_cut(tmp_path: Path) -> None:
    question = "How many sheep are there if all but nine of the seventeen run away today?"
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps({"question": question, "choices": ["one", "two"]}) + "\n")
    options = DecontaminateOptions(benchmarks=(str(path),), keys=("question", "choices"), action="cut", margin=10, max_cuts=2)
    step = Decontaminate(options)
    document = Document(f"First part, which stays. {question.upper()} Second part, which stays too.")
    step.apply([document])
    assert document.text == "First part, whi\n\nart, which stays too."
    assert document.dropped is None and step.counts["places cut"] == 1
    document = Document(f"{'x ' * 30}{question} short {question}{' y' * 30}")
    step.apply([document])
    assert "sheep" not in document.text and "short" not in document.text and step.counts["places cut"] == 3
    document = Document((question + " " + "z " * 30) * 3)
    step.apply([document])
    assert document.dropped == "text of benchmarks in more than 2 places"


def test_benchmarks_that_cannot_be_read(tmp_path: Path) -> None:
    for content, expected in (
        (b'{"question": "x"}\n{"other": 1}\n', "b.jsonl:2: none of the fields"),
        (b"[1\n", "b.jsonl:1: not JSON"),
        (b'{"question": 3}\n', "b.jsonl:1: expected text"),
        (b'{"question": "\xff"}\n', "b.jsonl:1: not UTF-8"),
        (b"\n", "no text in it"),
        ('{"question": "one two"}\n{"question": "天地玄黄"}\n'.encode(), "no text in it that has 8 words, or 12 characters"),
    ):
        path = tmp_path / "b.jsonl"
        path.write_bytes(content)
        assert expected in Decontaminate.problems(DecontaminateOptions(benchmarks=(str(path),)))[0]
    (tmp_path / "b.json").write_text('[{"question": "one two three four five six seven eight nine"}]\n')  # no plain text
    assert "b.json:1: none of the fields" in Decontaminate.problems(DecontaminateOptions(benchmarks=(str(tmp_path / "b.json"),)))[0]
    assert Decontaminate.problems(DecontaminateOptions(benchmarks=(), words=3, margin=-1)) != []


# ---- perplexity


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model that knows nothing; its texts are numbers."""
    from megatron_lite.checkpoint.save import save_checkpoint
    from megatron_lite.cli.train import resolve_model
    from megatron_lite.config.load import load, to_dict
    from megatron_lite.mesh.layout import Layout
    from megatron_lite.mesh.mesh import ProcessMesh
    from megatron_lite.train.assemble import assemble

    flags = (
        "--model llama --num-layers 2 --hidden-size 32 --num-attention-heads 4 --init-method-std 0.3 --seq-length 8 --device cpu "
        "--max-position-embeddings 8 --lr 1e-3 --train-iters 1 --micro-batch-size 1 --mock-data --tokenizer-type NullTokenizer "
        "--vocab-size 61 --make-vocab-size-divisible-by 8"
    )
    directory = tmp_path_factory.mktemp("run")
    config = load(flags.split(), resolve=resolve_model).config
    mesh = ProcessMesh.open(Layout())
    shares = [s for s in assemble(config, mesh).optimizer.shares() if s.kind == "weight"]
    save_checkpoint(directory, 7, shares, {"config": to_dict(config)}, mesh.axis("world"))
    return directory


def test_bits_of_a_checkpoint(checkpoint: Path) -> None:
    """Token by token: the chance of each after those before it in its window, from the logits of the window's beginning."""
    from megatron_lite.train.score import CheckpointScorer

    threads = torch.get_num_threads()
    try:
        scorer = CheckpointScorer(checkpoint)
        ids = [3, 7, 11, 2, 59, 4, 4, 4, 9, 10, 21]  # a window of 8 and one of 3
        expected, sequence = 0.0, [scorer.tokenizer.eod_id, *ids]
        for position, target in enumerate(ids):
            begin = position // 8 * 8
            logits = scorer.generator.logits(np.array([sequence[begin : position + 1]]))
            assert logits is not None
            expected -= math.log2(float(torch.softmax(logits[0, -1].double(), -1)[target]))
        text = " ".join(map(str, ids))
        assert scorer.bits(text) == pytest.approx(expected, rel=1e-5)

        open_band = {"any": [0.0, 1000.0]}
        step = Perplexity(PerplexityOptions(f"checkpoint:{checkpoint}", open_band))
        score = expected / len(text)
        for low, high, reason in (
            (0.0, score + 0.01, None),
            (0.0, score - 0.01, "too many bits per byte"),
            (score + 0.01, 99.0, "too few bits per byte"),
        ):
            step.bands = {"any": (low, high)}
            document = Document(text, language="en")
            step.apply([document])
            assert document.dropped == reason
        notes = step.take_notes()
        assert notes is not None and sum(notes["en"].values()) == 3 and step.take_notes() is None
        both = Perplexity.merge_notes(None, notes, {"zh": notes["en"]})
        assert sorted(both) == ["en", "zh"] and sum(both["en"].values()) == 3
        (title,) = [t for t in Perplexity.facts(None, both).histograms if "zh" in t]
        assert title == "bits per byte, zh"
    finally:
        torch.set_num_threads(threads)


class StandIn(ModuleType):
    """What of the package kenlm is used: each word has a probability of 1/8, an end of line of 1/2."""

    class Model:
        def __init__(self, path: str) -> None:
            self.path = path

        def score(self, text: str, bos: bool, eos: bool) -> float:
            assert bos and eos
            return -(3 * len(text.split()) + 1) * math.log10(2)


def test_kenlm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "en.arpa"
    path.write_text("")
    options = PerplexityOptions(str(tmp_path / "{language}.arpa"), {"en": [0.5, 2.0], "zh": [0.5, 2.0]})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install kenlm" in Perplexity.problems(options)[0]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert Perplexity.problems(options) == []
    assert list(Perplexity.files(options)) == [str(tmp_path / "en.arpa"), str(tmp_path / "zh.arpa")]
    monkeypatch.setitem(sys.modules, "kenlm", StandIn("kenlm"))
    step = Perplexity(options)
    texts = [("four words of it\n\n", "en"), ("aaaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbbbb", "en"), ("天地", "zh"), ("a b", "de")]
    docs = [Document(text, language=language) for text, language in texts]
    step.apply(docs)
    assert [d.dropped for d in docs] == [None, "too few bits per byte", None, None]  # 13/18, 7/40, 7/6, no band
    assert step.counts == {"documents in a language without bounds": 1}


def test_quantiles_of_bits_per_byte_by_brute_force() -> None:
    """Where all documents fall into one bar of the histogram, the quantiles still tell where a band can be."""
    rng = random.Random(4)
    scores = sorted(rng.gauss(1.05, 0.02) for _ in range(301))
    notes: dict[str, dict[str, int]] = {}
    for score in scores:
        notes = Perplexity.merge_notes(None, json.loads(json.dumps(notes)), {"en": {str(int(score * 100)): 1}, "zh": {"3000": 1}})
    facts = Perplexity.facts(None, notes)
    for percent in (5, 25, 50, 75, 95):
        exact = scores[math.ceil(percent / 100 * len(scores)) - 1]
        assert exact <= facts.numbers[f"bits per byte, en: {percent}% of the documents have at most"] <= exact + 0.01
    assert sum(facts.histograms["bits per byte, en"].values()) == 301 and facts.histograms["bits per byte, zh"] == {"30.0": 301}


def test_perplexity_problems(tmp_path: Path) -> None:
    for bands in ({"en": [1.0]}, {"en": [2.0, 1.0]}, {"en": ["a", "b"]}, {"en": 3.0}):
        assert "bands.en" in Perplexity.problems(PerplexityOptions(f"checkpoint:{tmp_path}", bands))[0]  # type: ignore[arg-type]
    assert "holds no checkpoint" in Perplexity.problems(PerplexityOptions(f"checkpoint:{tmp_path}"))[0]
    assert "no directory" in Perplexity.problems(PerplexityOptions("checkpoint:/nowhere"))[0]
    assert any("{language}" in p for p in Perplexity.problems(PerplexityOptions("{language}.bin", {"any": [0.0, 1.0]})))


# ---- drift


def corpus(path: Path, documents: int, seed: int, words: int = 60, vocabulary: int = 2000) -> list[str]:
    """A corpus of random words, and its texts."""
    rng = random.Random(seed)
    texts = [" ".join(f"w{rng.randrange(vocabulary)}" for _ in range(rng.randint(words // 2, words))) for _ in range(documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def test_features() -> None:
    length, ratio, entropy = features(b"ab" * 500)
    assert length == 1000 and ratio > 20 and entropy == 1.0
    assert features(b"abcd", [5, 5, 5, 5])[2] == 0.0 and features(b"aaaa", [1, 2, 3, 4])[2] == 2.0
    assert features(bytes(range(256)))[1] < 1


def test_the_statistic_by_brute_force() -> None:
    rng = random.Random(1)
    a = [(n, rng.gauss(0, 1), float(rng.randint(0, 3)), 1.0) for n in range(80)]
    b = [(n, rng.gauss(0.5, 1), float(rng.randint(0, 3)), 1.0) for n in range(60)]
    for moved in compare(a, b):
        column = {"length": 1, "compression ratio": 2, "byte entropy": 3}[moved.feature]
        x, y = [row[column] for row in a], [row[column] for row in b]
        d = max(abs(sum(v <= t for v in x) / len(x) - sum(v <= t for v in y) / len(y)) for t in x + y)
        assert moved.d == pytest.approx(d, abs=1e-12)


def test_samples_do_not_depend_on_order_or_grouping(tmp_path: Path) -> None:
    texts = corpus(tmp_path / "a.jsonl", 500, 1)
    whole = Sample(50)
    for text in texts:
        whole.add(text)
    rows = whole.take()
    assert len(rows) == 50 and rows == sample_of(str(tmp_path / "a.jsonl"), 50, InputOptions())
    options = DriftOptions(str(tmp_path / "a.jsonl"), sample=50)
    shuffled = random.Random(2).sample(texts, len(texts))
    steps = [Drift(options), Drift(options)]  # two workers, blocks of 7
    notes: list = []
    for number in range(0, len(shuffled), 7):
        step = steps[number % 2]
        step.apply([Document(text) for text in shuffled[number : number + 7]])
        if (taken := step.take_notes()) is not None:
            notes = Drift.merge_notes(options, notes, json.loads(json.dumps(taken)))
    assert notes == rows
    assert sum(len(step.sample.keys) for step in steps) == 100, "only what is in the sample is kept"


def test_drift_as_a_step_names_what_moved(tmp_path: Path) -> None:
    corpus(tmp_path / "old.jsonl", 900, 1)
    options = DriftOptions(str(tmp_path / "old.jsonl"), threshold=0.12, sample=700)
    for name, change, moved in (
        ("same", {}, []),
        ("longer", {"words": 90}, ["length"]),
        ("repeating", {"vocabulary": 9}, ["compression ratio", "length"]),
    ):
        step = Drift(options)
        step.apply([Document(text) for text in corpus(tmp_path / "new.jsonl", 900, 7, **change)])
        facts = Drift.facts(options, step.take_notes())
        named = [feature for feature in ("length", "compression ratio") if any(w.startswith(f"{feature} moved") for w in facts.warnings)]
        assert (set(moved) <= set(named)) if moved else facts.warnings == [], (name, facts)
        assert facts.numbers["documents compared, new"] == 700
    assert Drift.facts(options, None).warnings  # an empty corpus is said
    step = Drift(options)
    step.apply([Document("three documents"), Document("of another"), Document("kind")])
    with open(tmp_path / "old.jsonl", "a") as file:
        file.write('{"text": 5}\n')
    facts = Drift.facts(options, step.take_notes())
    assert "too few documents to tell whether length moved: D 1.000" in facts.warnings[0]
    assert facts.numbers["bad records of the reference: the value of 'text' is a number, not a string"] == 1
    assert len(Drift.problems(DriftOptions("x", threshold=1.5, sample=3))) == 2


def test_small_samples_do_not_tell() -> None:
    assert chance(5000, 5000) == pytest.approx(0.039) and chance(100, 100) == pytest.approx(0.2758, abs=1e-3)
    kinds = {d: finding(Moved("length", d, 1, 2), 0.1, chance(100, 100))[0] for d in (0.0, 0.1, 0.2, 0.27, 0.28, 1.0)}
    assert list(kinds.values()) == [SAME, SAME, TOO_FEW, TOO_FEW, MOVED, MOVED]
    assert finding(Moved("length", 1.0, 1, 2), 0.1, chance(3, 3))[0] == TOO_FEW


def test_drift_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    corpus(Path("old.jsonl"), 600, 1)
    corpus(Path("same.jsonl"), 600, 2)
    corpus(Path("other.jsonl"), 600, 3, words=120)
    command = "data drift old.jsonl same.jsonl --sample 500 --threshold 0.13".split()
    assert main(command) == 0
    assert "moved" not in capsys.readouterr().out
    assert main([*command[:3], "other.jsonl", *command[4:], "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["features"]["length"]["D"] > 0.4 and found["documents"] == [500, 500]
    assert main("data drift old.jsonl --save-profile p.drift.json".split()) == 0
    assert main("data drift p.drift.json other.jsonl --sample 500".split()) == 1
    assert "drift: length moved, D 0." in capsys.readouterr().out
    assert main("data drift p.drift.json other.jsonl --sample 9999".split()) == 2  # a profile of fewer documents
    other_tokens = "--tokenizer-type NullTokenizer --vocab-size 9"
    assert main(f"data drift p.drift.json other.jsonl --sample 500 {other_tokens}".split()) == 2
    assert "is a profile of the entropy of bytes: leave the tokenizer out" in capsys.readouterr().err
    Path("ids.jsonl").write_text("".join(json.dumps({"text": f"{n % 7} {n % 3} 5"}) + "\n" for n in range(20)))
    assert main(f"data drift ids.jsonl ids.jsonl {other_tokens} --save-profile t.drift.json --json".split()) == 0
    assert list(json.loads(capsys.readouterr().out)["features"]) == ["length", "compression ratio", "token entropy"]
    assert main("data drift t.drift.json ids.jsonl --sample 10".split()) == 2
    assert f"is a profile of the entropy of tokens: give {other_tokens}, or" in capsys.readouterr().err
    assert main("data drift ids.jsonl ids.jsonl --vocab-size 9".split()) == 2  # and not the entropy of bytes without a word
    assert "no tokenizer is named" in capsys.readouterr().err
    assert main("data drift old.jsonl".split()) == 2
    Path("none.jsonl").write_text("")
    assert main("data drift none.jsonl --save-profile none.drift.json".split()) == 2 and not Path("none.drift.json").exists()
    Path("gb").mkdir()  # the same corpora, in an encoding and with a separator of their own
    for name in ("old.jsonl", "same.jsonl"):
        texts = [json.loads(line)["text"].replace("w", "中") for line in Path(name).read_text().splitlines()]
        Path("gb", name).with_suffix(".txt").write_text("\n--\n".join(texts), encoding="gb18030")
    read = ["--encoding", "gb18030", "--document-separator", r"\n--\n"]
    assert main(["data", "drift", "gb/old.txt", "gb/same.txt", "--threshold", "0.13", *read, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == [600, 600]
    assert main("data drift gb/old.txt gb/same.txt".split()) == 2
    assert main("data drift old.jsonl same.jsonl --encoding klingon".split()) == 2
    Path("mixed").mkdir()  # the separator need only fit one of the corpora
    Path("mixed/a.txt").write_text("\n--\n".join(json.loads(line)["text"] for line in Path("old.jsonl").read_text().splitlines()))
    Path("mixed/b.jsonl").write_text('{"text": "of another kind"}\n')
    capsys.readouterr()
    assert main(["data", "drift", "mixed", "same.jsonl", "--threshold", "0.13", *read[2:]]) == 0
    assert capsys.readouterr().out.startswith("601 documents of the reference, 600 new")
    assert main(["data", "drift", "same.jsonl", "mixed", "--threshold", "0.13", *read[2:]]) == 0
    for new in ("other.jsonl", "none.jsonl", "gone.jsonl"):  # no file to separate, no document, no file: and no profile
        more = read[2:] if new == "other.jsonl" else []
        assert main(["data", "drift", "old.jsonl", new, "--save-profile", "q.drift.json", *more]) == 2
        assert not Path("q.drift.json").exists()
    Path("p.drift.json").write_text("{}")
    assert main("data drift p.drift.json other.jsonl".split()) == 2
    Path("bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    capsys.readouterr()
    assert main("data drift old.jsonl bad.jsonl".split()) == 2
    assert "bad.jsonl:2" in capsys.readouterr().err
    assert main("data drift old.jsonl bad.jsonl --skip-bad".split()) == 2  # one document is left
    out = capsys.readouterr().out
    assert "1 bad in the new corpus: no key 'text'" in out and "too few documents to tell whether length moved: D 1.000" in out
    assert main("data drift bad.jsonl other.jsonl --skip-bad --json".split()) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["result"] == "too few documents" and found["bad"] == {"reference": {"no key 'text'": 1}, "new": {}}
    assert main("data drift bad.jsonl --skip-bad --save-profile bad.drift.json".split()) == 0
    assert capsys.readouterr().out.startswith("1 bad in the reference corpus: no key 'text'\nbad.drift.json: 1 documents")
