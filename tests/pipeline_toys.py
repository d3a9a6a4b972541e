"""Stages, batches and a reference for the tests of the pipeline: the same model in one process, in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from whole_model import make_whole

from megatron_lite.config.transformer import TransformerConfig
from megatron_lite.data.batch import Batch, Row, make_batch
from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.model.blocks import Block
from megatron_lite.model.gpt import GPT
from megatron_lite.model.protocol import ForwardContext, ModelDefinition
from megatron_lite.optim.buckets import Gradients
from megatron_lite.pipeline.runtime import Runtime, Sums
from megatron_lite.pipeline.stage import Recompute, Stage
from megatron_lite.tensor.regions import reduce_from_tp
from megatron_lite.tensor.spec import TensorParallel

SEED = 1
VOCAB = 29
TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 24,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "make_vocab_size_divisible_by": 4,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.2,
}


def tiny(**changes: Any) -> TransformerConfig:
    """A GPT with tied embeddings, learned positions and biases, small enough for hundreds of steps."""
    return TransformerConfig(**{**TINY, **changes})


class AuxBlock(Block):
    """A block with an auxiliary loss: the sum of squares of what it gives, weighted by the token's loss mask."""

    def forward(self, hidden: torch.Tensor, ctx: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        hidden = super().forward(hidden, ctx)
        mask = ctx.batch.loss_mask
        if self.parallel.sequence_parallel:
            n = len(hidden)
            mask = mask[self.parallel.axis.index * n : (self.parallel.axis.index + 1) * n]
        own = 0.01 * (hidden.square().mean(1) * mask).sum()
        return hidden, reduce_from_tp(own, self.parallel.axis) if self.parallel.sequence_parallel else own


class AuxGPT(GPT):
    """A GPT whose odd blocks have an auxiliary loss."""

    def make_block(self, index: int) -> nn.Module:
        return (AuxBlock if index % 2 else Block)(self.config, self.parallel, index)


def batch_of(
    rows: Sequence[int], seq_length: int = 8, first_row: int = 0, valid: int | None = None, documents: bool = True
) -> Batch:
    """A microbatch of made-up rows (by number); ``valid``: how many targets count; ``documents``: two in some rows."""
    made = []
    for row in rows:
        tokens = np.random.default_rng([3, row]).integers(0, VOCAB, seq_length + 1)
        starts = [0, 3] if documents and row % 3 == 1 and seq_length > 3 else [0]
        made.append(Row(tokens, np.array(starts), row))
    batch = make_batch(made, first_row)
    if valid is not None:
        mask = torch.zeros_like(batch.loss_mask)
        mask[:valid] = 1
        batch = replace(batch, loss_mask=mask, valid_tokens=valid)
    return batch


def microbatches(total: int, size: int, dp: int = 1, dp_index: int = 0, first: int = 0) -> list[Batch]:
    """Microbatches of one data-parallel rank for the global batch of rows [first, first + total)."""
    found = []
    for m in range(total // (size * dp)):
        start = m * size * dp + dp_index * size
        found.append(batch_of(range(first + start, first + start + size), first_row=start))
    return found


@dataclass
class Built:
    """What one rank trains with."""

    mesh: ProcessMesh
    stage: Stage
    gradients: Gradients
    runtime: Runtime

    @property
    def parallel(self) -> TensorParallel:
        return self.stage.definition.parallel

    def train(self, batches: list[Batch], step: int = 0, scales: list[float] | None = None) -> Sums:
        """Zeroed gradients, then one step's backward, scaled by 1 / (B * S) unless told otherwise."""
        self.gradients.zero()
        scales = scales or [1 / b.tokens.numel() for b in batches]
        return self.runtime.train(batches, seed=SEED, step=step, scales=scales, gradients=self.gradients)

    def close(self) -> None:
        self.gradients.close()
        self.mesh.close()


def build(
    layout: Layout,
    config: TransformerConfig,
    *,
    definition: type[ModelDefinition] = GPT,
    schedule: str = "1f1b",
    recompute: Recompute | None = None,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float64,
    first: int | None = None,
    **buckets: Any,
) -> Built:
    """This rank of a job (queues number their messages and check them on arrival)."""
    mesh = ProcessMesh.open(layout, kv_heads=config.kv_heads, numbered=True)
    parallel = TensorParallel(
        mesh.axis("tp"),
        kv_heads=config.kv_heads,
        sequence_parallel=sequence_parallel and layout.tp > 1,
        dtype=dtype,
        vocab_multiple=config.make_vocab_size_divisible_by,
    )
    stage = Stage.build(
        definition(config, parallel), layout, mesh.coords.pp, seed=SEED, recompute=recompute, first=first
    )
    buckets.setdefault("bucket_size", 700)
    gradients = Gradients(stage.parameters_by_name(), mesh, tie_holders=stage.tie_holders, **buckets)
    return Built(mesh, stage, gradients, Runtime(stage, mesh, schedule))


@dataclass(frozen=True)
class Reference:
    """What one process has for a global batch: gradients of the scaled objective, and its sums."""

    gradients: dict[str, torch.Tensor]
    loss: float
    aux: float


def reference(
    config: TransformerConfig,
    batches: list[Batch],
    *,
    definition: type[ModelDefinition] = GPT,
    step: int = 0,
    training: bool = True,
    scales: list[float] | None = None,
) -> Reference:
    """The whole model on all microbatches of a step, without a pipeline, buckets or a runtime."""
    whole = make_whole(definition, config, seed=SEED)
    scales = scales or [1 / b.tokens.numel() for b in batches]
    loss = aux = 0.0
    objective = torch.zeros((), dtype=torch.float64)
    for batch, scale in zip(batches, scales, strict=True):
        ctx = ForwardContext(batch, SEED, step, training)
        hidden, extra = whole.hidden(ctx)
        loss_sum = whole.parts["head"](hidden, ctx)
        loss, aux = loss + float(loss_sum.detach()) * scale, aux + float(extra.detach()) * scale
        objective = objective + (loss_sum + extra) * scale
    names, parameters = zip(*whole.by_name.items(), strict=True)
    grads = torch.autograd.grad(objective, parameters)
    return Reference(dict(zip(names, grads, strict=True)), loss, aux)


def gradient_error(built: Built, want: Reference) -> float:
    """Largest deviation of the summed gradients that this rank keeps, in units of 1e-12 of what is allowed per tensor.

    A tensor agrees when max|a - b| <= 1e-12 * max(max|ref|, s), s a thousandth of the root mean square of all gradients.
    Key biases have an exact gradient of zero and are held to 1e-12.
    """
    squares = sum(float(g.square().sum()) for g in want.gradients.values())
    floor = 1e-3 * (squares / sum(g.numel() for g in want.gradients.values())) ** 0.5
    worst = 0.0
    for bucket in built.gradients.buckets:
        begin, end = built.gradients.own(bucket) if built.gradients.zero_stage else (bucket.begin, bucket.end)
        flat = built.gradients.gradients[bucket.buffer]
        for slot in bucket.slots:
            full, box = want.gradients[slot.name], built.parallel.rectangle(slot.spec)
            local = torch.zeros(slot.entry.shape, dtype=torch.float64)
            inside = tuple(slice(0, n) for n in box.size)
            local[inside] = full[tuple(slice(b, b + n) for b, n in zip(box.start, box.size, strict=True))]
            lo, hi = max(begin, slot.begin), min(end, slot.end)
            if lo < hi:
                error = (flat[lo:hi] - local.view(-1)[lo - slot.begin : hi - slot.begin]).abs().max()
                scale = 1.0 if slot.name.endswith("key.bias") else max(float(full.abs().max()), floor)
                worst = max(worst, float(error) / scale * 1e12)
    return worst
