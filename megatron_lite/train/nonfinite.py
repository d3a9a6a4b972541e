"""Where a number stopped being finite: which microbatch, and the first module or parameter.

A step that was not finite did not touch the weights, and its dropout masks are keyed, so it can be computed again: each
microbatch alone, with hooks that look at the output of every module in the order in which they are computed, and
without sums over ranks, so that a gradient is still that of the rank that made it. Every rank walks through all
microbatches, whatever it has found, since the stages need each other; then the findings are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron_lite.data.batch import Batch


class NonFiniteError(RuntimeError):
    """The run met a number that is not finite and was told to stop; the text says where."""


class NoSums:
    """Stands where the runtime expects gradient buckets: every rank keeps its own gradients."""

    def last_microbatch(self) -> None:
        """Nothing is armed."""

    def finish(self) -> None:
        """Nothing is summed."""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _finite(tensors: Iterator[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors)


class FirstNonFinite:
    """Hooks that note the first module of a stage whose output is not finite.

    Attributes:
        found: (how many modules had been computed before, name), or None.
    """

    def __init__(self, stage: nn.Module) -> None:
        self.found: tuple[int, str] | None = None
        self._computed = 0
        self._handles = [m.register_forward_hook(self._hook(name)) for name, m in stage.named_modules() if name]

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if self.found is None and not _finite(_tensors(output)):
                self.found = (self._computed, name)
            self._computed += 1

        return look

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def _bad(tensors: Iterator[tuple[str, torch.Tensor]]) -> list[str]:
    return [name for name, tensor in tensors if not _finite(_tensors(tensor))]


def diagnose(assembly: Any, batches: Sequence[Batch], *, seed: int, step: int, scales: Sequence[float]) -> str:
    """A sentence that says where this step's first non-finite number arose. Collective over the job.

    Args:
        assembly: the objects of this rank; the gradients are overwritten.
        batches, seed, scales: as the step had them.
        step: number of finished steps, as the step had it.
    """
    mesh, stage = assembly.mesh, assembly.stage
    parameters = stage.parameters_by_name()
    order = {name: i for i, name in enumerate(stage.specs)}
    findings: list[tuple[Any, ...]] = []  # (microbatch, 0 forward | 1 backward, order of computation, rank, name)
    for number, (batch, scale) in enumerate(zip(batches, scales, strict=True)):
        assembly.gradients.zero()
        hooks = FirstNonFinite(stage)
        try:
            assembly.runtime.train([batch], seed=seed, step=step, scales=[scale], gradients=NoSums())
        finally:
            hooks.remove()
        if hooks.found is not None:
            computed, module = hooks.found
            findings.append((number, 0, [mesh.coords.pp, computed], mesh.rank, module))
        gradients = _bad((name, p.main_grad) for name, p in parameters.items())
        if gradients:  # backward goes from the end of the model to its beginning
            last = max(gradients, key=lambda name: order[name])
            findings.append((number, 1, [-order[last]], mesh.rank, last))
    assembly.gradients.zero()
    weights = _bad((name, p.detach()) for name, p in parameters.items())
    answers = mesh.axis("world").gather_json({"first": min(findings, default=None), "weights": weights[:3]})
    where = f"step {step + 1}"
    found = [answer["first"] for answer in answers if answer["first"] is not None]
    if not found:
        return f"{where}: a sum over ranks or microbatches is not finite, though every part of it is (it is too large)"
    number, kind, _, rank, name = min(found)
    where += f", microbatch {number}, rank {rank}"
    if kind == 1:
        return f"{where}: every output of the forward pass is finite, the gradient of {name} is not"
    bad = answers[rank]["weights"]
    cause = f" (weights that are not finite: {', '.join(bad)})" if bad else ""
    return f"{where}: the output of {name} in the forward pass is not finite{cause}"
