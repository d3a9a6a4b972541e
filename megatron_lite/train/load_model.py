"""A model from a checkpoint, for inference: weights only, in any layout and dtype."""

from __future__ import annotations

from typing import Any

import torch

from megatron_lite.checkpoint.load import Reader, name_problems
from megatron_lite.config.schema import RunConfig
from megatron_lite.mesh.layout import layout_for
from megatron_lite.mesh.local import RankInfo
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.pipeline.runtime import Runtime
from megatron_lite.train.assemble import kv_heads, make_stage


def load_weights(stage: Any, reader: Reader) -> None:
    """Fill the parameters of a stage from a checkpoint; padding rows become zero.

    Raises ValueError where the checkpoint is of another model.
    """
    wrong = name_problems(
        {n: s for n, s in reader.names().items() if not n.endswith(".padding")},
        {name: spec.full_shape for name, spec in stage.specs.items()}.items(),
    )
    if wrong:
        raise ValueError(f"{reader.directory} is the checkpoint of another model: {'; '.join(wrong[:6])}")
    parallel = stage.definition.parallel
    with torch.no_grad():
        for name, parameter in stage.parameters_by_name().items():
            box = parallel.rectangle(parameter.spec)
            values = torch.empty(box.size, dtype=parameter.dtype)
            reader.read("weight", name, box, values)
            parameter.zero_()
            parameter[tuple(slice(0, n) for n in box.size)].copy_(values)


def load_model(config: RunConfig[Any], info: RankInfo, reader: Reader) -> tuple[ProcessMesh, Runtime]:
    """Mesh and runtime of this rank's stage with a checkpoint's weights. The default group is open (or there is one rank)."""
    layout = layout_for(
        info.world_size,
        tp=config.parallel.tensor_model_parallel_size,
        pp=config.parallel.pipeline_model_parallel_size,
    )
    cuda = config.parallel.device == "cuda" or (config.parallel.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", info.local_rank) if cuda else torch.device("cpu")
    backend = config.parallel.distributed_backend or ("nccl" if cuda else "gloo")
    mesh = ProcessMesh.open(layout, backend=backend, device=device, kv_heads=kv_heads(config.model))
    _, stage = make_stage(config, mesh, initialise=False)
    load_weights(stage, reader)
    return mesh, Runtime(stage, mesh)
