"""Rotary positions: each pair of features of a query or key is turned by an angle proportional to the position.

Feature i is paired with feature i + R/2 of the first R features (the half-split convention of GPT-NeoX, Llama and
Hugging Face, not the interleaved one of the paper), and features behind R carry no position. Frequencies and angles
are fp32, as in the checkpoints people import, or fp64 for fp64 models; the rotation is done in that precision too.

Sources: Su et al. 2021 (arXiv 2104.09864); the frequency scaling is that of Llama 3.1 (arXiv 2407.21783).
"""

from __future__ import annotations

import math

import torch
from torch import nn

from megatron_lite.config.transformer import TransformerConfig


def inverse_frequencies(config: TransformerConfig, dtype: torch.dtype) -> torch.Tensor:
    """Radians per position of each pair of features: base^(-2i/R), scaled where the config says so; [R/2] on the CPU."""
    steps = torch.arange(0, config.rotary_dim, 2, device="cpu", dtype=dtype)
    frequencies = 1.0 / (config.rotary_base ** (steps / config.rotary_dim))
    return _llama3_scaling(frequencies, config) if config.use_rope_scaling else frequencies


def _llama3_scaling(frequencies: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Stretch long wavelengths by the factor, keep short ones, and blend linearly (in original/wavelength) between."""
    original = config.rope_scaling_original_max_position_embeddings
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    factor = config.rope_scaling_factor
    wavelength = 2 * math.pi / frequencies
    share = (original / wavelength - low) / (high - low)  # 0 at the long border, 1 at the short one
    blended = (1 - share) * frequencies / factor + share * frequencies
    scaled = torch.where(wavelength > original / low, frequencies / factor, blended)
    return torch.where(wavelength < original / high, frequencies, scaled)


class Rotary(nn.Module):
    """Turns query and key heads by their positions; no parameters."""

    inverse: torch.Tensor

    def __init__(self, config: TransformerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.rotated = config.rotary_dim
        self.register_buffer("inverse", inverse_frequencies(config, wide).to(device), persistent=False)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate [T, heads, head_dim] queries and keys by int64 positions [T]."""
        angles = positions.to(self.inverse.dtype)[:, None] * self.inverse
        cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]  # [T, 1, R/2]
        return self._turn(query, cos, sin), self._turn(key, cos, sin)

    def _turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x[..., : self.rotated].to(cos.dtype).chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
        return turned if self.rotated == x.shape[-1] else torch.cat((turned, x[..., self.rotated :]), dim=-1)
