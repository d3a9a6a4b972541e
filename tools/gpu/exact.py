"""What the ops mean, written out: exact results in long double, plain ones in PyTorch, and the sizes of their terms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from megatron_lite.ops.adamw import coefficients

EPS = 1e-5
LR, BETA1, BETA2, ADAM_EPS, DECAY = 1e-3, 0.9, 0.95, 1e-8, 0.1
Exact = Sequence[np.ndarray]


def numbers(t: torch.Tensor) -> np.ndarray:
    """The values of a tensor, without rounding."""
    return t.detach().to(torch.float64).cpu().numpy().astype(np.longdouble)


def exact_rms_norm(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, terms: bool = False) -> Exact:
    """(y, gradient of x, gradient of weight); with ``terms`` the sums of their terms' absolute values."""
    x_, w, g = numbers(x), numbers(weight), numbers(grad)
    scale = 1 / np.sqrt((x_**2).mean(-1, keepdims=True) + np.longdouble(EPS))
    xhat, d = x_ * scale, g * w
    products = np.abs(d * xhat) if terms else d * xhat
    dx = (
        np.abs(d) + np.abs(xhat) * products.mean(-1, keepdims=True)
        if terms
        else d - xhat * products.mean(-1, keepdims=True)
    )
    dw = (np.abs(g * xhat) if terms else g * xhat).sum(0)
    return x_ * scale * w, scale * dx, dw


def exact_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, grad: torch.Tensor, terms: bool = False
) -> Exact:
    """(y, gradients of x, weight and bias); with ``terms`` the sums of their terms' absolute values."""
    x_, w, b, g = numbers(x), numbers(weight), numbers(bias), numbers(grad)
    centered = x_ - x_.mean(-1, keepdims=True)
    scale = 1 / np.sqrt((centered**2).mean(-1, keepdims=True) + np.longdouble(EPS))
    xhat, d = centered * scale, g * w
    if terms:
        xhat, d, g = np.abs(xhat), np.abs(d), np.abs(g)
        dx = scale * (d + d.mean(-1, keepdims=True) + xhat * (d * xhat).mean(-1, keepdims=True))
        return xhat * np.abs(w) + np.abs(b), dx, (g * xhat).sum(0), g.sum(0)
    dx = scale * (d - d.mean(-1, keepdims=True) - xhat * (d * xhat).mean(-1, keepdims=True))
    return xhat * w + b, dx, (g * xhat).sum(0), g.sum(0)


def exact_adamw(w: torch.Tensor, m: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, factor: float) -> Exact:
    """(weight, first moment, second moment) after step 3."""
    c = coefficients(LR, BETA1, BETA2, ADAM_EPS, DECAY, 3)
    g = numbers(grad) * np.longdouble(factor)
    m_ = numbers(m) * c.beta1 + g * c.one_minus_beta1
    v_ = numbers(v) * c.beta2 + g * g * c.one_minus_beta2
    w_ = numbers(w) * c.decay - m_ / (np.sqrt(v_) * c.inverse_root + c.eps) * c.step_size
    return w_, m_, v_


def exact_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor, vocab: int) -> Exact:
    """(sum of losses, gradient of the logits)."""
    z, weight, rows = numbers(logits), numbers(mask), np.arange(len(targets))
    z, true = z - z[:, :vocab].max(-1, keepdims=True), targets.cpu().numpy()
    e = np.exp(z)
    e[:, vocab:] = 0
    total = e.sum(-1, keepdims=True)
    loss = (weight * (np.log(total[:, 0]) - z[rows, true])).sum()
    grad = e / total
    grad[rows, true] -= 1
    return np.asarray(loss), grad * weight[:, None]


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v within each document, every operation in the inputs' dtype."""
    outputs = []
    group = q.shape[1] // k.shape[1]
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        a, b, c = (t.transpose(0, 1) for t in (a, b.repeat_interleave(group, 1), c.repeat_interleave(group, 1)))
        scores = a @ b.transpose(1, 2) * q.shape[-1] ** -0.5
        hidden = torch.ones(a.shape[1], a.shape[1], dtype=torch.bool, device=q.device).triu(1)
        outputs.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ c).transpose(0, 1))
    return torch.cat(outputs)


@torch.no_grad()
def attention_terms(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, lengths: Sequence[int]
) -> list[torch.Tensor]:
    """For the output and the gradients of q, k and v the sums of their terms' absolute values.

    With P the weights, dP = g v^T: dS = P (dP - sum P dP), dq = dS k / sqrt(d), dk = dS^T q / sqrt(d), dv = P^T g.
    """
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    found: list[list[torch.Tensor]] = [[], [], [], []]
    for a, b, c, g in zip(*(t.split(lengths) for t in (q, k, v, grad)), strict=True):
        a, b, c, g = (t.transpose(0, 1) for t in (a, b.repeat_interleave(group, 1), c.repeat_interleave(group, 1), g))
        hidden = torch.ones(a.shape[1], a.shape[1], dtype=torch.bool, device=q.device).triu(1)
        p = (a @ b.transpose(1, 2) * scale).masked_fill(hidden, float("-inf")).softmax(-1)
        dp = g.abs() @ c.abs().transpose(1, 2)
        ds = p * (dp + (p * dp).sum(-1, keepdim=True)) * scale
        parts = p @ c.abs(), ds @ b.abs(), ds.transpose(1, 2) @ a.abs(), p.transpose(1, 2) @ g.abs()
        for i, part in enumerate(parts):
            part = part.transpose(0, 1)
            found[i].append(part.unflatten(1, (-1, group)).sum(2) if i > 1 else part)
    return [torch.cat(parts) for parts in found]


def plain_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor, vocab: int) -> torch.Tensor:
    """PyTorch's, summed over what the mask counts."""
    return (F.cross_entropy(logits[:, :vocab], targets, reduction="none") * mask.to(logits.dtype)).sum()
