"""Stages: every part once under its global name, ties shared, recompute without an effect on numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from foreign.plain_linear import PlainConfig, PlainModel
from pipeline_toys import SEED, AuxGPT, batch_of, tiny
from torch import nn
from whole_model import make_whole

from megatron_lite.mesh.collectives import Axis
from megatron_lite.mesh.layout import Layout
from megatron_lite.model.gpt import GPT
from megatron_lite.model.protocol import ForwardContext, ModelDefinition, full_specs, tie
from megatron_lite.pipeline import stage as module
from megatron_lite.pipeline.stage import Recompute, Stage, recompute_units, tie_holders
from megatron_lite.tensor.spec import TensorParallel


def parallel(**changes: Any) -> TensorParallel:
    return TensorParallel(Axis.single(), dtype=torch.float64, vocab_multiple=4, **changes)


def stages(definition: ModelDefinition, pp: int, **options: Any) -> list[Stage]:
    return [Stage.build(definition, Layout(pp=pp), i, seed=SEED, **options) for i in range(pp)]


def run(parts: list[Stage], ctx: ForwardContext) -> tuple[torch.Tensor, float]:
    """(loss sum, sum of the auxiliary losses) of a batch through all stages, in one graph."""
    hidden, aux = None, 0.0
    for part in parts:
        out = part(hidden, ctx)
        hidden, aux = out.hidden, aux + (0.0 if out.aux_sum is None else out.aux_sum)
        assert (out.loss_sum is None) == (part is not parts[-1]) and (out.hidden is None) == (part is parts[-1])
    return out.loss_sum, aux  # type: ignore[return-value]


@pytest.mark.parametrize(("depth", "pp"), [(5, 2), (6, 2), (7, 3), (4, 4), (3, 1)])
def test_every_parameter_once_under_its_global_name(depth: int, pp: int) -> None:
    """Also where the depth does not divide: nothing is dropped, and no stage is empty."""
    config = tiny(num_layers=depth)
    whole = make_whole(GPT, config, seed=SEED, vocab_multiple=4)
    parts = stages(GPT(config, parallel()), pp)
    held: dict[str, list[nn.Parameter]] = {}
    for part in parts:
        assert len(part.blocks) >= 1
        local = {"embed.tokens.weight" if n == "head.output.weight" else n for n, _ in part.named_parameters()}
        assert local == part.parameters_by_name().keys()
        for name, parameter in part.parameters_by_name().items():
            held.setdefault(name, []).append(parameter)
    assert held.keys() == whole.by_name.keys()
    for name, copies in held.items():
        assert len(copies) == (2 if name == "embed.tokens.weight" and pp > 1 else 1)
        assert all(torch.equal(copy, whole.by_name[name]) for copy in copies)
    assert [i for part in parts for i in map(int, part.blocks)] == list(range(depth))


def test_first_and_last_stage_by_hand() -> None:
    definition = GPT(tiny(num_layers=6), parallel())
    assert [len(part.blocks) for part in stages(definition, 3, first=1)] == [1, 3, 2]
    assert [len(part.blocks) for part in stages(definition, 3, first=1, last=1)] == [1, 4, 1]
    with pytest.raises(ValueError, match="6 of 6 blocks leave 0 for 2 other stages"):
        stages(definition, 3, first=6)
    with pytest.raises(ValueError, match="6 blocks cannot fill 7 pipeline stages"):
        stages(definition, 7)


def test_a_large_head_takes_blocks_off_the_last_stage() -> None:
    block = sum(p.numel() for p in GPT(tiny(), parallel()).make_block(0).parameters())
    config = tiny(num_layers=8, vocab_size=2 * block // tiny().hidden_size)
    assert [len(part.blocks) for part in stages(GPT(config, parallel()), 4)] == [2, 2, 3, 1]


# --- ties ---


def test_tied_embeddings() -> None:
    (alone,) = stages(GPT(tiny(), parallel()), 1)
    assert alone.head.output.weight is alone.embed.tokens.weight  # type: ignore[union-attr]
    assert alone.tie_holders == {"embed.tokens.weight": (0,)}
    for part in stages(GPT(tiny(), parallel()), 3):
        assert part.tie_holders == {"embed.tokens.weight": (0, 2)}
    for part in stages(GPT(tiny(untie_embeddings_and_output_weights=True), parallel()), 2):
        assert part.tie_holders == {}


class SharedBlocks(GPT):
    """All blocks share one MLP matrix; blocks 1 and 3 another one."""

    def make_block(self, index: int) -> nn.Module:
        block = super().make_block(index)
        tie(block.mlp.down.weight, "blocks.0.mlp.down.weight")
        if index in (1, 3):
            tie(block.mlp.up.weight, "blocks.1.mlp.up.weight")
        return block


def test_shared_blocks() -> None:
    definition = SharedBlocks(tiny(), parallel())
    two = stages(definition, 2)
    want = {
        "blocks.0.mlp.down.weight": (0, 1),
        "blocks.1.mlp.up.weight": (0, 1),
        "embed.tokens.weight": (0, 1),
    }
    assert two[0].tie_holders == two[1].tie_holders == want
    assert two[1].blocks["2"].mlp.down.weight is two[1].blocks["3"].mlp.down.weight  # type: ignore[union-attr]
    assert "blocks.2.mlp.down.weight" not in two[1].parameters_by_name()
    assert tie_holders(full_specs(definition), [range(i, i + 1) for i in range(4)]) == {
        "blocks.0.mlp.down.weight": (0, 1, 2, 3),
        "blocks.1.mlp.up.weight": (1, 3),
        "embed.tokens.weight": (0, 3),
    }
    whole = make_whole(SharedBlocks, tiny(), seed=SEED)
    loss, _ = run(two, ForwardContext(batch_of([0, 1])))
    torch.testing.assert_close(loss, whole.loss(batch_of([0, 1])), rtol=1e-12, atol=0)


class TiedAcrossAxes(GPT):
    def make_block(self, index: int) -> nn.Module:
        block = super().make_block(index)
        tie(block.mlp.up.weight if index else block.mlp.down.weight, "blocks.0.mlp.down.weight")
        return block


def test_a_tie_of_two_ways_to_split_is_refused() -> None:
    axis = Axis("tp", (0, 1), 0, group="none")
    square = tiny(ffn_hidden_size=16)
    definition = TiedAcrossAxes(square, TensorParallel(axis, device=torch.device("meta"), vocab_multiple=4))
    with pytest.raises(
        ValueError, match=r"blocks.0.mlp.down.weight is tied between parameters that are split differently"
    ):
        Stage.build(definition, Layout(tp=2), 0)


def test_a_team_model_of_ordinary_layers() -> None:
    definition = PlainModel(PlainConfig(), parallel())
    whole = make_whole(PlainModel, PlainConfig(), seed=SEED)
    parts = stages(definition, 3)
    for part in parts:
        for name, parameter in part.parameters_by_name().items():
            assert torch.equal(parameter, whole.by_name[name])
    loss, _ = run(parts, ForwardContext(batch_of([0, 1])))
    torch.testing.assert_close(loss, whole.loss(batch_of([0, 1])), rtol=1e-12, atol=0)


# --- recompute ---


def test_units() -> None:
    assert recompute_units(None, 5) == [(0, 5, False)]
    assert recompute_units(Recompute(), 3) == [(0, 1, True), (1, 2, True), (2, 3, True)]
    assert recompute_units(Recompute("uniform", 2), 5) == [(0, 2, True), (2, 4, True), (4, 5, True)]
    assert recompute_units(Recompute("block", 2), 5) == [(0, 1, True), (1, 2, True), (2, 5, False)]
    assert recompute_units(Recompute("block", 9), 2) == [(0, 1, True), (1, 2, True)]
    assert recompute_units(Recompute("block"), 2) == [(0, 1, True), (1, 2, True)]
    with pytest.raises(ValueError, match="recompute-method every: use uniform or block"):
        Recompute("every")
    with pytest.raises(ValueError, match="recompute-num-layers 0"):
        Recompute("block", 0)


def saved_bytes(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call returns, and the bytes of distinct storages that autograd saved in it."""
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return call(), sum(seen.values())


