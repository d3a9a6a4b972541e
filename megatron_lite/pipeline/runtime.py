"""Running a verified plan: a loop over its actions.

Of a microbatch the stage keeps, from forward to backward, its input and the *edge* of the graph at its output. The
output itself is let go as soon as it has been sent, without a trick: autograd needs the edge, and the tensor only where
some operation saved it. A stage calls backward once for each microbatch.

Where the loop waits is what ``simulate`` assumes: a pass for its message, a send for the one before it in its queue, the
end for the last sends. On a GPU a wait orders the compute stream, the host runs on. Buffers are allocated on the compute
stream; a receive starts after what that stream has in hand, and a send's tensor is held until the stream is behind the
send, so memory is reused in order.

The loss of a microbatch is multiplied by its scale before backward; the sums that come back carry the same factor, so
that the objective that is logged is the one that was differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_lite.data.batch import Batch
from megatron_lite.mesh.collectives import Handle
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.model.protocol import ForwardContext
from megatron_lite.pipeline.action import Backward, Direction, Forward, Plan, Recv, Send
from megatron_lite.pipeline.lower import lower
from megatron_lite.pipeline.stage import Stage
from megatron_lite.pipeline.verify import verify
from megatron_lite.tensor.regions import slice_length


class GradientSums(Protocol):
    """What the runtime needs of the gradient buckets."""

    def last_microbatch(self) -> None:
        """The next backward call is the last of the step."""

    def finish(self) -> None:
        """Start the sums that were not started, and wait for all of them."""


@dataclass(frozen=True)
class Sums:
    """Sums over the microbatches of one step on this rank.

    Attributes:
        loss_sum: of scale * loss over the microbatches, fp64 scalar on the device; None on every stage but the last.
        aux_sum: of scale * auxiliary loss of this stage's blocks, likewise; None where no block has one.
        tokens: valid target tokens, host integer; the same on all stages.
        losses: in evaluation, the loss sum of each microbatch on the last stage, fp64 scalars on the device.
    """

    loss_sum: torch.Tensor | None
    aux_sum: torch.Tensor | None
    tokens: int
    losses: tuple[torch.Tensor, ...] = ()


class _Entrance(torch.autograd.Function):
    """A scalar behind an output; its backward pass hands on the gradient that has come by message.

    ``torch.autograd.backward`` takes a gradient too, but imports sympy to compare shapes: half a second of every rank.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, message: list[torch.Tensor]) -> torch.Tensor:
        """A zero without a shape; nothing of the output is kept."""
        ctx.message = message
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """The gradient that is in the list by now."""
        return ctx.message.pop(), None


