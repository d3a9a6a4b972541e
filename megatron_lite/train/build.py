"""Everything a run needs, from its configuration: groups of ranks, data, model, optimizer, and what a checkpoint holds.

All ranks build together and decide alike: whatever is wrong is an error on every one of them before anything is trained.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import megatron_lite
from megatron_lite.checkpoint.owner import take_together
from megatron_lite.config.derived import log_directory
from megatron_lite.config.load import to_dict
from megatron_lite.config.schema import RunConfig
from megatron_lite.config.summary import listed
from megatron_lite.config.summary import notices as warnings
from megatron_lite.mesh.agreement import agree, code_digest
from megatron_lite.mesh.layout import layout_for
from megatron_lite.mesh.local import RankInfo
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.model.protocol import load_definition, source_digest
from megatron_lite.optim import from_config
from megatron_lite.optim.batch_size import BatchSchedule
from megatron_lite.optim.scaler import LossScaler
from megatron_lite.optim.schedule import Rates
from megatron_lite.train import resume
from megatron_lite.train.assemble import Assembly, assemble, kv_heads
from megatron_lite.train.datasets import Data, open_data
from megatron_lite.train.guard import Guard
from megatron_lite.train.progress import Progress
from megatron_lite.train.provenance import write_run_json
from megatron_lite.train.report import Reporter, host_names

PATIENCE = 6.0  # how much longer than a step it may take to index data, or to read a checkpoint from a busy disk


def backend_of(config: RunConfig[Any]) -> str:
    """``--distributed-backend``, else nccl on GPUs and gloo on CPUs."""
    return config.parallel.distributed_backend or ("nccl" if device_type(config) == "cuda" else "gloo")


def device_type(config: RunConfig[Any]) -> str:
    """``cuda`` or ``cpu``."""
    wanted = config.parallel.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: torch sees no GPU on this machine; give --device cpu, or check the driver with "
            "`megatron-lite doctor`"
        )
    return wanted if wanted != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Built:
    """The objects of one rank's run.

    Attributes:
        mesh, data, assembly: what computes.
        batch, rates, scaler: the schedules.
        last_step: steps of the whole training.
        progress: where the run stands: at its beginning, or where the checkpoint left it.
        loaded: the checkpoint, or None.
        reporter, log_dir: where it reports.
    """

    mesh: ProcessMesh
    data: Data
    assembly: Assembly
    batch: BatchSchedule
    rates: Rates
    scaler: LossScaler
    last_step: int
    progress: Progress
    loaded: resume.Found | None
    reporter: Reporter
    log_dir: Path


def build(
    config: RunConfig[Any],
    info: RankInfo,
    backend: str,
    guard: Guard,
    closing: contextlib.ExitStack,
    environment: dict[str, str] | None = None,
) -> Built:
    """Build and load everything. Collective over the job; the default group is open where there are several ranks.

    Args:
        config, info, backend: what, where and over which library.
        guard: hears what is being done, and where logs go.
        closing: gets what has to be stopped however the run ends.
        environment: variables that we set, for run.json.

    Raises:
        ValueError: on every rank, for whatever a person can put right: data, checkpoints, settings that differ.
    """
    parallel, training = config.parallel, config.training
    layout = layout_for(
        info.world_size,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        cp=parallel.context_parallel_size,
    )
    if training.deterministic:
        torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", info.local_rank) if device_type(config) == "cuda" else torch.device("cpu")
    mesh = ProcessMesh.open(layout, backend=backend, device=device, kv_heads=kv_heads(config.model))
    sources = {
        "code": code_digest(Path(megatron_lite.__file__).parent),
        "code of the model": source_digest(load_definition(config.architecture)),
    }
    agree(mesh, {"configuration": to_dict(config), **sources})
    log_dir = Path(mesh.axis("world").gather_json(log_directory(config, time.strftime("%Y%m%d-%H%M%S")))[0])
    guard.log_dir = log_dir
    batch = from_config.batch_schedule(training, config.data.seq_length, layout.dp)
    last_step, samples = from_config.training_length(training, batch)
    rates = from_config.rates(training, config.optimizer, batch)
    scaler = from_config.loss_scaler(training, config.optimizer)
    if config.checkpoint.save is not None and not config.evaluation.skip_train:
        guard.beat(f"taking {config.checkpoint.save} for this run", PATIENCE)
        closing.callback(take_together(Path(config.checkpoint.save), mesh.axis("world")))
    guard.beat("opening the data", PATIENCE)
    data = open_data(config, mesh, batch, last_step, samples, lambda text: guard.beat(text, PATIENCE))
    closing.callback(data.close)
    found = resume.find_together(config, mesh)
    guard.beat("building the model")
    assembly = assemble(config, mesh, initialise=found is None)
    progress = Progress()
    notices: list[str] = []
    if found is not None:
        guard.beat(f"loading {found.directory}", PATIENCE)
        progress, rates, found = resume.load(assembly, config, found, rates, scaler, notices.append, facts=data.facts, mix=data.mix)
        for first, end in progress.skipped_ranges:
            data.train.skip(first, end)
    elif config.checkpoint.load:
        notices.append(resume.starting_fresh(config))
    reporter = Reporter(config, mesh, assembly.definition, log_dir, progress.step, last_step)
    for line in [*data.summary, *notices, *listed("warnings:", [*warnings(config), *data.notices])]:
        reporter.say(line)
    built = Built(mesh, data, assembly, batch, rates, scaler, last_step, progress, found, reporter, log_dir)
    _write_provenance(config, info, built, environment or {})
    return built


def _write_provenance(config: RunConfig[Any], info: RankInfo, built: Built, environment: dict[str, str]) -> None:
    hosts = host_names(built.mesh, info.host)
    if built.mesh.rank == 0:
        extra = {
            "run": built.reporter.run,
            "layout": asdict(built.mesh.layout),
            "loaded": str(built.loaded.directory) if built.loaded is not None else None,
            "first_step": built.progress.step,
        }
        write_run_json(built.log_dir, to_dict(config), hosts, environment, extra)
