"""Saving and loading a run: what goes into a checkpoint besides tensors, and what each way of loading takes out.

The rules of loading:

* ``--load D`` with D = ``--save`` and no checkpoint in D at all: start fresh, and say so (unless
  ``--exit-on-missing-checkpoint``). Any other D without a checkpoint is an error. The newest complete one counts; broken
  ones are passed over and named, also where only their bytes tell; only broken ones are an error.
* ``--finetune``: weights only, all counters at zero. ``--no-load-optim``: weights and counters, fresh moments, and bias
  correction from the start with them.
* A model that would compute something else with the same weights is an error, for ``--finetune`` a note.
* Schedules that differ from the checkpoint's are an error that shows both, unless a flag says who wins. Settings that
  decide which samples come next are named where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.load import CorruptCheckpoint, Reader, load_shares, name_problems
from megatron_lite.checkpoint.manifest import Found, find_checkpoint, incomplete_reason, list_steps
from megatron_lite.checkpoint.retention import prune
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.checkpoint.together import everyone
from megatron_lite.config.load import TRAINING_OF_MODEL, to_dict
from megatron_lite.config.schema import RunConfig
from megatron_lite.data.mix import Mix
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.optim.scaler import LossScaler
from megatron_lite.optim.schedule import Rates, on_resume
from megatron_lite.train.assemble import Assembly
from megatron_lite.train.other_data import data_notes
from megatron_lite.train.progress import Progress

# Options of a model that may change between two starts: they decide how it is trained, or every size tells of them.
FREE = TRAINING_OF_MODEL | {"max_position_embeddings", "ffn_hidden_size", "vocab_size"}


# ---- which checkpoint


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
            given = f"--load {root}: there is no checkpoint in it"
            for step in (d.step for d in list_steps(root.parent) if d.path == root):
                raise ValueError(f"{given}, it is one. Give its directory: --load {root.parent} --ckpt-step {step}")
            raise ValueError(f"{given}. Give the --save directory of a run, or leave --load out")
    return found


def starting_fresh(config: RunConfig[Any]) -> str:
    """What is said where ``--load`` holds nothing yet."""
    return f"--load {config.checkpoint.load} holds no checkpoint and is the same as --save: starting fresh"


def _decided_by_rank_0(mesh: ProcessMesh, choose: Callable[[], Found | None]) -> Found | None:
    """The choice of rank 0, on every rank: a directory listing may differ between hosts for a while."""

    def chosen() -> dict[str, Any]:
        found = choose()
        return {} if found is None else {**asdict(found), "directory": str(found.directory)}

    answer = everyone(mesh.axis("world"), chosen, only=0, error=_plain)[0]
    return Found(answer["step"], Path(answer["directory"]), answer["notice"]) if answer else None


def _plain(text: str) -> ValueError:
    """What one rank found is everybody's business: without the rank and the class of the error."""
    return ValueError(text.removeprefix("rank 0: ").removeprefix("ValueError: "))


def find_together(config: RunConfig[Any], mesh: ProcessMesh) -> Found | None:
    """:func:`find`, the same on every rank. Collective."""
    return _decided_by_rank_0(mesh, lambda: find(config))


def newest_together(root: Path, mesh: ProcessMesh) -> Found:
    """The newest complete checkpoint in ``root``, the same on every rank; ValueError where there is none. Collective."""
    found = _decided_by_rank_0(mesh, lambda: find_checkpoint(root))
    if found is None:
        raise ValueError(f"there is no checkpoint in {root}")
    return found


def older(found: Found) -> Found | None:
    """The newest complete checkpoint that was saved before ``found``, in the same directory."""
    steps = [d for d in list_steps(found.directory.parent) if d.saved_at is not None]
    paths = [d.path for d in steps]
    if found.directory not in paths:
        return None
    for d in steps[paths.index(found.directory) + 1 :]:
        if incomplete_reason(d.path) is None:
            return Found(d.step, d.path, f"checkpoint: {d.path} (the newest that is not damaged)")
    return None


