"""Clipping as a factor that stays on the device.

The global norm is known on the device after one small reduction; the factor is computed there and read there by the
optimizer, so the host never waits for it. Where the norm is within the limit the factor is exactly 1.0, so a clip that
is not active changes no bit.
"""

from __future__ import annotations

import torch

EPS = 1e-6  # of torch.nn.utils.clip_grad_norm_ and Megatron-LM


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / (norm + 1e-6)).

    Args:
        norm: scalar, L2 norm of the unscaled gradients of the whole model, on the device.
        max_norm: the limit; 0 means off: the factor is 1 whatever the norm is.

    Returns a scalar of norm's dtype on its device. A norm of 0 gives 1; inf gives 0 and NaN gives NaN, which never
    reach a weight since a step that is not finite is skipped.
    """
    if max_norm < 0:
        raise ValueError(f"clip-grad is {max_norm}: give a positive norm, or 0 to leave gradients as they are")
    if max_norm == 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + EPS)).clamp(max=1.0)
