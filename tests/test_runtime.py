"""The runtime against one process: any number of microbatches, both schedules, evaluation, ties, reductions counted."""

from __future__ import annotations

import weakref
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from pipeline_toys import SEED, AuxGPT, Built, Reference, batch_of, build, gradient_error, microbatches, reference, tiny
from torch import nn

from megatron_lite.mesh.layout import Layout
from megatron_lite.model.gpt import GPT
from megatron_lite.model.protocol import ForwardContext
from megatron_lite.optim.sharded import Optimizer
from megatron_lite.pipeline.stage import Recompute
from megatron_lite.testing.ranks import run_ranks

ROWS = 24  # divisible by 1, 2, 3, 4, 8 microbatches of any of the sizes below, over one or two data-parallel ranks
NEVER, ONE = torch.tensor(False), torch.tensor(1.0, dtype=torch.float64)


def check(built: Built, want: Reference, got: Any, where: object) -> None:
    """Gradients and sums of this rank agree with one process (sums of the last stage are those of its dp rank only)."""
    error = gradient_error(built, want)
    assert error <= 1.0, (where, error)
    sums = torch.zeros(2, dtype=torch.float64)
    if got.loss_sum is not None:
        sums[0] = got.loss_sum
    if got.aux_sum is not None:
        sums[1] = got.aux_sum
    sums /= built.mesh.layout.tp
    built.mesh.axis("world").all_reduce(sums).wait()
    assert abs(float(sums[0]) - want.loss) <= 1e-12 * abs(want.loss), (where, sums, want.loss)
    assert abs(float(sums[1]) - want.aux) <= 1e-12 * max(abs(want.aux), 1e-3), (where, sums, want.aux)


# --- any number of microbatches, in every shape of job ---


def _all_counts(layout: Layout, counts: list[int], want: Reference, options: dict[str, Any], config: Any) -> None:
    for schedule in ("1f1b", "gpipe"):
        built = build(layout, config, schedule=schedule, **options)
        for m in counts:
            size = ROWS // (m * layout.dp)
            got = built.train(microbatches(ROWS, size, layout.dp, built.mesh.coords.dp), scales=[1 / (8 * size)] * m)
            assert (got.loss_sum is not None) == (built.mesh.coords.pp == layout.pp - 1)
            assert got.tokens == sum(b.valid_tokens for b in microbatches(ROWS, size, layout.dp, built.mesh.coords.dp))
            # Microbatches of other sizes have other scales; bring the sums to those of the reference, whose size is 1.
            for flat in built.gradients.gradients:
                flat.mul_(size)
            scaled = type(got)(
                None if got.loss_sum is None else got.loss_sum * size,
                None if got.aux_sum is None else got.aux_sum * size,
                got.tokens,
            )
            check(built, want, scaled, (layout.describe(), schedule, m))
        built.close()


CASES: list[tuple[Layout, dict[str, Any]]] = [
    (Layout(), {}),
    (Layout(pp=2), {}),
    (Layout(pp=2), {"first": 1, "recompute": Recompute("uniform", 2)}),
    (Layout(pp=4), {"definition": AuxGPT}),
    (Layout(pp=2, dp=2), {"zero_stage": 1}),
    (Layout(tp=2, pp=2), {"sequence_parallel": True, "definition": AuxGPT, "recompute": Recompute("block", 1)}),
]


@pytest.mark.parametrize(
    ("layout", "options"), CASES, ids=lambda x: x.describe() if isinstance(x, Layout) else "-".join(x)
)
def test_gradients_are_those_of_one_process(layout: Layout, options: dict[str, Any]) -> None:
    want = reference(tiny(), microbatches(ROWS, 1), definition=options.get("definition", GPT))
    counts = [m for m in (1, 2, 3, 4, 8) if ROWS % (m * layout.dp) == 0]
    run_ranks(layout.world_size, _all_counts, layout, counts, want, options, tiny())


def _with_dropout(want: Reference) -> None:
    for recompute in (None, Recompute("uniform", 2), Recompute("block", 1)):
        built = build(Layout(pp=2), tiny(hidden_dropout=0.3, attention_dropout=0.3), recompute=recompute)
        check(built, want, built.train(microbatches(3, 1), step=5), recompute)
        built.close()


