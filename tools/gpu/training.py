"""A single-process run of the program's own objects, for the parts that train."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_lite.config.schema import OptimizerConfig, ParallelConfig, RunConfig, TrainingConfig
from megatron_lite.config.schema_io import DataConfig
from megatron_lite.config.transformer import LlamaConfig
from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.train.assemble import Assembly, assemble
from megatron_lite.train.step import HostNumbers, StepReport

LR, DECAY = 1e-3, 0.1


def build(model: LlamaConfig, device: torch.device, *, bf16: bool, micro: int, batch: int, seq: int) -> Assembly:
    """Everything that trains, on one device."""
    config: RunConfig[Any] = RunConfig(
        model,
        ParallelConfig(),
        TrainingConfig(micro_batch_size=micro, global_batch_size=batch, train_iters=1000, bf16=bf16, seed=1),
        OptimizerConfig(lr=LR, weight_decay=DECAY, clip_grad=1.0),
        DataConfig(seq_length=seq, mock_data=True),
        architecture="llama",
    )
    return assemble(config, ProcessMesh.open(Layout(), device=device))


def train(
    assembly: Assembly, batches: Callable[[int], Any], steps: int, lr: float = LR
) -> tuple[list[StepReport], list[float]]:
    """Reports and seconds of some steps; a step ends with its host read, so the clock needs no synchronisation."""
    reports, seconds = [], []
    for step in range(steps):
        began = time.perf_counter()
        reports.append(
            assembly.step.run(
                batches(step),
                seed=1,
                step=step,
                loss_scale=1.0,
                update=step + 1,
                learning_rates={"": lr},
                weight_decay=DECAY,
                host=HostNumbers(0, False, 0.0, 0.0),
            )
        )
        seconds.append(time.perf_counter() - began)
    return reports, seconds
