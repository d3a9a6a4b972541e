"""From the configuration's flags to schedules and the loss scaler, and what is wrong with those flags.

Schedules are either in iterations or in samples, as the length of the training is (``--train-iters`` or
``--train-samples``); a flag of the other unit is refused, never converted by a guess. Iterations become samples by
simulating the batch schedule, so that a warm-up of 10 iterations ends at iteration 10 also while the batch grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from megatron_lite.config.problem import Problem
from megatron_lite.config.schema import OptimizerConfig, RunConfig, TrainingConfig
from megatron_lite.mesh.layout import Layout
from megatron_lite.optim.batch_size import BatchSchedule, lr_scaling_factor, rampup_problems
from megatron_lite.optim.scaler import LossScaler
from megatron_lite.optim.schedule import LrSchedule, Rates, WeightDecaySchedule

DECOUPLED_TAGS = ("embedding", "head")
_MOST_SAMPLES = 1 << 53  # up to which blends and schedules compute exactly


def global_batch_size(training: TrainingConfig, dp: int) -> int:
    """The final global batch: the flag, else the last step of the schedule, else micro-batch-size * dp."""
    if training.global_batch_size is not None:
        return training.global_batch_size
    if training.step_batch_size_schedule is not None:
        return BatchSchedule.steps(training.step_batch_size_schedule, 1).final
    return training.micro_batch_size * dp


def batch_schedule(training: TrainingConfig, seq_length: int, dp: int) -> BatchSchedule:
    """The global batch by consumed samples. Raises ValueError for what :func:`problems` would list."""
    size = global_batch_size(training, dp)
    if training.step_batch_size_schedule is not None:
        return BatchSchedule.steps(training.step_batch_size_schedule, seq_length)
    if training.rampup_batch_size is not None:
        return BatchSchedule.rampup(*training.rampup_batch_size, size)
    return BatchSchedule.constant(size)


def training_length(training: TrainingConfig, batch: BatchSchedule) -> tuple[int, int]:
    """(steps, samples) of the whole training. With ``--train-samples``: as many whole steps as fit into them."""
    if training.train_iters is not None:
        return training.train_iters, batch.samples_after(training.train_iters)
    assert training.train_samples is not None, "checked by problems()"
    steps = batch.iterations_within(training.train_samples)
    return steps, training.train_samples


def rates(training: TrainingConfig, optimizer: OptimizerConfig, batch: BatchSchedule) -> Rates:
    """Learning-rate schedules by tag and the weight-decay schedule, all in samples. Raises ValueError as they do."""
    assert optimizer.lr is not None, "checked by problems()"
    total = training_length(training, batch)[1]
    decay = _samples(optimizer.lr_decay_iters, optimizer.lr_decay_samples, batch, total)
    if optimizer.lr_warmup_fraction is not None:
        warmup: float = optimizer.lr_warmup_fraction * decay
    else:
        warmup = _samples(optimizer.lr_warmup_iters or None, optimizer.lr_warmup_samples or None, batch, 0)
    wsd = optimizer.lr_wsd_decay_samples or 0
    if optimizer.lr_wsd_decay_iters is not None:
        steps = optimizer.lr_decay_iters if optimizer.lr_decay_iters is not None else training.train_iters
        assert steps is not None, "checked by problems()"
        wsd = decay - batch.samples_after(max(0, steps - optimizer.lr_wsd_decay_iters))
    factor = lr_scaling_factor(optimizer.lr_scaling_rule, batch.final, optimizer.lr_scaling_base_batch)
    main = LrSchedule(
        max_lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        init_lr=optimizer.lr_warmup_init,
        decay_samples=decay,
        style=optimizer.lr_decay_style,
        warmup_samples=warmup,
        wsd_decay_samples=wsd,
        wsd_style=optimizer.lr_wsd_decay_style,
    ).scaled(factor)
    by_tag = {"": main}
    if optimizer.decoupled_lr is not None:
        low = optimizer.min_lr if optimizer.decoupled_min_lr is None else optimizer.decoupled_min_lr
        values = {**vars(main), "max_lr": optimizer.decoupled_lr * factor, "min_lr": low * factor}
        by_tag.update((tag, LrSchedule(**values)) for tag in DECOUPLED_TAGS)
    start = optimizer.weight_decay if optimizer.start_weight_decay is None else optimizer.start_weight_decay
    end = optimizer.weight_decay if optimizer.end_weight_decay is None else optimizer.end_weight_decay
    return Rates(by_tag, WeightDecaySchedule(start, end, optimizer.weight_decay_incr_style, max(1, total)))


def _samples(iterations: int | None, samples: int | None, batch: BatchSchedule, default: int) -> int:
    if iterations is not None:
        return batch.samples_after(iterations)
    return default if samples is None else samples


def loss_scaler(training: TrainingConfig, optimizer: OptimizerConfig) -> LossScaler:
    """The scale that multiplies the loss: 1 unless fp16, fixed with ``--loss-scale``, else dynamic."""
    if not training.fp16:
        return LossScaler.none()
    if optimizer.loss_scale is not None:
        return LossScaler.fixed(optimizer.loss_scale)
    return LossScaler.dynamic(
        initial=optimizer.initial_loss_scale,
        minimum=optimizer.min_loss_scale,
        window=optimizer.loss_scale_window,
        hysteresis=optimizer.hysteresis,
    )


def problems(config: RunConfig[Any], layout: Layout) -> list[Problem]:
    """Everything wrong with the flags of batch, schedule, clipping, AdamW and loss scale."""
    training, optimizer = config.training, config.optimizer
    found = [*_unit_problems(training, optimizer), *_number_problems(optimizer), *_scale_problems(training, optimizer)]
    batch_found = _batch_problems(training, layout.dp)
    if found or (batch_found and training.train_iters is None):
        return found + batch_found  # the schedules cannot be made
    try:
        if batch_found:  # lengths in steps can be judged beside a wrong batch
            batch = BatchSchedule.constant(max(1, training.global_batch_size or 1))
        else:
            batch = batch_schedule(training, config.data.seq_length, layout.dp)
        samples = training_length(training, batch)[1]
        if samples > _MOST_SAMPLES:
            return [*batch_found, Problem(f"the training has {samples:,} samples", rule=f"at most {_MOST_SAMPLES:,}")]
        rates(training, optimizer, batch)
    except ValueError as e:
        return [*batch_found, Problem(str(e))]
    return batch_found


def _batch_problems(training: TrainingConfig, dp: int) -> list[Problem]:
    if training.micro_batch_size < 1 or (training.global_batch_size is not None and training.global_batch_size < 1):
        numbers = f"micro-batch-size {training.micro_batch_size}, global-batch-size {training.global_batch_size}"
        return [Problem("a batch holds less than 1 sample", numbers, "both are at least 1")]
    ramp, steps = training.rampup_batch_size, training.step_batch_size_schedule
    if ramp is not None and steps is not None:
        return [
            Problem(
                "--rampup-batch-size and --step-batch-size-schedule are two schedules of one thing",
                nearest="give one of them",
            )
        ]
    if ramp is not None and (wrong := rampup_problems(*ramp, global_batch_size(training, dp))):
        return [Problem(w) for w in wrong]
    try:
        batch = batch_schedule(training, 1, dp)
    except ValueError as e:
        return [Problem(str(e))]
    if training.global_batch_size not in (None, batch.final):
        numbers = f"global-batch-size {training.global_batch_size}, last step {batch.final}"
        return [
            Problem(
                "--step-batch-size-schedule does not end at the global batch size",
                numbers,
                nearest="leave --global-batch-size out",
            )
        ]
    return [Problem(p) for p in batch.problems(training.micro_batch_size, dp)]


def _unit_problems(training: TrainingConfig, optimizer: OptimizerConfig) -> list[Problem]:
    found = []
    iters, samples = training.train_iters, training.train_samples
    if (iters is None) == (samples is None):
        numbers = f"train-iters {iters}, train-samples {samples}"
        found.append(Problem("the length of the training is not given once", numbers, "exactly one of the two"))
    for label, value in (("train-iters", iters), ("train-samples", samples)):
        if value is not None and value < 1:
            found.append(Problem(f"--{label} is {value}", rule="at least 1"))
    other = "samples" if iters is not None else "iters"
    for stem in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if getattr(optimizer, f"{stem}_{other}"):
            here = "iters" if other == "samples" else "samples"
            flag = f"--{stem}_{other}".replace("_", "-")
            numbers = f"{flag} {getattr(optimizer, f'{stem}_{other}')} with --train-{here}"
            found.append(
                Problem(
                    f"{flag} is in {other}, the training in {here}",
                    numbers,
                    "one unit in a run",
                    flag.replace(other, here),
                )
            )
    if optimizer.lr_warmup_fraction is not None:
        if optimizer.lr_warmup_iters or optimizer.lr_warmup_samples:
            found.append(
                Problem("--lr-warmup-fraction stands beside another length of the warm-up", nearest="give one of them")
            )
        if not 0 <= optimizer.lr_warmup_fraction < 1:
            found.append(Problem(f"--lr-warmup-fraction is {optimizer.lr_warmup_fraction}", rule="in [0, 1)"))
    if optimizer.lr_decay_style == "WSD" and not (optimizer.lr_wsd_decay_iters or optimizer.lr_wsd_decay_samples):
        found.append(
            Problem(
                "--lr-decay-style WSD needs the length of its last decay", nearest="--lr-wsd-decay-iters or -samples"
            )
        )
    return found


def _number_problems(optimizer: OptimizerConfig) -> list[Problem]:
    checks: list[tuple[str, Any, Callable[[Any], bool], str]] = [
        ("adam-beta1", optimizer.adam_beta1, lambda x: 0 <= x < 1, "in [0, 1)"),
        ("adam-beta2", optimizer.adam_beta2, lambda x: 0 <= x < 1, "in [0, 1)"),
        ("adam-eps", optimizer.adam_eps, lambda x: 0 < x < 1, "above 0, usually 1e-8"),
        ("clip-grad", optimizer.clip_grad, lambda x: 0 <= x < float("inf"), "not negative; 0 does not clip"),
        ("clip-grad-value", optimizer.clip_grad_value, lambda x: x is None or 0 < x < float("inf"), "above 0"),
    ]
    found = [Problem(f"--{name} is {value}", rule=rule) for name, value, good, rule in checks if not good(value)]
    if optimizer.lr is None:
        found.append(Problem("--lr is not given", rule="training needs a learning rate"))
    if optimizer.decoupled_min_lr is not None and optimizer.decoupled_lr is None:
        numbers = f"decoupled-min-lr {optimizer.decoupled_min_lr}"
        found.append(
            Problem("--decoupled-min-lr without --decoupled-lr has no effect", numbers, nearest="give --decoupled-lr")
        )
    if optimizer.lr_scaling_rule != "none" and not (optimizer.lr_scaling_base_batch or 0) > 0:
        numbers = f"lr-scaling-rule {optimizer.lr_scaling_rule}"
        found.append(
            Problem(
                "a scaling rule needs --lr-scaling-base-batch", numbers, "the batch for which the given lr is right"
            )
        )
    return found


def _scale_problems(training: TrainingConfig, optimizer: OptimizerConfig) -> list[Problem]:
    found = []
    if training.fp16:
        try:
            loss_scaler(training, optimizer)
        except ValueError as e:
            found.append(Problem(str(e)))
    elif optimizer.loss_scale not in (None, 1.0):
        found.append(
            Problem(
                f"--loss-scale {optimizer.loss_scale} without --fp16 has no effect",
                nearest="leave it out, or give --fp16",
            )
        )
    return found


def describe(schedules: Iterable[tuple[str, LrSchedule]]) -> list[str]:
    """One line per schedule, for the start-up summary."""
    return [
        f"learning rate{f' of {tag}' if tag else ''}: {s.style}, max {s.max_lr:g}, min {s.min_lr:g}, warm-up "
        f"{s.warmup_samples:,.10g} samples from {s.init_lr:g}, decay until sample {s.decay_samples:,}"
        for tag, s in schedules
    ]
