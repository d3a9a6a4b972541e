"""Every problem of a configuration, found before any weight exists.

:func:`check` asks the sections here (what concerns only flags) and the functions it is given (what concerns a room:
the model's sizes, batches and schedules), and returns the whole list, so that one start tells everything. Nothing here
touches a device or a process group; :func:`check_files` looks at the file system and runs on one rank only.
"""

from __future__ import annotations

import dataclasses
import math
import re
import signal
import tempfile
from collections.abc import Callable, Sequence
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lite.config.check_io import (
    blend_problems,
    checkpoint_problems,
    data_problems,
    evaluation_problems,
    logging_problems,
)
from megatron_lite.config.problem import ConfigError, Problem, nearest_name
from megatron_lite.config.schema import ParallelConfig, RunConfig, TrainingConfig
from megatron_lite.config.text_files import is_text_file, near_prefixes

if TYPE_CHECKING:
    from megatron_lite.mesh.layout import Layout

ProblemsFunction = Callable[[RunConfig[Any], "Layout"], Sequence["Problem | str"]]


def check(config: RunConfig[Any], world_size: int, functions: Sequence[ProblemsFunction] = ()) -> list[Problem]:
    """Everything that is wrong with a configuration on ``world_size`` ranks.

    Args:
        config: what to check.
        world_size: number of ranks.
        functions: each room's ``problems(config, layout)``, returning problems or plain sentences. Where the ranks do
            not fit the axes they are asked about one data-parallel rank, so that their findings are not lost.
    """
    found = list(not_in_this_version(config))
    layout, layout_found = _layout(config.parallel, world_size)
    found += layout_found
    found += parallel_problems(config)
    found += training_problems(config.training, config.optimizer.grad_reduce_in_bf16)
    found += rollback_problems(config)
    found += data_problems(config)
    found += evaluation_problems(config.evaluation)
    found += checkpoint_problems(config)
    found += logging_problems(config.logging, world_size)
    if layout is not None:
        for function in functions:
            found += [p if isinstance(p, Problem) else Problem(str(p)) for p in function(config, layout)]
        found += _stage_problems(config, found)
    found += value_problems(config, found)
    return _without_repeats(found)


def require(problems: Sequence[Problem]) -> None:
    """Raise :class:`ConfigError` if there are any problems."""
    if problems:
        raise ConfigError(problems)


def _without_repeats(problems: Sequence[Problem]) -> list[Problem]:
    return list(dict.fromkeys(problems))


def _layout(parallel: ParallelConfig, world_size: int) -> tuple[Layout | None, list[Problem]]:
    """The layout of the job; where the ranks do not fit, one with a single data-parallel rank and the reason."""
    from megatron_lite.mesh.layout import Layout, layout_for  # the mesh imports this package's problems

    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    try:
        return layout_for(world_size, tp=tp, cp=cp, pp=pp), []
    except ConfigError as error:
        fits = min(tp, pp, cp) >= 1
        return (Layout(tp=tp, cp=cp, dp=1, pp=pp) if fits else None), error.problems


def value_problems(config: RunConfig[Any], found: Sequence[Problem] = ()) -> list[Problem]:
    """Values that no comparison refuses: NaN and infinity, and the empty text of a shell's unset variable.

    An option that ``found`` has a word on is left to it. Infinity is allowed in a team's own model.
    """
    said = "\n".join(map(str, found)).replace("_", "-")
    problems = []
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        if not dataclasses.is_dataclass(part):
            continue
        infinity = section.name == "model" and ":" in config.architecture
        for option in dataclasses.fields(part):
            value, flag = getattr(part, option.name), option.name.replace("_", "-")
            values = value if isinstance(value, (tuple, list)) else (value,)
            if re.search(rf"(?<![a-z]){flag}(?![a-z-])", said):
                continue
            if any(isinstance(v, float) and (math.isnan(v) or (math.isinf(v) and not infinity)) for v in values):
                problems.append(Problem(f"--{flag} {value}", rule="a finite number"))
            if any(isinstance(v, str) and not v.strip() for v in values):
                problems.append(Problem(f"--{flag} is given an empty text", nearest=f"a value, or leave --{flag} out"))
    return problems


