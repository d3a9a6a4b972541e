"""What a run reports: ``metrics.jsonl``, TensorBoard, Weights & Biases, the console line and the progress bar.

``metrics.jsonl`` is the record: one line per optimizer step whatever the log interval, appended, floats in full
precision, written by one rank. Every line carries ``run``, which counts the starts in this log directory; after a
restart or a rollback steps repeat and a reader takes the last line of a step (:func:`read_metrics` does).
docs/metrics.md is its schema.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

PEAK_TFLOPS = (  # dense bf16, by a part of the device's name; the first match counts
    ("A100", 312.0),
    ("A800", 312.0),
    ("H20-", 148.0),
    ("H20 ", 148.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H200", 989.0),
)

STEP_FIELDS = (
    "step", "run", "time", "loss", "grad_norm", "learning_rate", "loss_scale", "skipped", "consumed_samples",
    "consumed_tokens", "step_seconds", "data_wait_seconds", "tokens_per_second", "tflops_per_gpu", "tflops_computed",
    "mfu", "memory_gib",
)  # fmt: skip


def peak_tflops(device_name: str, override: float | None = None) -> float | None:
    """Dense bf16 peak of a device in TFLOP/s, or None where it is not known (then there is no MFU)."""
    if override:
        return override
    name = f"{device_name} "
    return next((peak for part, peak in PEAK_TFLOPS if part in name), None)


def _records(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """What the lines hold; a line cut off by a kill is passed over."""
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            yield record


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line of a metrics file; a line cut off by a kill is passed over."""
    if path.exists():
        with open(path, encoding="utf-8", errors="replace") as f:
            yield from _records(f)


def read_metrics(path: Path) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
    """(training lines, lines of the evaluations on validation data) by step; the last line of a step counts.

    A line whose step is no whole number is none of ours and passed over.
    """
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    for record in read_lines(path):
        if type(record.get("step")) is not int:
            continue
        if "eval_loss" not in record:
            steps[record["step"]] = record
        elif record.get("split") == "validation":
            evaluations[record["step"]] = record
    return steps, evaluations


def last_lines(path: Path, size: int = 1 << 20) -> Iterator[dict[str, Any]]:
    """The whole lines at the end of a metrics file, as far as ``size`` bytes hold them."""
    if not path.exists():
        return
    with open(path, "rb") as f:
        f.seek(max(0, path.stat().st_size - size))
        yield from _records(f.read().decode(errors="replace").splitlines())


class Sink(Protocol):
    """Where records go while a run trains. ``name`` is what a person is told when it fails."""

    name: str

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def reason(error: Exception) -> str:
    """Why something could not be written, for a person: the system's words where there are some."""
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


class JsonLines:
    """Appends records to ``metrics.jsonl``; a line is written with one system call, and in whole or not at all.

    Attributes:
        name: the path.
        run: how many starts wrote to this file before (0 for the first).

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            runs = (record.get("run") for record in last_lines(path))
            self.run = max((run for run in runs if isinstance(run, int)), default=-1) + 1
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                self._append(b"\n")  # the line before was cut off by a kill: keep ours apart from it
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({reason(error)}): give another --log-dir") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line; a number that is not finite becomes null, which JSON has."""
        line = {"run": self.run, "time": time.time(), **record}
        line = {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in line.items()}
        self._append((json.dumps(line, allow_nan=False) + "\n").encode())

    def _append(self, data: bytes) -> None:
        """Append all of it. On a disk that is full the beginning may still fit: it is taken back before the error."""
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError:
            if done:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, os.lseek(self._fd, 0, os.SEEK_CUR) - done)
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


_thread_hook = threading.excepthook


