"""Saving and loading a run: what goes into a checkpoint besides tensors, and what each way of loading takes out.

The rules of loading:

* ``--load D`` with D = ``--save`` and no checkpoint in D at all: start fresh, and say so (unless
  ``--exit-on-missing-checkpoint``). Any other D without a checkpoint is an error. The newest complete one counts; broken
  ones are passed over and named; only broken ones are an error.
* ``--finetune``: weights only, all counters at zero. ``--no-load-optim``: weights and counters, fresh moments, and bias
  correction from the start with them.
* Schedules that differ from the checkpoint's are an error that shows both, unless a flag says who wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.load import Reader, load_shares, name_problems
from megatron_lite.checkpoint.manifest import Found, find_checkpoint
from megatron_lite.checkpoint.save import everyone, prune, save_checkpoint
from megatron_lite.config.load import to_dict
from megatron_lite.config.schema import RunConfig
from megatron_lite.optim.scaler import LossScaler
from megatron_lite.optim.schedule import Rates, on_resume
from megatron_lite.train.assemble import Assembly
from megatron_lite.train.progress import Progress


def find(config: RunConfig[Any]) -> Found | None:
    """The checkpoint that ``--load`` means, or None: start fresh. Raises ValueError by the rules above."""
    options = config.checkpoint
    if options.load is None:
        return None
    root = Path(options.load)
    found = find_checkpoint(root, options.ckpt_step)
    if found is None:
        same = options.save is not None and Path(options.save).resolve() == root.resolve()
        if not same or options.exit_on_missing_checkpoint:
            raise ValueError(f"--load {root}: there is no checkpoint in it. Give the --save directory of a run, or leave --load out")
    return found


def full_shapes(assembly: Assembly, config: RunConfig[Any]) -> dict[str, tuple[int, ...]]:
    """Name and full shape of every tensor of the whole model, trained vocabulary padding included."""
    shapes = {name: spec.full_shape for name, spec in assembly.stage.specs.items()}
    if not config.training.mask_padded_vocab:
        parallel = assembly.definition.parallel
        for name, spec in assembly.stage.specs.items():
            if spec.axes and spec.axes[0] == "vocab":
                padding = parallel.padded_vocab(spec.full_shape[0]) - spec.full_shape[0]
                if padding:
                    shapes[f"{name}.padding"] = (padding, *spec.full_shape[1:])
    return shapes


def load(
    assembly: Assembly,
    config: RunConfig[Any],
    found: Found,
    rates: Rates,
    scaler: LossScaler,
    say: Callable[[str], None],
    *,
    again: bool = False,
) -> tuple[Progress, Rates]:
    """Load a checkpoint into this rank's objects; returns the counters and the schedules to go on with. Collective.

    ``again``: this run wrote it and goes back to it, whole, whatever the options of the first load say.

    Raises ValueError on every rank for a checkpoint of another model, other schedules, or damaged bytes.
    """
    options = config.checkpoint
    world = assembly.mesh.axis("world")

    def read() -> None:
        reader = Reader(found.directory)
        wrong = name_problems(reader.names(), full_shapes(assembly, config).items())
        if wrong:
            shown = "; ".join(wrong[:6]) + (f"; and {len(wrong) - 6} more" if len(wrong) > 6 else "")
            raise ValueError(f"{found.directory} is the checkpoint of another model: {shown}")
        moments = again or (options.load_optim and not options.finetune)
        if moments and not reader.names("exp_avg"):
            raise ValueError(f"{found.directory} was saved without optimizer state: give --no-load-optim or --finetune")
        load_shares(reader, assembly.optimizer.targets(), weights_only=not moments)

    try:
        everyone(world, read)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    assembly.optimizer.refresh_weights()
    state = Reader(found.directory).state
    say(found.notice)
    if options.finetune and not again:
        return Progress(), rates
    progress = Progress.from_state(state["progress"])
    if not options.load_optim and not again:
        say("--no-load-optim: moments and bias correction start afresh; the position in data and schedules is the checkpoint's")
        progress.updates = 0
        return progress, rates
    notice = scaler.load_state_dict(state["scaler"])
    if notice is not None:
        say(notice)
    if again:
        return progress, rates
    rates = on_resume(
        state["rates"],
        rates,
        override=options.override_opt_param_scheduler,
        use_checkpoint=options.use_checkpoint_opt_param_scheduler,
    )
    return progress, rates


def save(
    assembly: Assembly,
    config: RunConfig[Any],
    progress: Progress,
    rates: Rates,
    scaler: LossScaler,
    *,
    final: bool,
    extra: dict[str, Any],
    beat: Callable[[], None] | None = None,
) -> Path:
    """Write a checkpoint of this moment and prune old ones. Collective. Raises SaveError on every rank if any failed."""
    options = config.checkpoint
    assert options.save is not None
    root = Path(options.save)
    shares = [s for s in assembly.optimizer.shares() if options.save_optim or s.kind == "weight"]
    state = {
        "config": to_dict(config),
        "progress": progress.state_dict(),
        "scaler": scaler.state_dict(),
        "rates": rates.as_dict(),
        "layout": asdict(assembly.mesh.layout),
        **extra,
    }
    world = assembly.mesh.axis("world")
    directory = save_checkpoint(root, progress.step, shares, state, world, progress=beat)  # type: ignore[arg-type]
    protect = {progress.step} if final else set()
    everyone(world, lambda: prune(root, options.keep_last, options.keep_every, protect), only=0)
    return directory


