"""``megatron-lite data clean`` as people run it: killed at any moment and started again; after, and before, another corpus."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clean_pipelines import files_of
from clean_toys import corpus

from megatron_lite.config.exit_codes import DONE, WAITING

STEPS = """steps:
  - normalise
  - bloom: {expected: 10000, save: seen}
  - quality
  - exact: {unit: line}
  - minhash: {save: near}
"""
FLAGS = "--config ../clean.yaml --input ../in.jsonl --output out --json report.json --keep-dropped dropped --shard-size 100KB"


def command(*more: str) -> list[str]:
    """The command line of a run in a directory."""
    return [sys.executable, "-m", "megatron_lite", "data", "clean", *FLAGS.split(), *more]


@pytest.mark.parametrize(
    ("kills", "parts"), [(3, 1), pytest.param(60, 1, marks=pytest.mark.nightly), pytest.param(60, 2, marks=pytest.mark.nightly)]
)
def test_a_run_killed_at_any_moment_goes_on(tmp_path: Path, kills: int, parts: int) -> None:
    texts = corpus(3, 4000)
    records = "".join(json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(texts))
    (tmp_path / "in.jsonl").write_text(records, encoding="utf-8")
    (tmp_path / "clean.yaml").write_text(STEPS)
    whole = tmp_path / "whole"
    whole.mkdir()
    begin = time.monotonic()
    subprocess.run(command(), check=True, stdout=subprocess.DEVNULL, cwd=whole)
    seconds = time.monotonic() - begin
    chance, left, done = random.Random(kills + parts), kills, 0  # kills that are left, runs that came to their end
    while left or not done:
        place, code = tmp_path / f"killed-{left}", WAITING
        place.mkdir()
        for turn in range(10**6):
            if code == DONE and turn % parts == 0:
                break
            more = ["--part", f"{turn % parts}/{parts}", "--workers", str(chance.choice((1, 2)))]
            process = subprocess.Popen(command(*more), stdout=subprocess.DEVNULL, start_new_session=True, cwd=place)
            try:
                code = process.wait(chance.uniform(0.1, 1.1) * seconds if left else None)
                assert code in (DONE, WAITING)
            except subprocess.TimeoutExpired:
                process.kill()
                code, left = process.wait(), left - 1
                gone_by = time.monotonic() + 20
                while time.monotonic() < gone_by and is_there(process.pid):
                    time.sleep(0.02)
                assert not is_there(process.pid), "a worker outlives its parent"
            if (place / "out").exists():
                assert all((place / name).exists() for name in ("out.html", "report.json", "dropped", "seen", "near"))
        assert files_of(place) == files_of(whole)
        shutil.rmtree(place)
        done += 1


def is_there(group: int) -> bool:
    """Whether a process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
