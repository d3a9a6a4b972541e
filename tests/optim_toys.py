"""Small models with records on their parameters, and one training step written out, for the tests of the optimizer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from megatron_lite.mesh.collectives import Axis, Handle
from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.optim.buckets import Gradients
from megatron_lite.optim.clip import clip_factor
from megatron_lite.optim.sharded import Optimizer
from megatron_lite.tensor.spec import ParamSpec, TensorParallel

NEVER = torch.tensor(False)
ONE = torch.tensor(1.0, dtype=torch.float64)


def parameter(value: torch.Tensor, spec: ParamSpec) -> nn.Parameter:
    param = nn.Parameter(value.clone())
    param.spec = spec  # type: ignore[attr-defined]
    return param


def plain_spec(name: str, shape: tuple[int, ...], **kwargs: Any) -> ParamSpec:
    """A record of a replicated parameter; matrices decay."""
    kwargs = {"decay": len(shape) > 1, **kwargs}
    return ParamSpec(name, tuple(shape), kwargs.pop("axes", (None,) * len(shape)), None, **kwargs)


def toy(dtype: torch.dtype, seed: int = 0, sizes: tuple[int, ...] = (5, 7, 6, 3)) -> dict[str, nn.Parameter]:
    """Weights and biases of a small MLP, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    params = {}
    for i, (n, m) in enumerate(pairwise(sizes)):
        for name, shape in ((f"layers.{i}.weight", (m, n)), (f"layers.{i}.bias", (m,))):
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            params[name] = parameter(value, plain_spec(name, shape))
    return params


def toy_loss(params: Mapping[str, nn.Parameter], x: torch.Tensor) -> torch.Tensor:
    """Sum over the rows of x [rows, 5] of a smooth loss."""
    h = x.to(next(iter(params.values())).dtype)
    for i in range(len(params) // 2):
        h = torch.tanh(h @ params[f"layers.{i}.weight"].t() + params[f"layers.{i}.bias"])
    return (h - 0.3).square().sum()


def samples(step: int, rows: int) -> torch.Tensor:
    """The global batch of a step, fp64 [rows, 5]."""
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(1000 + step), dtype=torch.float64)


def train_step(
    gradients: Gradients, optimizer: Optimizer, step: int, microbatches: int, rows: int, clip: float, lr: float = 0.05
) -> float:
    """One step on this rank's part of the global batch; returns the norm before clipping."""
    axis = gradients.axis
    gradients.zero()
    mine = samples(step, rows).view(microbatches, axis.size, -1, 5)[:, axis.index]
    for m in range(microbatches):
        if m == microbatches - 1:
            gradients.last_microbatch()
        toy_loss(gradients.parameters, mine[m]).backward()
    gradients.finish()
    unscale = 1.0 / rows
    total = optimizer.norm_squared()
    gradients.mesh.axis("world").all_reduce(total)
    norm = total.sqrt() * unscale
    optimizer.step(lr, 0.1, clip_factor(norm, clip) * unscale, ~torch.isfinite(norm), update=step + 1)
    return float(norm)


def reference_run(
    dtype: torch.dtype, steps: int, rows: int, clip: float, lr: float = 0.05
) -> tuple[dict[str, Any], list[float]]:
    """The same training by torch.optim.AdamW on one process."""
    params = toy(dtype)
    groups = [
        {"params": [p for p in params.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, foreach=False)
    norms = []
    for step in range(steps):
        adamw.zero_grad()
        (toy_loss(params, samples(step, rows)) / rows).backward()
        if clip:
            norms.append(float(torch.nn.utils.clip_grad_norm_(params.values(), clip)))
        else:
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in params.values()])))
        adamw.step()
    return {name: p.detach().clone() for name, p in params.items()}, norms


def single(**kwargs: Any) -> TensorParallel:
    return TensorParallel(Axis.single(), **kwargs)


class Imaginary(Axis):
    """An axis of several ranks of which only this one exists; what is done on it is written down.

    ``delay``: seconds that each reduction takes, one after the other, counted from when it was started.
    """

    def __init__(self, size: int = 2, delay: float = 0.0) -> None:
        super().__init__("dp_cp", tuple(range(size)), 0, group="none")
        self.delay = delay
        self.started: list[tuple[str, int, float]] = []
        self._free_at = 0.0

    def _start(self, kind: str, t: torch.Tensor) -> Handle:
        now = time.perf_counter()
        self.started.append((kind, t.numel(), now))
        self._free_at = done = max(now, self._free_at) + self.delay
        return Handle(finish=lambda: time.sleep(max(0.0, done - time.perf_counter())))

    def all_reduce(self, t: torch.Tensor, op: str = "sum", async_op: bool = False) -> Handle:
        return self._start("all_reduce", t)

    def reduce_scatter(self, out: torch.Tensor, t: torch.Tensor, async_op: bool = False) -> Handle:
        return self._start("reduce_scatter", t)

    def all_gather(self, out: torch.Tensor, t: torch.Tensor, async_op: bool = False) -> Handle:
        return self._start("all_gather", t)


class ImaginaryMesh(ProcessMesh):
    """A mesh of one rank that takes itself for one of several data-parallel ones."""

    def __init__(self, axis: Axis) -> None:
        one = ProcessMesh.open(Layout())
        self.__dict__.update(one.__dict__)
        self._axes = {**one._axes, "dp_cp": axis}
