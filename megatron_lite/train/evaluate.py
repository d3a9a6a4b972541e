"""Validation: the same held-out samples every time, dropout off, the plain loss over all valid tokens.

The number is loss sum / token count over every microbatch and data-parallel rank, added in rank order, so it depends on
no layout and no microbatch size; every rank gets it. Training is untouched: no gradient, no random number, no counter.

Of several sources each one's loss is told beside that of all. The loader then gives the same samples sorted by source
(:mod:`megatron_lite.data.by_source`), a microbatch is of one source, and the sums that one exchange brings together are a table
of (loss, tokens) by source.

A request to stop does not wait for the end: ranks agree on it after every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_lite.data.by_source import BySource
from megatron_lite.data.loader import SampleError
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.train.step import STOP_DATA


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found, the same on every rank.

    Attributes:
        loss: mean in nats per valid token; 0 for a set without one, nan where it was broken off.
        by_source: the mean of each source that has valid tokens in the evaluated samples; empty for a single source.
        stop: why any rank wanted to stop (then there is no result), or 0.
        unread: of STOP_DATA, what this rank could not read, if it is one of those.
    """

    loss: float
    by_source: dict[str, float] = field(default_factory=dict)
    stop: int = 0
    unread: SampleError | None = None


def agreed(mesh: ProcessMesh, reason: int) -> int:
    """The largest reason that any rank has for stopping, on every rank. Collective; the host waits."""
    largest = torch.full((1,), float(reason), device=mesh.device)
    mesh.axis("world").all_reduce(largest, op="max").wait()
    return int(largest.item())


def evaluate(
    mesh: ProcessMesh,
    runtime: Any,
    loader: Any,
    *,
    batches: int,
    global_batch: int,
    beat: Callable[[str], None] = lambda phase: None,
    stop: Callable[[], int] = lambda: 0,
) -> Evaluation:
    """Evaluate the first ``batches`` global batches of ``loader``. Collective.

    Args:
        beat: told what comes next.
        stop: why this rank wants to stop, or 0.
    """
    reports = mesh.coords.tp == 0 and mesh.coords.pp == mesh.layout.pp - 1
    world = mesh.axis("world")
    sorted_rows = loader.dataset if isinstance(loader.dataset, BySource) else None
    names = sorted_rows.names if sorted_rows is not None else [""]
    rows = len(sorted_rows) if sorted_rows is not None else batches * global_batch
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=mesh.device)
    for first in range(0, rows, global_batch):
        beat(f"evaluation batch {first // global_batch + 1} of {-(-rows // global_batch)}")
        unread, size = None, min(global_batch, rows - first)
        try:
            step = loader.step(first, size)
        except SampleError as error:  # the others wait for this rank
            unread, step = error, loader.blank(first, size)
        losses = runtime.evaluate(step.microbatches).losses
        if reports:
            for loss, batch, samples in zip(losses, step.microbatches, step.samples, strict=True):
                source = 0 if sorted_rows is None else sorted_rows.source(samples[0])
                sums[source, 0] += loss
                sums[source, 1] += batch.valid_tokens
        if reason := agreed(mesh, STOP_DATA if unread else stop()):
            return Evaluation(float("nan"), stop=reason, unread=unread)
    table = torch.empty(mesh.layout.world_size, sums.numel(), dtype=torch.float64, device=mesh.device)
    world.all_gather(table, sums.reshape(-1)).wait()
    sums = table.sum(dim=0).view(-1, 2)
    loss, tokens = sums.sum(dim=0).tolist()
    by_source = {name: part / count for name, (part, count) in zip(names, sums.tolist(), strict=True) if count}
    return Evaluation(loss / max(1.0, tokens), by_source if len(names) > 1 else {})
