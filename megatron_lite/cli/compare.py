"""``megatron-lite compare RUN RUN``: where two runs part, and what was set differently.

A run is a log directory (``--log-dir``). Printed are the first step at which loss or gradient norm differ by more than
``--rtol``, the settings that differ, and where the curves were drawn (``--plot``, with matplotlib).
Exit status: 0 the runs agree on all common steps, 1 they do not, 2 a directory holds no run.
"""

from __future__ import annotations

import argparse
import json
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
    """|a - b| / max(|a|, |b|); 0 where both are missing, infinite where one is."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    scale = max(abs(a), abs(b))
    return abs(a - b) / scale if scale else 0.0


def first_difference(a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]], rtol: float) -> tuple[int, str, float] | None:
    """(step, field, relative difference) of the first common step that differs, or None."""
    for step in sorted(a.keys() & b.keys()):
        for field in COMPARED:
            difference = relative_difference(a[step].get(field), b[step].get(field))
            if difference > rtol:
                return step, field, difference
    return None


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
    figure.savefig(path)


def run(argv: Sequence[str]) -> int:
    """The subcommand."""
    parser = argparse.ArgumentParser("megatron-lite compare", description="Where two runs part, and what was set differently.")
    parser.add_argument("runs", nargs=2, metavar="RUN", type=Path, help="log directory of a run (holds metrics.jsonl and run.json)")
    parser.add_argument("--rtol", type=float, default=0.0, help="relative difference that still counts as equal (default: 0, bitwise)")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE", help="draw the curves into FILE (.png, .svg or .pdf)")
    args = parser.parse_args(argv)
    from megatron_lite.train.metrics import read_metrics

    steps, configs = [], []
    for directory in args.runs:
        metrics, settings = directory / "metrics.jsonl", directory / "run.json"
        if not metrics.exists():
            raise ValueError(f"{directory} holds no metrics.jsonl: give the --log-dir of a run")
        steps.append(read_metrics(metrics)[0])
        configs.append(json.loads(settings.read_text())["config"] if settings.exists() else {})
    one, two = (dict(flatten(c)) for c in configs)
    changed = [k for k in sorted(one.keys() | two.keys()) if one.get(k) != two.get(k)]
    print(f"settings that differ: {len(changed)}")
    for key in changed:
        print(f"  {key}: {one.get(key)!r} | {two.get(key)!r}")
    common = sorted(steps[0].keys() & steps[1].keys())
    if not common:
        raise ValueError(f"the runs have no step in common ({len(steps[0])} and {len(steps[1])} steps)")
    print(f"steps in common: {len(common)} ({common[0]} to {common[-1]})")
    found = first_difference(steps[0], steps[1], args.rtol)
    if found is None:
        print(f"no difference in {' or '.join(COMPARED)} above a relative {args.rtol:g}")
    else:
        step, field, difference = found
        print(f"first difference: step {step}, {field} {steps[0][step][field]!r} | {steps[1][step][field]!r} (relative {difference:.3g})")
        last = common[-1]
        print(f"at step {last}: loss {steps[0][last]['loss']!r} | {steps[1][last]['loss']!r}")
    if args.plot is not None:
        draw([(str(d), s) for d, s in zip(args.runs, steps, strict=True)], args.plot)
        print(f"curves: {args.plot}")
    return 0 if found is None else 1