def test_masks_are_those_of_one_process() -> None:
    """Dropout on: masks are keyed, so stages and recompute change no gradient."""
    config = tiny(hidden_dropout=0.3, attention_dropout=0.3)
    want = reference(config, microbatches(3, 1), step=5)
    other = reference(config, microbatches(3, 1), step=6)
    assert not torch.equal(want.gradients["head.norm.weight"], other.gradients["head.norm.weight"])
    run_ranks(2, _with_dropout, want)


# --- microbatches that differ ---


def _uneven(layout: Layout, want: Reference, lengths: list[int], sequence_parallel: bool) -> None:
    batches = [batch_of([i], n, first_row=i) for i, n in enumerate(lengths)]
    for schedule in ("1f1b", "gpipe"):
        built = build(layout, tiny(), schedule=schedule, sequence_parallel=sequence_parallel)
        check(built, want, built.train(batches), (schedule, lengths))
        built.close()


@pytest.mark.parametrize(("layout", "sequence_parallel"), [(Layout(pp=4), False), (Layout(tp=2, pp=2), True)])
def test_microbatches_of_different_lengths(layout: Layout, sequence_parallel: bool) -> None:
    """Shapes follow from the batch, which every rank reads: nothing is negotiated, nothing hangs."""
    lengths = [6, 4, 10, 2] if sequence_parallel else [7, 5, 9, 3, 3]
    want = reference(tiny(), [batch_of([i], n, first_row=i) for i, n in enumerate(lengths)])
    run_ranks(layout.world_size, _uneven, layout, want, lengths, sequence_parallel)


def _valid_counts(layout: Layout, counts: list[int], want: Reference) -> None:
    built = build(layout, tiny())
    batches = [batch_of([i], valid=n) for i, n in enumerate(counts)]
    mine = batches[built.mesh.coords.dp :: layout.dp]
    got = built.train(mine)
    check(built, want, got, counts)
    assert got.tokens == sum(b.valid_tokens for b in mine)
    built.close()


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(dp=2), Layout(pp=2, dp=2)], ids=Layout.describe)
@pytest.mark.parametrize("counts", [[4, 1], [4, 0], [0, 0, 1, 5]], ids=str)
def test_each_valid_token_weighs_the_same(layout: Layout, counts: list[int]) -> None:
    """Sums are sums over tokens, however they lie: as microbatches, on data-parallel ranks, none on a rank at all."""
    want = reference(tiny(), [batch_of([i], valid=n) for i, n in enumerate(counts)])
    run_ranks(layout.world_size, _valid_counts, layout, counts, want)


# --- tied tensors ---


def _tied(want: Reference) -> None:
    layout, config = Layout(pp=2, dp=2), tiny()
    for zero, overlap, schedule in product((0, 1), (False, True), ("1f1b", "gpipe")):
        built = build(layout, config, schedule=schedule, zero_stage=zero, overlap=overlap)
        check(built, want, built.train(microbatches(6, 1, 2, built.mesh.coords.dp)), (zero, overlap, schedule))
        optimizer = Optimizer(built.gradients, built.parallel)
        for step in range(10 if overlap else 0):
            built.train(microbatches(6, 1, 2, built.mesh.coords.dp, first=6 * step))
            optimizer.step(0.01, 0.1, ONE, NEVER, update=step + 1)
        tied = built.stage.parameters_by_name()["embed.tokens.weight"]
        copies = built.mesh.axis("world").gather_json(tied.detach().view(-1).tolist())
        assert all(copy == copies[0] for copy in copies)  # JSON keeps every bit of a float
        built.close()


def test_tied_embeddings_on_the_first_and_the_last_stage() -> None:
    want = reference(tiny(), microbatches(6, 1))
    assert float(want.gradients["embed.tokens.weight"].abs().max()) > 0
    run_ranks(4, _tied, want)


# --- one reduction for each bucket and step ---


def _reductions(want: dict[int, Reference]) -> None:
    layout = Layout(pp=2, dp=2)
    for bucket, zero, overlap in product((50, 10**9), (0, 1), (False, True)):
        built = build(layout, tiny(), bucket_size=bucket, zero_stage=zero, overlap=overlap)
        for m, reference_ in want.items():
            built.mesh.traffic.reset()
            got = built.train(microbatches(2 * m, 1, 2, built.mesh.coords.dp))
            kind = "reduce_scatter" if zero else "all_reduce"
            counts = {k: calls for (axis, k), (calls, _) in built.mesh.traffic.counts.items() if axis == "dp_cp"}
            assert counts == {kind: len(built.gradients.buckets)}, (bucket, m, counts)
            assert (len(built.gradients.buckets) > 15) == (bucket == 50)
            check(built, reference_, got, (bucket, zero, overlap, m))
            whole = torch.cat([g.view(-1) for g in built.gradients.gradients]) if not zero else torch.zeros(1)
            both = built.mesh.axis("dp").gather_json(whole.tolist())
            assert both[0] == both[1]
        built.close()