def test_recompute_changes_no_bit_and_saves_memory() -> None:
    """Dropout on: its masks come from their address, so the second pass has those of the first."""
    definition = AuxGPT(tiny(hidden_dropout=0.2, attention_dropout=0.2), parallel())
    ctx = ForwardContext(batch_of(range(4)), SEED, 3, training=True)
    results, sizes, calls = {}, {}, {}
    for recompute in (None, Recompute(), Recompute("uniform", 3), Recompute("block", 2), Recompute("block")):
        (alone,) = stages(definition, 1, recompute=recompute)
        count = [0]
        for block in alone.blocks.values():
            block.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        (loss, aux), size = saved_bytes(lambda alone=alone: run([alone], ctx))  # type: ignore[misc]
        (loss + aux).backward()
        results[recompute] = {"": loss.detach()} | {n: p.grad for n, p in alone.parameters_by_name().items()}
        sizes[recompute], calls[recompute] = size, count[0]
    for recompute, got in results.items():
        assert all(torch.equal(got[name], value) for name, value in results[None].items()), recompute
    assert list(calls.values()) == [4, 8, 8, 6, 8]
    assert sizes[Recompute("block", 2)] < 0.65 * sizes[None]
    assert sizes[Recompute()] < 0.35 * sizes[None] and sizes[Recompute("block")] == sizes[Recompute()]


def test_nothing_is_computed_again_without_gradients() -> None:
    (alone,) = stages(GPT(tiny(), parallel()), 1, recompute=Recompute())
    count = [0]
    for block in alone.blocks.values():
        block.register_forward_pre_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    with torch.no_grad():
        loss, _ = run([alone], ForwardContext(batch_of([0])))
    assert count == [4] and not loss.requires_grad


class DrawnDropout(GPT):
    def make_block(self, index: int) -> nn.Module:
        block = super().make_block(index)
        block.extra = nn.Dropout(0.1)
        return block


def test_drawn_masks_do_not_go_with_recompute() -> None:
    definition = DrawnDropout(tiny(), parallel())
    stages(definition, 1)
    with pytest.raises(
        ValueError, match=r"blocks.0.extra, .* of torch would drop other elements in the second forward"
    ):
        stages(definition, 1, recompute=Recompute())


# --- the rest ---


def test_auxiliary_sums_of_a_stage() -> None:
    definition = AuxGPT(tiny(), parallel())
    batch = batch_of([0, 1])
    parts = stages(definition, 4)
    with torch.no_grad():
        hidden, sums = None, []
        for part in parts:
            out = part(hidden, ForwardContext(batch))
            hidden = out.hidden
            sums.append(out.aux_sum)
    assert [x is None for x in sums] == [True, False, True, False]
    _, aux = make_whole(AuxGPT, tiny(), seed=SEED).hidden(ForwardContext(batch))
    assert abs(float(sums[1] + sums[3]) - float(aux.detach())) <= 1e-12 * float(aux.detach())


def test_nothing_is_drawn_for_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("initial weights were drawn")

    monkeypatch.setattr(module, "fill", refuse)
    stages(GPT(tiny(), parallel()), 2, initialise=False)
    with pytest.raises(AssertionError, match="drawn"):
        stages(GPT(tiny(), parallel()), 2)
