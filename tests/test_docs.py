"""README and docs: their commands run, their names exist, and the Chinese pages have the same commands.

Blocks of ```` ```bash ```` are run, each page's in order, in a directory that looks like the repository. What takes long is run
in a short form (:data:`SHORT`); its long form has a test of its own, which is named there. The programs are those of
``warm.py``, with ``--nightly`` the real ones. Blocks marked ``cluster`` or ``gpu`` are not started: their scripts and flags are
parsed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from warm import programs

from megatron_lite.cli.train import resolve_model
from megatron_lite.config.flags import ABSENT, ACCEPTED, ALIASES, REFUSED, known_flags
from megatron_lite.config.load import load
from megatron_lite.config.transformer import TransformerConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHINESE = {"README.md": "README.zh-CN.md", "docs/advice-checked.md": "docs/advice-checked.zh-CN.md"}
COPIED = ("examples", "tools", "megatron_lite", "tests", "docs", "csrc")

SMALL_CORPUS = """python - <<'PY'
import json, pathlib
files = sorted(pathlib.Path('megatron_lite/').rglob('*.py'))
pathlib.Path('corpus').mkdir()
for name, part in (('train', files[:-10]), ('heldout', files[-10:])):
    with open(f'corpus/{name}.jsonl', 'w') as f:
        f.writelines(json.dumps({'text': p.read_text()}) + '\\n' for p in part)