@dataclass
class _Kept:
    """What a microbatch leaves on a stage between its forward and its backward pass."""

    source: torch.Tensor | None  # the input, whose gradient goes back
    edge: GradientEdge | None  # of the entrance behind the output that was sent
    message: list[torch.Tensor]  # where the entrance finds the output's gradient
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
        """The verified plan of a schedule; a stage's buckets are one to it, since ``finish`` sums them all."""
        key = (schedule, microbatches)
        if key not in self._plans:
            plan = lower(schedule, self.mesh.layout.pp, microbatches, ties=self.stage.tie_holders)
            verify(plan)
            self._plans[key] = plan
        return self._plans[key]

    def train(
        self, batches: Sequence[Batch], *, seed: int, step: int, scales: Sequence[float], gradients: GradientSums
    ) -> Sums:
        """Forward and backward of all microbatches; ends with every gradient summed (``gradients.finish()``).

        Args:
            batches: microbatches of this data-parallel rank; they may differ in size, and hold no valid token.
            seed, step: key of the dropout masks.
            scales: factor on each microbatch's loss.
            gradients: set to zero by the caller.
        """
        self._mode(training=True)
        with torch.enable_grad():
            return _Run(self, self.plan(self.schedule, len(batches)), batches, scales, seed, step, gradients).run()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], *, seed: int = 0, step: int = 0) -> Sums:
        """Loss sums of any number of batches, dropout off. Keeps no graph and touches no gradient."""
        self._mode(training=False)
        return _Run(self, self.plan("forward", len(batches)), batches, [1.0] * len(batches), seed, step, None).run()

    @torch.no_grad()
    def infer(self, ctx: ForwardContext) -> torch.Tensor | None:
        """Logits [T, V] of one batch on the last stage, None on the others."""
        self._mode(training=False)
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

    def _mode(self, training: bool) -> None:
        """For modules of torch that look at their own flag."""
        if self.stage.training != training:
            self.stage.train(training)

    def message(self, batch: Batch) -> torch.Tensor:
        """A buffer for the hidden states that pass between stages: [T, H], or [T / tp, H] under sequence parallelism."""
        return torch.empty(
            self.message_shape(batch), dtype=self.stage.definition.parallel.dtype, device=self.mesh.device
        )

    def message_shape(self, batch: Batch) -> tuple[int, int]:
        """Shape of :meth:`message`."""
        parallel = self.stage.definition.parallel
        ranks = parallel.axis.size if parallel.sequence_parallel else 1
        return slice_length(batch.tokens.numel(), ranks), self.stage.definition.hidden_size


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
        self.index = runtime.mesh.coords.pp
        self.actions = plan.stages[self.index]
        self.batches, self.scales, self.gradients = batches, scales, gradients
        self.seed, self.step = seed, step
        self.kept: dict[int, _Kept] = {}
        self.posted: dict[tuple[Direction, int], tuple[torch.Tensor, Handle]] = {}
        self.results: dict[tuple[Direction, int], torch.Tensor] = {}
        self.sends: dict[Direction, Handle] = {}  # the last one of each queue
        self.loss: torch.Tensor | None = None
        self.losses: list[torch.Tensor] = []  # of the microbatches, in evaluation
        self.aux: torch.Tensor | None = None

    def run(self) -> Sums:
        finished = False
        for action in self.actions:
            if isinstance(action, Forward):
                self._forward(action.microbatch)
            elif isinstance(action, Backward):
                self._backward(action.microbatch)
            elif isinstance(action, Recv):
                self._post(action)
            elif isinstance(action, Send):
                self._send(action)
            elif not finished:  # the first sum of gradients: buckets in order, then ties, is what finish() does
                assert self.gradients is not None
                self.gradients.finish()
                finished = True
        for handle in self.sends.values():
            handle.wait()
        tokens = sum(batch.valid_tokens for batch in self.batches)
        return Sums(self.loss, self.aux, tokens, tuple(self.losses))

    def _post(self, action: Recv) -> None:
        buffer = self.runtime.message(self.batches[action.microbatch])
        handle = self.mesh.queue(*action.queue(self.index)).recv(buffer, action.microbatch)
        self.posted[action.direction, action.microbatch] = (buffer, handle)

    def _received(self, direction: Direction, microbatch: int) -> torch.Tensor | None:
        """The message that was posted for a pass, None at the ends of the pipeline."""
        if (direction, microbatch) not in self.posted:
            return None
        buffer, handle = self.posted.pop((direction, microbatch))
        handle.wait()
        return buffer

    def _send(self, action: Send) -> None:
        if (earlier := self.sends.pop(action.direction, None)) is not None:
            earlier.wait()
        result = self.results.pop((action.direction, action.microbatch))
        queue = self.mesh.queue(*action.queue(self.index))
        self.sends[action.direction] = queue.send(result, action.microbatch)

    def _forward(self, microbatch: int) -> None:
        training = self.gradients is not None
        source = self._received("forward", microbatch)
        if source is not None and training:
            source.requires_grad_()
        batch, scale = self.batches[microbatch], self.scales[microbatch]
        out = self.stage(source, ForwardContext(batch, seed=self.seed, step=self.step, training=training))
        objective = None
        if out.loss_sum is not None:
            objective = out.loss_sum * scale
            self.loss = _add(self.loss, out.loss_sum, scale)
            if not training:
                self.losses.append(out.loss_sum.to(torch.float64))
        if out.aux_sum is not None:
            objective = out.aux_sum * scale if objective is None else objective + out.aux_sum * scale
            self.aux = _add(self.aux, out.aux_sum, scale)
        edge: GradientEdge | None = None
        message: list[torch.Tensor] = []
        if out.hidden is not None:
            self._check_message(out.hidden, batch)
            self.results["forward", microbatch] = out.hidden.detach().contiguous()
            edge = get_gradient_edge(_Entrance.apply(out.hidden, message)) if training else None
        if training:
            self.kept[microbatch] = _Kept(source, edge, message, objective)

    def _backward(self, microbatch: int) -> None:
        if microbatch == len(self.batches) - 1:
            assert self.gradients is not None
            self.gradients.last_microbatch()
        kept = self.kept.pop(microbatch)
        gradient = self._received("backward", microbatch)
        roots: list[torch.Tensor | GradientEdge] = []
        if kept.edge is not None:
            assert gradient is not None
            kept.message.append(gradient)
            roots.append(kept.edge)
        if kept.objective is not None and kept.objective.requires_grad:
            roots.append(kept.objective)
        torch.autograd.backward(roots)  # type: ignore[arg-type]
        if kept.source is not None:
            gradient = kept.source.grad
            gradient = torch.zeros_like(kept.source) if gradient is None else gradient.contiguous()
            self.results["backward", microbatch] = gradient

    def _check_message(self, hidden: torch.Tensor, batch: Batch) -> None:
        wanted = self.runtime.message_shape(batch)
        if tuple(hidden.shape) != wanted or hidden.dtype != self.stage.definition.parallel.dtype:
            raise ValueError(
                f"the blocks of stage {self.index} give hidden states of shape {tuple(hidden.shape)} and {hidden.dtype}; "
                f"what passes between stages is [tokens, hidden_size] = {wanted} in the model's dtype, "
                f"{self.stage.definition.parallel.dtype}"
            )


def _add(total: torch.Tensor | None, value: torch.Tensor, scale: float) -> torch.Tensor:
    term = value.detach().to(torch.float64) * scale
    return term if total is None else total + term
