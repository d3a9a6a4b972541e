"""The same run in bf16 (with fp32 masters and gradients) and in fp32: the loss curves stay together.

Same seed, so the same weights, rounded, and the same batches. Single steps differ by rounding that training amplifies,
so means are compared: over all steps and over the last quarter, in which the model has learned.
"""

from __future__ import annotations

import gc
from statistics import fmean

import torch

from gpu.part import Outcome, Settings
from gpu.training import build, train
from megatron_lite.config.transformer import LlamaConfig
from megatron_lite.data.loader import Loader
from megatron_lite.data.mock import MockDataset

ALL_STEPS, LAST_STEPS = 0.02, 0.05  # largest relative differences of the mean loss


def run(settings: Settings, outcome: Outcome) -> None:
    """Both runs, and what separates them."""
    steps, seq, vocab = (200, 512, 4096) if settings.on_gpu else (12, 64, 128)
    sizes = (512, 6, 8, 1408) if settings.on_gpu else (64, 2, 2, 128)
    model = LlamaConfig(
        hidden_size=sizes[0],
        num_layers=sizes[1],
        num_attention_heads=sizes[2],
        ffn_hidden_size=sizes[3],
        group_query_attention=True,
        num_query_groups=2,
        vocab_size=vocab,
        max_position_embeddings=seq,
    )
    losses = {
        name: losses_of(model, settings.where, bf16, steps, seq) for name, bf16 in (("bf16", True), ("fp32", False))
    }
    outcome.numbers.update(losses)
    quarter = steps // 4
    for what, limit, part in (
        ("all steps", ALL_STEPS, slice(None)),
        (f"the last {quarter} steps", LAST_STEPS, slice(-quarter, None)),
    ):
        low, full = fmean(losses["bf16"][part]), fmean(losses["fp32"][part])
        gap = abs(low - full) / full
        outcome.check(
            gap <= limit, f"mean loss over {what}: bf16 {low:.5f}, fp32 {full:.5f}, {gap:.3%} apart (limit {limit:.0%})"
        )
    fell = losses["bf16"][0] - fmean(losses["bf16"][-quarter:])
    outcome.check(
        fell > (1.0 if settings.on_gpu else 0.05), f"the loss falls, in bf16 by {fell:.2f} nats in {steps} steps"
    )


def losses_of(model: LlamaConfig, device: torch.device, bf16: bool, steps: int, seq: int) -> list[float]:
    """The loss of every step of a run."""
    micro, batch = (8, 16) if device.type == "cuda" else (2, 4)
    assembly = build(model, device, bf16=bf16, micro=micro, batch=batch, seq=seq)
    with Loader(MockDataset(model.vocab_size, seq, 1), micro_batch_size=micro, seq_length=seq, device=device) as loader:
        reports, _ = train(assembly, lambda step: loader.step(step * batch, batch), steps)
    assembly.gradients.close()
    del assembly
    gc.collect()
    return [report.loss for report in reports]