def test_each_bucket_is_reduced_once_in_a_step() -> None:
    """Data-parallel ranks with different data, 1, 2 and 5 microbatches, tiny and huge buckets, sharded or not."""
    run_ranks(4, _reductions, {m: reference(tiny(), microbatches(2 * m, 1)) for m in (1, 2, 5)})


class Recording:
    """Gradients that write down what they are told, over those that do it."""

    def __init__(self, built: Built) -> None:
        self.inner, self.log = built.gradients, []  # type: ignore[var-annotated]

    def last_microbatch(self) -> None:
        self.log.append("last")
        self.inner.last_microbatch()

    def finish(self) -> None:
        self.log.append("finish")
        self.inner.finish()


def _order() -> list[list[str]]:
    logs = []
    for schedule, m in (("1f1b", 3), ("gpipe", 3), ("1f1b", 1)):
        built = build(Layout(pp=2), tiny(), schedule=schedule)
        recording, log = Recording(built), []
        forward, backward = built.stage.forward, torch.autograd.backward

        def forward_(*args: Any, log: list[str] = log, forward: Any = forward) -> Any:
            log.append("F")
            return forward(*args)

        def backward_(*args: Any, log: list[str] = log, backward: Any = backward) -> None:
            log.append("B")
            backward(*args)

        recording.log = log
        built.stage.forward = forward_  # type: ignore[method-assign]
        torch.autograd.backward = backward_
        built.gradients.zero()
        try:
            built.runtime.train(microbatches(m, 1), seed=1, step=0, scales=[1.0] * m, gradients=recording)
        finally:
            torch.autograd.backward = backward
        logs.append(log)
        built.close()
    return logs


def test_sums_are_armed_before_the_last_backward_and_only_then() -> None:
    first, last = run_ranks(2, _order)
    assert first[0] == ["F", "F", "B", "F", "B", "last", "B", "finish"]
    assert last[0] == ["F", "B", "F", "B", "F", "last", "B", "finish"]
    assert first[1] == last[1] == ["F", "F", "F", "B", "B", "last", "B", "finish"]
    assert first[2] == last[2] == ["F", "last", "B", "finish"]


# --- evaluation ---


def _evaluations(layout: Layout, rows: int, want: float) -> None:
    config = tiny(hidden_dropout=0.3, attention_dropout=0.3)
    built = build(layout, config)

    def loss(batches: list[Any]) -> float:
        sums = built.runtime.evaluate(batches)
        total = torch.zeros(2, dtype=torch.float64)
        if sums.loss_sum is not None:
            total[0], total[1] = sums.loss_sum, sums.tokens
        built.mesh.axis("world").all_reduce(total).wait()
        return float(total[0] / total[1])

    def close(value: float) -> bool:
        return abs(value - want) <= 1e-12 * want

    dp, index = layout.dp, built.mesh.coords.dp
    for size in (1, 2, 3, 6):
        assert close(loss(microbatches(rows, size, dp, index))), size
    built.train(microbatches(8, 2, dp, index))
    before = [g.clone() for g in built.gradients.gradients]
    weights = [w.clone() for w in built.gradients.weights]
    assert close(loss(microbatches(rows, 3, dp, index))) and close(loss(microbatches(rows, 1, dp, index)))
    assert all(torch.equal(a, b) for a, b in zip(before, built.gradients.gradients, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weights, built.gradients.weights, strict=True))
    built.train(microbatches(8, 2, dp, index))  # the same step again: nothing of the evaluations is left
    assert all(torch.equal(a, b) for a, b in zip(before, built.gradients.gradients, strict=True))
    assert close(loss(microbatches(rows, 2, dp, index)))
    built.close()


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(pp=2, dp=2)], ids=Layout.describe)
def test_evaluation(layout: Layout) -> None:
    """Any microbatch size and number, twice in a row, around training steps: one value, and no trace."""
    rows = 12
    batches = microbatches(rows, 1)
    sums = reference(tiny(), batches, training=False, scales=[1.0] * rows)
    want = sums.loss / sum(b.valid_tokens for b in batches)
    run_ranks(layout.world_size, _evaluations, layout, rows, want)


