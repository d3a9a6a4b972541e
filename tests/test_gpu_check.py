"""tools/gpu_check.py without a GPU: its parts in small, and what becomes of parts that fail, hang or cannot run."""

from __future__ import annotations

import importlib.util
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
    assert len(outcome.numbers) == 1 and any("a forgotten wait is noticed" in line for line in outcome.lines)
    outcome = run("sync")
    assert outcome.failures == [] and len(outcome.lines) == 2


def test_speed_beside_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """First losses on the same weights agree; what is missing is named, and the plain statement stands in."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    outcome = run("mfu")
    assert outcome.failures == []
    assert outcome.skipped == ["transformers is not installed: a plain PyTorch statement of the model stands in"]
    for name in ("megatron_lite", "plain PyTorch, SDPA"):
        assert outcome.numbers[name]["seconds"] > 0


@pytest.mark.nightly
def test_speed_beside_transformers() -> None:
    """The same with the package."""
    pytest.importorskip("transformers")
    outcome = run("mfu")
    assert outcome.failures == [] and outcome.skipped == [] and outcome.numbers["their time over ours"] > 0


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


def script_with(folder: Path, body: str) -> Any:
    """A copy of the script whose part ``build`` is something else, as a module."""
    (folder / "tools" / "gpu").mkdir(parents=True)
    for name in ("gpu_check.py", "gpu/part.py", "gpu/report.py", "gpu/__init__.py"):
        (folder / "tools" / name).write_text((SCRIPT.parent / name).read_text())
    head = "import os, time\nfrom gpu.part import Skipped\n\ndef run(settings, outcome):\n    outcome.say('one')\n"
    (folder / "tools/gpu/build_part.py").write_text(head + body)
    (folder / "megatron_lite").symlink_to(ROOT / "megatron_lite")
    spec = importlib.util.spec_from_file_location("copied_check", folder / "tools/gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("    raise KeyError('two')\n", "failed", "KeyError: 'two'"),
        ("    raise Skipped('no such tool')\n", "skipped", "no such tool"),
        ("    outcome.check(False, 'a fault')\n", "failed", "a fault"),
        ("    os._exit(7)\n", "failed", "it was ended"),
        ("    outcome.check(True, 'fine')\n", "passed", ""),
    ],
    ids=["raises", "skips", "finds", "dies", "passes"],
)
def test_how_parts_end(tmp_path: Path, body: str, status: str, reason: str) -> None:
    """What came before is kept and the reason is said."""
    script = script_with(tmp_path, body)
    found = script.start_part(script.PARTS[0], "cpu", 60)
    assert (found["status"], found["reason"], found["lines"][0]) == (status, reason, "one")
    assert ("Traceback" in found["traceback"]) == ("KeyError" in reason)


def test_a_part_that_hangs(tmp_path: Path) -> None:
    """It is ended when its time is over, with what it has started; what it had found is kept."""
    pid = tmp_path / "pid"
    script = script_with(
        tmp_path, f"    os.fork()\n    open({str(pid)!r}, 'a').write(f'{{os.getpid()}}\\n')\n    time.sleep(600)\n"
    )
    began = time.monotonic()
    found = script.start_part(script.PARTS[0], "cpu", 8)
    assert time.monotonic() - began < 60
    assert found["status"] == "failed" and found["reason"] == "not done after 8 s" and found["lines"] == ["one"]
    pids = [int(line) for line in pid.read_text().split()]
    assert len(pids) == 2 and all(map(gone, pids))


def test_no_time_left() -> None:
    """A part that could only be cut off does not begin."""
    found = gpu_check.start_part(gpu_check.PARTS[0], "cpu", 3)
    assert found["status"] == "skipped" and found["reason"] == "the time of the whole check was over"


def test_an_interrupt_ends_the_part(tmp_path: Path) -> None:
    """SIGTERM to the script: no part goes on without it."""
    pid = tmp_path / "pid"
    script_with(tmp_path, f"    open({str(pid)!r}, 'w').write(str(os.getpid()))\n    time.sleep(600)\n")
    command = [sys.executable, tmp_path / "tools/gpu_check.py", "--cpu", "--only", "build"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
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
