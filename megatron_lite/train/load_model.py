"""A model from a checkpoint, for inference: weights only, in any layout and dtype.

    reader = open_checkpoint(Path("runs/first"))
    config = inference_config(reader.state["config"])
    mesh, runtime = load_model(config, rank_info({}), reader)
    logits = Generator(runtime, mesh).logits(tokens)
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from megatron_lite.checkpoint.load import Reader, name_problems
from megatron_lite.checkpoint.manifest import find_checkpoint
from megatron_lite.config.load import from_dict
from megatron_lite.config.schema import RunConfig
from megatron_lite.mesh.layout import Layout, layout_for
from megatron_lite.mesh.local import RankInfo
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.model.problems import model_problems
from megatron_lite.model.protocol import load_definition
from megatron_lite.pipeline.runtime import Runtime
from megatron_lite.train.assemble import kv_heads, make_stage
from megatron_lite.train.build import backend_of, device_type

_SHOWN = 6  # problems in one message


def open_checkpoint(root: Path, step: int | None = None) -> Reader:
    """The newest complete checkpoint in a directory (``--save`` of a run), or that of a step.

    Raises:
        ValueError: there is none.
    """
    found = find_checkpoint(root, step)
    if found is None:
        raise ValueError(f"{root} holds no checkpoint: give the --save directory of a run")
    return Reader(found.directory)


def inference_config(
    saved: dict[str, Any], *, tp: int = 1, pp: int = 1, dtype: str = "fp32", device: str = "auto"
) -> RunConfig[Any]:
    """The configuration of a checkpoint's model (``reader.state["config"]``), in another layout and dtype.

    Raises:
        ValueError: every reason why the model does not run in this layout.
    """
    config = from_dict(saved, lambda architecture: load_definition(architecture).Config, "the checkpoint's configuration")
    parallel = dataclasses.replace(
        config.parallel,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=1,
        decoder_first_pipeline_num_layers=None,  # of another number of stages
        decoder_last_pipeline_num_layers=None,
        sequence_parallel=False,  # generation runs on rows of any length
        device=device,  # type: ignore[arg-type]
        distributed_backend=None,  # follows the device
    )
    flags: dict[str, Any] = {name: name == dtype for name in ("bf16", "fp16", "fp64")}
    training = dataclasses.replace(config.training, recompute_granularity=None, **flags)
    wrong = model_problems(
        load_definition(config.architecture),
        config.model,
        Layout(tp=tp, pp=pp),
        sequence_parallel=False,
        seq_length=config.data.seq_length,
    )
    if wrong:
        raise ValueError("; ".join(wrong))
    return dataclasses.replace(config, parallel=parallel, training=training)


def load_weights(stage: Any, reader: Reader) -> None:
    """Fill the parameters of a stage from a checkpoint; padding rows become zero.

    Raises:
        ValueError: the checkpoint is of another model, or damaged.
    """
    stored = {n: s for n, s in reader.names().items() if not n.endswith(".padding")}  # trained padding is no token
    wrong = name_problems(stored, {name: spec.full_shape for name, spec in stage.specs.items()}.items())
    if wrong:
        raise ValueError(f"{reader.directory} is the checkpoint of another model: {'; '.join(wrong[:_SHOWN])}")
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
    device = torch.device("cuda", info.local_rank) if device_type(config) == "cuda" else torch.device("cpu")
    mesh = ProcessMesh.open(layout, backend=backend_of(config), device=device, kv_heads=kv_heads(config.model))
    _, stage = make_stage(config, mesh, initialise=False)
    load_weights(stage, reader)
    return mesh, Runtime(stage, mesh)