def not_in_this_version(config: RunConfig[Any]) -> list[Problem]:
    """Values whose field exists but which this version does not have."""
    found = []
    if config.parallel.context_parallel_size > 1:
        what = f"--context-parallel-size {config.parallel.context_parallel_size} is not in this version"
        found.append(Problem(f"{what}: context parallelism", nearest="--context-parallel-size 1"))
    if config.parallel.zero_stage in (2, 3):
        what = f"--zero-stage {config.parallel.zero_stage} is not in this version"
        shards = "gradients" if config.parallel.zero_stage == 2 else "parameters"
        found.append(Problem(f"{what}: sharding {shards}", nearest="--zero-stage 1"))
    if config.training.recompute_granularity == "selective":
        what = "--recompute-granularity selective is not in this version"
        found.append(Problem(f"{what}: recomputing parts of a block", nearest="--recompute-granularity full"))
    return found


def parallel_problems(config: RunConfig[Any]) -> list[Problem]:
    """The flags of the parallel section that no layout needs."""
    parallel, found = config.parallel, []
    if parallel.zero_stage not in (0, 1, 2, 3):
        found.append(Problem(f"--zero-stage {parallel.zero_stage}", rule="0 or 1"))
    if parallel.ddp_bucket_size is not None and parallel.ddp_bucket_size < 1:
        found.append(Problem(f"--ddp-bucket-size {parallel.ddp_bucket_size}", rule="parameters, at least 1"))
    if parallel.distributed_timeout_minutes < 1:
        found.append(
            Problem(f"--distributed-timeout-minutes {parallel.distributed_timeout_minutes}", rule="at least 1")
        )
    if parallel.device == "cpu" and parallel.distributed_backend == "nccl":
        what = "--distributed-backend nccl moves data between GPUs only"
        found.append(Problem(what, "--device cpu", nearest="--distributed-backend gloo"))
    return found + _end_stage_problems(config)


def _end_stage_problems(config: RunConfig[Any]) -> list[Problem]:
    """``--decoder-first-`` and ``--decoder-last-pipeline-num-layers``."""
    parallel, found = config.parallel, []
    stages = parallel.pipeline_model_parallel_size
    ends = {"first": parallel.decoder_first_pipeline_num_layers, "last": parallel.decoder_last_pipeline_num_layers}
    given = {name: n for name, n in ends.items() if n is not None}
    layers = getattr(config.model, "num_layers", None)
    for name, n in given.items():
        flag = f"--decoder-{name}-pipeline-num-layers"
        if n < 1:
            found.append(Problem(f"{flag} {n}", rule="every stage holds at least one block"))
        elif stages == 1:
            found.append(
                Problem(f"{flag} {n} needs a pipeline", "pipeline-model-parallel-size 1", nearest=f"leave {flag} out")
            )
    if found or not given or not isinstance(layers, int):
        return found
    rest, others = layers - sum(given.values()), stages - len(given)
    if rest < others or (others == 0 and rest != 0):
        numbers = (
            f"{layers} blocks, {', '.join(f'{name} stage {n}' for name, n in given.items())}, {others} other stages"
        )
        rule = "the other stages hold what is left, at least one block each"
        room = layers - others
        nearest = f"stages that sum to {layers}" if others == 0 else f"at most {room} blocks on the given stages"
        found.append(Problem("the blocks do not fit the given stages", numbers, rule, nearest))
    return found


def _stage_problems(config: RunConfig[Any], found: Sequence[Problem]) -> list[Problem]:
    """Fewer blocks than stages, where no room has said so already."""
    layers, stages = getattr(config.model, "num_layers", None), config.parallel.pipeline_model_parallel_size
    if not isinstance(layers, int) or layers < 1 or layers >= stages or any("stage" in p.what for p in found):
        return []
    numbers = f"num-layers {layers}, pipeline-model-parallel-size {stages}"
    nearest = f"--pipeline-model-parallel-size {layers}"
    return [Problem("there are more pipeline stages than blocks", numbers, "a stage holds at least one block", nearest)]


def training_problems(training: TrainingConfig, grad_reduce_in_bf16: bool) -> list[Problem]:
    """Precision, recompute, and when to stop. (Batches and the length of the training: see optim.)"""
    found = []
    named = [name for name in ("bf16", "fp16", "fp64") if getattr(training, name)]
    if len(named) > 1:
        flags = " and ".join(f"--{name}" for name in named)
        found.append(
            Problem(f"{flags} are given together", rule="a run has one precision", nearest=f"--{named[0]} alone")
        )
    if training.fp64 and grad_reduce_in_bf16:
        found.append(Problem("--grad-reduce-in-bf16 with --fp64", rule="fp64 is for exact comparisons"))
    if training.recompute_num_layers is not None and training.recompute_num_layers < 1:
        found.append(Problem(f"--recompute-num-layers {training.recompute_num_layers}", rule="at least 1"))
    for name in ("exit_interval", "exit_duration_in_mins", "check_weight_hash_across_dp_replicas_interval"):
        value = getattr(training, name)
        if value is not None and value <= 0:
            found.append(Problem(f"--{name.replace('_', '-')} {value:g}", rule="above 0"))
    if training.manual_gc_interval < 0:
        found.append(Problem(f"--manual-gc-interval {training.manual_gc_interval}", rule="0 or more steps"))
    if training.seed < 0:
        found.append(Problem(f"--seed {training.seed}", rule="0 or more"))
    return found + _signal_problems(training)


