"""``megatron-lite train``: read the configuration, check all of it, say what will run, and train.

Order matters: flags and files are read without torch; variables of CUDA and the allocator are set from them; then the
model's module, the tokenizer and everything else may be imported. All ranks check, rank 0 prints.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lite.cli.environment import apply_early
from megatron_lite.config.check import ProblemsFunction, check, check_files, require
from megatron_lite.config.check_io import tokenizer_problems
from megatron_lite.config.exit_codes import DONE
from megatron_lite.config.load import BUILTIN, Loaded, load, with_checkpoint_args
from megatron_lite.config.problem import ConfigError, Problem
from megatron_lite.config.schema import RunConfig
from megatron_lite.config.summary import listed, notices, summary
from megatron_lite.mesh.local import RankInfo, die_with_parent, rank_info

if TYPE_CHECKING:
    from megatron_lite.mesh.layout import Layout


def run(argv: Sequence[str]) -> int:
    """Train as the command line says; the result is the exit code.

    ``--check-only N`` among the flags: check everything for N ranks, print the start-up text and start nothing.
    """
    argv, ranks = _check_only(argv)
    if ranks is not None:
        loaded, text = prepare(read(argv), RankInfo(0, ranks, 0, ranks, "here", "check"), {})
        end = [*listed("warnings:", notices(loaded.config)), "no problems; nothing was started"]
        print("\n".join([text, *end]), flush=True)
        return DONE
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # "save and go on", from a scheduler that knows of no start-up
    info = rank_info(os.environ)
    if info.world_size > 1:
        die_with_parent()
    try:
        environment = apply_early(argv, os.environ)
        loaded = read(argv)
        loaded, text = prepare(loaded, info, environment)
    except Exception as error:
        from megatron_lite.train.guard import fail_early

        return fail_early(info, error, os.environ)
    if info.rank == 0:
        print(text, flush=True)
    from megatron_lite.train.loop import train

    return train(loaded.config, info, environment=environment)


def _check_only(argv: Sequence[str]) -> tuple[list[str], int | None]:
    """The command line without ``--check-only N``, and N."""
    rest = list(argv)
    if "--check-only" not in rest:
        return rest, None
    at = rest.index("--check-only")
    number = rest[at + 1] if at + 1 < len(rest) else ""
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError([Problem(f"--check-only {number}", rule="needs the number of ranks", nearest="--check-only 8")])
    return rest[:at] + rest[at + 2 :], int(number)


def read(argv: Sequence[str]) -> Loaded:
    """The configuration of a command line, ``--use-checkpoint-args`` applied.

    Its ``problems`` (flags that do not exist) are for :func:`prepare` to tell, together with all others.

    Raises:
        ConfigError: with every problem of values and files.
    """
    loaded = load(argv, resolve_model, lenient=True)
    if loaded.config.checkpoint.use_checkpoint_args and loaded.config.checkpoint.load:
        saved = saved_config(loaded.config)
        return loaded if saved is None else with_checkpoint_args(loaded, saved, resolve_model)
    return loaded


def resolve_model(architecture: str) -> type:
    """Configuration class of a model: ours without importing torch, a team's own from its module."""
    if architecture in BUILTIN:
        return BUILTIN[architecture]
    from megatron_lite.model.protocol import load_definition

    try:
        return load_definition(architecture).Config
    except ValueError as error:
        raise ConfigError([Problem(f"--model {architecture}: {error}")]) from error


def saved_config(config: RunConfig[Any]) -> dict[str, Any] | None:
    """The configuration stored in the checkpoint that ``--load`` names; None where the run may start fresh.

    Raises:
        ConfigError: there is no checkpoint (and ``--load`` is not ``--save``), or none that is complete.
    """
    from megatron_lite.checkpoint.manifest import find_checkpoint, read_manifest

    load_from = Path(str(config.checkpoint.load))
    try:
        found = find_checkpoint(load_from, config.checkpoint.ckpt_step)
    except ValueError as error:
        raise ConfigError([Problem(f"--use-checkpoint-args: {error}")]) from error
    save = config.checkpoint.save
    if found is None and save is not None and load_from.resolve() == Path(save).resolve():
        return None
    if found is None:
        raise ConfigError([Problem(f"--use-checkpoint-args: {load_from} holds no checkpoint")])
    return dict(read_manifest(found.directory)["state"]["config"])


def with_vocabulary(config: RunConfig[Any]) -> tuple[RunConfig[Any], list[Problem]]:
    """The model's ``vocab_size`` from the tokenizer, where it is 0; a given one may be larger, not smaller.

    Returns:
        The configuration, and what is wrong: the tokenizer cannot be read, or has more ids than the given vocabulary.
    """
    given = getattr(config.model, "vocab_size", None)
    if given is None:
        return config, []
    from megatron_lite.text.tokenizer import vocabulary_size

    try:
        size = vocabulary_size(config.data)
    except ValueError as error:
        return config, [Problem(str(error))]
    if size is None or given >= size:
        return config, []
    if given:
        numbers = f"vocab-size {given}, tokenizer {size}"
        what = "the tokenizer has ids outside the vocabulary"
        nearest = f"--vocab-size {size}"
        if config.checkpoint.use_checkpoint_args:
            nearest += " for a new model; for the checkpoint's, the tokenizer with which it was trained"
        return config, [Problem(what, numbers, nearest=nearest)]
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size)), []


