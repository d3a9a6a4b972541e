"""From flags to schedules: units, defaults, and every problem by name."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lite.config.schema import OptimizerConfig, RunConfig, TrainingConfig
from megatron_lite.config.schema_io import DataConfig
from megatron_lite.mesh.layout import Layout
from megatron_lite.optim.from_config import batch_schedule, describe, loss_scaler, problems, rates, training_length
from megatron_lite.optim.scaler import LossScaler

TRAINING = {"train_iters": 100, "global_batch_size": 16, "micro_batch_size": 2}


def config(training: dict[str, Any], optimizer: dict[str, Any]) -> RunConfig[None]:
    return RunConfig(
        None,
        training=TrainingConfig(**training),
        optimizer=OptimizerConfig(**{"lr": 1.0, **optimizer}),
        data=DataConfig(seq_length=8),
    )


def found(training: dict[str, Any], optimizer: dict[str, Any] | None = None, dp: int = 2) -> str:
    return "\n".join(str(p) for p in problems(config({**TRAINING, **training}, optimizer or {}), Layout(dp=dp)))


def learning_rates(training: dict[str, Any], optimizer: dict[str, Any], steps: int, tag: str = "") -> list[float]:
    c = config({**TRAINING, **training}, optimizer)
    assert problems(c, Layout(dp=2)) == []
    batch = batch_schedule(c.training, c.data.seq_length, 2)
    r, consumed, out = rates(c.training, c.optimizer, batch), 0, []
    for _ in range(steps):
        out.append(r.learning_rates(consumed)[tag])
        consumed += batch.size(consumed)
    return out


def test_iterations_stay_exact_while_the_batch_grows() -> None:
    flags = {"lr_decay_style": "cosine", "lr_warmup_iters": 10, "min_lr": 0.1}
    ramp = {"rampup_batch_size": (8, 8, 160)}
    values = learning_rates(ramp, flags, 102)
    assert values.index(1.0) == 10 and values.count(1.0) == 1
    assert values[99] > 0.1 and values[100] == pytest.approx(0.1, abs=1e-15)
    for mbs in (1, 2, 4):  # 8, 4 and 2 microbatches at the end of the ramp
        assert learning_rates({**ramp, "micro_batch_size": mbs}, flags, 102) == values
    wsd = {"lr_decay_style": "WSD", "lr_warmup_iters": 10, "lr_wsd_decay_iters": 40, "lr_wsd_decay_style": "linear"}
    values = learning_rates(ramp, wsd, 101)
    assert values[10] == values[60] == 1.0 and values[61] < 1.0 and values[100] == 0.0
    c = config({**TRAINING, **ramp}, wsd)
    assert training_length(c.training, batch_schedule(c.training, 8, 2)) == (100, 1440)


def test_a_training_beyond_all_numbers_is_refused() -> None:
    """Blends compute with samples as floats, which are exact up to 2^53."""
    for length in ({"train_iters": 10**20}, {"train_iters": None, "train_samples": 2**53 + 1}):
        c = config({**TRAINING, **length}, {})
        assert any("samples" in p.what and "at most 9,007,199,254,740,992" in str(p) for p in problems(c, Layout(dp=2)))


def test_the_same_curve_in_samples() -> None:
    in_iterations = learning_rates({}, {"lr_warmup_iters": 5, "lr_decay_iters": 80}, 100)
    samples = {"train_iters": None, "train_samples": 1600}
    in_samples = learning_rates(samples, {"lr_warmup_samples": 80, "lr_decay_samples": 1280}, 100)
    fraction = learning_rates({}, {"lr_warmup_fraction": 1 / 16, "lr_decay_iters": 80}, 100)
    assert in_iterations == in_samples == pytest.approx(fraction)
    c = config({**TRAINING, **samples, "train_samples": 1605}, {})
    assert training_length(c.training, batch_schedule(c.training, 8, 2)) == (100, 1605)


def test_step_schedule_in_tokens() -> None:
    flags = {"global_batch_size": None, "step_batch_size_schedule": "0:8 0.64K:16"}
    c = config({**TRAINING, **flags}, {})
    assert problems(c, Layout(dp=2)) == []
    batch = batch_schedule(c.training, c.data.seq_length, 2)  # 640 tokens are 80 samples
    assert [batch.size(s) for s in (0, 79, 80)] == [8, 8, 16] and batch.samples_after(100) == 80 + 90 * 16


def test_decoupled_and_scaled_rates() -> None:
    flags = {"decoupled_lr": 4.0, "decoupled_min_lr": 2.0, "lr_decay_style": "linear", "min_lr": 0.5}
    assert learning_rates({}, flags, 101, "embedding")[::100] == [4.0, 2.0]
    assert learning_rates({}, flags, 101, "head")[::100] == [4.0, 2.0]
    assert learning_rates({}, flags, 101)[::100] == [1.0, 0.5]
    scaled = learning_rates({}, {**flags, "lr_scaling_rule": "sqrt", "lr_scaling_base_batch": 4}, 101, "head")
    assert scaled[::100] == [8.0, 4.0]


def test_weight_decay_ramps_over_the_training() -> None:
    flags = {"start_weight_decay": 0.0, "end_weight_decay": 0.4, "weight_decay_incr_style": "linear"}
    c = config(TRAINING, flags)
    decay = rates(c.training, c.optimizer, batch_schedule(c.training, 8, 2)).weight_decay
    assert [decay.at(16 * i) for i in (0, 50, 100)] == pytest.approx([0.0, 0.2, 0.4])


def test_loss_scaler_by_dtype() -> None:
    def scaler(training: dict[str, Any], optimizer: dict[str, Any]) -> LossScaler:
        c = config({**TRAINING, **training}, optimizer)
        return loss_scaler(c.training, c.optimizer)

    assert scaler({}, {}).kind == scaler({"bf16": True}, {}).kind == "none"
    assert scaler({"fp16": True}, {}) == LossScaler.dynamic()
    assert scaler({"fp16": True}, {"loss_scale": 64.0}) == LossScaler.fixed(64.0)
    assert scaler({"fp16": True}, {"initial_loss_scale": 8.0, "hysteresis": 1}).hysteresis_left == 1


def test_what_is_wrong_is_named() -> None:
    assert found({}) == ""
    assert "train-iters None, train-samples None" in found({"train_iters": None})
    assert "train-iters 100, train-samples 10" in found({"train_samples": 10})
    assert "--train-iters is 0" in found({"train_iters": 0})
    assert "--lr-warmup-samples is in samples, the training in iters" in found({}, {"lr_warmup_samples": 10})
    samples = {"train_iters": None, "train_samples": 1600}
    assert "try:     --lr-decay-samples" in found(samples, {"lr_decay_iters": 10})
    assert "another length of the warm-up" in found({}, {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 3})
    assert "--lr-warmup-fraction is 1.5" in found({}, {"lr_warmup_fraction": 1.5})
    assert "WSD needs the length" in found({}, {"lr_decay_style": "WSD"})
    assert "--lr is not given" in found({}, {"lr": None})
    assert "min_lr 2.0 is above max_lr 1.0" in found({}, {"min_lr": 2.0})
    assert "does not end before the decay" in found({}, {"lr_warmup_iters": 100})
    assert "--decoupled-min-lr without --decoupled-lr" in found({}, {"decoupled_min_lr": 0.1})
    assert "--lr-scaling-base-batch" in found({}, {"lr_scaling_rule": "linear"})
    assert "16 (from sample 0 on) is not divisible by micro-batch-size 2 * dp 3 = 6: use 12 or 18" in found({}, dp=3)
    ramp = found({"rampup_batch_size": (6, 2, 100)})
    assert "of 6 (from" in ramp and "of 10 (from" in ramp and "of 14 (from" in ramp and "of 8 (from" not in ramp
    assert "is not whole" in found({"rampup_batch_size": (8, 3, 100)})
    assert "two schedules of one thing" in found({"rampup_batch_size": (8, 8, 9), "step_batch_size_schedule": "0:8"})
    assert "does not end at the global batch size" in found({"step_batch_size_schedule": "0:8"})
    assert "must begin with 0:SIZE" in found({"global_batch_size": None, "step_batch_size_schedule": "5:8"})
    assert "less than 1 sample" in found({"micro_batch_size": 0})
    assert "--adam-beta2 is 1.0" in found({}, {"adam_beta2": 1.0})
    assert "--clip-grad is -1" in found({}, {"clip_grad": -1.0})
    assert "--loss-scale 8.0 without --fp16" in found({}, {"loss_scale": 8.0})
    assert "hysteresis 0 must be" in found({"fp16": True}, {"hysteresis": 0})
    assert "above end-weight-decay" in found({}, {"start_weight_decay": 1.0})
    several = found({"train_iters": None}, {"lr": None, "clip_grad": -1.0})
    assert all(part in several for part in ("the length of the training", "--lr is not", "--clip-grad"))


def test_description() -> None:
    c = config(TRAINING, {"decoupled_lr": 2.0, "lr_warmup_iters": 2})
    lines = describe(rates(c.training, c.optimizer, batch_schedule(c.training, 8, 2)).lr.items())
    assert lines[0] == "learning rate: linear, max 1, min 0, warm-up 32 samples from 0, decay until sample 1,600"
    assert lines[1].startswith("learning rate of embedding: linear, max 2")
