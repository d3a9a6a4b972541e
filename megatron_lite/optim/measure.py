"""Numbers about the whole model as sums over ranks, each element counted once.

Data-parallel ranks count equal shares of every bucket, whether the optimizer is sharded or not, so the work is divided.
Of the ranks that hold equal elements one counts: tp rank 0 for what tp does not split, replica 0 of a key/value head,
the first stage that holds a tied tensor. All results are fp64 scalars on the device; adding them over all ranks gives
the model's number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from megatron_lite.optim.flat import Slot
from megatron_lite.optim.state import Part, ShardedState
from megatron_lite.tensor.spec import TensorParallel

PIECE = 1 << 24  # elements summed at a time: 128 MiB in fp64


class Measure:
    """Sums over what this rank counts of one optimizer's gradients and weights."""

    def __init__(self, state: ShardedState, parallel: TensorParallel) -> None:
        self.state, self.parallel = state, parallel
        self.gradients = state.gradients

    def counts(self, slot: Slot) -> bool:
        """Whether this rank, with its data-parallel peers, counts a parameter."""
        mesh, parts = self.gradients.mesh, slot.spec.split_over()
        if slot.entry.tie and mesh.coords.pp != slot.entry.tie[0]:
            return False
        if "kv_shard" in parts:
            return mesh.axis("kv_replica").index == 0
        return "tp" in parts or mesh.axis("tp").index == 0

    def counted(self) -> Iterator[Part]:
        """This rank's share of the parameters that it counts."""
        return (part for part in self.state.parts(self.gradients.own) if self.counts(part.slot))

    def gradient_norm_squared(self) -> torch.Tensor:
        """Sum of squares of the (reduced, scaled) gradients; padding of the vocabulary included where it is trained."""
        return self._sum(self._gradient_runs(), _squares)

    def gradient_zeros(self) -> torch.Tensor:
        """Gradient elements that are exactly zero."""
        return self._sum((self._gradient(p) for p in self._true_parts()), lambda g: (g == 0).sum(dtype=torch.float64))

    def weight_norm_squared(self) -> torch.Tensor:
        """Sum of squares of the master weights."""
        return self._sum((self.state.view(p.bucket, p.begin, p.end)["weight"] for p in self._true_parts()), _squares)

    def non_finite_parameters(self) -> list[str]:
        """Names of the parameters with an inf or NaN gradient in this rank's share. Reads the device."""
        parts = self.state.parts(self.gradients.own)
        return [p.slot.name for p in parts if not bool(torch.isfinite(self._gradient(p)).all())]

    def _gradient(self, part: Part) -> torch.Tensor:
        return self.gradients.gradients[part.bucket.buffer][part.begin : part.end]

    def _gradient_runs(self) -> Iterator[torch.Tensor]:
        """Flat gradients that this rank counts, neighbours as one (what pads them is zero)."""
        run: Part | None = None
        for part in self.state.parts(self.gradients.own):
            counted = self.counts(part.slot)
            if run is not None and (not counted or run.bucket is not part.bucket):
                yield self._gradient(run)
                run = None
            if counted:
                run = Part(part.bucket, part.slot, part.begin if run is None else run.begin, part.end)
        if run is not None:
            yield self._gradient(run)

    def _true_parts(self) -> Iterator[Part]:
        """What this rank counts, without padding of the vocabulary that takes no part in the model."""
        for part in self.counted():
            n = part.slot.entry.numel
            if self.parallel.mask_padded_vocab:
                n = self.parallel.rectangle(part.slot.spec).numel
            end = min(part.end, part.slot.begin + n)
            if part.begin < end:
                yield Part(part.bucket, part.slot, part.begin, end)

    def _sum(self, flats: Iterable[torch.Tensor], value: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        weights = self.gradients.weights
        device = weights[0].device if weights else self.gradients.mesh.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for flat in flats:
            total += value(flat)
        return total


def _squares(flat: torch.Tensor) -> torch.Tensor:
    """Sum of squares in fp64. PyTorch makes an fp64 copy of what it sums, so it is given a piece at a time."""
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for piece in flat.split(PIECE):
        norm: torch.Tensor = torch.linalg.vector_norm(piece, dtype=torch.float64)
        total += norm.square()
    return total
