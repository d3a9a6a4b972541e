"""AdamW over this rank's share of the model.

:class:`Optimizer` ties together the buckets (:mod:`megatron_lite.optim.buckets`), the state beside them
(:mod:`megatron_lite.optim.state`) and the sums over the model (:mod:`megatron_lite.optim.measure`). A share is
updated in stretches of equal (weight decay, learning rate), which a parameter's record decides, never the shape of a
shard. Under ZeRO 1 the weights are gathered afterwards, bucket by bucket while the next one is updated. The weights are
the masters rounded, after every step and after a load.

Nothing in a step reads from the device: the norm, whether it is finite, the clip factor and the flag that skips the
update are tensors there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from megatron_lite.mesh.collectives import Handle
from megatron_lite.ops.adamw import adamw_
from megatron_lite.optim.buckets import Gradients
from megatron_lite.optim.flat import Bucket
from megatron_lite.optim.measure import Measure
from megatron_lite.optim.shares import Share, slot_shares
from megatron_lite.optim.state import Part, ShardedState
from megatron_lite.tensor.spec import TensorParallel


class Optimizer:
    """The optimizer of one rank.

    Args:
        gradients: the buckets; their ZeRO stage decides what this rank keeps.
        parallel: where this rank's shards lie in the full tensors.
        beta1, beta2, eps: of AdamW.
        overlap_gather: leave the gathers of updated weights under way at the end of :meth:`step`; see
            :meth:`wait_before`. Otherwise ``step`` waits for them.
    """

    def __init__(
        self,
        gradients: Gradients,
        parallel: TensorParallel,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        overlap_gather: bool = False,
    ) -> None:
        self.gradients, self.parallel = gradients, parallel
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self._clear_padding()
        self.state = ShardedState(gradients)
        self.measure = Measure(self.state, parallel)
        self._stretches = [list(self.state.stretches(bucket)) for bucket in gradients.buckets]
        self._overlap_gather = overlap_gather
        self._gathers: dict[int, Handle] = {}  # by bucket

    def _clear_padding(self) -> None:
        """Rows that pad the vocabulary start at zero, also where a checkpoint, which has none, fills the rest."""
        for bucket in self.gradients.buckets:
            for slot in bucket.slots:
                true = self.parallel.rectangle(slot.spec).numel
                self.gradients.weights[bucket.buffer][slot.begin + true : slot.end].zero_()

    # ---- a step

    def norm_squared(self) -> torch.Tensor:
        """Sum of squares of the gradients that this rank counts, fp64 scalar on the device; not unscaled.

        After ``gradients.finish()``. Summed over all ranks it is that of the whole model, each element once.
        """
        return self.measure.gradient_norm_squared()

    def non_finite(self, norm_squared: torch.Tensor | None = None) -> torch.Tensor:
        """1.0 (fp64 scalar on the device) if a gradient that this rank counts is inf or NaN, else 0.0.

        Read off the sum of squares, which is in fp64 and so finite for every finite fp32 gradient. (In an fp64 model a
        gradient above 1e154 counts as not finite.) Give ``norm_squared`` if it has been computed already.
        """
        total = self.norm_squared() if norm_squared is None else norm_squared
        return (~torch.isfinite(total)).to(torch.float64)

    def clip_values(self, limit: float, unscale: torch.Tensor) -> None:
        """Clamp every gradient to [-limit, limit], in units of the unscaled gradient. NaN stays, inf does not.

        Args:
            limit: largest absolute value.
            unscale: scalar on the device by which gradients are multiplied later.

        Measure the norm first: the one that is reported is that before any clipping.
        """
        for bucket in self.gradients.buckets:
            begin, end = self.state.updated(bucket)
            part = self.gradients.gradients[bucket.buffer][begin:end]
            bound = (limit / unscale).to(part.dtype)
            part.clamp_(-bound, bound)

    def step(
        self,
        lr: float | Mapping[str, float],
        weight_decay: float,
        factor: torch.Tensor,
        skip: torch.Tensor,
        *,
        update: int,
    ) -> None:
        """One AdamW step and the gather of the weights. Collective over the data-parallel ranks under ZeRO 1.

        Args:
            lr: learning rate, or one for each tag of a parameter (that of ``""`` for tags that are not named).
            weight_decay: of parameters whose record says that they decay.
            factor: scalar on the device on every gradient: unscaling times clipping.
            skip: scalar bool on the device: leave everything as it is.
            update: number of this update, the first is 1; skipped steps do not count (bias correction).
        """
        self.wait_weights()
        rates = lr if isinstance(lr, Mapping) else {"": lr}
        for bucket in reversed(self.gradients.buckets):  # the first layers' weights are needed first
            for s in self._stretches[bucket.index]:
                adamw_(
                    s.weight,
                    s.master,
                    s.gradient,
                    s.exp_avg,
                    s.exp_avg_sq,
                    lr=rates.get(s.tag, rates[""]),
                    beta1=self.beta1,
                    beta2=self.beta2,
                    eps=self.eps,
                    weight_decay=weight_decay if s.decay else 0.0,
                    step=update,
                    factor=factor,
                    skip=skip,
                )
            self._gather(bucket)
        if not self._overlap_gather:
            self.wait_weights()

    def wait_weights(self) -> None:
        """Wait for the gathers that are under way. Whoever reads weights calls this, except :meth:`wait_before`."""
        for handle in self._gathers.values():
            handle.wait()
        self._gathers.clear()

    def wait_before(self, modules: Iterable[nn.Module]) -> None:
        """Let each module (a block, say) wait, when its forward begins, for the gathers of its own weights only."""
        for module in modules:
            names = [p.spec.name for p in module.parameters()]  # type: ignore[attr-defined]
            buckets = sorted({self.gradients.bucket_of(name).index for name in names})

            def before(_module: nn.Module, _inputs: object, buckets: list[int] = buckets) -> None:
                for index in buckets:
                    if index in self._gathers:
                        self._gathers.pop(index).wait()

            module.register_forward_pre_hook(before)

    def _gather(self, bucket: Bucket) -> None:
        axis = self.gradients.axis
        if self.gradients.zero_stage >= 1 and axis.size > 1:
            begin, end = self.gradients.own(bucket)
            own = self.gradients.weights[bucket.buffer][begin:end]
            self._gathers[bucket.index] = axis.all_gather(self.gradients.weight(bucket), own, async_op=True)

    # ---- numbers for the log

    def count_zeros(self) -> torch.Tensor:
        """Gradient elements that are exactly zero among those this rank counts, fp64 scalar on the device."""
        return self.measure.gradient_zeros()

    def weight_norm_squared(self) -> torch.Tensor:
        """Sum of squares of the master weights that this rank counts, fp64 scalar on the device."""
        return self.measure.weight_norm_squared()

    def non_finite_parameters(self) -> list[str]:
        """Names of parameters with an inf or NaN gradient in this rank's share. Reads the device."""
        return self.measure.non_finite_parameters()

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds: ``weights``, ``gradients``, ``masters``, ``moments``."""
        return self.state.memory()

    # ---- checkpoints

    def shares(self) -> list[Share]:
        """What this rank saves: with the other ranks' shares, every element of every tensor once.

        The tensors are views of the live state, in a fixed order.
        """
        self.wait_weights()
        return [share for part in self.measure.counted() for share in self._shares(part)]

    def targets(self) -> list[Share]:
        """What this rank needs: fill each tensor in place from a checkpoint, then call :meth:`refresh_weights`."""
        self.wait_weights()
        return [share for part in self.state.parts(self.state.updated) for share in self._shares(part)]

    def refresh_weights(self) -> None:
        """Weights = masters rounded, gathered from all ranks. Collective over the data-parallel ranks."""
        for bucket in self.gradients.buckets:
            self.state.weights_from_masters(bucket)
            self._gather(bucket)
        self.wait_weights()

    def masters_from_weights(self) -> None:
        """Masters = weights, after something else than :meth:`targets` has written the parameters."""
        self.state.masters_from_weights()

    def _shares(self, part: Part) -> list[Share]:
        view = self.state.view(part.bucket, part.begin, part.end)
        return slot_shares(self.parallel, part.slot, part.begin - part.slot.begin, view)
