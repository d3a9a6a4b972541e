"""One step under torch's sync debug mode: the host waits for the device at one place, the step's read.

The mode raises wherever an operation of torch would wait for the device. It is lifted inside ``TrainStep.read`` only; the
staged back end calls nothing that the mode counts. Once with four ranks (tensor, pipeline and data parallel), once alone
in bf16 with the loader's copies in the step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gpu.part import Outcome, Settings
from megatron_lite.config.schema import RunConfig
from megatron_lite.data.loader import Loader
from megatron_lite.data.mock import MockDataset
from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.testing.layouts import LEARNING_RATE, Case, batches_of, tiny_gpt, tiny_llama
from megatron_lite.testing.ranks import RankFailed, RankHang, run_ranks
from megatron_lite.testing.staged import NAME, Options, stand_in_for_default_group
from megatron_lite.train.assemble import Assembly, assemble, kv_heads
from megatron_lite.train.step import HostNumbers

SHARDED = {"sequence_parallel": True, "zero_stage": 1, "overlap_grad_reduce": True}
BF16 = {"fp64": False, "bf16": True}
CASES = {
    "tp 2 x pp 2, sequence parallel, ZeRO-1": Case(Layout(tp=2, pp=2), global_batch=8, parallel=SHARDED),
    "dp 4, ZeRO-1, bf16": Case(Layout(dp=4), global_batch=8, parallel=SHARDED, training=BF16),
    "tp 2 x dp 2, dropout, recompute": Case(
        Layout(tp=2, dp=2),
        tiny_gpt(hidden_dropout=0.2, attention_dropout=0.1),
        "gpt",
        global_batch=8,
        parallel=SHARDED,
        training={"recompute_granularity": "full"},
    ),
}
# Heads of 64: what variable-length flash attention takes.
ALONE = Case(model=tiny_llama(hidden_size=256), global_batch=4, training=BF16)


class Guarded:
    """Counts the reads of a step, and lifts the mode inside them."""

    def __init__(self, assembly: Assembly, strict: bool) -> None:
        self.reads, self.strict = 0, strict
        self._read = assembly.step.read
        assembly.step.read = self.read  # type: ignore[method-assign]

    def read(self, numbers: torch.Tensor) -> torch.Tensor:
        """The step's one read."""
        self.reads += 1
        if self.strict:
            torch.cuda.set_sync_debug_mode("default")
        try:
            return self._read(numbers)
        finally:
            if self.strict:
                torch.cuda.set_sync_debug_mode("error")


def strict_steps(assembly: Assembly, config: RunConfig[Any], batches: Any, steps: int = 3) -> list[int]:
    """Reads in each of some steps; the first, in which libraries load, is not under the mode."""
    device = assembly.mesh.device
    counts = []
    for step in range(steps):
        guarded = Guarded(assembly, strict=device.type == "cuda" and step > 0)
        if guarded.strict:
            torch.cuda.synchronize(device)
            torch.cuda.set_sync_debug_mode("error")
        try:
            assembly.step.run(
                batches(step),
                seed=1,
                step=step,
                loss_scale=1.0,
                update=step + 1,
                learning_rates={"": LEARNING_RATE},
                weight_decay=config.optimizer.weight_decay,
                host=HostNumbers(0, False, 0.0, 0.0),
            )
        finally:
            if guarded.strict:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(guarded.reads)
        assembly.step.read = guarded._read  # type: ignore[method-assign]
    return counts


def on_rank(case: Case, device: str) -> list[int]:
    """Strict steps on one of several ranks."""
    stand_in_for_default_group(Options())
    # Queues that number their messages (tests) look at each header on the host: not here.
    mesh = ProcessMesh.open(case.layout, backend=NAME, device=device, kv_heads=kv_heads(case.model))
    assembly = assemble(case.config(), mesh)
    made = [batches_of(case, step, mesh.coords.dp, mesh.device) for step in range(3)]
    counts = strict_steps(assembly, case.config(), made.__getitem__)
    assembly.gradients.close()
    mesh.close()
    return counts


def alone(device: torch.device) -> list[int]:
    """Strict steps of one process that include the loader: threads, page-locked memory, the copy stream."""
    case = replace(ALONE, layout=Layout())
    mesh = ProcessMesh.open(case.layout, device=device, kv_heads=kv_heads(case.model))
    assembly = assemble(case.config(), mesh)
    dataset = MockDataset(case.model.vocab_size, case.seq_length, 1)
    with Loader(dataset, micro_batch_size=2, seq_length=case.seq_length, device=device) as loader:
        counts = strict_steps(assembly, case.config(), lambda step: loader.step(step * 4, 4))
    assembly.gradients.close()
    return counts


def run(settings: Settings, outcome: Outcome) -> None:
    """Every case; a wait of the host is an error with its place."""
    mode = "under set_sync_debug_mode('error')" if settings.on_gpu else "(the mode needs a GPU)"
    try:
        counts = alone(settings.where)
        outcome.check(counts == [1] * 3, f"alone, bf16, loader in the step: {counts} reads in three steps {mode}")
    except RuntimeError as error:
        outcome.check(False, f"alone, bf16: {last_place(error)}")
    for name, case in list(CASES.items())[: None if settings.on_gpu else 1]:
        if settings.time_is_short():
            outcome.skip(f"{name}: the time was over")
            continue
        try:
            found = run_ranks(4, on_rank, case, str(settings.where), timeout=settings.patience)
            outcome.check(found == [[1] * 3] * 4, f"{name}: {found[0]} reads in three steps {mode}")
        except (RankFailed, RankHang) as error:
            outcome.check(False, f"{name}: {str(error)[-1500:]}")


def last_place(error: BaseException) -> str:
    """What was raised, and where in the package."""
    place, frame = "", error.__traceback__
    while frame is not None:
        if "megatron_lite" in frame.tb_frame.f_code.co_filename:
            place = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    return f"{error} ({place})"
