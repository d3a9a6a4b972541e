"""The quickstart: its short form as a whole, its parts one by one, and (nightly) the full form in its time."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from warm import programs

ROOT = Path(__file__).parent.parent
PARTS = ROOT / "examples" / "quickstart"
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def part(name: str) -> ModuleType:
    """A script of the quickstart as a module."""
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", PARTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def quickstart(cwd: Path, *args: str, script: Path | None = None, path: str = "", seconds: float = 400) -> tuple[int, str]:
    """Exit status and everything printed."""
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER and k != "PYTHONPATH"}
    environment["PATH"] = os.pathsep.join(filter(None, [path, str(Path(sys.executable).parent), environment["PATH"]]))
    command = ["bash", str(script or ROOT / "examples" / "quickstart.sh"), *args]
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
    )
    return done.returncode, done.stdout


def check_output(text: str, out: Path, steps: int) -> dict[str, float]:
    """What every form prints and leaves; the losses of the table."""
    assert f"steps in common: 5 ({steps + 1} to {steps + 5})" in text
    assert "no difference in loss or grad_norm above a relative 1e-05" in text
    assert "layout: tp 2 x cp 1 x dp 1 x pp 2 = 4 ranks" in text and "layout: tp 1 x cp 1 x dp 2 x pp 2 = 4 ranks" in text
    assert f"step {steps}: validation loss" in text and re.search(rf"step 20/{steps + 5} \| loss ", text)
    assert "def main(" in text.split("== a text sampled from the checkpoint")[1]
    assert sorted(p.name for p in (out / "checkpoints").glob("step_*")) == [f"step_{s:08d}" for s in (steps, steps + 5)]
    rows = re.findall(r"^(table of one token|table of two tokens|model)[^0-9]*(?:\d+ +)?(\d+\.\d{3}) +(\d+\.\d{3})$", text, re.M)
    assert [name for name, _, _ in rows] == ["table of one token", "table of two tokens", "model"], text
    ratios = [float(nats) / float(bits) for _, nats, bits in rows]
    assert max(ratios) - min(ratios) < 0.01 * min(ratios), "one corpus has one number of bytes per token"
    assert text.count("FAILS") == 0
    return {name: float(nats) for name, nats, _ in rows}


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """The short form, once: from another directory, into a path with a space, over what an earlier run has left."""
    cwd = tmp_path_factory.mktemp("some where")
    (cwd / "a run" / "checkpoints" / "step_00000999").mkdir(parents=True)
    (cwd / "a run" / "unbroken").mkdir()
    (cwd / "a run" / "unbroken" / "metrics.jsonl").write_text('{"step": 101, "loss": 0.0}\n')
    path = programs(tmp_path_factory.mktemp("programs") / "bin")  # the full form takes the real ones
    return (cwd / "a run", *quickstart(cwd, "--quick", "--out", "a run", path=path))


@pytest.mark.timeout(500)
def test_short_form(short: tuple[Path, int, str]) -> None:
    out, code, text = short
    assert code == 0, text
    losses = check_output(text, out, 100)
    assert losses["model"] <= losses["table of one token"] - 0.5
    assert [p.name for p in out.parent.iterdir()] == ["a run"], "nothing beside it"
    resumed = json.loads((out / "resumed" / "run.json").read_text())
    assert resumed["config"]["parallel"]["zero_stage"] == 1 and resumed["config"]["checkpoint"]["ckpt_step"] == 100


def test_what_is_not_reached_fails(short: tuple[Path, int, str]) -> None:
    """The report's two conditions, each asked for too much."""
    out, code, text = short
    assert code == 0, text
    options = ["--load", "checkpoints", "--train", "data/train_text_document", "--heldout", "data/heldout_text_document"]
    command = [sys.executable, str(PARTS / "report.py"), *options, "--text", "corpus/heldout.jsonl", "--windows", "8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--below", "9", "--rise", "-9"], cwd=out, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stderr
    assert re.search(r"FAILS the model is .* \(at least 9\)\nok    without what precedes", done.stdout), done.stdout


def test_another_run_into_the_same_directory_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / ".lock", "w") as f:
        holder = subprocess.Popen(["flock", "--exclusive", str(f.name), "sleep", "60"])
        try:
            end = time.monotonic() + 20
            while subprocess.run(["flock", "--nonblock", f.name, "true"]).returncode == 0 and time.monotonic() < end:
                time.sleep(0.05)
            code, text = quickstart(ROOT, "--quick", "--out", str(tmp_path), seconds=60)
        finally:
            holder.terminate()
            holder.wait()
    assert code == 2 and "another run is writing to" in text


def test_options() -> None:
    code, text = quickstart(ROOT, "--help", seconds=60)
    assert code == 0 and "--quick" in text and "set -euo" not in text and not text.startswith("#")
    code, text = quickstart(ROOT, "--fast", seconds=60)
    assert code == 2 and "unknown option --fast" in text
    assert quickstart(ROOT, "--out", seconds=60)[0] != 0


