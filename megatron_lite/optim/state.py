"""Where the optimizer's state lies: master weights and two moments beside the buckets.

Under ZeRO 1 (Rajbhandari et al., arXiv:1910.02054) a rank keeps state for its share of each bucket only, under ZeRO 0
for everything. bf16 and fp16 weights have fp32 masters; fp32 and fp64 weights are their own masters and no copy is
kept. The moments have the masters' dtype. For each flat weight buffer there is one flat tensor of each kind, the shares
of its buckets end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from megatron_lite.optim.buckets import Gradients
from megatron_lite.optim.flat import Bucket, Slot

LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Stretch:
    """Neighbouring elements that are updated alike: flat views of one length, and what decides the update.

    ``master`` is ``weight`` itself where weights are their own masters.
    """

    weight: torch.Tensor
    master: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    decay: bool
    tag: str


@dataclass(frozen=True)
class Part:
    """Elements [begin, end) of a bucket's buffer, all of one parameter."""

    bucket: Bucket
    slot: Slot
    begin: int
    end: int


class ShardedState:
    """Masters and moments of what this rank updates; the masters start as the weights."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self._begin: dict[int, int] = {}  # by bucket: where its share begins in the state of its buffer
        sizes = [0] * len(gradients.weights)
        for bucket in gradients.buckets:
            begin, end = self.updated(bucket)
            self._begin[bucket.index] = sizes[bucket.buffer]
            sizes[bucket.buffer] += end - begin
        self._masters: list[torch.Tensor | None] = []
        self._moments: list[tuple[torch.Tensor, torch.Tensor]] = []
        for weights, n in zip(gradients.weights, sizes, strict=True):
            low = weights.dtype in LOW_PRECISION
            dtype = torch.float32 if low else weights.dtype
            self._masters.append(torch.zeros(n, dtype=dtype, device=weights.device) if low else None)
            first = torch.zeros(n, dtype=dtype, device=weights.device)
            self._moments.append((first, torch.zeros_like(first)))
        self.masters_from_weights()

    def updated(self, bucket: Bucket) -> tuple[int, int]:
        """[begin, end) in the bucket's buffer that this rank keeps state for."""
        return self.gradients.own(bucket) if self.gradients.zero_stage >= 1 else (bucket.begin, bucket.end)

    def view(self, bucket: Bucket, begin: int, end: int) -> dict[str, torch.Tensor]:
        """Flat views of the state of elements [begin, end) of the bucket's buffer: weight, exp_avg, exp_avg_sq."""
        shift = self._begin[bucket.index] - self.updated(bucket)[0]
        at = slice(begin + shift, end + shift)
        first, second = self._moments[bucket.buffer]
        master = self._masters[bucket.buffer]
        weight = self.gradients.weights[bucket.buffer][begin:end] if master is None else master[at]
        return {"weight": weight, "exp_avg": first[at], "exp_avg_sq": second[at]}

    def weights_from_masters(self, bucket: Bucket) -> None:
        """This rank's weights of a bucket = its masters, rounded."""
        if self._masters[bucket.buffer] is not None:
            begin, end = self.updated(bucket)
            self.gradients.weights[bucket.buffer][begin:end].copy_(self.view(bucket, begin, end)["weight"])

    def masters_from_weights(self) -> None:
        """Masters = the weights as they are."""
        for bucket in self.gradients.buckets:
            if self._masters[bucket.buffer] is not None:
                begin, end = self.updated(bucket)
                self.view(bucket, begin, end)["weight"].copy_(self.gradients.weights[bucket.buffer][begin:end])

    def stretches(self, bucket: Bucket) -> Iterator[Stretch]:
        """What this rank updates of a bucket, cut where weight decay or learning rate change.

        The zeros between parameters join the stretch on their left: their update is zero.
        """
        begin, end = self.updated(bucket)
        kinds = [(slot.spec.decay, slot.spec.tag) for slot in bucket.slots]
        cuts = [i for i in range(len(kinds)) if i == 0 or kinds[i] != kinds[i - 1]]
        borders = [*(bucket.slots[i].begin for i in cuts), bucket.end]
        for cut, left, right in zip(cuts, borders, borders[1:], strict=False):
            lo, hi = max(begin, left), min(end, right)
            if lo < hi:
                view = self.view(bucket, lo, hi)
                own_master = self._masters[bucket.buffer] is not None
                weight = self.gradients.weights[bucket.buffer][lo:hi] if own_master else view["weight"]
                gradient = self.gradients.gradients[bucket.buffer][lo:hi]
                decay, tag = kinds[cut]
                yield Stretch(weight, view["weight"], gradient, view["exp_avg"], view["exp_avg_sq"], decay, tag)

    def parts(self, span: Callable[[Bucket], tuple[int, int]]) -> Iterator[Part]:
        """Every parameter's elements inside a span of its bucket (``updated``, or the gradients' ``own``)."""
        for bucket in self.gradients.buckets:
            begin, end = span(bucket)
            for slot in bucket.slots:
                lo, hi = max(begin, slot.begin), min(end, slot.end)
                if lo < hi:
                    yield Part(bucket, slot, lo, hi)

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds, by category."""

        def total(tensors: Iterable[torch.Tensor | None]) -> int:
            return sum(t.numel() * t.element_size() for t in tensors if t is not None)

        return {
            "weights": total(self.gradients.weights),
            "gradients": total(self.gradients.gradients),
            "masters": total(self._masters),
            "moments": total(m for pair in self._moments for m in pair),
        }
