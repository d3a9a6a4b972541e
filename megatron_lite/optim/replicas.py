"""A check that ranks which must hold equal weights do: bitwise, by checksum.

Weights that are replicated drift apart when a gradient sum is missing, and the loss falls on all the same. Compared are
data-parallel ranks (everything), tp ranks (what tp does not split), replicas of a key/value head, and the holders of a
tie. It reads every weight to the host, so it runs when asked for.
"""

from __future__ import annotations

import zlib

import torch

from megatron_lite.mesh.collectives import Axis
from megatron_lite.optim.buckets import Gradients
from megatron_lite.optim.flat import Slot


def replica_differences(gradients: Gradients) -> list[str]:
    """One line for each parameter and group of ranks that should agree and do not. Collective over the job."""
    slots = sorted((slot for bucket in gradients.buckets for slot in bucket.slots), key=lambda s: s.name)
    sums = {slot.name: _checksum(gradients.parameters[slot.name]) for slot in slots}
    mesh = gradients.mesh
    found = _differences(gradients.axis, slots, sums)
    found += _differences(
        mesh.axis("tp"), [s for s in slots if not {"tp", "kv_shard"} & set(s.spec.split_over())], sums
    )
    found += _differences(mesh.axis("kv_replica"), [s for s in slots if "kv_shard" in s.spec.split_over()], sums)
    for stages, axis in gradients.tie_axes.items():
        found += _differences(axis, [s for s in slots if s.entry.tie == stages], sums)
    return found


def _checksum(param: torch.Tensor) -> int:
    host = param.detach().cpu().contiguous().view(-1)
    return zlib.crc32(host.view(torch.uint8).numpy().tobytes()) if host.numel() else 0


def _differences(axis: Axis, slots: list[Slot], sums: dict[str, int]) -> list[str]:
    if axis.size == 1:
        return []
    everyone: list[list[int]] = axis.gather_json([sums[s.name] for s in slots])
    found = []
    for slot, values in zip(slots, zip(*everyone, strict=True), strict=True):
        if len(set(values)) > 1:
            odd = [rank for rank, value in zip(axis.ranks, values, strict=True) if value != values[0]]
            found.append(f"{slot.name}: ranks {odd} of {axis.name} differ from rank {axis.ranks[0]}")
    return found
