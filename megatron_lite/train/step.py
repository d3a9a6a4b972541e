"""One optimizer step: the pipeline, one exchange between all ranks, the update, one host read.

After backward every rank writes a dozen numbers into a small fp64 vector: its part of the squared gradient norm, whether
a gradient was not finite, its loss sum and token count, requests to stop or save, a digest of the batch it read, how long
its last step took. One all-gather brings all vectors to all ranks; unscale factor, clip factor and the skip flag are
computed from them on the device, where AdamW reads them, and the host reads the same table once, after everything has
been launched. An all-gather instead of a sum costs a few kilobytes more and gives every rank the same sums in the same
order, each rank's own numbers (which one was slow, whose batch differs), and maxima beside sums.

Loss normalisation happens here alone. Backward ran with ``scale / (B * S)`` on every loss sum; the exact rest,
``B * S / (scale * valid tokens of the global batch)``, is part of the unscale factor, in fp64 and once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_lite.data.batch import Batch
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.ops.host import to_device
from megatron_lite.optim.clip import clip_factor

FIELDS = (
    "norm_squared", "non_finite", "loss", "aux", "tokens", "squared_lengths", "stop", "save", "digest", "seconds",
    "memory_gib", "data_wait",
)  # fmt: skip
AT = {name: i for i, name in enumerate(FIELDS)}
STOP_LIMIT, STOP_SIGNAL, STOP_DATA = 1, 2, 3


class StepBatches(Protocol):
    """What the loader gives for one step of one data-parallel rank."""

    @property
    def microbatches(self) -> Sequence[Batch]: ...
    @property
    def digest(self) -> int: ...
    @property
    def valid_tokens(self) -> int: ...
    @property
    def wait_seconds(self) -> float: ...


@dataclass(frozen=True)
class HostNumbers:
    """What the host adds to this rank's vector.

    ``stop`` is 0, or why this rank wants to stop after this step (STOP_SIGNAL, STOP_LIMIT); STOP_DATA: it could not read its
    samples, and no rank makes an update.
    """

    stop: int
    save: bool
    last_step_seconds: float
    memory_gib: float


@dataclass(frozen=True)
class StepReport:
    """What one step did, the same on every rank.

    Attributes:
        loss: the objective, loss sum over valid tokens of the global batch (or the mean of microbatch means).
        aux_loss: auxiliary sums over the same count; part of the objective that was minimised, logged on its own.
        grad_norm: L2 norm of the unscaled gradient before clipping, every element of the model counted once.
        skipped: the update was not made.
        tokens: valid target tokens of the global batch.
        squared_lengths: sum over documents of the squared length, over the global batch.
        stop: 0, or the largest reason that any rank gave for stopping; save: whether any rank asks for a save.
        slowest_rank, slowest_seconds: of the step before.
        memory_gib: maximum over ranks.
        data_wait: longest wait of a rank for its batches, in seconds.
    """

    loss: float
    aux_loss: float
    grad_norm: float
    skipped: bool
    tokens: int
    squared_lengths: int
    stop: int
    save: bool
    slowest_rank: int
    slowest_seconds: float
    memory_gib: float
    data_wait: float


class BatchMismatch(ValueError):
    """Ranks that must compute on the same batch read different ones."""


class TrainStep:
    """Runs steps over a built stage, its gradients and its optimizer.

    Args:
        mesh, runtime, gradients, optimizer: the objects of this rank.
        loss_normalization: ``token`` or ``microbatch`` (docs/configuration.md).
        clip_grad: largest norm, 0 for no clipping; clip_value: largest absolute gradient element, or None.
    """

    def __init__(
        self,
        mesh: ProcessMesh,
        runtime: Any,
        gradients: Any,
        optimizer: Any,
        *,
        loss_normalization: str = "token",
        clip_grad: float = 1.0,
        clip_value: float | None = None,
    ) -> None:
        self.mesh, self.runtime, self.gradients, self.optimizer = mesh, runtime, gradients, optimizer
        self._by_token = loss_normalization == "token"
        self._clip_grad, self._clip_value = clip_grad, clip_value
        layout, coords = mesh.layout, mesh.coords
        # Ranks that hold one copy of a data-parallel rank's loss and batch: the last stage's first tp rank.
        self._reports_loss = coords.tp == 0 and coords.pp == layout.pp - 1
        self._reports_aux = coords.tp == 0

    def run(
        self,
        batches: StepBatches,
        *,
        seed: int,
        step: int,
        loss_scale: float,
        update: int,
        learning_rates: Mapping[str, float],
        weight_decay: float,
        host: HostNumbers,
    ) -> StepReport:
        """One step.

        Args:
            step: number of this step, for dropout (skipped steps count).
            update: number of this update if it is made, the first is 1 (skipped steps do not count).
            learning_rates: by parameter tag, ``""`` for the rest.
        """
        micro = batches.microbatches
        tokens_of_row = micro[0].rows * micro[0].seq_length
        self.gradients.zero()
        sums = self.runtime.train(
            micro, seed=seed, step=step, scales=self.scales(micro, loss_scale), gradients=self.gradients
        )
        table = self._exchange(sums, batches, host)
        tokens = table[:, AT["tokens"]].sum()
        if self._by_token:
            unscale = tokens_of_row / (loss_scale * tokens.clamp(min=1.0))
        else:
            unscale = torch.full_like(tokens, 1.0 / (loss_scale * len(micro) * self.mesh.layout.dp))
        bad = table[:, AT["non_finite"]].sum() + (~torch.isfinite(table[:, AT["loss"]])).sum()
        norm = table[:, AT["norm_squared"]].sum().sqrt() * unscale
        if self._clip_value is not None:
            self.optimizer.clip_values(self._clip_value, unscale)
        factor = unscale * clip_factor(norm, self._clip_grad)
        self.optimizer.step(learning_rates, weight_decay, factor, bad > 0, update=update)
        numbers = torch.cat([table.reshape(-1), torch.stack([unscale, norm, bad.to(norm.dtype)])])
        return self._report(self.read(numbers))

    def read(self, numbers: torch.Tensor) -> torch.Tensor:
        """The one place of a step where the host waits for the device."""
        return numbers.cpu()

    def scales(self, micro: Sequence[Batch], loss_scale: float) -> list[float]:
        """The factor on each microbatch's loss sum before backward; the rest is in the unscale factor."""
        if self._by_token:
            return [loss_scale / (micro[0].rows * micro[0].seq_length)] * len(micro)
        return [loss_scale / max(1, b.valid_tokens) for b in micro]

    def _exchange(self, sums: Any, batches: StepBatches, host: HostNumbers) -> torch.Tensor:
        """This rank's vector and everybody's: fp64 [world, len(FIELDS)]."""
        micro = batches.microbatches
        vector = torch.zeros(len(FIELDS), dtype=torch.float64)
        if self._reports_loss:
            vector[AT["tokens"]] = batches.valid_tokens
            vector[AT["squared_lengths"]] = sum(b.squared_lengths for b in micro)
        vector[AT["stop"]], vector[AT["save"]] = host.stop, host.save
        vector[AT["digest"]] = batches.digest
        vector[AT["seconds"]], vector[AT["memory_gib"]] = host.last_step_seconds, host.memory_gib
        vector[AT["data_wait"]] = batches.wait_seconds
        vector = to_device(vector, self.mesh.device)
        norm_squared = self.optimizer.norm_squared()
        vector[AT["norm_squared"]] = norm_squared
        vector[AT["non_finite"]] = self.optimizer.non_finite(norm_squared) if host.stop != STOP_DATA else 1.0
        if self._reports_loss and sums.loss_sum is not None:
            vector[AT["loss"]] = sums.loss_sum
        if self._reports_aux and sums.aux_sum is not None:
            vector[AT["aux"]] = sums.aux_sum
        table = torch.empty(self.mesh.layout.world_size, len(FIELDS), dtype=torch.float64, device=self.mesh.device)
        self.mesh.axis("world").all_gather(table, vector).wait()
        return table

    def _report(self, numbers: torch.Tensor) -> StepReport:
        table = numbers[:-3].view(-1, len(FIELDS)).numpy()
        unscale, norm, bad = numbers[-3:].tolist()
        if table[:, AT["stop"]].max() != STOP_DATA:
            self._check_digests(table[:, AT["digest"]])
        tokens = int(table[:, AT["tokens"]].sum())
        seconds = table[:, AT["seconds"]]
        return StepReport(
            loss=_sum(table[:, AT["loss"]]) * unscale,
            aux_loss=_sum(table[:, AT["aux"]]) * unscale,
            grad_norm=norm,
            skipped=bad > 0,
            tokens=tokens,
            squared_lengths=int(table[:, AT["squared_lengths"]].sum()),
            stop=int(table[:, AT["stop"]].max()),
            save=bool(table[:, AT["save"]].any()),
            slowest_rank=int(seconds.argmax()),
            slowest_seconds=float(seconds.max()),
            memory_gib=float(table[:, AT["memory_gib"]].max()),
            data_wait=float(table[:, AT["data_wait"]].max()),
        )

    def _check_digests(self, digests: Any) -> None:
        layout = self.mesh.layout
        first: dict[tuple[int, int], int] = {}
        for rank, digest in enumerate(digests):
            coords = layout.coords(rank)
            key = (coords.dp, coords.cp)
            earlier = first.setdefault(key, rank)
            if digests[earlier] != digest or math.isnan(digest):
                raise BatchMismatch(
                    f"ranks {earlier} and {rank} compute on the same batch (data-parallel rank {coords.dp}) but read different "
                    "samples: their data files or index caches differ. Compare the files on their hosts (checksums are in "
                    "PREFIX.meta.json)"
                )


def _sum(column: Any) -> float:
    """The sum over ranks, rounded once: zeros of ranks that have nothing to add do not change how the others are added."""
    values = column.tolist()
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
