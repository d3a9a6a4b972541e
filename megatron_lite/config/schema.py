"""A run's configuration: the one definition from which flags, YAML form, help and docs are derived.

Every section is a frozen dataclass. A field ``tensor_model_parallel_size`` is the flag ``--tensor-model-parallel-size``
(no section prefix) and the YAML key ``tensor_model_parallel_size`` under ``parallel:``; the text under a field is its
help. Names and defaults are Megatron-LM's where it has the flag; where a default differs on purpose,
:data:`megatron_lite.config.flags.DIFFERENCES` says so. ``None`` means *not given*: what follows from the other values
is computed where it is used (:mod:`megatron_lite.config.derived`, :mod:`megatron_lite.optim.from_config`), so that a
configuration holds only what a person said.

The model's section is the dataclass of the model that ``--model`` names (:mod:`megatron_lite.config.transformer` for
``gpt`` and ``llama``, a team's own otherwise), therefore :class:`RunConfig` is generic in it.

What this does not do: no checks (:mod:`megatron_lite.config.check`), no reading (:mod:`megatron_lite.config.load`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, TypeVar

import tyro

from megatron_lite.config.schema_io import CheckpointConfig, DataConfig, EvaluationConfig, LoggingConfig

ModelConfig = TypeVar("ModelConfig")
Flat: Any = tyro.conf.OmitArgPrefixes  # marks a section whose flags carry no "--section." prefix


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks share the work. The data-parallel size is what remains: world size / (tp * cp * pp)."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices (tp)."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages (pp)."""
    context_parallel_size: int = 1
    """Ranks that share a sequence (cp); above 1 is not in this version."""
    sequence_parallel: bool = False
    """Split the hidden states between blocks over the tp ranks; no effect at tp 1."""
    zero_stage: int = 0
    """What data-parallel ranks shard: 0 nothing, 1 optimizer state (--use-distributed-optimizer means 1)."""
    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of forward and backward in the pipeline."""
    decoder_first_pipeline_num_layers: int | None = None
    """Blocks on the first stage. Default: blocks are split by cost."""
    decoder_last_pipeline_num_layers: int | None = None
    """Blocks on the last stage. Default: blocks are split by cost."""
    overlap_grad_reduce: bool = False
    """Reduce a gradient bucket while backward goes on."""
    ddp_bucket_size: int | None = None
    """Parameters in a gradient bucket (not bytes). Default max(40000000, 1000000 * dp)."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Library that moves data between ranks. Default nccl on GPUs, gloo on CPUs."""
    distributed_timeout_minutes: int = 10
    """A collective that waits longer than this is a hang."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto is cuda where a GPU is visible, else cpu."""


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train, in which batches, in which precision, and when to stop."""

    micro_batch_size: int = 1
    """Samples that one data-parallel rank computes at a time."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks. Default micro-batch-size * data-parallel size."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """START INCREMENT SAMPLES: the global batch grows from START by INCREMENT to its full size over SAMPLES."""
    step_batch_size_schedule: str | None = None
    """Global batch by consumed tokens, e.g. "0:768 250B:1536" (K, M, B, T are powers of 1000)."""
    train_iters: int | None = None
    """Optimizer steps of the whole training; this or --train-samples."""
    train_samples: int | None = None
    """Samples of the whole training; this or --train-iters."""
    seed: int = 1234
    """Seed of initial weights, sample order and dropout."""
    bf16: bool = False
    """Compute in bfloat16 with fp32 masters."""
    fp16: bool = False
    """Compute in float16 with fp32 masters and a loss scale."""
    fp64: bool = False
    """Everything in float64, for equivalence tests."""
    loss_normalization: Literal["token", "microbatch"] = "token"
    """token: loss sum / valid tokens of the global batch; microbatch: mean of the microbatches' means."""
    mask_padded_vocab: bool = True
    """on|off: padded vocabulary columns take no part in the softmax."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """full: keep only a block's input and compute the block again in backward; selective is not in this version."""
    recompute_method: Literal["uniform", "block"] | None = None
    """uniform: every block, in units of --recompute-num-layers; block: only that many blocks of each stage."""
    recompute_num_layers: int | None = None
    """See --recompute-method. Default 1 for uniform, every block of the stage for block."""
    deterministic: bool = False
    """Bitwise equal reruns: sums over ranks in rank order, deterministic kernels (--deterministic-mode)."""
    manual_gc: bool = False
    """Collect Python's garbage at the same step on all ranks (done every 100 steps without this flag)."""
    manual_gc_interval: int = 0
    """With --manual-gc: steps between collections; 0 collects around evaluation only."""
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """What to do when a loss or gradient is not finite in bf16, fp32 or fp64 (fp16 skips and lowers its scale)."""
    exit_interval: int | None = None
    """Save and exit with code 7 at each step that this divides."""
    exit_duration_in_mins: float | None = None
    """Save and exit with code 7 after this many minutes."""
    exit_signals: tuple[str, ...] = ("TERM", "INT", "USR1")
    """Signals on which a run finishes its step, saves and exits with code 6."""
    save_signals: tuple[str, ...] = ("USR2",)
    """Signals on which a run saves and goes on."""
    check_weight_hash_across_dp_replicas_interval: int | None = None
    """Steps between checks that all copies of a weight, over dp, tp and ties, are bitwise equal; if not, the run ends."""
    compat: Literal["megatron"] | None = None
    """megatron: every default in which we differ from Megatron-LM's numbers is set to theirs."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its learning-rate and weight-decay schedules, clipping and the fp16 loss scale."""

    lr: float | None = None
    """Largest learning rate (required to train)."""
    min_lr: float = 0.0
    """Smallest learning rate of the decay."""
    decoupled_lr: float | None = None
    """Learning rate of embedding and head, where it differs."""
    decoupled_min_lr: float | None = None
    """Smallest learning rate of embedding and head."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay after warm-up."""
    lr_decay_iters: int | None = None
    """Steps until the learning rate is at its smallest. Default --train-iters."""
    lr_decay_samples: int | None = None
    """Samples until the learning rate is at its smallest. Default --train-samples."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""
    lr_warmup_samples: int = 0
    """Samples of linear warm-up."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a fraction of the decay length."""
    lr_warmup_init: float = 0.0
    """Learning rate at which warm-up starts."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """WSD: shape of the final decay."""
    lr_wsd_decay_iters: int | None = None
    """WSD: steps of the final decay."""
    lr_wsd_decay_samples: int | None = None
    """WSD: samples of the final decay."""
    lr_scaling_rule: Literal["none", "linear", "sqrt", "auto"] = "none"
    """Scale the learning rates by global batch / base: linear, sqrt, or auto (linear up to 4096, sqrt beyond)."""
    lr_scaling_base_batch: int | None = None
    """Global batch for which the given learning rates are right; required with a scaling rule."""
    weight_decay: float = 0.01
    """Decoupled weight decay; none on biases and 1-D parameters."""
    start_weight_decay: float | None = None
    """Weight decay at the start of a ramp. Default --weight-decay."""
    end_weight_decay: float | None = None
    """Weight decay at the end of a ramp. Default --weight-decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the weight-decay ramp."""
    clip_grad: float = 1.0
    """Largest global L2 norm of the gradients; 0 does not clip (the norm is reported all the same)."""
    clip_grad_value: float | None = None
    """Largest absolute value of a gradient element."""
    adam_beta1: float = 0.9
    """Decay of the running mean of gradients."""
    adam_beta2: float = 0.999
    """Decay of the running mean of squared gradients."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    loss_scale: float | None = None
    """fp16: a fixed loss scale. Default: dynamic."""
    initial_loss_scale: float = 2.0**16
    """fp16: first dynamic loss scale."""
    min_loss_scale: float = 1.0
    """fp16: smallest dynamic loss scale."""
    loss_scale_window: int = 1000
    """fp16: good steps in a row after which the scale doubles."""
    hysteresis: int = 2
    """fp16: bad steps that are forgiven before the scale halves."""
    grad_reduce_in_bf16: bool = False
    """Send gradients between data-parallel ranks in bfloat16 (half the bytes, less exact)."""


