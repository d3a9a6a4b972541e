"""Attention by document: every kernel against a brute-force mask, borders that do not leak, and the dispatch."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.ops.attention import ATTENTION, Documents, attention, cached_attention, reference
from megatron_lite.ops.op import Problem, choose, target

ROWS = [[5, 6, 5, 1, 1, 7], [4, 4, 4], [9], [1], [1, 1, 1], [2, 3, 2, 3, 3]]
HEADS = [(4, 4), (4, 2), (6, 1)]
KERNELS = ["reference", "sdpa"]  # what a CPU can run


def documents_of(lengths: list[int]) -> Documents:
    total = sum(lengths)
    offsets = torch.full((total + 1,), total, dtype=torch.int32)
    offsets[: len(lengths) + 1] = torch.tensor([0, *lengths]).cumsum(0)
    return Documents(offsets, len(lengths), max(lengths))


def random_qkv(
    total: int, heads: int, kv_heads: int, dim: int = 8, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((total, heads, dim), (total, kv_heads, dim), (total, kv_heads, dim))
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for s in shapes]


def brute_force(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float) -> torch.Tensor:
    """One T x T mask, one head at a time."""
    total, heads, _ = q.shape
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    at = torch.arange(total)
    visible = (owner[:, None] == owner[None]) & (at[:, None] >= at[None])
    outputs = []
    for head in range(heads):
        kv = head // (heads // k.shape[1])
        scores = (q[:, head] @ k[:, kv].T * scale).masked_fill(~visible, float("-inf"))
        outputs.append(scores.softmax(-1) @ v[:, kv])
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("lengths", ROWS, ids=str)
def test_output_and_gradients_equal_a_masked_softmax(kernel, heads, kv_heads, lengths):
    q, k, v = random_qkv(sum(lengths), heads, kv_heads)
    expected = brute_force(q, k, v, lengths, 0.3)
    toward = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), toward)
    out = attention(q, k, v, documents_of(lengths), scale=0.3, kernel=kernel)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    for got, want in zip(torch.autograd.grad(out, (q, k, v), toward), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_document_does_not_feel_its_neighbours(kernel, dtype):
    """Bitwise the same when another document's tokens change, and the same as alone."""
    lengths = [6, 9, 6, 11]
    q, k, v = random_qkv(sum(lengths), 4, 2, dtype=dtype)
    other = [t.clone() for t in random_qkv(sum(lengths), 4, 2, dtype=dtype, seed=1)]
    mine = slice(6, 15)
    for changed, kept in zip(other, (q, k, v), strict=True):
        changed.data[mine] = kept.data[mine]
    out = attention(q, k, v, documents_of(lengths), kernel=kernel)[mine]
    assert torch.equal(out, attention(*other, documents_of(lengths), kernel=kernel)[mine])
    alone = attention(q[mine], k[mine], v[mine], documents_of([9]), kernel=kernel)
    torch.testing.assert_close(out, alone, rtol=0, atol=2 * torch.finfo(dtype).eps)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for grad in grads:  # and nothing flows out of the document
        assert torch.count_nonzero(grad[:6]) == 0 and torch.count_nonzero(grad[15:]) == 0


