"""Cross entropy over a split vocabulary against plain torch: numbers by hand, ranks, precision, memory, bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.mesh.collectives import Axis
from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.tensor.loss import gather_vocab, vocab_parallel_cross_entropy
from megatron_lite.tensor.spec import TensorParallel
from megatron_lite.testing.ranks import run_ranks

ALONE = TensorParallel(Axis.single(), vocab_multiple=8)


def logits_of(tokens: int, columns: int, dtype: torch.dtype = torch.float64, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens * 1000 + columns)
    return (torch.randn(tokens, columns, dtype=torch.float64, generator=generator) * scale).to(dtype)


def padded_slice(full: torch.Tensor, tp: int, index: int, width: int) -> torch.Tensor:
    """A rank's columns of full logits; what pads them is large, so that it shows if it is used."""
    padded = torch.full((len(full), tp * width), 50.0, dtype=full.dtype)
    padded[:, : full.shape[1]] = full
    return padded[:, index * width : (index + 1) * width].contiguous()


def on_ranks(tp: int, width: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Loss and gradient of every case on this rank's columns, and the bytes moved."""
    done = []
    with ProcessMesh.open(Layout(tp=tp)) as mesh:
        parallel = TensorParallel(mesh.axis("tp"))
        for case in cases:
            full, options = case["logits"], case.get("options", {})
            logits = padded_slice(full, tp, mesh.coords.tp, width).requires_grad_()
            mesh.traffic.reset()
            loss = vocab_parallel_cross_entropy(logits, case["targets"], parallel, full.shape[1], **options)
            traffic = mesh.traffic.as_dict()
            (loss * case.get("factor", 1.0)).backward()
            whole = gather_vocab(logits, parallel, full.shape[1])
            assert torch.equal(whole, full)
            again = vocab_parallel_cross_entropy(whole, case["targets"], ALONE, full.shape[1], **options)
            done.append({"loss": loss.detach(), "grad": logits.grad, "traffic": traffic, "gathered": again})
    return done


def joined(results: list[list[dict[str, Any]]], case: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradient of the full logits); padding has none, and the loss is the same bits on every rank."""
    assert all(torch.equal(r[case]["loss"], results[0][case]["loss"]) for r in results)
    grad = torch.cat([r[case]["grad"] for r in results], 1)
    assert not grad[:, columns:].any()
    return results[0][case]["loss"], grad[:, :columns]


# ---- numbers by hand


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_four_logits_by_hand(tp: int) -> None:
    """Smoothing over each rank's own columns would give 0.940190 and 0.540190 on the two ranks of tp 2."""
    four, gap = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[0.0, 1e4, -1e4, 0.0]])
    three, one = torch.tensor([3]), torch.tensor([1])
    cases = [
        {"logits": four, "targets": three},
        {"logits": four, "targets": three, "options": {"label_smoothing": 0.1}},
        {"logits": gap, "targets": three},
        {"logits": gap, "targets": one},
        {"logits": gap.bfloat16(), "targets": three, "options": {"label_smoothing": 0.1}},
        {"logits": four, "targets": torch.tensor([-100])},
        {"logits": four, "targets": torch.tensor([7]), "options": {"ignore_index": 7}},
    ]
    results = run_ranks(tp, on_ranks, tp, 4 // tp, cases)
    losses = [joined(results, i, 4)[0] for i in range(len(cases))]
    assert [round(float(x), 6) for x in losses[:2]] == [0.440190, 0.590190]
    assert [float(x) for x in losses[2:4]] == [1e4, 0.0]
    for i, case in enumerate(cases[:5]):
        logits = case["logits"].double().requires_grad_()
        smoothing = case.get("options", {}).get("label_smoothing", 0.0)
        expected = F.cross_entropy(logits, case["targets"], label_smoothing=smoothing, reduction="sum")
        expected.backward()
        loss, grad = joined(results, i, 4)
        assert torch.isfinite(loss) and torch.isfinite(grad).all()
        expected = expected.detach()
        assert abs(float((loss - expected).detach())) <= 1e-6 * max(float(expected.detach()), 1.0)
        assert grad.dtype == case["logits"].dtype
        assert (grad.double() - logits.grad).abs().max() <= (4e-3 if grad.dtype == torch.bfloat16 else 1e-7)
    for i in (5, 6):
        loss, grad = joined(results, i, 4)
        assert float(loss) == 0.0 and not grad.any()
    for result in results:  # logits that were gathered before are not summed again
        for case in result:
            assert torch.allclose(case["gathered"].detach(), case["loss"], rtol=1e-6)


# ---- ranks


@pytest.mark.parametrize(("tp", "width"), [(1, 64), (2, 32), (4, 16), (4, 32), (3, 21)])
def test_split_vocabularies_agree_with_plain_torch(tp: int, width: int) -> None:
    """61 columns: the last rank has fewer true ones; at tp 4 and width 32 it has none."""
    full, generator = logits_of(20, 61), torch.Generator().manual_seed(0)
    targets = torch.randint(0, 61, (20,), generator=generator)
    targets[4] = -100
    mask = (torch.rand(20, generator=generator) < 0.7).float()
    cases = [
        {
            "logits": full,
            "targets": targets,
            "options": {"label_smoothing": s, "loss_mask": m},
            "factor": 1.7,
        }
        for s in (0.0, 0.2)
        for m in (None, mask)
    ]
    results = run_ranks(tp, on_ranks, tp, width, cases)
    for i, case in enumerate(cases):
        logits, options = full.clone().requires_grad_(), case["options"]
        losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=options["label_smoothing"])
        expected = (losses * (1.0 if options["loss_mask"] is None else mask)).sum()
        (expected * 1.7).backward()
        loss, grad = joined(results, i, 61)
        assert abs(float((loss - expected).detach())) <= 1e-12 * float(expected.detach())
        assert (grad - logits.grad).abs().max() <= 1e-12 * logits.grad.abs().max()
        rows = 3 if options["label_smoothing"] else 2
        moved = {"tp.all_reduce": {"calls": 2, "bytes": (1 + rows) * 20 * 8}}
        assert all(r[i]["traffic"] == ({} if tp == 1 else moved) for r in results)