# ---- loading


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
    facts: Mapping[str, Any] | None = None,
    mix: Mix | None = None,
) -> tuple[Progress, Rates, Found]:
    """Load a checkpoint into this rank's objects. Collective.

    Args:
        assembly, scaler: what is filled.
        config, rates: what this run was asked to do.
        found: the checkpoint. Where its bytes turn out to be damaged and ``--ckpt-step`` does not name it, the next
            older one is tried.
        say: takes a line for the user.
        again: this run wrote it and goes back to it, whole, whatever the options of the first load say.
        facts: what this run knows of its tokenizer, its curriculum and its transform, to be compared.
        mix: gets what the checkpoint's run had consumed of each source.

    Returns:
        The counters and the schedules to go on with, and the checkpoint that was loaded.

    Raises ValueError on every rank for a checkpoint of another model, other schedules, or damaged bytes.
    """
    options = config.checkpoint
    moments = again or (options.load_optim and not options.finetune)
    while True:
        damage = _read(assembly, config, found, moments=moments)
        if damage is None:
            break
        before = _decided_by_rank_0(assembly.mesh, lambda: None if options.ckpt_step is not None else older(found))  # noqa: B023
        if before is None:
            raise CorruptCheckpoint(f"{found.directory} is damaged: {damage}")
        say(f"{found.directory} is damaged, an older one is loaded: {damage}")
        found = before
    assembly.optimizer.refresh_weights()
    state = Reader(found.directory).state
    say(found.notice)
    if not again and (other := _other_function(state["config"]["model"], to_dict(config)["model"])):
        what = f"{found.directory} was trained as another model: {'; '.join(other)}"
        if not options.finetune:
            raise ValueError(f"{what}. Its weights fit, and would compute something else: --finetune takes them all the same")
        say(f"NOTE: {what}")
    if options.finetune and not again:
        say("--finetune: weights only; steps, data and schedules start afresh")
        return Progress(), rates, found
    progress = Progress.from_state(state["progress"])
    if mix is not None:
        mix.go_on(progress.consumed_samples, state.get("mix", {}).get("consumed"))
    if not again:
        for line in data_notes(state, to_dict(config), facts, mix):
            say(line)
    if not moments:
        say(
            "--no-load-optim: moments, bias correction and loss scale start afresh; the position in data and schedules is the "
            "checkpoint's, the schedules are this run's"
        )
        return replace(progress, updates=0), rates, found
    notice = scaler.load_state_dict(state["scaler"])
    if notice is not None:
        say(notice)
    if not again:
        rates = on_resume(
            state["rates"],
            rates,
            override=options.override_opt_param_scheduler,
            use_checkpoint=options.use_checkpoint_opt_param_scheduler,
        )
    return progress, rates, found


def _read(assembly: Assembly, config: RunConfig[Any], found: Found, *, moments: bool) -> str | None:
    """Read this rank's shares; returns what is damaged on any rank. Raises ValueError for another model's checkpoint."""

    def read() -> str | None:
        try:
            reader = Reader(found.directory)
            wrong = name_problems(reader.names(), full_shapes(assembly, config).items())
            if wrong:
                shown = "; ".join(wrong[:6]) + (f"; and {len(wrong) - 6} more" if len(wrong) > 6 else "")
                raise ValueError(f"{found.directory} is the checkpoint of another model: {shown}")
            if moments and not reader.names("exp_avg"):
                raise ValueError(
                    f"{found.directory} was saved without optimizer state: give --no-load-optim or --finetune"
                )
            load_shares(reader, assembly.optimizer.targets(), weights_only=not moments)
        except CorruptCheckpoint as error:
            return str(error)
        return None

    damages = everyone(assembly.mesh.axis("world"), read, error=_without_class)
    return next((damage for damage in damages if damage is not None), None)


def _without_class(text: str) -> ValueError:
    return ValueError(text.replace("ValueError: ", ""))


def _other_function(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Options that make the same weights compute something else than they were trained for."""

    def seen(model: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: value for name, value in model.items() if name not in FREE}
        if {"kv_channels", "num_query_groups", "group_query_attention"} <= model.keys():  # what they come to
            found["kv_channels"] = model["kv_channels"] or model["hidden_size"] // model["num_attention_heads"]
            if not found.pop("group_query_attention"):
                found["num_query_groups"] = model["num_attention_heads"]
        return found

    theirs, ours = seen(before), seen(now)
    return [
        f"{name} {theirs[name]} in the checkpoint, {ours[name]} now"
        for name in theirs
        if name in ours and theirs[name] != ours[name]
    ]


# ---- saving


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
    directory = save_checkpoint(root, progress.step, shares, state, world, progress=beat)
    protect = {progress.step} if final else set()
    everyone(world, lambda: prune(root, options.keep_last, options.keep_every, protect), only=0)
    return directory
