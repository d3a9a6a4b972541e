"""The shape of a decoder-only transformer, as one frozen record.

Field names are Megatron-LM's flag names with underscores, and so are the defaults; the text under each field is its
help. ``0`` means *not given* for the sizes that every model needs (:func:`megatron_lite.model.problems.model_problems`
reports them together with everything else that is wrong), and ``None`` means *follows from the others*: read the
resolved number from the properties (``head_dim``, ``ffn_size``, ``kv_heads`` ...), never from the field.

This file imports no torch: the command line reads it to print its help.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TransformerConfig:
    """A GPT-like model: learned positions, LayerNorm, GELU, biases and a tied head unless told otherwise."""

    num_layers: int = 0
    """Number of transformer blocks (required)."""
    hidden_size: int = 0
    """Width of the hidden states (required)."""
    num_attention_heads: int = 0
    """Number of query heads (required)."""
    ffn_hidden_size: int | None = None
    """Width inside the MLP. Default 4 * hidden-size; with --swiglu 8/3 * hidden-size, down to a multiple of 64."""
    group_query_attention: bool = False
    """Fewer key/value heads than query heads (grouped-query attention)."""
    num_query_groups: int = 1
    """Number of key/value heads; read only with --group-query-attention."""
    kv_channels: int | None = None
    """Size of one attention head. Default hidden-size / num-attention-heads."""
    vocab_size: int = 0
    """True vocabulary size, without padding. 0: the tokenizer's."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded on each rank so that this times the tensor-parallel size divides it."""

    max_position_embeddings: int | None = None
    """Longest position the model is made for (required, at least the sequence length)."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How positions enter the model."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = 1.0
    """Share of each head's features that is rotated; the others carry no position."""
    use_rope_scaling: bool = False
    """Scale the rotary frequencies by the rule of Llama 3.1, for contexts longer than the original one."""
    rope_scaling_factor: float = 8.0
    """Rope scaling: long wavelengths are stretched by this."""
    rope_scaling_low_freq_factor: float = 1.0
    """Rope scaling: wavelengths above original length / this are stretched in full."""
    rope_scaling_high_freq_factor: float = 4.0
    """Rope scaling: wavelengths below original length / this stay as they are."""
    rope_scaling_original_max_position_embeddings: int = 8192
    """Rope scaling: the context length before it was extended."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of the norms before attention, before the MLP and before the head."""
    norm_epsilon: float = 1e-5
    """Added to the variance (or mean square) inside a norm."""
    apply_layernorm_1p: bool = False
    """Norms multiply by 1 + weight, with weights that start at 0."""
    qk_layernorm: bool = False
    """Normalise every query and key head before the rotary embedding."""
    swiglu: bool = False
    """MLP with a gate: down(silu(gate(x)) * up(x))."""
    squared_relu: bool = False
    """MLP activation relu(x)^2 instead of GELU (tanh form)."""
    add_bias_linear: bool = True
    """Linear layers have biases (--disable-bias-linear turns it off)."""
    add_qkv_bias: bool = False
    """Query, key and value have biases even without --add-bias-linear."""
    untie_embeddings_and_output_weights: bool = False
    """The head has a matrix of its own instead of the token embedding's."""

    attention_dropout: float = 0.1
    """Dropout probability of attention weights (in training). Above 0 the reference attention runs."""
    hidden_dropout: float = 0.1
    """Dropout probability of embeddings and of what attention and MLP add to the hidden states (in training)."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights; attention output and MLP down start at this / sqrt(2 * num-layers)."""
    label_smoothing: float = 0.0
    """Label smoothing of the training loss, in PyTorch's convention (evaluation reports the plain loss)."""
    no_weight_decay_patterns: tuple[str, ...] = ()
    """Glob patterns of parameter names that weight decay leaves alone, besides 1-D tensors and biases."""

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        if self.kv_channels is not None:
            return self.kv_channels
        return self.hidden_size // max(1, self.num_attention_heads)

    @property
    def kv_heads(self) -> int:
        """Key/value heads of the whole model."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def query_size(self) -> int:
        """Features of all query heads together (q in the FLOPs formula)."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of all key heads together (kv in the FLOPs formula)."""
        return self.kv_heads * self.head_dim

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP; the default for gated MLPs rounds down to a multiple of 64, as Megatron-LM does."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return 8 * self.hidden_size // 192 * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def mlp_matrices(self) -> int:
        """Matrices of one MLP: 3 with a gate, else 2 (k in the FLOPs formula)."""
        return 3 if self.swiglu else 2

    @property
    def qkv_bias(self) -> bool:
        """Whether query, key and value have biases."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def rotary_dim(self) -> int:
        """Rotated features of each head; 0 without rotary positions."""
        return int(self.head_dim * self.rotary_percent) if self.position_embedding_type == "rope" else 0

    @property
    def tied(self) -> bool:
        """Whether the head uses the token embedding's matrix."""
        return not self.untie_embeddings_and_output_weights

    @property
    def output_init_std(self) -> float:
        """Initial standard deviation of attention output and MLP down: sigma / sqrt(2 L), L the global depth."""
        return self.init_method_std / (2.0 * max(1, self.num_layers)) ** 0.5


@dataclass(frozen=True)
class LlamaConfig(TransformerConfig):
    """A Llama-like model: the same blocks with rotary positions, RMSNorm, gated MLPs, no biases, no dropout, untied."""

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "rope"
    """How positions enter the model."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    """Kind of the norms before attention, before the MLP and before the head."""
    swiglu: bool = True
    """MLP with a gate: down(silu(gate(x)) * up(x))."""
    add_bias_linear: bool = False
    """Linear layers have biases."""
    untie_embeddings_and_output_weights: bool = True
    """The head has a matrix of its own instead of the token embedding's."""
    attention_dropout: float = 0.0
    """Dropout probability of attention weights (in training). Above 0 the reference attention runs."""
    hidden_dropout: float = 0.0
    """Dropout probability of embeddings and of what attention and MLP add to the hidden states (in training)."""
