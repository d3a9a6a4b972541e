"""Llama: the same transformer with rotary positions, RMSNorm, gated MLPs, no biases and a head of its own.

Source: Touvron et al. 2023 (arXiv 2302.13971).
"""

from __future__ import annotations

from megatron_lite.config.transformer import LlamaConfig
from megatron_lite.model.gpt import GPT


class Llama(GPT):
    """GPT with the defaults of :class:`LlamaConfig`."""

    Config = LlamaConfig
