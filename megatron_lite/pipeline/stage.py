"""One pipeline rank's part of the model: a slice of the blocks, plus embed and head at the ends.

The stage names parameters as the whole model does, makes the holders of a tied tensor that are together on it one
parameter, and applies recompute around blocks; a model file knows of none of this. Which stages hold a tied tensor is
arithmetic over the whole model's records, so no rank has to ask another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_lite.mesh.layout import Layout
from megatron_lite.model.protocol import ForwardContext, ModelDefinition, build_part, full_specs
from megatron_lite.pipeline.partition import partition
from megatron_lite.tensor.init import initialise as fill
from megatron_lite.tensor.spec import ParamSpec


@dataclass(frozen=True)
class Recompute:
    """Keep a block's input only and compute it again in backward (Chen et al., arXiv:1604.06174).

    Attributes:
        method: ``uniform``: every block, in units of ``blocks`` (default 1); ``block``: only the first ``blocks`` of the
            stage (default: all of them), one at a time.
        blocks: see above.
    """

    method: str = "uniform"
    blocks: int | None = None

    def units(self, count: int) -> list[tuple[int, int, bool]]:
        """(first, end, whether recomputed) of the units in which ``count`` blocks run."""
        if self.method == "block":
            recomputed = count if self.blocks is None else min(self.blocks, count)
            return [(i, i + 1, i < recomputed) for i in range(count)]
        unit = self.blocks or 1
        return [(i, min(i + unit, count), True) for i in range(0, count, unit)]


@dataclass(frozen=True)
class StageOutput:
    """What a stage gives for a microbatch.

    Attributes:
        hidden: [T, H] for the next stage; None on the last.
        loss_sum: scalar sum of token losses; on the last stage only.
        aux_sum: scalar sum of the blocks' auxiliary losses on this stage, or None where no block has one.
    """

    hidden: torch.Tensor | None
    loss_sum: torch.Tensor | None
    aux_sum: torch.Tensor | None


class Stage(nn.Module):
    """See the module's text. Made by :meth:`build`.

    Attributes:
        index, count: this stage and how many there are.
        tie_holders: for every tied tensor of the model, the stages that hold it.
        specs: records of all parameters of the whole model, by global name.
    """

    def __init__(
        self,
        definition: ModelDefinition,
        index: int,
        placement: list[range],
        parts: dict[str, nn.Module],
        specs: dict[str, dict[str, ParamSpec]],
        recompute: Recompute | None,
    ) -> None:
        super().__init__()
        self.definition, self.index, self.count = definition, index, len(placement)
        self.placement, self.recompute = placement, recompute
        self.embed = parts.get("embed")
        self.blocks = nn.ModuleDict({str(i): parts[f"blocks.{i}"] for i in placement[index]})
        self.head = parts.get("head")
        self.specs = {name: spec for part in specs.values() for name, spec in part.items()}
        self.tie_holders = _tie_holders(specs, placement)
        self._share_ties()

    @classmethod
    def build(
        cls,
        definition: ModelDefinition,
        layout: Layout,
        index: int,
        *,
        seed: int = 0,
        recompute: Recompute | None = None,
        first: int | None = None,
        last: int | None = None,
        initialise: bool = True,
    ) -> Stage:
        """Build stage ``index`` of the model and fill its parameters (``initialise`` off: they keep whatever memory held).

        Raises ValueError where the blocks do not fill the stages.
        """
        specs = full_specs(definition)
        placement = place(specs, layout.pp, first=first, last=last)
        parts = {name: build_part(definition, name, seed) for name in parts_of(index, placement)}
        stage = cls(definition, index, placement, parts, specs, recompute)
        if initialise:
            fill(stage.parameters_by_name(), seed)
        return stage

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Parameters by global name, each once."""
        return {parameter.spec.name: parameter for parameter in self.parameters()}  # type: ignore[attr-defined]

    def _share_ties(self) -> None:
        """Make holders of one tied tensor one parameter."""
        first: dict[str, nn.Parameter] = {}
        for module in self.modules():
            for key, parameter in module._parameters.items():
                if parameter is None or parameter.spec.tie is None:  # type: ignore[attr-defined]
                    continue
                module._parameters[key] = first.setdefault(parameter.spec.tie, parameter)  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor | None, ctx: ForwardContext) -> StageOutput:
        """Run this stage on a microbatch; ``hidden`` is None on the first stage."""
        hidden, aux = self._body(hidden, ctx)
        if self.head is None:
            return StageOutput(hidden, None, aux)
        return StageOutput(None, self.head(hidden, ctx), aux)

    def logits(self, hidden: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        """Hidden states for the next stage, or [T, V] logits on the last."""
        hidden, _ = self._body(hidden, ctx)
        return hidden if self.head is None else self.head.logits(hidden, ctx)  # type: ignore[operator]

    def _body(self, hidden: torch.Tensor | None, ctx: ForwardContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.embed is not None:
            hidden = self.embed(ctx)
        assert hidden is not None
        blocks = list(self.blocks.values())
        aux: torch.Tensor | None = None
        plain = Recompute("block", 0)
        units = (self.recompute if self.recompute is not None and torch.is_grad_enabled() else plain).units(len(blocks))
        for begin, end, again in units:
            if again:  # masks are keyed, not drawn, so no generator state has to be kept for the second pass
                hidden, part = checkpoint(
                    _run_blocks, blocks[begin:end], hidden, ctx, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden, part = _run_blocks(blocks[begin:end], hidden, ctx)
            if part is not None:
                aux = part if aux is None else aux + part
        return hidden, aux


def _run_blocks(
    blocks: list[nn.Module], hidden: torch.Tensor, ctx: ForwardContext
) -> tuple[torch.Tensor, torch.Tensor | None]:
    aux: torch.Tensor | None = None
    for block in blocks:
        result = block(hidden, ctx)
        if isinstance(result, tuple):
            hidden, part = result
            aux = part if aux is None else aux + part
        else:
            hidden = result
    return hidden, aux


def place(
    specs: dict[str, dict[str, ParamSpec]], pp: int, *, first: int | None = None, last: int | None = None
) -> list[range]:
    """Blocks of each stage, costed by the elements that a token is multiplied with."""

    def cost(part: str) -> float:
        return float(sum(s.numel for s in specs[part].values()))

    blocks = [cost(part) for part in specs if part.startswith("blocks.")]
    return partition(blocks, pp, first=first, last=last, head_cost=cost("head"))


def parts_of(stage: int, placement: list[range]) -> list[str]:
    """Names of a stage's parts, in order."""
    parts = ["embed"] if stage == 0 else []
    parts += [f"blocks.{i}" for i in placement[stage]]
    return parts + (["head"] if stage == len(placement) - 1 else [])


def _tie_holders(specs: dict[str, dict[str, ParamSpec]], placement: list[range]) -> dict[str, tuple[int, ...]]:
    holders: dict[str, set[int]] = {}
    for stage in range(len(placement)):
        for part in parts_of(stage, placement):
            for name, spec in specs[part].items():
                if spec.tie is not None:
                    holders.setdefault(name, set()).add(stage)
    return {name: tuple(sorted(stages)) for name, stages in sorted(holders.items())}
