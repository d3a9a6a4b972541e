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

    Raises:
        ValueError: another method, or fewer than 1 block.
    """

    method: str = "uniform"
    blocks: int | None = None

    def __post_init__(self) -> None:
        if self.method not in ("uniform", "block"):
            raise ValueError(f"recompute-method {self.method}: use uniform or block")
        if self.blocks is not None and self.blocks < 1:
            raise ValueError(f"recompute-num-layers {self.blocks}: at least 1")


def recompute_units(recompute: Recompute | None, count: int) -> list[tuple[int, int, bool]]:
    """(first, end, whether computed again) of the units in which a stage's ``count`` blocks run."""
    if recompute is None:
        return [(0, count, False)]
    if recompute.method == "uniform":
        unit = recompute.blocks or 1
        return [(i, min(i + unit, count), True) for i in range(0, count, unit)]
    again = count if recompute.blocks is None else min(recompute.blocks, count)
    return [(i, i + 1, True) for i in range(again)] + ([(again, count, False)] if again < count else [])


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

    Its modules are named as in the whole model (``embed``, ``blocks.7``, ``head``), and so are its parameters.

    Attributes:
        index, count: this stage and how many there are.
        placement: blocks of every stage.
        specs: of every tensor of the whole model, by global name (a tied one once).
        tie_holders: for every tied tensor of the model, the stages that hold it.
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
        self.specs = {name: spec for held in specs.values() for name, spec in held.items()}
        self.tie_holders = tie_holders(specs, placement)
        self._share_ties()
        if recompute is not None:
            self._refuse_drawn_masks()

    def persistent_buffers(self) -> dict[str, torch.Tensor]:
        """What its modules have registered as state besides parameters (not their caches: ``persistent=False``)."""
        stored = self.state_dict().keys()
        return {name: buffer for name, buffer in self.named_buffers() if name in stored}

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
        """Build one stage of the model.

        Args:
            definition, layout: of the model and the job.
            index: which stage.
            seed: of the initial weights.
            recompute: which blocks are computed again in backward.
            first, last: blocks on the first and the last stage, where given by hand.
            initialise: fill the parameters; otherwise they are left as memory was (a checkpoint will be loaded).

        Raises:
            ValueError: the blocks do not fill the stages, or the model does not go with ``recompute``.
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
                shared = first.setdefault(parameter.spec.tie, parameter)  # type: ignore[attr-defined]
                if shared.shape != parameter.shape:  # one full shape, but split over tp in two ways
                    raise ValueError(
                        f"{parameter.spec.tie} is tied between parameters that are split differently: "  # type: ignore[attr-defined]
                        f"{tuple(shared.shape)} and {tuple(parameter.shape)} on this rank"
                    )
                module._parameters[key] = shared

    def _refuse_drawn_masks(self) -> None:
        """torch's dropout draws its masks: the second pass of a recomputed block would draw others."""
        drawn = [n for n, m in self.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
        if drawn:
            raise ValueError(
                f"recompute-granularity full: {', '.join(drawn)} of torch would drop other elements in the second forward "
                f"pass; use megatron_lite.tensor.random.dropout, which is keyed, or no recompute"
            )

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
        for begin, end, again in recompute_units(self.recompute, len(blocks)):
            if again and torch.is_grad_enabled():  # masks are keyed, so no generator's state has to be kept
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
    """Blocks of each stage.

    A part costs as many operations for a token as its parameters have elements, a tied matrix in the head too; a lookup
    in the embedding costs nothing. (Attention's products over the sequence are left out: the same for each block, and a small
    part until sequences are long.)

    Args:
        specs: of :func:`megatron_lite.model.protocol.full_specs`.
        first, last: blocks on the first and the last stage, where given by hand.

    Raises:
        ValueError: the blocks do not fill the stages.
    """

    def cost(part: str) -> int:
        return sum(spec.numel for spec in specs[part].values())

    blocks = [cost(part) for part in specs if part.startswith("blocks.")]
    return partition(blocks, pp, first=first, last=last, head_cost=cost("head"))


def parts_of(stage: int, placement: list[range]) -> list[str]:
    """Names of a stage's parts, in order."""
    parts = ["embed"] if stage == 0 else []
    parts += [f"blocks.{i}" for i in placement[stage]]
    return parts + (["head"] if stage == len(placement) - 1 else [])


def tie_holders(specs: dict[str, dict[str, ParamSpec]], placement: list[range]) -> dict[str, tuple[int, ...]]:
    """The stages that hold each tied tensor, by its name: arithmetic, the same on every rank."""
    holders: dict[str, set[int]] = {}
    for stage in range(len(placement)):
        for part in parts_of(stage, placement):
            for name, spec in specs[part].items():
                if spec.tie is not None:
                    holders.setdefault(name, set()).add(stage)
    return {name: tuple(sorted(stages)) for name, stages in sorted(holders.items())}
