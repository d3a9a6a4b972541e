"""Validation: the same held-out samples every time, dropout off, the plain loss over all valid tokens.

The number is loss sum / token count over every microbatch and data-parallel rank, added in rank order, so it depends on
no layout and no microbatch size; every rank gets it. Training is untouched: no gradient, no random number, no counter.

A request to stop does not wait for the end: ranks agree on it after every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_lite.mesh.mesh import ProcessMesh


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
) -> tuple[float, int]:
    """Evaluate the first ``batches`` global batches of ``loader``. Collective.

    Args:
        beat: told what comes next.
        stop: why this rank wants to stop, or 0.

    Returns:
        (mean loss in nats per valid token, 0), the same on every rank; (nan, reason) where any rank wanted to stop. A
        set without a valid token gives 0.
    """
    reports = mesh.coords.tp == 0 and mesh.coords.pp == mesh.layout.pp - 1
    world = mesh.axis("world")
    vector = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for number in range(batches):
        beat(f"evaluation batch {number + 1} of {batches}")
        step = loader.step(number * global_batch, global_batch)
        sums = runtime.evaluate(step.microbatches)
        if reports:
            vector[0] += sums.loss_sum
            vector[1] += step.valid_tokens
        if reason := agreed(mesh, stop()):
            return float("nan"), reason
    table = torch.empty(mesh.layout.world_size, 2, dtype=torch.float64, device=mesh.device)
    world.all_gather(table, vector).wait()
    loss, tokens = table.sum(dim=0).tolist()
    return loss / max(1.0, tokens), 0