def model_function(config: RunConfig[Any], layout: Layout) -> list[str]:
    """What the model's room has to say about a configuration."""
    from megatron_lite.model.problems import model_problems
    from megatron_lite.model.protocol import load_definition

    found = model_problems(
        load_definition(config.architecture),
        config.model,
        layout,
        sequence_parallel=config.parallel.sequence_parallel,
        seq_length=config.data.seq_length,
    )
    if config.checkpoint.load and not config.checkpoint.use_checkpoint_args and found and "is required" in found[0]:
        found[0] += "; --use-checkpoint-args takes the model and the tokenizer from --load"
    return found


def split_function(config: RunConfig[Any], layout: Layout) -> list[str]:
    """What the data's room has to say about ``--split``."""
    from megatron_lite.data.sources import parse_split

    try:
        training = parse_split(config.data.split)[0]
    except ValueError as error:
        return [str(error)]
    if config.data.data_path and training == 0 and not config.evaluation.skip_train:
        return [f"--split {config.data.split} leaves nothing to train on: the first share is training"]
    return []


def save_function(config: RunConfig[Any], layout: Layout) -> list[Problem]:
    """Checkpoints in ``--save`` that this start does not go on from: it would overwrite or prune another run's."""
    from megatron_lite.checkpoint.manifest import list_steps

    load, save = config.checkpoint.load, config.checkpoint.save
    if not save or (load and Path(load).resolve() == Path(save).resolve()):
        return []
    there = [d.step for d in list_steps(Path(save)) if d.saved_at is not None]
    if not there:
        return []
    return [
        Problem(
            f"--save {save} holds checkpoints of an earlier run (the newest of step {there[0]})",
            rule="a start that does not go on from them would mix two runs, and overwrite or prune the earlier one",
            nearest=f"--load {save} to go on, another --save, or remove them",
        )
    ]


def problem_functions() -> list[ProblemsFunction]:
    """The rooms that are asked about a configuration."""
    from megatron_lite.optim.from_config import problems as optimizer_problems

    return [model_function, optimizer_problems, split_function, save_function]


def prepare(loaded: Loaded, info: RankInfo, environment: dict[str, str]) -> tuple[Loaded, str]:
    """Check everything; the configuration with its vocabulary, and the start-up text.

    Raises:
        ConfigError: with every problem.
    """
    from megatron_lite.mesh.layout import layout_for

    config, vocabulary_found = with_vocabulary(loaded.config)
    checked = config  # a tokenizer that cannot be read is one problem, not also a vocabulary that is missing
    vocabulary_found += tokenizer_problems(config)
    if vocabulary_found and getattr(config.model, "vocab_size", None) == 0:
        checked = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=2))
    found = [*loaded.problems, *check_files(config), *vocabulary_found]
    found += check(checked, info.world_size, problem_functions())
    require(list(dict.fromkeys(found)))
    loaded, parallel = dataclasses.replace(loaded, config=config), config.parallel
    layout = layout_for(
        info.world_size,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        cp=parallel.context_parallel_size,
    )
    lines, lr_by_rule = schedule_lines(config, layout)
    first = not goes_on(config)
    return loaded, summary(loaded, layout, lines=lines, lr_by_rule=lr_by_rule, environment=environment, first_start=first)


def goes_on(config: RunConfig[Any]) -> bool:
    """Whether a start goes on with a run: there is a checkpoint to load, and not its weights alone."""
    from megatron_lite.checkpoint.manifest import list_steps

    load = config.checkpoint.load
    return bool(load and not config.checkpoint.finetune and any(d.saved_at is not None for d in list_steps(Path(load))))


def schedule_lines(config: RunConfig[Any], layout: Layout) -> tuple[list[str], dict[str, float] | None]:
    """What the optimizer's room says of batches, length and learning rates; and the lr under each scaling rule."""
    from megatron_lite.optim import from_config
    from megatron_lite.optim.batch_size import lr_scaling_table

    training, optimizer = config.training, config.optimizer
    batch = from_config.batch_schedule(training, config.data.seq_length, layout.dp)
    steps, samples = from_config.training_length(training, batch)
    per_step = batch.final // (training.micro_batch_size * layout.dp)
    work = f"{per_step} microbatches of {training.micro_batch_size} on each of {layout.dp} data-parallel ranks"
    lines = [f"global batch {batch.final}: {work}; {steps:,} steps, {samples:,} samples"]
    if len(batch.phases) > 1:
        lines.append(f"the batch grows from {batch.phases[0][1]} to {batch.final} over {batch.phases[-1][0]:,} samples")
    lines += from_config.describe(from_config.rates(training, optimizer, batch).lr.items())
    base = optimizer.lr_scaling_base_batch
    table = lr_scaling_table(optimizer.lr, batch.final, base) if base and optimizer.lr is not None else None
    return lines, table
