"""A training step on paper: the sizes that the formulas of this package read.

A :class:`Job` is a model, a layout and the options that change what is stored or sent. The records of the parameters
come from the model itself, built on the meta device, their places in the gradient buckets from the arithmetic that the
optimizer uses, the blocks of a stage from the partition that the pipeline uses: the planner has no second opinion on
any of them. The formulas for activations and for the traffic of layers are those of the transformer blocks of
``model/blocks``; a team's own model has its weights and buckets planned, not its activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_lite.config.transformer import TransformerConfig
from megatron_lite.mesh.collectives import Axis
from megatron_lite.mesh.layout import Layout
from megatron_lite.model.gpt import GPT
from megatron_lite.model.protocol import ModelDefinition, full_specs
from megatron_lite.optim.flat import ALIGNMENT, Bucket, Entry
from megatron_lite.optim.flat import place as place_in_buckets
from megatron_lite.pipeline.lower import lower
from megatron_lite.pipeline.stage import Recompute, parts_of, place, tie_holders
from megatron_lite.pipeline.verify import Report, verify
from megatron_lite.tensor.spec import ParamSpec, TensorParallel


@dataclass(frozen=True)
class Job:
    """One step of a run.

    Attributes:
        config: of the model.
        layout: sizes of the axes.
        seq_length, micro_batch_size, microbatches: S, B, and the number of microbatches of each data-parallel rank.
        dtype: of weights and hidden states.
        sequence_parallel: no effect at tp 1.
        schedule, recompute: of the pipeline.
        first, last: blocks on the first and the last stage, where given by hand.
        zero_stage, bucket_size, reduce_dtype, deterministic: of the gradients, as in
            :class:`megatron_lite.optim.buckets.Gradients`.
        definition: the model's class.
    """

    config: TransformerConfig
    layout: Layout
    seq_length: int
    micro_batch_size: int = 1
    microbatches: int = 1
    dtype: torch.dtype = torch.bfloat16
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    recompute: Recompute | None = None
    first: int | None = None
    last: int | None = None
    zero_stage: int = 0
    bucket_size: int | None = None
    reduce_dtype: torch.dtype | None = None
    deterministic: bool = False
    definition: type[ModelDefinition] = GPT

    # ---- sizes

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch, T = B * S."""
        return self.micro_batch_size * self.seq_length

    @property
    def slices(self) -> int:
        """Ranks that share the hidden states between blocks: tp under sequence parallelism, else 1."""
        return self.layout.tp if self.sequence_parallel else 1

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states between two blocks on one rank: [T, H], or its slice."""
        return self.tokens * self.config.hidden_size * self.dtype.itemsize // self.slices

    @property
    def wide(self) -> torch.dtype:
        """Dtype of gradients, losses and statistics: fp32, or fp64 for an fp64 model."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def dp_ranks(self) -> int:
        """Ranks that a gradient is summed over: dp * cp."""
        return self.layout.dp * self.layout.cp

    def group_size(self, axis: str) -> int:
        """Ranks in ``tp`` or ``kv_replica``, the parts of the mesh over which a gradient may be partial."""
        if axis == "kv_replica":
            return self.layout.kv_replicas(self.config.kv_heads)
        assert axis == "tp", axis
        return self.layout.tp

    # ---- model, stages, buckets

    @cached_property
    def parallel(self) -> TensorParallel:
        """What layers need to know, on the first of ranks that do not exist."""
        tp = self.layout.tp
        axis = Axis("tp", tuple(range(tp)), 0, group="none", imaginary=True) if tp > 1 else Axis.single()
        return TensorParallel(
            axis,
            kv_heads=self.config.kv_heads,
            sequence_parallel=self.sequence_parallel and tp > 1,
            dtype=self.dtype,
            device=torch.device("meta"),
            vocab_multiple=self.config.make_vocab_size_divisible_by,
        )

    @cached_property
    def specs(self) -> dict[str, dict[str, ParamSpec]]:
        """Records of the whole model's parameters, by part."""
        return full_specs(self.definition(self.config, self.parallel))

    @cached_property
    def placement(self) -> list[range]:
        """Blocks of each stage."""
        return place(self.specs, self.layout.pp, first=self.first, last=self.last)

    @cached_property
    def tie_holders(self) -> dict[str, tuple[int, ...]]:
        """Stages that hold each tied tensor."""
        return tie_holders(self.specs, self.placement)

    @cached_property
    def schedule_report(self) -> Report:
        """What the pipeline's schedule costs."""
        return verify(lower(self.schedule, self.layout.pp, self.microbatches, ties=self.tie_holders))

    def buckets(self, stage: int) -> tuple[Bucket, ...]:
        """Gradient buckets of a rank of a stage (all ranks of a stage have the same)."""
        held: dict[str, ParamSpec] = {}
        for part in parts_of(stage, self.placement):
            for name, spec in self.specs[part].items():
                held.setdefault(name, spec)
        unit = ALIGNMENT // min(self.dtype.itemsize, self.wide.itemsize)
        placed = place_in_buckets(
            [self._entry(spec) for spec in held.values()],
            bucket_size=self.bucket_size,
            shards=self.dp_ranks,
            alignment=lambda _: unit,
        )
        return placed.buckets

    def _entry(self, spec: ParamSpec) -> Entry:
        shape = self.parallel.local_shape(spec.axes, spec.full_shape)
        partial = next((part for part in spec.partial_over if self.group_size(part) > 1), None)
        return Entry(spec, shape, self.dtype, partial, self.tie_holders[spec.tie] if spec.tie is not None else ())
