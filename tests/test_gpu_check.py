"""tools/gpu_check.py without a GPU: its parts in small, and what becomes of parts that fail, hang or cannot run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import need_kernels

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "gpu_check.py"
sys.path[:0] = [str(ROOT / "tools")]

import gpu_check  # noqa: E402
from gpu import ops_part, report  # noqa: E402
from gpu.part import Outcome, Settings, Skipped  # noqa: E402


def check(*args: str, timeout: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the script."""
    command = [sys.executable, str(SCRIPT), *args]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout, **options)


def run(part: str, seconds: float = 600) -> Outcome:
    """A part in this process, in small."""
    outcome = Outcome()
    __import__(f"gpu.{part}_part", fromlist=["run"]).run(Settings("cpu", seconds), outcome)
    return outcome


def test_the_command(tmp_path: Path) -> None:
    """Two parts from the command line: exit code, JSON, Markdown."""
    need_kernels()
    done = check("--cpu", "--only", "build", "--only", "nccl", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("cpu-*.json")
    found = json.loads(path.read_text())
    assert [(p["name"], p["status"]) for p in found["parts"]] == [("build", "passed"), ("nccl", "skipped")]
    assert found["torch"] == torch.__version__ and found["device"] == "CPU" and found["date"]
    text = path.with_suffix(".md").read_text()
    assert "| build | passed |" in text and "NCCL needs two GPUs, 0 visible" in text and torch.__version__ in text


def test_without_a_gpu() -> None:
    """Said in a sentence, exit 2."""
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = check()
    assert done.returncode == 2 and "no NVIDIA GPU" in done.stderr and "Traceback" not in done.stderr


def test_ops() -> None:
    """Every op of the table is compared, and everything holds."""
    need_kernels()
    outcome = run("ops")
    assert outcome.failures == []
    for name in (
        "rms_norm compiled-cpu",
        "swiglu compiled-cpu",
        "adamw compiled-cpu",
        "attention sdpa",
        "layer_norm torch",
    ):
        assert outcome.numbers[name]["comparisons"] >= 8


def test_a_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in one element of one op, and one in a single bit of a random number."""
    real = ops_part.swiglu

    def wrong(gate: torch.Tensor, up: torch.Tensor, *, kernel: str) -> torch.Tensor:
        out = real(gate, up, kernel=kernel)
        return (
            out if kernel == "reference" else out + torch.where(torch.arange(out.numel()).view(out.shape) == 0, 0.02, 0)
        )

    monkeypatch.setattr(ops_part, "swiglu", wrong)
    monkeypatch.setattr(ops_part, "keep_rows", lambda out, *_: out.fill_(True))
    outcome = Outcome()
    ops = ops_part.Ops(Settings("cpu"), outcome)
    ops.swiglu()
    assert any("swiglu" in line for line in outcome.failures)
    before = len(outcome.failures)
    ops.random_numbers()
    assert any("philox_keep" in line for line in outcome.failures[before:])


def test_equivalence_and_sync() -> None:
    """The matrix over the staged back end, the wait left out on purpose, one read a step."""
    outcome = run("equivalence")
    assert outcome.failures == [] and outcome.skipped == []
    assert len(outcome.numbers) == 2 and any("a forgotten wait is noticed" in line for line in outcome.lines)
    outcome = run("sync")
    assert outcome.failures == [] and len(outcome.lines) == 4


def test_speed() -> None:
    """Ours and a peer, whose first losses on the same weights agree."""
    outcome = run("mfu")
    assert outcome.failures == []
    assert outcome.numbers["megatron_lite"]["seconds"] > 0 and outcome.numbers["their time over ours"] > 0


def test_speed_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is named, and the plain statement stands in."""
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    outcome = run("mfu")
    assert outcome.skipped == ["transformers is not installed: a plain PyTorch statement of the model stands in"]
    assert "plain PyTorch, SDPA" in outcome.numbers


def test_precision() -> None:
    """The two curves."""
    outcome = run("precision")
    assert outcome.failures == []
    assert (
        len(outcome.numbers["bf16"]) == len(outcome.numbers["fp32"])
        and outcome.numbers["bf16"] != outcome.numbers["fp32"]
    )


@pytest.mark.nightly
def test_sanitizer(tmp_path: Path) -> None:
    """Every kernel under the compiler's sanitizers."""
    done = check("--cpu", "--only", "sanitizer", "--out", str(tmp_path), timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("cpu-*.json")
    found = json.loads(path.read_text())
    assert found["parts"][0]["status"] == "passed" and "launches" in found["parts"][0]["lines"][0]


@pytest.mark.nightly
def test_everything(tmp_path: Path) -> None:
    """The whole command."""
    done = check("--cpu", "--out", str(tmp_path), timeout=2400)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("cpu-*.json")
    states = {p["name"]: p["status"] for p in json.loads(path.read_text())["parts"]}
    assert states == {p.name: "skipped" if p.name == "nccl" else "passed" for p in gpu_check.PARTS}


def broken_tools(folder: Path, body: str) -> Path:
    """A copy of the script whose part ``build`` is something else."""
    (folder / "tools" / "gpu").mkdir(parents=True)
    for name in ("gpu_check.py", "gpu/part.py", "gpu/report.py", "gpu/__init__.py"):
        (folder / "tools" / name).write_text((SCRIPT.parent / name).read_text())
    (folder / "tools/gpu/build_part.py").write_text(
        f"import os, time\nfrom gpu.part import Skipped\n\ndef run(settings, outcome):\n{body}"
    )
    (folder / "megatron_lite").symlink_to(ROOT / "megatron_lite")
    return folder / "tools/gpu_check.py"


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("    outcome.say('one'); raise KeyError('two')\n", "failed", "KeyError: 'two'"),
        ("    outcome.say('one'); raise Skipped('no such tool')\n", "skipped", "no such tool"),
        ("    outcome.say('one'); outcome.check(False, 'a fault')\n", "failed", "a fault"),
        ("    outcome.say('one'); os._exit(7)\n", "failed", "it was ended"),
    ],
    ids=["raises", "skips", "finds", "dies"],
)
def test_parts_that_end_badly(tmp_path: Path, body: str, status: str, reason: str) -> None:
    """What came before is kept, the reason is said, and the script goes on."""
    script = broken_tools(tmp_path, body)
    done = subprocess.run(
        [sys.executable, script, "--part", "build", "--cpu", "--result", tmp_path / "r.json"],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["status"], found["reason"], found["lines"][0]) == (status, reason, "one"), done.stderr
    assert (done.returncode == 0) == (status == "skipped")
    assert ("Traceback" in found["traceback"]) == (status == "failed" and "KeyError" in reason)