@pytest.mark.parametrize(("lacks", "reason"), [("torch 2.11 or later (there is 2.4.0)", "torch 2.11"), ("tyro", "lacks tyro")])
def test_an_environment_is_made_where_the_active_one_will_not_do(tmp_path: Path, lacks: str, reason: str) -> None:
    """With stand-ins for the two Pythons: which commands they get."""
    (tmp_path / "examples").mkdir()
    script = tmp_path / "examples" / "quickstart.sh"
    shutil.copy(ROOT / "examples" / "quickstart.sh", script)
    stand_in = tmp_path / "bin" / "python3"
    stand_in.parent.mkdir()
    stand_in.write_text(
        f'#!/bin/bash\necho "$0 $*" >> "{tmp_path}/calls"\n'
        f'[ "$1" = - ] && echo "{lacks}"\n'
        'if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi\n'
        '[ "$1 $2" = "-m pip" ] && exit 3\nexit 0\n'
    )
    stand_in.chmod(0o755)
    code, text = quickstart(tmp_path, script=script, path=str(stand_in.parent), seconds=60)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert code == 3 and reason in text, text
    assert any(call.endswith(f"-m venv {tmp_path}/.venv") for call in calls)
    assert calls[-1].startswith(f"{tmp_path}/.venv/bin/python -m pip install")
    assert calls[-1].endswith(f"-r {tmp_path}/requirements.lock")


# ---- corpus and report


def test_corpus(tmp_path: Path) -> None:
    """At least 10 MB of files, a tenth of them held out, none in both; a small corpus of files from everywhere."""
    for name, options in (("all", []), ("small", ["--max-bytes", "2000000"])):
        command = [sys.executable, str(PARTS / "make_corpus.py"), "--out", str(tmp_path / name), *options]
        subprocess.run(command, check=True, timeout=120, capture_output=True)
        lines = {s: [json.loads(x) for x in open(tmp_path / name / f"{s}.jsonl", encoding="utf-8")] for s in ("train", "heldout")}
        texts = {split: {line["text"] for line in found} for split, found in lines.items()}
        assert not texts["train"] & texts["heldout"] and all(len(texts[s]) == len(lines[s]) for s in texts)
        share = len(lines["heldout"]) / sum(map(len, lines.values()))
        assert 0.05 < share < 0.2
        size = sum(len(text.encode()) for found in texts.values() for text in found)
        assert size >= 10_000_000 if name == "all" else 2_000_000 <= size <= 2_300_000
        folders = {line["path"].split("/")[0] for line in lines["train"]}
        assert len(folders) > 20
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == ["heldout.jsonl", "train.jsonl"]


def test_tables_are_probabilities() -> None:
    report, rng = part("report"), np.random.default_rng(1)
    size = 7
    stream = rng.choice(size - 1, size=200, p=[0.4, 0.3, 0.1, 0.1, 0.05, 0.05])  # the last id never occurs
    stream[-1] = 5
    tables = report.Tables(stream, size)
    assert abs(tables.one.sum() - 1) < 1e-12 and tables.one.min() > 0
    for before in range(size):
        chances = tables.two(np.full(size, before), np.arange(size))
        assert chances.min() > 0 and abs(chances.sum() - 1) < 1e-12, before
    pairs = list(zip(stream[:-1], stream[1:], strict=True))
    for before, token in ((0, 1), (1, 0), (3, 5), (6, 2)):
        follow = [t for b, t in pairs if b == before]
        if follow:
            back_off = report.DISCOUNT * len(set(follow)) / len(follow) * tables.one[token]
            want = max(follow.count(token) - report.DISCOUNT, 0) / len(follow) + back_off
        else:
            want = tables.one[token]
        assert abs(tables.two(np.array([before]), np.array([token]))[0] - want) < 1e-12


def test_windows_lie_in_documents(tmp_path: Path) -> None:
    from megatron_lite.data.indexed import IndexedDataset, IndexedWriter

    report = part("report")
    lengths, begin = (700, 100, 257, 258, 256, 2000), 0
    with IndexedWriter(tmp_path / "data", dtype=np.uint16) as writer:
        for length in lengths:
            writer.add_document(np.arange(begin, begin + length))
            begin += length
    data = IndexedDataset(tmp_path / "data")
    borders = np.cumsum((0, *lengths))
    for count in (1, 5, 11):
        text = report.windows(data, count)
        assert text.shape == (count, 257) and (np.diff(text, axis=1) == 1).all()
        documents = np.searchsorted(borders, text, side="right")
        assert (documents == documents[:, :1]).all() and (np.diff(text[:, 0]) >= 257).all()
    with pytest.raises(SystemExit, match="only 11 windows"):
        report.windows(data, 12)


def test_the_probe_keeps_the_last_inputs_and_the_target() -> None:
    report, rng = part("report"), np.random.default_rng(2)
    text = rng.integers(0, 4, size=(50, 257))
    table = np.array([0.0, 0.0, 0.0, 0.0, 0.25, 0.75])
    drawn = report.redrawn(text, table)
    assert (drawn[:, -9:] == text[:, -9:]).all()  # 8 inputs and the last target
    assert set(np.unique(drawn[:, :-9])) == {4, 5}
    assert abs((drawn[:, :-9] == 5).mean() - 0.75) < 0.02


# ---- the full form


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_full_form(tmp_path: Path) -> None:
    """Twice at once into one directory; each in under 6 minutes."""
    for _ in range(2):
        began = time.monotonic()
        code, text = quickstart(tmp_path, "--out", "run", seconds=590)
        assert code == 0, text
        assert time.monotonic() - began < 360
        steps = int(re.findall(r"(\d+) steps and 5 more beyond a save", text)[0])
        losses = check_output(text, tmp_path / "run", steps)
        assert losses["model"] <= losses["table of one token"] - 0.5
        assert len(re.findall(r"^ok    ", text, re.M)) == 2
