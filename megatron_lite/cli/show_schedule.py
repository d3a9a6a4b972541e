"""``megatron-lite show-schedule``: a pipeline schedule as a drawing, with what it costs.

The plan that is drawn is the one that would run: lowered by the same code, and verified before it is shown.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import tyro

from megatron_lite.config.exit_codes import CONFIGURATION, DONE


@dataclass(frozen=True)
class Options:
    """Draw a pipeline schedule: a row for each stage, a column for each unit of time; F forward, B backward."""

    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of forward and backward."""
    pipeline_model_parallel_size: int = 4
    """Stages."""
    microbatches: int = 8
    """Microbatches of a step: global batch / (micro batch * data-parallel size)."""
    forward: int = 1
    """Units of time of a forward pass."""
    backward: int = 2
    """Units of time of a backward pass."""
    actions: bool = False
    """Also list every action of every stage, messages and sums of gradients included."""


def run(argv: Sequence[str]) -> int:
    """Print the drawing."""
    try:
        options = tyro.cli(Options, args=list(argv), prog="megatron-lite show-schedule")
    except SystemExit as stopped:
        return CONFIGURATION if stopped.code else DONE
    sys.stdout.write(text(options))
    return DONE


def text(options: Options) -> str:
    """The drawing and the costs.

    Raises:
        ValueError: a size or a duration below 1.
    """
    from megatron_lite.pipeline.lower import lower
    from megatron_lite.pipeline.verify import draw, verify

    for flag, value in (("--forward", options.forward), ("--backward", options.backward)):
        if value < 1:
            raise ValueError(f"{flag} {value}: a pass takes at least 1 unit of time")
    plan = lower(options.pipeline_schedule, options.pipeline_model_parallel_size, options.microbatches)
    report = verify(plan, forward=options.forward, backward=options.backward)
    lines = [
        f"{plan.schedule}, {len(plan.stages)} stages, {plan.microbatches} microbatches",
        draw(plan, forward=options.forward, backward=options.backward),
        f"time {report.makespan:g} units, bubble {report.bubble:.1%}",
        f"microbatches whose activations a stage keeps at its peak: {', '.join(map(str, report.peak_microbatches))}",
    ]
    if options.actions:
        for stage, actions in enumerate(plan.stages):
            lines += [f"stage {stage}:", *(f"  {action}" for action in actions)]
    return "\n".join(lines) + "\n"