def _signal_problems(training: TrainingConfig) -> list[Problem]:
    known = [s.name.removeprefix("SIG") for s in signal.Signals]
    found = []
    for name in (*training.exit_signals, *training.save_signals):
        if name.upper().removeprefix("SIG") not in known:
            found.append(
                Problem(f"unknown signal {name}", nearest=nearest_name(name.upper(), known) or "TERM, INT, USR1")
            )
        elif name.upper().removeprefix("SIG") in ("KILL", "STOP"):
            found.append(Problem(f"signal {name} cannot be handled by any program", nearest="TERM"))
    both = sorted(set(training.exit_signals) & set(training.save_signals))
    if both:
        what = f"{', '.join(both)} in both --exit-signals and --save-signals"
        found.append(Problem(what, rule="a signal means one thing"))
    return found


def rollback_problems(config: RunConfig[Any]) -> list[Problem]:
    """Rolling back needs something to go back to."""
    if config.training.on_nan == "rollback" and not config.checkpoint.save:
        rule = "it loads the newest complete checkpoint of --save"
        return [Problem("--on-nan rollback without --save", rule=rule, nearest="--save DIRECTORY, or --on-nan skip")]
    return []


def check_files(config: RunConfig[Any]) -> list[Problem]:
    """Data and checkpoints that the configuration names and that are not there (looked for on this machine)."""
    data, found = config.data, []
    for flag in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        entries = getattr(data, flag)
        for prefix in () if blend_problems(flag, entries) else prefixes(entries):
            if "://" in prefix:
                continue  # in a store, which is asked when it is opened
            if is_text_file(prefix):
                if not (Path(prefix).exists() or glob(prefix, recursive=True)) and not data.mock_data:
                    found.append(Problem(f"--{flag.replace('_', '-')} {prefix}: no such file"))
                continue
            missing = [suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
            if missing and not data.mock_data:
                what = f"--{flag.replace('_', '-')} {prefix}: {' and '.join(prefix + s for s in missing)} not found"
                rule = "a prefix names PREFIX.bin and PREFIX.idx; preprocess_data.py writes PREFIX_text_document"
                stem = next((prefix.removesuffix(s) for s in (".bin", ".idx") if prefix.endswith(s)), None)
                near = [stem] if stem and Path(stem + ".idx").is_file() else near_prefixes(prefix)
                nearest = f"--{flag.replace('_', '-')} {' or '.join(near)}" if near else ""
                if Path(prefix).is_file() and near != [stem]:
                    nearest = f"tools/preprocess_data.py --input {prefix} first, if that is text"
                found.append(Problem(what, rule=rule, nearest=nearest))
    load, save = config.checkpoint.load, config.checkpoint.save
    if load and not Path(load).is_dir() and not (save and Path(load).resolve() == Path(save).resolve()):
        rule = "only a --load that is the same as --save may be missing"
        found.append(Problem(f"--load {load}: no such directory", rule=rule))
    for flag, directory in (
        ("--save", save),
        ("--tensorboard-dir", config.logging.tensorboard_dir),
        ("--stage-dir", data.stage_dir),
    ):
        reason = unwritable(Path(directory)) if directory else None
        if reason:
            found.append(Problem(f"{flag} {directory} cannot be written: {reason}", nearest=f"another {flag}"))
    return found


def unwritable(directory: Path) -> str | None:
    """Why no file can be written in a directory, made with its parents where it is not there; None: one can be."""
    there = directory
    try:
        while not there.exists():
            there = there.parent
        with tempfile.TemporaryDirectory(prefix=".megatron_lite-", dir=there):
            return None
    except OSError as error:
        return f"{there}: {error.strerror}"


def prefixes(path: Sequence[str]) -> list[str]:
    """The dataset prefixes of a ``--data-path``: without the weights, where there are weights."""
    return list(path[1::2]) if weighted(path) else list(path)


def weighted(path: Sequence[str]) -> bool:
    """Whether a ``--data-path`` is WEIGHT PREFIX pairs: at least two entries, and the first is a number."""
    try:
        return len(path) >= 2 and float(path[0]) is not None
    except ValueError:
        return False
