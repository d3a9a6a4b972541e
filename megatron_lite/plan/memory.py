"""Bytes that a rank holds, by category, as formulas.

Weights, gradients and optimizer state are flat buffers whose sizes follow from the parameters' records, so they are
exact, alignment included. Activations are what autograd keeps of a microbatch between its forward and its backward
pass, times the microbatches that the schedule keeps at its peak, plus, with recompute, the one unit that is alive while
it is computed again. What a layer keeps depends on the kernel that runs, and the kernels say so themselves (``ops``), for a
device that need not be there.

Not counted: tensors that live only inside one operation (the logits before the loss is taken, gathered inputs under
sequence parallelism, gradients on their way through a block), the batch itself, communication libraries and the CUDA
context. Rows are taken to hold one document each.

Legend: T tokens of a microbatch (T' on this rank: T / tp under sequence parallelism), H hidden size, q and kv features of
this rank's query and key heads, f this rank's width of the MLP, V' its padded share of the vocabulary, e bytes of an
element of the hidden states, w of fp32 (fp64 in an fp64 model).

Source of the accounting per layer: Korthikanti et al. 2022 (arXiv 2205.05198), section 4; here without copies that a
fused kernel spares, and with SwiGLU, grouped heads and rotary positions.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from megatron_lite.ops.attention import ATTENTION
from megatron_lite.ops.gelu import GELU
from megatron_lite.ops.layer_norm import LAYER_NORM
from megatron_lite.ops.op import Op, Problem, choose, numel, target
from megatron_lite.ops.rms_norm import RMS_NORM
from megatron_lite.ops.swiglu import SWIGLU
from megatron_lite.optim.state import LOW_PRECISION
from megatron_lite.pipeline.stage import recompute_units
from megatron_lite.plan.job import Job


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        weights, gradients: the flat buffers.
        masters, moments: optimizer state; fp32 and fp64 weights are their own masters.
        activations: kept for backward at the schedule's peak.
        recomputed: what one recomputed unit holds while its backward pass runs.
        messages: hidden states on their way between stages, and their gradients, at most.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    activations: int
    recomputed: int
    messages: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(astuple(self))


def rank_memory(job: Job, stage: int, device: str = "cuda") -> Memory:
    """Bytes that a rank of a stage holds at the peak of a step.

    Args:
        device: the target, as ``ops`` knows them (``cpu``, ``cuda``, ``cuda:h100``).

    Weights take n e bytes and gradients n w, n the elements of the stage's buckets with their padding. Optimizer state
    is two moments of n w bytes and, for weights of half precision, masters of n w; under ZeRO 1 a data-parallel rank
    keeps its share of each bucket only.
    """
    n = sum(bucket.end - bucket.begin for bucket in job.buckets(stage))
    kept = n // job.dp_ranks if job.zero_stage else n
    state = torch.float32.itemsize if job.dtype in LOW_PRECISION else job.dtype.itemsize
    return Memory(
        weights=n * job.dtype.itemsize,
        gradients=n * job.wide.itemsize,
        masters=kept * state if job.dtype in LOW_PRECISION else 0,
        moments=2 * kept * state,
        activations=job.schedule_report.peak_microbatches[stage] * microbatch_bytes(job, stage, device),
        recomputed=recomputed_bytes(job, stage, device),
        messages=message_bytes(job, stage),
    )


def microbatch_bytes(job: Job, stage: int, device: str) -> int:
    """What a stage keeps of one microbatch between forward and backward.

    Every block's tensors, or, of a unit that is computed again, its input alone: T' H e.
    """
    total = embedding_bytes(job) if stage == 0 else 0
    for begin, end, again in recompute_units(job.recompute, len(job.placement[stage])):
        total += job.hidden_bytes if again else (end - begin) * block_bytes(job, device)
    return total + (head_bytes(job, device) if stage == job.layout.pp - 1 else 0)


def recomputed_bytes(job: Job, stage: int, device: str) -> int:
    """The largest unit that is computed again, all its blocks' tensors at once; its input has been kept already."""
    units = recompute_units(job.recompute, len(job.placement[stage]))
    longest = max((end - begin for begin, end, again in units if again), default=0)
    return longest * block_bytes(job, device) - job.hidden_bytes if longest else 0


def message_bytes(job: Job, stage: int) -> int:
    """At most 3 T' H e for each neighbour: what goes there is one result under way and the next one, and of what comes
    from there one message is received ahead."""
    neighbours = (stage > 0) + (stage < job.layout.pp - 1)
    return 3 * neighbours * job.hidden_bytes


