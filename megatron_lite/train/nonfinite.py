"""Where a number stopped being finite: which microbatch, and the first module or parameter.

A step that was not finite did not touch the weights, so its forward pass can be run again: hooks on every module look at
each output, in the order in which they are computed. Where all of them are finite, backward made it, and the parameters'
gradients, which are still in their buffers, tell which. All ranks take part, since the stages need each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron_lite.data.batch import Batch


class NonFiniteError(RuntimeError):
    """The run met a number that is not finite and was told to stop; the text says where."""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


class FirstNonFinite:
    """Hooks that note the first module of a stage whose output is not finite."""

    def __init__(self, stage: nn.Module) -> None:
        self.found: str | None = None
        self._handles = [
            module.register_forward_hook(self._hook(name or "the stage"))
            for name, module in stage.named_modules()
        ]

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if self.found is None and not all(bool(torch.isfinite(t).all()) for t in _tensors(output)):
                self.found = name

        return look

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def diagnose(assembly: Any, batches: Sequence[Batch], *, seed: int, step: int) -> str:
    """A sentence that says where this step's first non-finite number arose. Collective over the job."""
    mesh = assembly.mesh
    bad_parameters = assembly.optimizer.non_finite_parameters()
    findings: list[tuple[int, str]] = []
    for number, batch in enumerate(batches):
        hooks = FirstNonFinite(assembly.stage)
        assembly.runtime.evaluate([batch], seed=seed, step=step)
        hooks.remove()
        if hooks.found is not None:
            findings.append((number, hooks.found))
            break
    answers = mesh.axis("world").gather_json({"forward": findings, "backward": bad_parameters[:4]})
    forward = [
        (number, mesh.layout.coords(rank).pp, rank, module)
        for rank, answer in enumerate(answers)
        for number, module in answer["forward"]
    ]
    if forward:
        number, _, rank, module = min(forward)
        return f"step {step}, microbatch {number}: the output of {module} is not finite in the forward pass (first seen on rank {rank})"
    # Backward runs from the last stage to the first, so the last stage with a bad gradient is where it began.
    backward = [(-mesh.layout.coords(rank).pp, rank, names["backward"]) for rank, names in enumerate(answers) if names["backward"]]
    if backward:
        _, rank, names = min(backward)
        return (
            f"step {step}: every output of the forward pass is finite, the gradient of {', '.join(names)} is not "
            f"(rank {rank}, after all {len(batches)} microbatches)"
        )
    return f"step {step}: the loss is not finite, but a second forward pass of the same batch is"
