"""Running a verified plan: a loop over its actions.

Of a microbatch the stage keeps, from forward to backward, its input and the *edge* of the graph at its output; the
output itself is dropped once it has been sent. Receives are posted one ahead, into buffers of their own. A send is
waited for before the next one of its queue starts, as the verifier assumes, and all of them at the end.

The loss of a microbatch is multiplied by its scale before backward; the sums that come back carry the same factor, so
that the objective that is logged is the one that was differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_lite.data.batch import Batch
from megatron_lite.mesh.collectives import Handle
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.model.protocol import ForwardContext
from megatron_lite.pipeline.action import Backward, Direction, Forward, Plan, Recv, Reduce, Send, Sync
from megatron_lite.pipeline.lower import lower
from megatron_lite.pipeline.stage import Stage
from megatron_lite.pipeline.verify import verify


class GradientSums(Protocol):
    """What the runtime needs of the gradient buckets."""

    def last_microbatch(self) -> None: ...
    def finish(self) -> None: ...


@dataclass(frozen=True)
class Sums:
    """Sums over the microbatches of one step on this rank, fp64 scalars on the device.

    Attributes:
        loss_sum: of scale * loss over the microbatches; None on every stage but the last.
        aux_sum: of scale * auxiliary loss of this stage's blocks; None where no block has one.
    """

    loss_sum: torch.Tensor | None
    aux_sum: torch.Tensor | None


@dataclass
class _Kept:
    """What a microbatch leaves on a stage between its forward and its backward pass."""

    source: torch.Tensor | None  # the input, whose gradient goes back
    edge: GradientEdge | None  # of the output that was sent
    objective: torch.Tensor | None  # scaled loss and auxiliary loss


class Runtime:
    """Runs training steps, evaluation and inference over one stage.

    Args:
        stage, mesh: of this rank.
        schedule: ``1f1b`` or ``gpipe``.
    """

    def __init__(self, stage: Stage, mesh: ProcessMesh, schedule: str = "1f1b") -> None:
        self.stage, self.mesh, self.schedule = stage, mesh, schedule
        self._plans: dict[tuple[str, int], Plan] = {}

    def plan(self, schedule: str, microbatches: int) -> Plan:
        """The verified plan of a schedule."""
        key = (schedule, microbatches)
        if key not in self._plans:
            ties = {name: held for name, held in self.stage.tie_holders.items() if len(held) > 1}
            plan = lower(schedule, self.mesh.layout.pp, microbatches, buckets=[1] * self.mesh.layout.pp, ties=ties)
            verify(plan)
            self._plans[key] = plan
        return self._plans[key]

    def train(
        self, batches: Sequence[Batch], *, seed: int, step: int, scales: Sequence[float], gradients: GradientSums
    ) -> Sums:
        """Forward and backward of all microbatches; ends with every gradient summed (``gradients.finish()``).

        ``scales`` multiplies each microbatch's loss.
        """
        run = _Run(self, self.plan(self.schedule, len(batches)), batches, scales, seed, step, gradients)
        return run()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], *, seed: int = 0, step: int = 0) -> Sums:
        """Loss sums of batches, dropout off; no gradient is touched. Any number of batches."""
        run = _Run(self, self.plan("forward", len(batches)), batches, [1.0] * len(batches), seed, step, None)
        return run()

    @torch.no_grad()
    def infer(self, ctx: ForwardContext) -> torch.Tensor | None:
        """Logits [T, V] of one batch on the last stage, None on the others."""
        me, pp = self.mesh.coords.pp, self.mesh.layout.pp
        hidden = None
        if me > 0:
            hidden = self.message(ctx.batch)
            self.mesh.queue(me - 1, me, "forward").recv(hidden).wait()
        out = self.stage.logits(hidden, ctx)
        if me == pp - 1:
            return out
        self.mesh.queue(me, me + 1, "forward").send(out.contiguous()).wait()
        return None

    def message(self, batch: Batch) -> torch.Tensor:
        """A buffer for the hidden states that pass between stages: [T, H], or [T / tp, H] under sequence parallelism."""
        parallel = self.stage.definition.parallel
        tokens = batch.tokens.numel() // (parallel.axis.size if parallel.sequence_parallel else 1)
        return torch.empty(tokens, self.stage.definition.hidden_size, dtype=parallel.dtype, device=self.mesh.device)


class _Run:
    """One walk through a plan."""

    def __init__(
        self,
        runtime: Runtime,
        plan: Plan,
        batches: Sequence[Batch],
        scales: Sequence[float],
        seed: int,
        step: int,
        gradients: GradientSums | None,
    ) -> None:
        self.runtime, self.stage, self.mesh = runtime, runtime.stage, runtime.mesh
        self.actions = plan.stages[self.mesh.coords.pp]
        self.batches, self.scales, self.gradients = batches, scales, gradients
        self.seed, self.step = seed, step
        self.kept: dict[int, _Kept] = {}
        self.inputs: dict[tuple[Direction, int], torch.Tensor] = {}
        self.outputs: dict[tuple[Direction, int], torch.Tensor] = {}
        self.sends: dict[Direction, Handle] = {}
        self.posted: dict[Direction, tuple[Handle, torch.Tensor, int]] = {}
        self.to_receive: dict[Direction, list[Recv]] = {"forward": [], "backward": []}
        self.loss: torch.Tensor | None = None
        self.aux: torch.Tensor | None = None
        self.summed = False

    def __call__(self) -> Sums:
        for action in self.actions:
            if isinstance(action, Recv):
                self.to_receive[action.direction].append(action)
        for waiting in self.to_receive.values():
            waiting.reverse()
        for direction in ("forward", "backward"):
            self._post(direction)
        for action in self.actions:
            if isinstance(action, Forward):
                self._forward(action.microbatch)
            elif isinstance(action, Backward):
                self._backward(action.microbatch)
            elif isinstance(action, Recv):
                self._receive(action)
            elif isinstance(action, Send):
                self._send(action)
            elif isinstance(action, Reduce | Sync) and not self.summed:
                assert self.gradients is not None
                self.gradients.finish()  # buckets in order, then ties: the whole tail of the plan
                self.summed = True
        for handle in self.sends.values():
            handle.wait()
        return Sums(self.loss, self.aux)

    def _post(self, direction: Direction) -> None:
        """Start the next receive of a queue, one ahead of its use."""
        if not self.to_receive[direction]:
            return
        action = self.to_receive[direction].pop()
        buffer = self.runtime.message(self.batches[action.microbatch])
        queue = self.mesh.queue(action.peer, self.mesh.coords.pp, direction)
        self.posted[direction] = (queue.recv(buffer, action.microbatch), buffer, action.microbatch)

    def _receive(self, action: Recv) -> None:
        handle, buffer, microbatch = self.posted.pop(action.direction)
        assert microbatch == action.microbatch, (microbatch, action)
        handle.wait()
        self.inputs[action.direction, microbatch] = buffer
        self._post(action.direction)

    def _send(self, action: Send) -> None:
        earlier = self.sends.pop(action.direction, None)
        if earlier is not None:
            earlier.wait()
        tensor = self.outputs.pop((action.direction, action.microbatch))
        queue = self.mesh.queue(self.mesh.coords.pp, action.peer, action.direction)
        self.sends[action.direction] = queue.send(tensor, action.microbatch)

    def _forward(self, microbatch: int) -> None:
        training = self.gradients is not None
        source = self.inputs.pop(("forward", microbatch), None)
        if source is not None and training:
            source.requires_grad_()
        batch = self.batches[microbatch]
        out = self.stage(source, ForwardContext(batch, seed=self.seed, step=self.step, training=training))
        scale = self.scales[microbatch]
        objective = None
        if out.loss_sum is not None:
            objective = out.loss_sum * scale
            self.loss = _add(self.loss, out.loss_sum, scale)
        if out.aux_sum is not None:
            objective = out.aux_sum * scale if objective is None else objective + out.aux_sum * scale
            self.aux = _add(self.aux, out.aux_sum, scale)
        edge = None
        if out.hidden is not None:
            self.outputs["forward", microbatch] = out.hidden.detach().contiguous()
            if training:
                edge = get_gradient_edge(out.hidden)
        if training:
            self.kept[microbatch] = _Kept(source, edge, objective)

    def _backward(self, microbatch: int) -> None:
        if microbatch == len(self.batches) - 1:
            assert self.gradients is not None
            self.gradients.last_microbatch()
        kept = self.kept.pop(microbatch)
        roots: list[torch.Tensor | GradientEdge] = []
        seeds: list[torch.Tensor | None] = []
        if kept.edge is not None:
            roots.append(kept.edge)
            seeds.append(self.inputs.pop(("backward", microbatch)))
        if kept.objective is not None:
            roots.append(kept.objective)
            seeds.append(torch.ones_like(kept.objective))
        torch.autograd.backward(roots, seeds)  # type: ignore[arg-type]
        if kept.source is not None:
            gradient = kept.source.grad
            self.outputs["backward", microbatch] = torch.zeros_like(kept.source) if gradient is None else gradient.contiguous()


def _add(total: torch.Tensor | None, value: torch.Tensor, scale: float) -> torch.Tensor:
    term = value.detach().to(torch.float64) * scale
    return term if total is None else total + term