def _logits() -> list[float] | None:
    built = build(Layout(pp=2), tiny())
    out = built.runtime.infer(ForwardContext(batch_of([0, 1])))
    built.close()
    return None if out is None else out.reshape(-1).tolist()


def test_logits_come_from_the_last_stage() -> None:
    from whole_model import make_whole

    from megatron_lite.model.gpt import GPT

    want = make_whole(GPT, tiny(), seed=SEED).logits(batch_of([0, 1]))
    first, last = run_ranks(2, _logits)
    assert first is None
    torch.testing.assert_close(torch.tensor(last, dtype=torch.float64).view(want.shape), want, rtol=1e-12, atol=1e-12)


# --- what is kept ---


class Saved:
    """What autograd holds in place of a saved tensor, marked with its forward pass."""

    def __init__(self, tensor: torch.Tensor, number: int) -> None:
        self.tensor, self.number = tensor, number


def _kept() -> list[tuple[int, int]]:
    found = []
    for schedule in ("1f1b", "gpipe"):
        built = build(Layout(pp=4), tiny(), schedule=schedule)
        saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        outputs: list[weakref.ref[Any]] = []
        peaks = [0, 0]
        forward = built.stage.forward

        def pack(tensor: torch.Tensor, saved: Any = saved, outputs: Any = outputs) -> Saved:
            token = Saved(tensor, len(outputs))
            saved.add(token)
            return token

        def watched(
            *args: Any, forward: Any = forward, saved: Any = saved, outputs: Any = outputs, peaks: Any = peaks
        ) -> Any:
            peaks[1] = max(peaks[1], sum(ref() is not None for ref in outputs))
            out = forward(*args)
            outputs.append(weakref.ref((out.loss_sum if out.hidden is None else out.hidden).untyped_storage()))
            peaks[0] = max(peaks[0], len({token.number for token in saved}))
            return out

        built.stage.forward = watched  # type: ignore[method-assign]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda token: token.tensor):
            built.train(microbatches(8, 1))
        assert len(outputs) == 8
        found.append((peaks[0], peaks[1]))
        built.close()
    return found


def test_a_stage_keeps_few_graphs_and_one_output() -> None:
    """1F1B keeps the graphs of pp - stage microbatches, GPipe all; an output is kept until the next one goes."""
    for stage, ((kept, outputs), (all_kept, all_outputs)) in enumerate(run_ranks(4, _kept)):
        assert (kept, all_kept) == (4 - stage, 8)
        if stage < 3:
            assert outputs == all_outputs == 1


# --- when things go wrong ---


class HalfPrecisionBlock(nn.Module):
    def forward(self, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return hidden.float()


def test_a_failed_step_leaves_no_trace() -> None:
    config, want = tiny(), reference(tiny(), microbatches(4, 1))
    built = build(Layout(), config, overlap=True)
    for bad in range(4):
        batches = microbatches(4, 1)
        batches[bad].tokens[2] = config.vocab_size
        with pytest.raises(ValueError, match="outside the vocabulary"):
            built.train(batches)
        check(built, want, built.train(microbatches(4, 1)), bad)


def _wrong_message() -> str:
    built = build(Layout(pp=2), tiny())
    if built.mesh.coords.pp == 1:
        return ""
    built.stage.blocks["0"] = HalfPrecisionBlock()
    built.stage.blocks["1"] = HalfPrecisionBlock()
    with pytest.raises(ValueError) as error:
        built.train(microbatches(2, 1))
    return str(error.value)


def test_hidden_states_of_another_dtype_are_told() -> None:
    text = run_ranks(2, _wrong_message)[0]
    assert "stage 0" in text and "float32" in text and "float64" in text


def test_plans_are_made_once() -> None:
    built = build(Layout(), tiny())
    made: Counter[str] = Counter()
    import megatron_lite.pipeline.runtime as module

    verify = module.verify
    module.verify = lambda plan: made.update([plan.schedule]) or verify(plan)  # type: ignore[assignment]
    try:
        for _ in range(3):
            built.train(microbatches(2, 1))
            built.runtime.evaluate(microbatches(3, 1))
    finally:
        module.verify = verify
    assert made == {"1f1b": 1, "forward": 1}