def block_bytes(job: Job, device: str) -> int:
    """What a block keeps for its backward pass.

    - the two norms: their inputs, which are the hidden states before attention and before the MLP, and statistics;
    - the normed inputs of the two groups of column-parallel layers: 2 T' H e;
    - qk-norm, where there is one: queries and keys before it, and statistics for every head;
    - rotary positions: cosines and sines, T R w for R rotated features of a head;
    - attention: queries, keys, values, output and statistics of the softmax, or all attention weights
      (:func:`_attention_bytes`); the output is also the next layer's input;
    - the activation's inputs (gate and up, or one of them): T f e each, and its output, T f e, which is the input of the
      second matrix;
    - dropout of what attention and MLP add: masks of T' H bytes each.
    """
    config, t, tp = job.config, job.tokens, job.layout.tp
    hidden = (t // job.slices, config.hidden_size)
    query = (t, config.num_attention_heads // tp, config.head_dim)
    key = (t, max(1, config.kv_heads // tp), config.head_dim)
    total = 2 * _norm_bytes(job, hidden, device) + 2 * job.hidden_bytes
    if config.qk_layernorm:
        total += _norm_bytes(job, query, device) + _norm_bytes(job, key, device)
    total += t * config.rotary_dim * job.wide.itemsize
    total += _attention_bytes(job, query, key, device)
    total += _mlp_bytes(job, (t, config.ffn_size // tp), device)
    if config.hidden_dropout > 0:
        total += 2 * hidden[0] * hidden[1]
    return total


def embedding_bytes(job: Job) -> int:
    """What the embedding keeps: under tp, each token's row on this rank and whether it is elsewhere (T int64, T bool);
    with dropout, its mask. Ids and positions belong to the batch."""
    total = 9 * job.tokens if job.layout.tp > 1 else 0
    if job.config.hidden_dropout > 0:
        total += job.tokens // job.slices * job.config.hidden_size
    return total


def head_bytes(job: Job, device: str) -> int:
    """What the head keeps: the norm's input and statistics, the normed hidden states (T' H e), and of the loss the
    exponentials of the logits (T V' w), for each token two sums (three with label smoothing) and its weight (w each), its
    column (int64) and whether it is here (bool)."""
    config, t = job.config, job.tokens
    columns = job.parallel.padded_vocab(config.vocab_size) // job.layout.tp
    rows = 4 if config.label_smoothing else 3
    norm = _norm_bytes(job, (t // job.slices, config.hidden_size), device)
    return norm + job.hidden_bytes + t * (columns + rows) * job.wide.itemsize + 9 * t


def _attention_bytes(job: Job, query: tuple[int, ...], key: tuple[int, ...], device: str) -> int:
    """What attention keeps, its output included.

    The fused kernels keep queries, keys, values, the output and a number per query and head. The reference, which runs
    with attention dropout, keeps all weights, T S heads of them, in fp32, and with dropout the dropped ones too and a
    mask of one byte each; its output is a tensor of its own.
    """
    drops = job.config.attention_dropout > 0
    options = (("dropout", drops), ("longest", job.seq_length))
    choice = choose(ATTENTION, Problem(target(device), (job.dtype,) * 3, (query, key, key), options=options))
    assert choice.bytes_saved is not None
    if choice.name != "reference":
        return choice.bytes_saved
    weights = query[0] * query[1] * job.seq_length
    return choice.bytes_saved + (weights if drops else 0) + numel(query) * job.dtype.itemsize


def _mlp_bytes(job: Job, wide: tuple[int, int], device: str) -> int:
    """Inputs of the activation, as its kernel keeps them, and its output."""
    out = wide[0] * wide[1] * job.dtype.itemsize
    if job.config.swiglu:
        return out + _saves(SWIGLU, device, [job.dtype] * 2, wide, wide)
    if job.config.squared_relu:
        return 2 * out  # relu(x), kept by both relu and square, and its square
    return out + _saves(GELU, device, [job.dtype], wide)


def _norm_bytes(job: Job, shape: tuple[int, ...], device: str) -> int:
    """What a norm over the last dim keeps."""
    weight = shape[-1:]
    dtype = torch.promote_types(job.dtype, torch.float32) if job.config.apply_layernorm_1p else job.dtype
    if job.config.normalization == "RMSNorm":
        return _saves(RMS_NORM, device, [job.dtype, dtype], shape, weight)
    return _saves(LAYER_NORM, device, [job.dtype, dtype, job.dtype], shape, weight, weight)


def _saves(op: Op, device: str, dtypes: list[torch.dtype], *shapes: tuple[int, ...]) -> int:
    """Bytes that the kernel which would run keeps."""
    saved = choose(op, Problem(target(device), tuple(dtypes), shapes)).bytes_saved
    assert saved is not None, f"{op.name} does not say what it keeps"
    return saved