def test_a_part_that_hangs(tmp_path: Path) -> None:
    """It is ended when its time is over, with what it has started; the report says so and has what it had found."""
    pid = tmp_path / "pid"
    body = f"    outcome.say('one')\n    child = os.fork()\n    open({str(pid)!r}, 'a').write(f'{{os.getpid()}}\\n')\n    time.sleep(600)\n"
    script = broken_tools(tmp_path, body)
    done = subprocess.run(
        [sys.executable, script, "--cpu", "--only", "build", "--seconds", "12", "--out", tmp_path / "out"],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    (path,) = (tmp_path / "out").glob("*.json")
    (part,) = json.loads(path.read_text())["parts"]
    assert part["status"] == "failed" and part["reason"].startswith("not done after") and part["lines"] == ["one"]
    for number in map(int, pid.read_text().split()):
        assert gone(number)


def test_an_interrupt_ends_the_part(tmp_path: Path) -> None:
    """SIGTERM to the script: no part goes on without it."""
    pid = tmp_path / "pid"
    script = broken_tools(tmp_path, f"    open({str(pid)!r}, 'w').write(str(os.getpid()))\n    time.sleep(600)\n")
    process = subprocess.Popen([sys.executable, script, "--cpu", "--only", "build"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert gone(int(pid.read_text()))


def gone(pid: int) -> bool:
    """Whether a process is not there any more, or soon."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as f:
                if f.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    return False


def test_report() -> None:
    """The name of the file, and every kind of part in the text."""
    part = {"name": "ops", "title": "t", "seconds": 1.0, "lines": ["ok: x"], "reason": "", "traceback": ""}
    facts = {"device": "NVIDIA H200", "date": "2026-03-01 10:00:00", "torch": "2.11.0", "cuda": "13.0", "driver": "580"}
    facts |= {"python": "3.12", "sources": "abc", "seconds": 2.0, "command": "python tools/gpu_check.py"}
    parts = [part | {"status": s} for s in ("passed", "skipped")] + [
        part | {"status": "failed", "reason": "r", "traceback": "Tb"}
    ]
    whole = {**facts, "parts": parts}
    assert report.file_stem(whole) == "nvidia-h200-2026-03-01"
    text = report.markdown(whole)
    assert (
        "# GPU check: NVIDIA H200, 2026-03-01" in text
        and "**failed**" in text
        and "- failed: r" in text
        and "Tb" in text
    )
    assert "torch: 2.11.0 (CUDA 13.0)" in text


def test_time_of_all_parts() -> None:
    """No budget is longer than the whole, and the whole is below six minutes."""
    assert gpu_check.TOTAL_SECONDS < 360 and max(p.seconds for p in gpu_check.PARTS) < gpu_check.TOTAL_SECONDS
    with pytest.raises(Skipped):
        run("nccl")
