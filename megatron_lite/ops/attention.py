"""Causal attention over a flat row of tokens that holds many documents.

Queries, keys and values are [T, heads, head_dim] with T = B * S; ``cu_seqlens`` says where documents begin, and a
token sees the earlier tokens of its own document. The one idea: documents are never told apart by a T x T mask, they
are computed apart, so the work is the sum of their squared lengths, a document's result does not depend on its
neighbours by a single bit, and nothing can see across a border by an option forgotten on the way.

Three kernels and their conditions:

* ``varlen``: PyTorch's variable-length flash attention, one launch for all documents (CUDA, bf16 and fp16);
* ``sdpa``: ``scaled_dot_product_attention`` once per distinct document length (any device and dtype);
* the reference: plain matrix products and a softmax in fp32 (fp64 for fp64 inputs), which defines correct. It is also
  the only one that drops attention weights, since masks are addressed by query and key position (tensor/random.py).

Grouped-query attention needs no copies: query head h reads key/value head h // (heads / kv_heads).

Sources: Dao et al. 2022 (arXiv 2205.14135) for flash attention; Ainslie et al. 2023 (arXiv 2305.13245) for grouped
heads.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megatron_lite.ops.host import to_device
from megatron_lite.ops.op import Kernel, Op, Problem, Reason, capability_reason, dtype_reason, numel, wide

DropWeights = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(weights [n, heads, L, L], first token of each of the n documents, int64 [n]) -> weights with some set to zero."""

LARGEST_SCORES = 1 << 26  # elements of one [n, heads, L, L] tensor the reference may make at a time, where n > 1


@dataclass(frozen=True)
class Documents:
    """Where documents lie in a flat row.

    Attributes:
        cu_seqlens: int32 [at least count + 1], offsets; entries behind ``count`` are padding.
        count: documents, host integer.
        longest: length of the longest, host integer.
        known: their lengths, host integers; () where they are not known on the host.
    """

    cu_seqlens: torch.Tensor
    count: int
    longest: int
    known: tuple[int, ...] = ()

    def lengths(self, total: int) -> list[int]:
        """Lengths of the documents; read from the device only if they are neither known nor all equal."""
        if self.known:
            return list(self.known)
        if self.count * self.longest == total:
            return [self.longest] * self.count
        if self.cu_seqlens.device.type == "meta":  # a dry run: any lengths with this sum have the right shapes
            full, rest = divmod(total, self.longest)
            return [self.longest] * full + ([rest] if rest else [])
        return torch.diff(self.cu_seqlens[: self.count + 1]).tolist()


def per_length(
    run: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    largest: Callable[[int], int] | None = None,
) -> torch.Tensor:
    """Call ``run(q, k, v, first_tokens)`` on [n, L, heads, head_dim] once for each distinct document length L.

    Args:
        largest: most documents of length L one call may take.

    Returns:
        [T, heads, head_dim], documents in their order.
    """
    lengths = documents.lengths(q.shape[0])
    if len(set(lengths)) == 1 and (largest is None or largest(lengths[0]) >= len(lengths)):
        n, length = len(lengths), lengths[0]
        first = torch.arange(0, n * length, length, device=q.device)
        rows = [t.view(n, length, *t.shape[1:]) for t in (q, k, v)]
        return run(*rows, first).reshape(q.shape[0], q.shape[1], v.shape[2])
    pieces = [t.split(lengths) for t in (q, k, v)]
    outputs: list[torch.Tensor | None] = [None] * len(lengths)
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    for members in _groups(lengths, largest):
        first = to_device(torch.tensor([offsets[i] for i in members]), q.device)
        stacked = [torch.stack([piece[i] for i in members]) for piece in pieces]
        for i, out in zip(members, run(*stacked, first).unbind(0), strict=True):
            outputs[i] = out
    return torch.cat([out for out in outputs if out is not None])


