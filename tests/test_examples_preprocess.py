"""The job array that tokenizes a corpus in parts: what it makes is the one-part run's, failures hold up the join, reruns go on.

Slurm is played by ``slurm_stand_in.py`` under the name sbatch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from megatron_lite.data.index_format import prefix_paths
from megatron_lite.text.preprocess import Options, preprocess
from megatron_lite.text.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "slurm" / "preprocess.sbatch"
NUMBERS = partial(build_tokenizer, "NullTokenizer", vocab_size=100)


def checkout(folder: Path, **settings: str) -> Path:
    """A directory that looks like a checkout, with other settings in the script; the script."""
    text = SCRIPT.read_text()
    for name, value in settings.items():
        text, n = re.subn(rf"^{name}=(\(.*?\)|\S+)", lambda _, s=f"{name}={value}": s, text, count=1, flags=re.M)
        assert n == 1, name
    for name in ("megatron_lite", "tools"):
        (folder / name).symlink_to(ROOT / name)
    copy = folder / "examples" / "slurm" / SCRIPT.name
    copy.parent.mkdir(parents=True)
    copy.write_text(text)
    return copy


def corpus(folder: Path) -> list[Path]:
    """Two files of which one has two keys in a record."""
    (folder / "in").mkdir(parents=True)
    lines = [
        json.dumps({"text": " ".join(str(j % 90) for j in range(i % 23 + 1)), "title": str(i % 90)}) for i in range(90)
    ]
    files = [folder / "in" / "a.jsonl", folder / "in" / "b.jsonl"]
    files[0].write_text("\n".join(lines[:70]) + "\n")
    files[1].write_text("\n".join(lines[70:]))
    return files


class Cluster:
    """A checkout and a Slurm whose jobs run at once."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        program = self.bin / "sbatch"
        stand_in = (ROOT / "tests" / "slurm_stand_in.py").read_text().partition("\n")[2]
        program.write_text(f"#!{sys.executable}\n{stand_in}")
        program.chmod(0o755)
        common = {
            "INPUT": f"({folder}/in/*.jsonl)",
            "OUTPUT_PREFIX": f"{folder}/tokens/corpus",
            "PARTS": "3",
            "TOKENIZER": "(--tokenizer-type NullTokenizer --vocab-size 100)",
            "PYTHON": sys.executable,
        }
        self.script = checkout(folder, **common | settings)

    def run(self, *flags: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        env["PATH"] = f"{self.bin}:{env['PATH']}"
        return subprocess.run(["bash", self.script, *flags], env=env, capture_output=True, text=True, timeout=300)

    def jobs(self) -> list[tuple[str, str]]:
        """(number, exit code or never) of each."""
        return [(line.split()[0], line.split()[1]) for line in (self.bin / "jobs").read_text().splitlines()]

    def log(self, number: str) -> str:
        return (self.bin / f"job{number}.log").read_text()


def content(prefix: Path) -> list[bytes]:
    return [path.read_bytes() for path in prefix_paths(prefix)]


def test_the_joined_parts_are_the_one_part_run(tmp_path: Path) -> None:
    files = corpus(tmp_path)
    cluster = Cluster(tmp_path, KEYS="(text title)")
    done = cluster.run()
    assert done.returncode == 0, done.stderr
    assert cluster.jobs() == [("101", "0"), ("102", "0")], cluster.log("101")
    options = Options(NUMBERS, keys=("text", "title"), append_eod=True)
    preprocess(files, str(tmp_path / "whole"), options)
    for key in ("text", "title"):
        assert content(tmp_path / "tokens" / f"corpus_{key}_document") == content(tmp_path / f"whole_{key}_document")
        assert f"corpus_{key}_document: good" in cluster.log("102")


def test_a_part_that_fails_holds_up_the_join_and_a_rerun_makes_what_is_missing(tmp_path: Path) -> None:
    files = corpus(tmp_path)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\n[[ $* == *2/3* && ! -e {tmp_path}/up ]] && exit 9\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    cluster = Cluster(tmp_path, PYTHON=str(python))
    assert cluster.run("--log-interval", "7").returncode == 0
    assert cluster.jobs() == [("101", "9"), ("102", "never")]
    assert not list((tmp_path / "tokens").glob("*.idx"))
    assert len(list((tmp_path / "tokens" / "corpus.parts").glob("*.idx"))) == 2
    (tmp_path / "up").touch()
    assert cluster.run("--log-interval", "7").returncode == 0
    assert cluster.jobs()[2:] == [("103", "0"), ("104", "0")], cluster.log("103")
    assert cluster.log("103").count("is complete: ") == 2
    preprocess(files, str(tmp_path / "whole"), Options(NUMBERS, append_eod=True))
    assert content(tmp_path / "tokens" / "corpus_text_document") == content(tmp_path / "whole_text_document")


def test_parts_of_another_input_are_not_joined(tmp_path: Path) -> None:
    """A changed file moves the cuts between parts: what is finished does not fit what would be made now."""
    files = corpus(tmp_path)
    cluster = Cluster(tmp_path)
    assert cluster.run().returncode == 0
    files[0].write_text(files[0].read_text() + '{"text": "1"}\n')
    again = cluster.run()
    assert again.returncode == 2 and "corpus.parts to start anew" in again.stderr and len(cluster.jobs()) == 2
    shutil.rmtree(tmp_path / "tokens" / "corpus.parts")
    assert cluster.run("--log-interval", "3").returncode == 0 and cluster.jobs()[2:] == [("103", "0"), ("104", "0")]
    assert cluster.run("--skip-bad").returncode == 2


def test_it_says_how_it_is_started(tmp_path: Path) -> None:
    corpus(tmp_path)
    script = Cluster(tmp_path).script
    env = os.environ | {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path)}
    alone = subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=60)
    assert alone.returncode != 0 and "start this with bash, it submits itself" in alone.stderr
    moved = shutil.copy(script, tmp_path / "moved.sbatch")
    wrong = subprocess.run(
        ["bash", moved], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=60
    )
    assert wrong.returncode == 2 and "start this from the root of the checkout" in wrong.stderr


@pytest.mark.parametrize("flag", re.findall(r"(?<=\s)--[a-z-]+", SCRIPT.read_text().partition("exec ")[2]))
def test_every_flag_is_one_of_the_tool(flag: str) -> None:
    from megatron_lite.cli.preprocess import parser

    assert flag in parser().format_help()