PY"""
# (pattern, what is run instead). The long forms: tests/test_quickstart.py, tests/test_examples_cluster.py, the whole run.
SHORT = (
    (r"bash examples/quickstart\.sh", "bash -n examples/quickstart.sh"),
    (r"(bash examples/pretrain_gpt_tp8_pp4\.sh --cpu-demo)", r"\1 --print-flags"),
    (r"bash tools/test\.sh", "bash -n tools/test.sh"),
    (r"python examples/quickstart/make_corpus\.py --out corpus", SMALL_CORPUS),
    (r"--vocab-size 8192", "--vocab-size 600"),
    (r"(python -m megatron_lite check \S+)", r"\1 --max-ranks 1"),
    (r"(pip install .*)", r": \1"),
    (r"(python -m pytest .*)", r": \1"),  # runs with all tests
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: what stands behind the fence, and the text."""

    page: Path
    info: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [Block(page, info.strip(), text) for info, text in found]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands(text: str) -> list[str]:
    """The commands of a block, continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip() and not line.lstrip().startswith("#")]


def short_form(text: str) -> str:
    for pattern, instead in SHORT:
        text = re.sub(pattern, instead if "\\1" in instead else lambda _, t=instead: t, text)
    return text


# ---- commands run


def workplace(directory: Path, warm: bool) -> dict[str, str]:
    """Make a directory look like the repository, with its programs on the path; returns the environment."""
    for part in COPIED:
        (directory / part).symlink_to(ROOT / part)
    path = os.pathsep.join([programs(directory / "bin", warm), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONPATH")
    kept = {k: v for k, v in os.environ.items() if k not in launcher and not k.startswith("SLURM_")}
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


RUNNABLE = [p for p in PAGES if p.name not in {Path(c).name for c in CHINESE.values()} and any(b.info == "bash" for b in blocks(p))]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", RUNNABLE, ids=name)
def test_commands_run(page: Path, tmp_path: Path, seen: set[str], request: pytest.FixtureRequest) -> None:
    environment = workplace(tmp_path, warm=not request.config.getoption("--nightly"))
    for block in blocks(page):
        if block.info != "bash":
            continue
        whole = [c for c in commands(block.text) if not (c.startswith("python -m megatron_lite check") and c in seen)]
        seen.update(whole)
        script = "set -euo pipefail\n" + "\n".join(short_form(c) for c in whole)
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, f"{name(page)}:\n{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.fixture(scope="module")
def seen() -> set[str]:
    """Commands that have run; what needs nothing from before runs once."""
    return set()


# ---- commands that are not started


def flags_of_a_script(path: Path) -> list[str]:
    """The training flags of a launch script, which prints them when asked, and starts nothing."""
    done = subprocess.run(["bash", path, "--print-flags"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def train_flags(command: str) -> list[str] | None:
    """What a command hands to ``train``; None for other commands."""
    match = re.search(r"(?:megatron_lite train|megatron-lite train|tools/pretrain_gpt\.py)\s+(.*)", command)
    return shlex.split(re.sub(r"\$\{?(\w+)\}?", "1", match[1])) if match else None


def test_commands_for_clusters_and_gpus_are_well_formed() -> None:
    number = 0
    for page in PAGES:
        for block in blocks(page):
            if not block.info.startswith("bash "):
                continue
            assert block.info.split()[1] in ("cluster", "gpu"), f"{name(page)}: unknown mark {block.info!r}"
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
            for command in commands(block.text):
                number += 1
                if (given := train_flags(command)) is not None:
                    load(given, resolve_model)
                for path in re.findall(r"\b(?:examples|tools)/[\w./-]+", command):
                    assert (ROOT / path).is_file(), f"{name(page)}: {path} of {command!r}"
                    if path.endswith((".sh", ".sbatch")):
                        subprocess.run(["bash", "-n", ROOT / path], check=True)
                    if path.endswith(".sh"):
                        load(flags_of_a_script(ROOT / path), resolve_model)
    assert number


# ---- names exist


def slug(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    return {slug(re.sub(r"`|\[([^\]]*)\]\([^)]*\)", r"\1", t)) for t in re.findall(r"^#+ (.*)$", prose(page), re.M)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name(page)} links to {target}"
        assert ROOT in file.parents, f"{name(page)} links out of the repository: {target}"
        if anchor:
            assert anchor in anchors(file), f"{name(page)} links to {target}; there are {sorted(anchors(file))}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for file, test in re.findall(r"\b(test_\w+\.py)(?:::(test_\w+))?", text):
        path = ROOT / "tests" / file
        assert path.exists(), f"{name(page)} names {file}"
        assert not test or f"def {test}(" in path.read_text(), f"{name(page)} names {file}::{test}"
    for path in re.findall(r"`((?:examples|tools|tests|docs|csrc|megatron_lite)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), f"{name(page)} names {path}"
    rooms = "|".join(p.name for p in (ROOT / "megatron_lite").iterdir() if p.is_dir())
    for path in re.findall(rf"`((?:{rooms})/[\w/]+\.py)`", text):
        assert (ROOT / "megatron_lite" / path).exists(), f"{name(page)} names {path}"


OF_OTHERS = {"--nproc-per-node", "--shutdown-timeout", "--extra-index-url", "--flag", "--no-flag", "--node-rank", "--nnodes"}
OF_OTHERS |= {"--rdzv-backend", "--rdzv-endpoint", "--requeue", "--signal", "--ntasks-per-node", "--gpus-per-node", "--nodes"}
OF_OTHERS |= {"--gpus-per-task", "--gpu-bind", "--nightly", "--help", "--reset-", "--monitor-interval", "--max-restarts", "--log-dir"}


@cache
def flags_in_sources() -> set[str]:
    files = [*(ROOT / "megatron_lite" / "cli").glob("*.py"), *(ROOT / "megatron_lite" / "ops").glob("*.py")]
    files += [p for tree in ("tools", "examples") for p in (ROOT / tree).rglob("*") if p.suffix in (".py", ".sh", ".sbatch")]
    return {flag for p in files for flag in re.findall(r"[\"'\s(|](--[a-z][\w-]+)", p.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "configuration.md"], ids=name)
def test_flags_that_are_named_exist(page: Path) -> None:
    known = set(known_flags(TransformerConfig)) | set(ALIASES) | set(ACCEPTED) | set(ABSENT) | set(REFUSED) | OF_OTHERS
    known |= flags_in_sources()
    from megatron_lite.cli.show_schedule import Options

    known |= {"--" + field.replace("_", "-") for field in Options.__dataclass_fields__}
    named = set(re.findall(r"(?<![\w-])(--[a-z][\w-]*)", page.read_text(encoding="utf-8")))
    strange = {f for f in named if f not in known and f.replace("--no-", "--", 1) not in known and not f.startswith("--model")}
    assert not strange, f"{name(page)} names flags that nothing reads: {sorted(strange)}"


# ---- the Chinese pages


@pytest.mark.parametrize("page", CHINESE)
def test_the_chinese_page_has_the_same_commands(page: str) -> None:
    english, chinese = ROOT / page, ROOT / CHINESE[page]
    assert [(b.info, b.text) for b in blocks(english)] == [(b.info, b.text) for b in blocks(chinese)]


@pytest.mark.parametrize("page", CHINESE)
def test_the_chinese_page_has_the_same_parts(page: str) -> None:
    """As many headings of each level, rows of tables and list items, and the same code names in the same rows."""
    english, chinese = (prose(ROOT / p) for p in (page, CHINESE[page]))
    for what in (r"^# ", r"^## ", r"^### ", r"^\|", r"^- ", r"^\d+\. "):
        assert len(re.findall(what, english, re.M)) == len(re.findall(what, chinese, re.M)), what
    rows = [[re.findall(r"`[^`]+`", line) for line in text.splitlines() if line.startswith("|")] for text in (english, chinese)]
    for one, other in zip(*rows, strict=True):
        assert sorted(one) == sorted(other)


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        if not page.name.endswith(".zh-CN.md"):
            assert f"(docs/{page.name})" in text or f"(docs/{page.name}#" in text, f"README does not link to {page.name}"
