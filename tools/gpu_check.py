"""Everything that only a GPU can show, in under six minutes and without network.

    python tools/gpu_check.py                 on a machine with an NVIDIA GPU; the report goes to docs/gpu/
    python tools/gpu_check.py --only ops      one part (may be repeated)
    python tools/gpu_check.py --cpu           every part that can run without a GPU, in small: tests the check itself

Each part is a process of its own with a time limit, so that one that fails, hangs or breaks the device's context does
not stop the others. What is not installed skips its part, or its piece of a part, by name. docs/gpu/README.md says what
each part proves. Exit code: 0 if no part failed, 1 if one did, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOTAL_SECONDS = 345.0
CPU_FACTOR = 6.0  # more time where there is no GPU, and perhaps two busy cores


@dataclass(frozen=True)
class Part:
    """A part of the check: ``tools/gpu/<name>_part.py``, the most seconds it may take, and what it shows."""

    name: str
    seconds: float
    title: str


PARTS = (
    Part("build", 110, "csrc compiles for this card and loads"),
    Part("ops", 45, "every kernel of the op table is as close to fp64 as the bound demands"),
    Part("equivalence", 80, "4 ranks on one GPU compute what one process computes, over a back end that is late"),
    Part("sync", 45, "a step waits for the device once"),
    Part("sanitizer", 45, "the kernels read and write nothing but their tensors"),
    Part("nccl", 60, "the same over NCCL"),
    Part("precision", 50, "200 steps in bf16 beside 200 steps in fp32"),
    Part("mfu", 90, "speed of a 1.2B Llama at sequence 4,096, beside the same model in other hands"),
)


def main(argv: list[str] | None = None) -> int:
    """Run the parts, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", choices=[p.name for p in PARTS], metavar="PART", help="run this part: %(choices)s"
    )
    parser.add_argument("--cpu", action="store_true", help="run without a GPU, in small")
    parser.add_argument("--out", type=Path, help="where the report goes (default: docs/gpu; with --cpu nowhere)")
    parser.add_argument(
        "--seconds", type=float, help=f"for all parts together (default: {TOTAL_SECONDS:.0f}; with --cpu more)"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)  # in the process of a part
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    device, factor = ("cpu", CPU_FACTOR) if args.cpu else ("cuda", 1.0)
    total = args.seconds or TOTAL_SECONDS * factor
    if args.part is not None:
        return run_part(args.part, device, total, args.result)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through the finally that ends a part
    facts = machine(device)
    if facts is None:
        print("gpu_check: torch sees no NVIDIA GPU here; --cpu runs the parts that need none", file=sys.stderr)
        return 2
    began = time.monotonic()
    results = []
    for part in PARTS:
        if args.only and part.name not in args.only:
            continue
        left = total - (time.monotonic() - began)
        print(f"== {part.name}: {part.title}", flush=True)
        results.append(start_part(part, device, min(part.seconds * factor, left)))
        print(
            f"   {results[-1]['status']} after {results[-1]['seconds']:.0f} s {results[-1]['reason']}".rstrip(),
            flush=True,
        )
    command = " ".join(["python tools/gpu_check.py", *(sys.argv[1:] if argv is None else argv)])
    report = {**facts, "command": command, "seconds": time.monotonic() - began, "parts": results}
    folder = args.out or (None if args.cpu else ROOT / "docs" / "gpu")
    if folder is not None:
        sys.path[:0] = [str(ROOT / "tools")]
        from gpu.report import write

        print("\n".join(f"written: {path}" for path in write(report, folder)))
    failed = [part["name"] for part in results if part["status"] == "failed"]
    print(f"{report['seconds']:.0f} s; " + (f"failed: {', '.join(failed)}" if failed else "nothing failed"))
    return 1 if failed else 0


def machine(device: str) -> dict[str, Any] | None:
    """What the report says about the machine; None without a GPU where one is needed. In a process of its own: this
    one keeps no context on the device."""
    code = (
        "import json, torch; gpu = torch.cuda.is_available();"
        "print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.get_device_name(0) if gpu else None,"
        "torch.cuda.device_count()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    version, cuda, name, count = json.loads(done.stdout.strip().splitlines()[-1])
    if device == "cuda" and name is None:
        return None
    return {
        "device": name if device == "cuda" else "CPU",
        "gpus": count,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "torch": version,
        "cuda": cuda,
        "driver": output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "python": platform.python_version(),
        "sources": output(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]),
    }


def output(command: list[str]) -> str:
    """First line of what a program prints, or "" where that does not work."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0] if done.returncode == 0 else ""


def start_part(part: Part, device: str, seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own; its result, or why there is none."""
    result: dict[str, Any] = {"name": part.name, "title": part.title, "status": "skipped", "reason": "", "seconds": 0.0}
    result |= {"lines": [], "failures": [], "skipped": [], "numbers": {}, "traceback": ""}
    if seconds < 5:
        return {**result, "reason": "the time of the whole check was over"}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--part", part.name, "--result", str(path)]
        command += ["--seconds", f"{seconds:.1f}", *(["--cpu"] if device == "cpu" else [])]
        one_thread = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}  # ranks and other work share the cores
        process = subprocess.Popen(command, start_new_session=True, env={**os.environ, **one_thread})
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            result |= {"status": "failed", "reason": f"not done after {seconds:.0f} s"}
        finally:
            end_group(process)
        if path.exists():  # as far as it came
            over = {"status": result["status"], "reason": result["reason"]} if result["reason"] else {}
            result |= {**json.loads(path.read_text()), **over}
        elif not result["reason"]:
            result |= {"status": "failed", "reason": f"the process ended with code {process.returncode} and no result"}
    return {**result, "seconds": time.monotonic() - began}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a part's process and whatever it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run_part(name: str, device: str, seconds: float, path: Path | None) -> int:
    """In the process of a part: run it, and write what it found, also when it raises."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
    from gpu.part import Outcome, Settings, Skipped, prepare_process

    prepare_process()

    result: dict[str, Any] = {"status": "failed", "reason": "it was ended", "traceback": ""}

    def save() -> None:
        if path is not None:
            path.write_text(json.dumps({**outcome.found(), **result}))

    outcome = Outcome(changed=save)
    try:
        importlib.import_module(f"gpu.{name}_part").run(Settings(device, seconds), outcome)
        result |= {"status": "failed" if outcome.failures else "passed", "reason": "; ".join(outcome.failures[:1])}
    except Skipped as reason:
        result |= {"status": "skipped", "reason": str(reason)}
    except Exception as error:
        result |= {"reason": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        result["traceback"] = traceback.format_exc()[-6000:]
        print(result["traceback"], file=sys.stderr)
    save()
    end_pool()
    return 0 if result["status"] != "failed" else 1


def end_pool() -> None:
    """End ranks that the part has started."""
    if "megatron_lite.testing.ranks" in sys.modules:
        sys.modules["megatron_lite.testing.ranks"].close_pool()


if __name__ == "__main__":
    sys.exit(main())