# ---- one process


@settings(deadline=None)
@given(
    tokens=st.integers(1, 6),
    columns=st.integers(1, 9),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    scale=st.sampled_from([0.0, 1.0, 100.0]),
    data=st.data(),
)
def test_any_small_problem_agrees_with_plain_torch(
    tokens: int, columns: int, smoothing: float, scale: float, data: st.DataObject
) -> None:
    targets = torch.tensor(data.draw(st.lists(st.integers(0, columns - 1), min_size=tokens, max_size=tokens)))
    weights = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=tokens, max_size=tokens)))
    ours = logits_of(tokens, columns, scale=scale).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(ours, targets, ALONE, columns, weights, smoothing)
    expected = (F.cross_entropy(theirs, targets, reduction="none", label_smoothing=smoothing) * weights).sum()
    loss.backward()
    expected.backward()
    assert abs(float((loss - expected).detach())) <= 1e-12 * max(1.0, float(expected.detach()))
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_logits_are_widened_first(dtype: torch.dtype) -> None:
    """The loss is that of fp64 arithmetic on the rounded logits, to fp32's precision; the gradient is rounded once."""
    logits, targets = logits_of(64, 500, dtype), torch.arange(64)
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss = vocab_parallel_cross_entropy(ours, targets, ALONE, 500, label_smoothing=0.1)
    expected = F.cross_entropy(exact, targets, reduction="sum", label_smoothing=0.1)
    loss.backward()
    expected.backward()
    assert loss.dtype == torch.float32
    assert abs(float((loss - expected).detach())) <= 1e-6 * float(expected.detach())
    assert (ours.grad.double() - exact.grad).abs().max() <= torch.finfo(dtype).eps * exact.grad.abs().max() + 1e-6
    assert torch.equal(ours.detach(), logits)  # not overwritten


def test_padding_takes_part_when_it_is_told_to() -> None:
    """``--mask-padded-vocab off``: as if the vocabulary were the padded one, except that smoothing spreads over V."""
    parallel = TensorParallel(Axis.single(), mask_padded_vocab=False)
    ours, targets = logits_of(5, 8).requires_grad_(), torch.arange(5)
    theirs = ours.detach().clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(ours, targets, parallel, 6)
    expected = F.cross_entropy(theirs, targets, reduction="sum")
    loss.backward()
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-13)
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-14)
    assert ours.grad[:, 6:].all()


def test_tokens_that_do_not_count_may_hold_anything() -> None:
    logits = logits_of(3, 8).requires_grad_()
    targets, mask = torch.tensor([1, 9999, -100]), torch.tensor([1.0, 0.0, 1.0])
    loss = vocab_parallel_cross_entropy(logits, targets, ALONE, 8, mask)
    loss.backward()
    assert torch.allclose(loss, F.cross_entropy(logits[:1], targets[:1]))
    assert not logits.grad[1:].any()


def test_what_cannot_be_is_refused() -> None:
    logits = logits_of(3, 8)
    with pytest.raises(ValueError, match=r"target id 6 \(token 2 of the microbatch\) .* vocabulary of 6: .* 0 to 5"):
        vocab_parallel_cross_entropy(logits, torch.tensor([1, 2, 6]), ALONE, 6)
    with pytest.raises(ValueError, match=r"label smoothing 1.1 is not in \[0, 1\]"):
        vocab_parallel_cross_entropy(logits, torch.tensor([1, 2, 3]), ALONE, 6, label_smoothing=1.1)


def test_one_tensor_of_the_size_of_the_logits_is_kept_and_becomes_the_gradient() -> None:
    logits, targets = logits_of(32, 128, torch.float32).requires_grad_(), torch.arange(32)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = vocab_parallel_cross_entropy(logits, targets, ALONE, 128, torch.ones(32))
    large = [t for t in kept if t.numel() >= 32 * 128]
    assert len(large) == 1 and sum(t.numel() for t in kept) <= 32 * 128 + 6 * 32
    (grad,) = torch.autograd.grad(loss, logits)
    assert grad.data_ptr() == large[0].data_ptr()


def test_a_second_backward_is_refused_rather_than_wrong() -> None:
    logits = logits_of(3, 8).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([1, 2, 3]), ALONE, 8)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