def _groups(lengths: list[int], largest: Callable[[int], int] | None) -> Iterator[list[int]]:
    """Indices of documents of one length, at most ``largest(length)`` at a time."""
    by_length: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        by_length.setdefault(length, []).append(i)
    for length, members in by_length.items():
        step = len(members) if largest is None else max(1, largest(length))
        for begin in range(0, len(members), step):
            yield members[begin : begin + step]


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    scale: float,
    drop: DropWeights | None = None,
) -> torch.Tensor:
    """What attention means: softmax(scale * q k^T) v over each document's causal triangle, in fp32 or fp64."""
    heads, kv_heads = q.shape[1], k.shape[1]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        compute = wide(q.dtype)
        n, length, _, d = q.shape
        # [n, L, heads, d] -> [n, kv_heads, group * L, d]: the query heads of one key head side by side
        queries = q.to(compute).view(n, length, kv_heads, heads // kv_heads, d).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(n, kv_heads, heads // kv_heads * length, d)
        scores = queries @ k.to(compute).permute(0, 2, 3, 1) * scale
        scores = scores.view(n, heads, length, length)
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        if drop is not None:
            weights = drop(weights, first)
        weights = weights.reshape(n, kv_heads, heads // kv_heads * length, length)
        out = weights @ v.to(compute).permute(0, 2, 1, 3)  # [n, kv_heads, group * L, d]
        out = out.view(n, heads, length, v.shape[-1]).transpose(1, 2)  # [n, L, heads, d]
        return out.to(q.dtype)

    return per_length(run, q, k, v, documents, lambda length: LARGEST_SCORES // (heads * length * length))


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    scale: float,
    drop: DropWeights | None = None,
) -> torch.Tensor:
    """PyTorch's fused attention, once per distinct document length."""
    assert drop is None
    grouped = q.shape[1] != k.shape[1]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [n, heads, L, d]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2)

    return per_length(run, q, k, v, documents)


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    scale: float,
    drop: DropWeights | None = None,
) -> torch.Tensor:
    """PyTorch's variable-length flash attention: one launch, nothing read from the device."""
    from torch.nn.attention.varlen import varlen_attn  # not in every torch this project runs on

    assert drop is None
    offsets = documents.cu_seqlens[: documents.count + 1]
    accepted = inspect.signature(varlen_attn).parameters  # the spelling of "causal" and of grouped heads has changed
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in accepted else {"is_causal": True}
    if q.shape[1] != k.shape[1] and "enable_gqa" in accepted:
        options["enable_gqa"] = True
    longest = documents.longest
    out = varlen_attn(q, k, v, offsets, offsets, longest, longest, scale=scale, **options)
    assert isinstance(out, torch.Tensor)
    return out


def _no_dropout(problem: Problem) -> Reason:
    if problem.option("dropout"):
        return "attention dropout > 0: its masks are keyed by query and key position, which only the reference applies"
    return None


def _varlen_applies(problem: Problem) -> Reason:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    head_dim = problem.shapes[0][-1]
    if head_dim > 256 or head_dim % 8:
        return f"takes head sizes that are multiples of 8 up to 256, not {head_dim}"
    reason = dtype_reason(problem, (torch.bfloat16, torch.float16)) or capability_reason(problem, (8, 0))
    return reason or _no_dropout(problem)


def _flash_saves(problem: Problem) -> int:
    """q, k, v, the output and one fp32 logarithm per query and head."""
    q, k, v = problem.shapes
    return (2 * numel(q) + numel(k) + numel(v)) * problem.dtypes[0].itemsize + q[0] * q[1] * 4


def _reference_saves(problem: Problem) -> int:
    """fp32 copies of q, k, v, and the weights of documents of ``longest`` tokens, twice with dropout."""
    q, k, v = problem.shapes
    weights = q[0] * q[1] * problem.option("longest", q[0])
    copies = numel(q) + numel(k) + numel(v)
    return (copies + weights * (2 if problem.option("dropout") else 1)) * wide(problem.dtypes[0]).itemsize


ATTENTION = Op(
    "attention",
    reference,
    (
        Kernel("varlen", ("cuda",), varlen, _varlen_applies, saves=_flash_saves),
        Kernel("sdpa", ("cpu", "cuda", "meta"), sdpa, _no_dropout, saves=_flash_saves),
    ),
    _reference_saves,
)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    *,
    scale: float | None = None,
    drop: DropWeights | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """Causal attention inside each document.

    Args:
        q: [T, heads, head_dim].
        k, v: [T, kv_heads, head_dim]; kv_heads divides heads.
        documents: where they lie in the row of T tokens.
        scale: of the scores, default head_dim^-0.5.
        drop: drops attention weights, None for no dropout.
        kernel: the implementation to use, None for the best that applies.

    Returns:
        [T, heads, head_dim] in the dtype of q.

    Raises:
        ValueError: the kernel asked for cannot run; says its limit.
    """
    assert q.shape[0] == k.shape[0] == v.shape[0] and q.shape[1] % k.shape[1] == 0, (q.shape, k.shape, v.shape)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    run = ATTENTION.pick(q, k, v, kernel=kernel, dropout=drop is not None)
    return run(q, k, v, documents, scale, drop)


def cached_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of new tokens over all tokens of their row so far, for generation.

    Args:
        q: [rows, n, heads, head_dim], the last n tokens of each row.
        k, v: [rows, m, kv_heads, head_dim], all m >= n tokens of each row.

    Returns:
        [rows, n, heads, head_dim].
    """
    n, m = q.shape[1], k.shape[1]
    visible = None
    if n > 1:  # query i is token m - n + i of its row
        visible = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [rows, heads, tokens, d]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)