@dataclass(frozen=True)
class RunConfig(Generic[ModelConfig]):
    """Train a transformer. Every flag can stand in a YAML file (--config run.yaml), under its section; flags win."""

    model: ModelConfig
    """The model's own options."""
    parallel: Annotated[ParallelConfig, Flat] = field(default_factory=ParallelConfig)
    """How the ranks share the work."""
    training: Annotated[TrainingConfig, Flat] = field(default_factory=TrainingConfig)
    """How long, in which batches, in which precision."""
    optimizer: Annotated[OptimizerConfig, Flat] = field(default_factory=OptimizerConfig)
    """AdamW and its schedules."""
    data: Annotated[DataConfig, Flat] = field(default_factory=DataConfig)
    """What to train on."""
    evaluation: Annotated[EvaluationConfig, Flat] = field(default_factory=EvaluationConfig)
    """When to evaluate."""
    checkpoint: Annotated[CheckpointConfig, Flat] = field(default_factory=CheckpointConfig)
    """What to save and load."""
    logging: Annotated[LoggingConfig, Flat] = field(default_factory=LoggingConfig)
    """What to report."""
    architecture: Annotated[str, tyro.conf.arg(name="model", metavar="gpt|llama|MODULE:CLASS")] = "gpt"
    """Which model: gpt, llama, or MODULE:CLASS, a team's own; its options are then --model.FIELD."""