def _worker_failed(args: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread ends with the error that its next call raises: it is told there, not as a traceback here."""
    if not type(args.thread).__module__.startswith("tensorboard."):
        _thread_hook(args)


class TensorBoard:
    """Scalars for TensorBoard, under one tag per field.

    Args:
        directory: of the event files.
        first_step: finished steps at this start; what an earlier start wrote of later steps is not shown any more.

    Raises:
        ValueError: the package is missing, or the directory cannot be written.
    """

    def __init__(self, directory: Path, first_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "--tensorboard-dir is given, but the package tensorboard is not installed: pip install tensorboard"
            ) from None
        self.name = f"TensorBoard's file in {directory}"
        threading.excepthook = _worker_failed
        try:
            self._writer = SummaryWriter(str(directory), purge_step=first_step + 1)  # type: ignore[no-untyped-call]
        except Exception as error:  # TensorFlow's file systems, where it is installed, have errors of their own
            raise ValueError(f"--tensorboard-dir {directory} cannot be written ({reason(error)})") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a record."""
        for name, value in record.items():
            if name not in ("step", "run", "time") and isinstance(value, int | float):
                self._writer.add_scalar(name, value, record["step"])  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()  # type: ignore[no-untyped-call]


class WeightsAndBiases:
    """Scalars for Weights & Biases, which has to be installed; offline where its server cannot be reached.

    Raises:
        ValueError: the package is missing, or not even an offline run can be begun.
    """

    name = "the record for Weights & Biases"

    def __init__(self, project: str, name: str | None, directory: Path, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError("--wandb-project is given, but the package wandb is not installed: pip install wandb") from None
        try:
            self._run = wandb.init(project=project, name=name, dir=str(directory), config=config)
        except Exception as e:  # whatever the client raises when it has no network or no login
            print(f"W&B: no connection ({type(e).__name__}: {e}); this run is recorded offline, `wandb sync` sends it later", flush=True)
            try:
                self._run = wandb.init(project=project, name=name, dir=str(directory), config=config, mode="offline")
            except Exception as error:
                raise ValueError(f"--wandb-project: no run can be recorded in {directory} ({reason(error)})") from error

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log({k: v for k, v in record.items() if k not in ("step", "run", "time") and v is not None}, step=record["step"])

    def close(self) -> None:
        self._run.finish()


def _short(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}g}"


def step_line(record: Mapping[str, Any], last_step: int, eta_seconds: float | None) -> str:
    """One human-readable line about a step."""
    loss = record["loss"]
    parts = [
        f"step {record['step']}/{last_step}",
        f"loss {loss:.4f}" if loss is not None and math.isfinite(loss) else f"loss {loss}",
        f"lr {record['learning_rate']:.3e}",
        f"grad norm {_short(record['grad_norm'])}" if record.get("grad_norm") is not None else "grad norm -",
    ]
    if record.get("loss_scale", 1.0) != 1.0:
        parts.append(f"loss scale {record['loss_scale']:g}")
    if record.get("skipped"):
        parts.append("SKIPPED")
    parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    if record.get("tflops_per_gpu") is not None:
        parts.append(f"{_short(record['tflops_per_gpu'], 3)} TFLOP/s per rank")
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    parts.append(f"{record['step_seconds'] * 1000:.0f} ms")
    parts.append(f"{record['memory_gib']:.2f} GiB")
    if eta_seconds is not None:
        parts.append(f"ETA {format_seconds(eta_seconds)}")
    return " | ".join(parts)


def format_seconds(seconds: float) -> str:
    """``1d02h``, ``3h05m``, ``4m10s`` or ``12s``."""
    s = int(seconds + 0.5)
    if s >= 86400:
        return f"{s // 86400}d{s % 86400 // 3600:02d}h"
    if s >= 3600:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 60}m{s % 60:02d}s" if s >= 60 else f"{s}s"


ETA_STEPS = 100  # by whose time, evaluations and saves included, the rest is judged


class Console:
    """The line per interval, and on a terminal a bar that moves with every step.

    A standard output that cannot be written any more (a full disk, a reader that is gone) is given up, not the run.
    """

    def __init__(self, first_step: int, last_step: int, interval: int, enabled: bool) -> None:
        self.enabled, self.interval, self.last_step = enabled, max(1, interval), last_step
        self._times = deque([time.monotonic()], maxlen=ETA_STEPS + 1)  # when the last steps were done
        bar = enabled and sys.stdout.isatty()
        self._bar = tqdm(total=last_step, initial=first_step, unit="step", dynamic_ncols=True, file=sys.stdout) if bar else None

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if not self.enabled:
            return
        try:
            if self._bar is not None:
                self._bar.write(text, file=sys.stdout)
            else:
                print(text, flush=True)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Say nothing from now on; what standard output still holds goes nowhere, so that it cannot fail again at exit."""
        self.enabled = False
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        with contextlib.suppress(OSError):
            print(f"standard output cannot be written any more: {reason(error)}; the run goes on without it", file=sys.stderr, flush=True)

    def step(self, record: Mapping[str, Any]) -> None:
        """Report one step."""
        step = record["step"]
        self._times.append(time.monotonic())
        if self._bar is not None:
            self._bar.n = step
            speed = f"{record['tokens_per_second']:,.0f} tok/s"
            try:
                self._bar.set_postfix_str(f"loss {record['loss']:.4f} lr {record['learning_rate']:.2e} {speed}")
            except OSError as error:
                self._give_up(error)
        if step % self.interval == 0 or step == self.last_step:
            left = (self._times[-1] - self._times[0]) / (len(self._times) - 1) * (self.last_step - step)
            self.say(step_line(record, self.last_step, left))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
