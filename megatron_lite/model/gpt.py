"""GPT: token and position embeddings, transformer blocks, and a head that may share the token matrix.

Every flag of the "Model" group is an option of this one definition; Llama (``model/llama.py``) is the same definition
with other defaults.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron_lite.config.transformer import TransformerConfig
from megatron_lite.model.blocks import Block, hidden_dropout, make_norm
from megatron_lite.model.flops import transformer_flops
from megatron_lite.model.hf import hf_tensors
from megatron_lite.model.names import HfTensor
from megatron_lite.model.problems import transformer_problems
from megatron_lite.model.protocol import Flops, ForwardContext, ModelDefinition, tie

if TYPE_CHECKING:
    from megatron_lite.mesh.layout import Layout

TOKENS = "embed.tokens.weight"
