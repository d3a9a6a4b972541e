"""From a configuration and a mesh to the objects that compute: model stage, gradients, optimizer, pipeline, step.

Every arrow is a plain constructor and nothing here talks to other ranks except the constructors that say so. What a
rehearsal, a generator or a test needs is built by the same functions as the training run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_lite.config.derived import bucket_parameters, precision
from megatron_lite.config.schema import RunConfig
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.model.protocol import ModelDefinition, load_definition
from megatron_lite.optim.buckets import Gradients
from megatron_lite.optim.sharded import Optimizer
from megatron_lite.pipeline.runtime import Runtime
from megatron_lite.pipeline.stage import Recompute, Stage
from megatron_lite.tensor.spec import TensorParallel
from megatron_lite.train.step import TrainStep

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def kv_heads(model: Any) -> int | None:
    """Key/value heads of a model's configuration, or None for a model that does not say."""
    heads = getattr(model, "kv_heads", None)
    return int(heads) if heads else None


def tensor_parallel(config: RunConfig[Any], mesh: ProcessMesh) -> TensorParallel:
    """What layers need to know of this rank."""
    return TensorParallel(
        axis=mesh.axis("tp"),
        kv_heads=kv_heads(config.model),
        sequence_parallel=config.parallel.sequence_parallel and mesh.layout.tp > 1,
        dtype=DTYPES[precision(config.training)],
        device=mesh.device,
        vocab_multiple=getattr(config.model, "make_vocab_size_divisible_by", 128),
        mask_padded_vocab=config.training.mask_padded_vocab,
    )


def recompute(config: RunConfig[Any]) -> Recompute | None:
    """How blocks are recomputed, or None."""
    training = config.training
    if training.recompute_granularity is None:
        return None
    return Recompute(training.recompute_method or "uniform", training.recompute_num_layers)


def make_stage(config: RunConfig[Any], mesh: ProcessMesh, *, initialise: bool = True) -> tuple[ModelDefinition, Stage]:
    """This rank's part of the model. ``initialise`` off leaves parameters unfilled: a checkpoint will be loaded."""
    definition = load_definition(config.architecture)(config.model, tensor_parallel(config, mesh))
    stage = Stage.build(
        definition,
        mesh.layout,
        mesh.coords.pp,
        seed=config.training.seed,
        recompute=recompute(config),
        first=config.parallel.decoder_first_pipeline_num_layers,
        last=config.parallel.decoder_last_pipeline_num_layers,
        initialise=initialise,
    )
    return definition, stage


@dataclass
class Assembly:
    """The objects of one rank."""

    mesh: ProcessMesh
    definition: ModelDefinition
    stage: Stage
    gradients: Gradients
    optimizer: Optimizer
    runtime: Runtime
    step: TrainStep


def assemble(config: RunConfig[Any], mesh: ProcessMesh, *, initialise: bool = True) -> Assembly:
    """Build everything that trains. Collective over the job."""
    definition, stage = make_stage(config, mesh, initialise=initialise)
    parallel, training, optimizer_config = config.parallel, config.training, config.optimizer
    gradients = Gradients(
        stage.parameters_by_name(),
        mesh,
        zero_stage=parallel.zero_stage,
        bucket_size=bucket_parameters(parallel, mesh.layout.dp),
        overlap=parallel.overlap_grad_reduce,
        reduce_dtype=torch.bfloat16 if optimizer_config.grad_reduce_in_bf16 else None,
        deterministic=training.deterministic,
        tie_holders=stage.tie_holders,
    )
    optimizer = Optimizer(
        gradients,
        definition.parallel,
        beta1=optimizer_config.adam_beta1,
        beta2=optimizer_config.adam_beta2,
        eps=optimizer_config.adam_eps,
    )
    runtime = Runtime(stage, mesh, schedule=parallel.pipeline_schedule)
    step = TrainStep(
        mesh,
        runtime,
        gradients,
        optimizer,
        loss_normalization=training.loss_normalization,
        clip_grad=optimizer_config.clip_grad,
        clip_value=optimizer_config.clip_grad_value,
    )
    return Assembly(mesh, definition, stage, gradients, optimizer, runtime, step)
