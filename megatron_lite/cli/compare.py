"""``megatron-lite compare RUN RUN``: where two runs part, and what was set differently.

A run is a log directory (``--log-dir``). Printed are the first step at which loss or gradient norm differ by more than
``--rtol``, the settings that differ, and where the curves were drawn (``--plot``, with matplotlib).
Exit status: 0 the runs agree on all common steps, 1 they do not, 2 a directory holds no run or the two share no step.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

COMPARED = ("loss", "grad_norm")


def flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every leaf of a nested configuration."""
    if isinstance(config, dict):
        for key, value in config.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, config


def relative_difference(a: float | None, b: float | None) -> float:
    """|a - b| / max(|a|, |b|); 0 where both are missing, or the same number, NaN too; infinite where one is not finite."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a) and math.isfinite(b) else math.inf


def first_difference(a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]], rtol: float) -> tuple[int, str, float] | None:
    """(step, field, relative difference) of the first common step that differs, or None."""
    for step in sorted(a.keys() & b.keys()):
        for field in COMPARED:
            difference = relative_difference(a[step].get(field), b[step].get(field))
            if difference > rtol:
                return step, field, difference
    return None


def largest_differences(a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]]) -> str:
    """The worst relative difference of each field, and its step."""
    common = sorted(a.keys() & b.keys())
    worst = (max((relative_difference(a[s].get(field), b[s].get(field)), s, field) for s in common) for field in COMPARED)
    return ", ".join(f"{field} {difference:.3g} (step {step})" for difference, step, field in worst)


def draw(runs: Sequence[tuple[str, dict[int, dict[str, Any]]]], path: Path) -> None:
    """Loss and gradient norm over steps as a picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(len(COMPARED), 1, sharex=True)
    for panel, field in zip(panels, COMPARED, strict=True):
        for name, steps in runs:
            points = [(s, r[field]) for s, r in sorted(steps.items()) if r.get(field) is not None]
            panel.plot([s for s, _ in points], [v for _, v in points], label=name, linewidth=1)
        panel.set_ylabel(field.replace("_", " "))
        panel.grid(alpha=0.3)
    panels[0].legend()
    panels[-1].set_xlabel("step")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ValueError(f"--plot {path}: {error.strerror}") from None


def read_run(directory: Path) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """(training lines by step, configuration) of a run's log directory; no run.json counts as no settings.

    Raises:
        ValueError: it holds no run, or its files cannot be read.
    """
    from megatron_lite.train.metrics import read_metrics

    metrics, settings = directory / "metrics.jsonl", directory / "run.json"
    if not directory.is_dir():
        raise ValueError(f"there is no directory {directory}: give the --log-dir of a run")
    if not metrics.exists():
        raise ValueError(f"{directory} holds no metrics.jsonl: give the --log-dir of a run")
    try:
        steps = read_metrics(metrics)[0]
    except OSError as error:
        raise ValueError(f"{metrics} cannot be read: {error.strerror}") from None
    if not steps:
        raise ValueError(f"{metrics} holds no step: the run has not finished one")
    for step, record in steps.items():
        for field in COMPARED:
            if type(record.get(field)) not in (int, float, type(None)):
                raise ValueError(f"{metrics} is not the record of a run: {field} of step {step} is {record[field]!r}")
    if not settings.exists():
        return steps, {}
    try:
        return steps, dict(json.loads(settings.read_text(encoding="utf-8"))["config"])
    except OSError as error:
        raise ValueError(f"{settings} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{settings} is not the record of a run") from None


def run(argv: Sequence[str]) -> int:
    """The subcommand."""
    parser = argparse.ArgumentParser("megatron-lite compare", description="Where two runs part, and what was set differently.")
    parser.add_argument("runs", nargs=2, metavar="RUN", type=Path, help="log directory of a run (holds metrics.jsonl and run.json)")
    parser.add_argument("--rtol", type=float, default=0.0, help="relative difference that still counts as equal (default: 0, bitwise)")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE", help="draw the curves into FILE (.png, .svg or .pdf)")
    args = parser.parse_args(argv)
    if not args.rtol >= 0:
        raise ValueError(f"--rtol {args.rtol}: 0 or more")
    (steps_one, config_one), (steps_two, config_two) = map(read_run, args.runs)
    one, two = dict(flatten(config_one)), dict(flatten(config_two))
    changed = [k for k in sorted(one.keys() | two.keys()) if one.get(k) != two.get(k)]
    print(f"settings that differ: {len(changed)}")
    for key in changed:
        print(f"  {key}: {one.get(key)!r} | {two.get(key)!r}")
    common = sorted(steps_one.keys() & steps_two.keys())
    if not common:
        spans = " and ".join(f"{min(steps)} to {max(steps)}" for steps in (steps_one, steps_two))
        raise ValueError(f"the runs have no step in common: steps {spans}")
    print(f"steps in common: {len(common)} ({common[0]} to {common[-1]})")
    found = first_difference(steps_one, steps_two, args.rtol)
    if found is None:
        print(f"no difference in {' or '.join(COMPARED)} above a relative {args.rtol:g}")
    else:
        step, field, difference = found
        values = f"{steps_one[step].get(field)!r} | {steps_two[step].get(field)!r}"
        print(f"first difference: step {step}, {field} {values} (relative {difference:.3g})")
        last = common[-1]
        print(f"at step {last}: loss {steps_one[last].get('loss')!r} | {steps_two[last].get('loss')!r}")
        print(f"largest relative difference of a step: {largest_differences(steps_one, steps_two)}")
        print("layouts round differently: --rtol 1e-5 asks whether two runs are equal apart from that")
    if args.plot is not None:
        draw([(str(args.runs[0]), steps_one), (str(args.runs[1]), steps_two)], args.plot)
        print(f"curves: {args.plot}")
    return 0 if found is None else 1
