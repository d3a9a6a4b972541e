"""Gradients in flat buffers, reduced bucket by bucket while backward goes on.

:class:`Gradients` moves every parameter's data into a flat weight buffer and gives it ``main_grad``, a view of a flat
gradient buffer in fp32 (fp64 in an fp64 model). Microbatches add into it. Where the parameter has the buffer's dtype,
``param.grad`` *is* that view and autograd adds in place; otherwise a hook adds ``param.grad`` and drops it. A layer may
also add into ``main_grad`` by itself and return None.

The hook sits on the parameter's AccumulateGrad node. It runs once for each backward call in which the parameter took
part, after all its uses, and also when the layer returned None. In the last microbatch of a step it tells that the
gradient is complete; when that holds for a whole bucket, the bucket's sum over the data-parallel ranks starts. Buckets
start in one fixed order, whatever order gradients come in, since all ranks must start the same collective. A parameter
that took no part leaves its bucket to :meth:`Gradients.finish`.

Not done here: no division. Sums are sums; the one factor (tokens, loss scale, clip) is applied by the optimizer.
After Li et al., PyTorch Distributed, VLDB 2020 (arXiv:2006.15704), and ZeRO, Rajbhandari et al. (arXiv:1910.02054).
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.optim.flat import ALIGNMENT, Bucket, Entry, Slot, place
from megatron_lite.optim.reduction import Reduction, sum_in_place
from megatron_lite.tensor.spec import ParamSpec

ZERO_STAGES = (0, 1)


class Gradients:
    """The weights and gradients of one rank's parameters, and their reduction.

    Args:
        params: parameters by name, in order of definition, each with its ``spec``. Their data is moved into flat
            buffers: make them before, and do not replace ``param.data`` after.
        mesh: the ranks; the axes ``dp_cp``, ``tp`` and ``kv_replica`` are used, and the holders of ties.
        zero_stage: 0: everyone gets the whole sum; 1: each rank its share of every bucket.
        bucket_size: parameters (not bytes) in a bucket; None: one bucket.
        overlap: start a bucket's sum during backward; otherwise all of them in :meth:`finish`. The same numbers.
        grad_dtype: dtype of the gradient buffers; None: fp64 for fp64 weights, else fp32.
        reduce_dtype: dtype in which gradients travel between data-parallel ranks; None: that of the buffers.
        deterministic: add in rank order.
        tie_holders: pipeline ranks that hold each tied tensor, by its name; the same on every rank of the job. A tied
            tensor that one rank holds need not be named.

    Collective over the job: every rank makes its own at the same time.

    Attributes:
        buckets: in the order of their reductions.
        weights, gradients: the flat buffers, one for each dtype of weights.
        parameters: by name.
        tie_axes: the holders of tied tensors on more than one stage, by their pipeline ranks.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        mesh: ProcessMesh,
        *,
        zero_stage: int = 0,
        bucket_size: int | None = None,
        overlap: bool = True,
        grad_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        deterministic: bool = False,
        tie_holders: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        if zero_stage not in ZERO_STAGES:
            raise ValueError(f"zero-stage {zero_stage} is not in this version: use 0 or 1")
        self.mesh = mesh
        self.axis = mesh.axis("dp_cp")
        self.zero_stage, self.overlap, self.deterministic = zero_stage, overlap, deterministic
        self.tie_holders = {name: tuple(sorted(set(stages))) for name, stages in (tie_holders or {}).items()}
        ties = sorted({stages for stages in self.tie_holders.values() if len(stages) > 1})
        self.tie_axes = {stages: mesh.tie_axis(stages) for stages in ties}
        self._grad_dtype, self._reduce_dtype = grad_dtype, reduce_dtype
        _check_parameters(params)
        placement = place(
            [self._entry(p) for p in params.values()],
            bucket_size=bucket_size,
            shards=self.axis.size,
            alignment=lambda dtype: ALIGNMENT // min(dtype.itemsize, self._main_dtype(dtype).itemsize),
        )
        self.buckets: tuple[Bucket, ...] = placement.buckets
        self._early = sum(not b.late for b in self.buckets)
        device = next((p.device for p in params.values()), mesh.device)
        self.weights = [
            torch.zeros(n, dtype=dtype, device=device)
            for dtype, n in zip(placement.dtypes, placement.sizes, strict=True)
        ]
        self.gradients = [torch.zeros_like(w, dtype=self._main_dtype(w.dtype)) for w in self.weights]
        self.parameters: dict[str, nn.Parameter] = {p.spec.name: p for p in params.values()}  # type: ignore[attr-defined]
        self._hooks: list[Any] = []
        self._nodes: list[Any] = []  # a parameter does not keep its AccumulateGrad node alive
        self._bucket_of: dict[str, int] = {}
        self._started: list[Reduction] = []
        self._finished = False
        for bucket in self.buckets:
            for slot in bucket.slots:
                self._adopt(bucket, slot)
        self._forget()

    # ---- what a step calls

    def zero(self) -> None:
        """Forget everything and set the gradients to zero: the start of a step, also after one that failed."""
        self.reset()
        for flat in self.gradients:
            flat.zero_()
        for param in self.parameters.values():
            self._attach(param)

    def reset(self) -> None:
        """Forget which gradients are in; sums that were started are waited for."""
        self._wait()
        self._forget()

    def last_microbatch(self, names: Iterable[str] | None = None) -> None:
        """The next backward call is the last one of this step for these parameters (default: all of them)."""
        self._armed.update(self.parameters if names is None else names)

    def finish(self) -> None:
        """Start every reduction that was not started, sum the late buckets, and wait for all."""
        assert not self._finished, "finish() twice without zero()"
        self._start_until(self._early)
        late = self.buckets[self._early :]
        for axes in (
            {b.index: self._partial_axis(b) for b in late},
            {b.index: self.tie_axes.get(b.tie) for b in late},
        ):
            handles = []
            for bucket in late:
                axis = axes[bucket.index]
                if axis is not None and axis.size > 1:
                    handles.append(sum_in_place(axis, self.gradient(bucket), ordered=self.deterministic))
            for handle in handles:
                handle.wait()
        self._start_until(len(self.buckets))
        self._wait()
        self._finished = True

    # ---- what the optimizer reads

    def weight(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's weights, flat."""
        return self.weights[bucket.buffer][bucket.begin : bucket.end]

    def gradient(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's gradients, flat."""
        return self.gradients[bucket.buffer][bucket.begin : bucket.end]

    def own(self, bucket: Bucket) -> tuple[int, int]:
        """[begin, end) in the bucket's buffer of this rank's share among the data-parallel ranks."""
        return bucket.shard(self.axis.size, self.axis.index)

    def bucket_of(self, name: str) -> Bucket:
        """The bucket that holds a parameter."""
        return self.buckets[self._bucket_of[name]]

    def close(self) -> None:
        """Take the hooks off; parameters keep their data and gradients."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._nodes.clear()

    # ---- inside

    def _main_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if self._grad_dtype is not None:
            return self._grad_dtype
        return torch.float64 if dtype == torch.float64 else torch.float32

    def _entry(self, param: nn.Parameter) -> Entry:
        spec: ParamSpec = param.spec  # type: ignore[attr-defined]
        parts = [part for part in spec.partial_over if self.mesh.axis(part).size > 1]
        assert len(parts) <= 1, f"{spec.name} is partial over {parts}: one part of the mesh contains the other"
        tie: tuple[int, ...] = ()
        if spec.tie is not None:
            tie = self.tie_holders.get(spec.tie, (self.mesh.coords.pp,))
            assert self.mesh.coords.pp in tie, f"{spec.name} lies on stage {self.mesh.coords.pp}, its holders are {tie}"
        return Entry(spec, tuple(param.shape), param.dtype, parts[0] if parts else None, tie)

    def _adopt(self, bucket: Bucket, slot: Slot) -> None:
        """Move a parameter into the buffers and hang the hook on it."""
        param = self.parameters[slot.name]
        data = self.weights[bucket.buffer][slot.begin : slot.end].view(param.shape)
        data.copy_(param.data)
        param.data = data
        param.main_grad = self.gradients[bucket.buffer][slot.begin : slot.end].view(param.shape)  # type: ignore[attr-defined]
        self._bucket_of[slot.name] = bucket.index
        self._attach(param)
        node = torch.autograd.graph.get_gradient_edge(param).node
        me, name = weakref.ref(self), slot.name
        self._hooks.append(node.register_hook(functools.partial(_arrived, me, name)))
        self._nodes.append(node)

    @staticmethod
    def _attach(param: nn.Parameter) -> None:
        main: torch.Tensor = param.main_grad  # type: ignore[attr-defined]
        param.grad = main if main.dtype == param.dtype else None

    def _forget(self) -> None:
        self._armed: set[str] = set()  # parameters whose next backward call is the last
        self._missing = [{slot.name for slot in bucket.slots} for bucket in self.buckets]
        self._next = 0  # the first bucket that was not started
        self._finished = False

    def _wait(self) -> None:
        for reduction in self._started:
            reduction.advance()
        for reduction in self._started:
            reduction.wait()
        self._started.clear()

    def _arrive(self, name: str) -> None:
        """A backward call has done with this parameter."""
        index = self._bucket_of[name]
        if self._finished or index < self._next:
            raise RuntimeError(
                f"a gradient of {name} came after its bucket was reduced: last_microbatch() was called too early, or "
                "zero() was not called at the start of the step"
            )
        param = self.parameters[name]
        if param.grad is not None and param.grad is not param.main_grad:  # type: ignore[attr-defined]
            param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
            self._attach(param)
        if name in self._armed and self.overlap:
            self._missing[index].discard(name)
            while self._next < self._early and not self._missing[self._next]:
                self._start_until(self._next + 1)

    def _start_until(self, end: int) -> None:
        for bucket in self.buckets[self._next : end]:
            flat = self.gradient(bucket)
            reduction = Reduction(
                self.axis,
                flat,
                scatter=self.zero_stage >= 1,
                ordered=self.deterministic,
                dtype=self._reduce_dtype or flat.dtype,
            )
            self._started.append(reduction)
            self._next = bucket.index + 1

    def _partial_axis(self, bucket: Bucket) -> Any:
        return None if bucket.partial is None else self.mesh.axis(bucket.partial)


def _arrived(me: weakref.ref[Gradients], name: str, *_: object) -> None:
    gradients = me()
    if gradients is not None:
        gradients._arrive(name)


def _check_parameters(params: Mapping[str, nn.Parameter]) -> None:
    specs = [getattr(p, "spec", None) for p in params.values()]
    without = [name for name, spec in zip(params, specs, strict=True) if spec is None]
    frozen = [name for name, p in params.items() if not p.requires_grad]
    names = [spec.name for spec in specs if spec is not None]
    twice = [n for n, count in Counter(names).items() if count > 1]
    if without:
        raise ValueError(f"parameters without a spec: {', '.join(without)}: a stage attaches one to each")
    if frozen:
        raise ValueError(f"parameters that take no gradient are not in this version: {', '.join(frozen)}")
    if twice:
        raise ValueError(f"parameters of the same name: {', '.join(twice)}: a tied tensor is one parameter on a rank")