def test_no_square_of_the_row_is_computed():
    """Work and memory grow with the sum of squared lengths: 64 documents cost 1/64 of one."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(lengths: list[int]) -> int:
        with FlopCounterMode(display=False) as counter:
            attention(*random_qkv(256, 2, 2), documents_of(lengths), kernel="reference")
        return counter.get_total_flops()

    assert flops([256]) == 2 * 2 * 2 * 256 * 256 * 8
    assert flops([4] * 64) * 64 == flops([256])
    assert flops([64, 128, 64]) == 2 * 2 * 2 * (64**2 * 2 + 128**2) * 8


def test_large_groups_are_computed_in_pieces(monkeypatch):
    monkeypatch.setattr("megatron_lite.ops.attention.LARGEST_SCORES", 2 * 4 * 5 * 5)
    lengths = [5, 5, 5, 5, 5]
    q, k, v = random_qkv(25, 4, 2)
    torch.testing.assert_close(
        attention(q, k, v, documents_of(lengths), kernel="reference"),
        brute_force(q, k, v, lengths, 8**-0.5),
        rtol=0,
        atol=1e-13,
    )


def test_dropping_weights_runs_on_the_reference_and_sees_first_tokens():
    lengths = [3, 2, 3]
    q, k, v = random_qkv(8, 2, 2)
    seen: dict[int, list[int]] = {}

    def drop(weights: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        seen[weights.shape[-1]] = first.tolist()
        return weights * 0

    with pytest.warns(UserWarning, match="attention dropout"):
        out = attention(q, k, v, documents_of(lengths), drop=drop)
    assert torch.count_nonzero(out) == 0
    assert seen == {3: [0, 5], 2: [3]}
    with pytest.raises(ValueError, match="attention dropout > 0"):
        attention(q, k, v, documents_of(lengths), drop=drop, kernel="sdpa")


@pytest.mark.parametrize("length", [1, 16, 2048, 4096, 16384, 16385])
def test_no_length_is_too_long(length):
    """The kernel chosen takes every length; the last rows equal a softmax over their keys."""
    q, k, v = (t.detach() for t in random_qkv(length, 1, 1, dim=4, dtype=torch.float32))
    with torch.no_grad():
        out = attention(q, k, v, documents_of([length]))[-1, 0]
        weights = (q[-1, 0] @ k[:, 0].T / 2).softmax(-1)
    torch.testing.assert_close(out, weights @ v[:, 0], rtol=1e-5, atol=1e-6)


def problem(device: str, dtype: torch.dtype, head_dim: int = 64, total: int = 64, **options: object) -> Problem:
    shapes = ((total, 8, head_dim), (total, 2, head_dim), (total, 2, head_dim))
    return Problem(target(device), (dtype,) * 3, shapes, options=tuple(options.items()))


@pytest.mark.parametrize(
    "device, dtype, head_dim, options, chosen, reason",
    [
        ("cuda:a100", torch.bfloat16, 64, {}, "varlen", None),
        ("cuda:h100", torch.float16, 256, {}, "varlen", None),
        ("cuda:a100", torch.float32, 64, {}, "sdpa", "not float32"),
        ("cuda:v100", torch.float16, 64, {}, "sdpa", "compute capability 8.0"),
        ("cuda:a100", torch.bfloat16, 320, {}, "sdpa", "up to 256, not 320"),
        ("cuda:a100", torch.bfloat16, 12, {}, "sdpa", "multiples of 8"),
        ("cuda:a100", torch.bfloat16, 64, {"dropout": True}, "reference", "attention dropout"),
        ("cpu", torch.float64, 64, {}, "sdpa", "runs on cuda"),
        ("meta", torch.bfloat16, 64, {}, "sdpa", "runs on cuda"),
    ],
)
@pytest.mark.parametrize("total", [1, 16, 2048, 4096, 16384, 16385])
def test_dispatch_without_a_device(device, dtype, head_dim, options, chosen, reason, total):
    choice = choose(ATTENTION, problem(device, dtype, head_dim, total, **options))
    assert choice.name == chosen
    if reason is not None:
        assert any(reason in why for _, why in choice.passed_over)


def test_forcing_a_kernel_that_cannot_says_its_limit():
    with pytest.raises(ValueError, match="up to 256, not 320"):
        choose(ATTENTION, problem("cuda:a100", torch.bfloat16, 320), "varlen")
    with pytest.raises(ValueError, match="it has: varlen, sdpa, reference"):
        choose(ATTENTION, problem("cpu", torch.float32), "flash3")


def test_bytes_kept_for_backward():
    """The fused kernels keep q, k, v, the output and one number per query; the reference also the weights."""
    assert (
        choose(ATTENTION, problem("cuda:a100", torch.bfloat16)).bytes_saved
        == 64 * 64 * (8 + 2 + 2 + 8) * 2 + 64 * 8 * 4
    )
    kept = choose(ATTENTION, problem("cpu", torch.float32, longest=16), "reference").bytes_saved
    assert kept == (64 * 64 * (8 + 2 + 2) + 64 * 8 * 16) * 4


def test_meta_tensors_need_no_offsets():
    q, k, v = (torch.empty(t.shape, device="meta") for t in random_qkv(24, 4, 2))
    documents = Documents(torch.empty(25, dtype=torch.int32, device="meta"), 5, 7)
    assert attention(q, k, v, documents).shape == (24, 4, 8)


@pytest.mark.parametrize("new", [1, 3, 7])
def test_cached_attention_is_the_tail_of_the_whole(new):
    rows, total = 2, 7
    q, k, v = random_qkv(rows * total, 4, 2)
    whole = reference(q, k, v, documents_of([total] * rows), 0.5).view(rows, total, 4, 8)
    split = [t.view(rows, total, *t.shape[1:]) for t in (q, k, v)]
    out = cached_attention(split[0][:, total - new :], split[1], split[2], 0.5)
    torch.testing.assert_close(out, whole[:, total - new :], rtol=0, atol=1e-13)
