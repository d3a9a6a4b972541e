"""The four lists of a launch script's flags.

A dense Megatron-LM launch script runs with only the path of the program changed. So that nothing happens silently,
each of its flags is in exactly one list:

* *implemented*: a field of the schema, see :func:`field_flags`;
* *alias* (:data:`ALIASES`): another name of flags of ours;
* *accepted without effect* (:data:`ACCEPTED`): said once at start, with the reason;
* *not in this version* (:data:`ABSENT`): refused by name, exit code 2; to be empty when the work is done.

What we do not set out to do at all (fp8, mixtures of experts, ...) is refused by name too (:data:`REFUSED`), and any
other flag is unknown: an error that names the nearest known one.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from megatron_lite.config.schema import RunConfig

SECTIONS = ("model", "parallel", "training", "optimizer", "data", "evaluation", "checkpoint", "logging")
MANY = -1  # number of values: as many as follow


@dataclass(frozen=True)
class FieldFlag:
    """A flag that is a field of the schema.

    Attributes:
        flag: e.g. ``--lr``, or ``--model.width`` for a team's own model.
        section: field of :class:`RunConfig` that holds it, or "" for a field of RunConfig itself.
        name: field name.
        kind: its type.
        negative: the flag that turns a boolean off, or "".
    """

    flag: str
    section: str
    name: str
    kind: Any
    negative: str = ""

    @property
    def is_bool(self) -> bool:
        return self.kind is bool

    @property
    def values(self) -> int:
        """How many values follow the flag; :data:`MANY` for a tuple of any length."""
        if self.is_bool:
            return 0
        for option in options_of(self.kind):
            if typing.get_origin(option) is tuple:
                items = typing.get_args(option)
                return MANY if items[-1:] == (Ellipsis,) else len(items)
        return 1


@dataclass(frozen=True)
class Alias:
    """Another name: ``becomes`` are tokens of ours, with ``{}`` where the value goes."""

    becomes: tuple[str, ...]
    values: int = 0


@dataclass(frozen=True)
class Accepted:
    """Accepted without effect, for this reason; with ``only``, any other value is refused."""

    reason: str
    values: int = 0
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Absent:
    """Not in this version; ``harmless`` values ask for nothing and are accepted."""

    what: str
    values: int = 0
    harmless: tuple[str, ...] = ()


ON_OFF = ("document_mask", "mask_padded_vocab")  # booleans that are also written "--flag on" and "--flag off"

ALIASES: dict[str, Alias] = {
    "--use-distributed-optimizer": Alias(("--zero-stage", "1")),
    "--no-mmap-bin-files": Alias(("--data-access", "pread")),
    "--deterministic-mode": Alias(("--deterministic",)),
    "--disable-bias-linear": Alias(("--no-add-bias-linear",)),
    "--reset-position-ids": Alias(("--document-mask",)),
    "--reset-attention-mask": Alias(("--document-mask",)),
    "--calculate-per-token-loss": Alias(("--loss-normalization", "token")),
    "--activations-checkpoint-method": Alias(("--recompute-granularity", "full", "--recompute-method", "{}"), 1),
    "--checkpoint-activations": Alias(("--recompute-granularity", "full")),
    "--use-rotary-position-embeddings": Alias(("--position-embedding-type", "rope")),
    "--persistent-save-interval": Alias(("--save-interval", "{}"), 1),
    "--save-retain-interval": Alias(("--keep-last", "1", "--keep-every", "{}"), 1),
}

_ONE_MODEL = "there is one implementation of the model"
_OP_TABLE = "each op's kernel is chosen by the op table; `megatron-lite doctor` shows the choice and the reason"
_ONE_FORMAT = "there is one checkpoint format; any layout loads it"
_RANDOM = "no random state exists: every draw is addressed by seed, step and place"

ACCEPTED: dict[str, Accepted] = {
    "--use-mcore-models": Accepted(_ONE_MODEL),
    "--transformer-impl": Accepted(_ONE_MODEL, 1),
    "--attention-backend": Accepted(_OP_TABLE, 1),
    "--use-flash-attn": Accepted(_OP_TABLE),
    "--cross-entropy-loss-fusion": Accepted(_OP_TABLE),
    "--cross-entropy-fusion-impl": Accepted(_OP_TABLE, 1),
    "--no-masked-softmax-fusion": Accepted(_OP_TABLE),
    "--no-bias-gelu-fusion": Accepted(_OP_TABLE),
    "--no-bias-swiglu-fusion": Accepted(_OP_TABLE),
    "--no-bias-dropout-fusion": Accepted(_OP_TABLE),
    "--no-rope-fusion": Accepted(_OP_TABLE),
    "--no-persist-layer-norm": Accepted(_OP_TABLE),
    "--no-gradient-accumulation-fusion": Accepted("weight gradients are added into the main gradients in any case"),
    "--attention-softmax-in-fp32": Accepted("the softmax is always computed in fp32 (fp64 in fp64 models)"),
    "--apply-query-key-layer-scaling": Accepted("it cancels out where the softmax is computed in fp32, as it is here"),
    "--accumulate-allreduce-grads-in-fp32": Accepted("gradients are always accumulated in fp32"),
    "--no-async-tensor-model-parallel-allreduce": Accepted("deprecated in Megatron-LM as well"),
    "--use-cpu-initialization": Accepted("initial weights are the same bits on every device and in every layout"),
    "--empty-unused-memory-level": Accepted("the allocator's cache is never emptied between steps", 1),
    "--cuda-graph-impl": Accepted("no CUDA graphs are captured", 1),
    "--DDP-impl": Accepted("gradients live in contiguous buckets in any case", 1),
    "--local-rank": Accepted("ranks are read from the launcher's environment", 1),
    "--disable-gloo-process-groups": Accepted("a cluster run opens no gloo groups"),
    "--optimizer": Accepted("the optimizer is AdamW", 1, only=("adam",)),
    "--dataloader-type": Accepted("the sampler goes through the data once an epoch", 1, only=("single",)),
    "--no-create-attention-mask-in-dataloader": Accepted("no mask is ever built; documents are given by offsets"),
    "--ckpt-format": Accepted(_ONE_FORMAT, 1),
    "--use-dist-ckpt": Accepted(_ONE_FORMAT),
    "--auto-detect-ckpt-format": Accepted(_ONE_FORMAT),
    "--dist-ckpt-strictness": Accepted("loading is always strict: a missing or unknown tensor is an error", 1),
    "--dist-ckpt-optim-fully-reshardable": Accepted("every checkpoint is"),
    "--ckpt-fully-parallel-save": Accepted("every rank writes its own part in any case"),
    "--ckpt-fully-parallel-load": Accepted("every rank reads its own part in any case"),
    "--use-persistent-ckpt-worker": Accepted("there is no background writer in this version"),
    "--no-load-rng": Accepted(_RANDOM),
    "--no-save-rng": Accepted(_RANDOM),
    "--log-throughput": Accepted("tokens/s and TFLOP/s are in every line"),
    "--log-progress": Accepted("metrics.jsonl has the tokens of every step"),
    "--timing-log-level": Accepted("step time and data wait are in every line; --profile shows the rest", 1),
    "--timing-log-option": Accepted("step time and data wait are in every line; --profile shows the rest", 1),
    "--rerun-mode": Accepted("no results are recomputed for comparison", 1),
    "--exit-signal-handler": Accepted("TERM is always handled; see --exit-signals"),
}

ABSENT: dict[str, Absent] = {
    "--context-parallel-size": Absent("context parallelism", 1, harmless=("1",)),
    "--cp-comm-type": Absent("context parallelism", MANY),
    "--num-layers-per-virtual-pipeline-stage": Absent("virtual pipeline stages", 1),
    "--num-virtual-stages-per-pipeline-rank": Absent("virtual pipeline stages", 1, harmless=("1",)),
    "--recompute-activations": Absent("selective recompute (--recompute-granularity full is there)"),
    "--recompute-modules": Absent("selective recompute (--recompute-granularity full is there)", MANY),
    "--overlap-param-gather": Absent("overlapping the parameter gather with the forward pass"),
    "--async-save": Absent("saving in the background"),
}

REFUSED: dict[str, str] = {  # prefix of a flag: what it asks for
    "--fp8": "fp8",
    "--fp4": "fp4",
    "--moe-": "mixtures of experts",
    "--num-experts": "mixtures of experts",
    "--expert-": "mixtures of experts",
    "--overlap-moe-": "mixtures of experts",
    "--multi-latent-attention": "multi-latent attention",
    "--q-lora-rank": "multi-latent attention",
    "--kv-lora-rank": "multi-latent attention",
    "--qk-head-dim": "multi-latent attention",
    "--qk-pos-emb-head-dim": "multi-latent attention",
    "--v-head-dim": "multi-latent attention",
    "--mtp-": "multi-token prediction",
    "--mamba-": "state-space layers",
    "--hybrid-": "state-space layers",
    "--heterogeneous-": "layers of different kinds in one model",
    "--window-size": "sliding-window attention",
    "--relative-attention": "relative position buckets",
    "--encoder-": "encoder-decoder models",
    "--bert-": "BERT",
    "--ict-": "retrieval models",
    "--retro-": "retrieval models",
    "--retriever-": "retrieval models",
    "--vision-": "vision models",
    "--dino-": "vision models",
    "--rl-": "reinforcement learning",
    "--grpo-": "reinforcement learning",
    "--perform-rl-step": "reinforcement learning",
    "--sft": "Megatron-LM's fine-tuning format (here: `megatron-lite data chat`, then --packing best-fit)",
    "--muon-": "the Muon optimizer",
    "--sgd-momentum": "plain SGD",
    "--optimizer-cpu-offload": "optimizer state on the host",
    "--cpu-offloading": "activations on the host",
    "--use-precision-aware-optimizer": "optimizer state in fewer bits",
    "--tp-comm-overlap": "Transformer Engine's overlapped tensor-parallel kernels",
    "--use-megatron-fsdp": "Megatron's FSDP",
    "--data-parallel-sharding-strategy": "Megatron's FSDP",
    "--use-torch-fsdp2": "PyTorch's FSDP",
    "--inprocess-": "restarts inside a process",
    "--use-legacy-models": "Megatron-LM's legacy models",
    "--no-position-embedding": "a deprecated flag (write --position-embedding-type none, or rope)",
    "--data-parallel-size": "it follows from the number of ranks: ranks / (tp * cp * pp)",
    "--model-parallel-size": "a deprecated flag (write --tensor-model-parallel-size)",
    "--batch-size": "a deprecated flag (write --micro-batch-size)",
    "--warmup": "a deprecated flag (write --lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction)",
    "--yaml-cfg": "Megatron-LM's YAML form (write --config with ours)",
}

OURS: frozenset[str] = frozenset(  # fields for which Megatron-LM has no flag
    (
        "architecture",
        "label_smoothing",
        "no_weight_decay_patterns",
        "rope_scaling_low_freq_factor",
        "rope_scaling_high_freq_factor",
        "rope_scaling_original_max_position_embeddings",
        "zero_stage",
        "pipeline_schedule",
        "device",
        "fp64",
        "loss_normalization",
        "mask_padded_vocab",
        "deterministic",
        "on_nan",
        "exit_signals",
        "save_signals",
        "compat",
        "clip_grad_value",
        "lr_scaling_rule",
        "lr_scaling_base_batch",
        "sample_order",
        "blend_temperature",
        "curriculum",
        "transform",
        "packing",
        "data_access",
        "stage_dir",
        "remote_cache_gib",
        "prefetch_mib",
        "pin_memory",
        "document_mask",
        "chat_template",
        "eod_token",
        "save_interval_minutes",
        "keep_last",
        "keep_every",
        "log_dir",
        "peak_tflops",
    )
)

DIFFERENCES: dict[str, str] = {  # field: how the default or meaning differs from Megatron-LM's
    "initial_loss_scale": "theirs starts at 2^32",
    "document_mask": "theirs lets documents see each other unless --reset-position-ids and --reset-attention-mask",
    "loss_normalization": "theirs is a mean of microbatch means unless --calculate-per-token-loss",
    "mask_padded_vocab": "theirs has the padded columns in the softmax",
    "sample_order": "theirs shuffles documents",
    "data_access": "theirs is --no-mmap-bin-files",
    "zero_stage": "theirs is --use-distributed-optimizer",
    "deterministic": "theirs is --deterministic-mode",
    "keep_every": "theirs is --save-retain-interval",
    "add_bias_linear": "theirs is --disable-bias-linear",
    "micro_batch_size": "theirs has to be given",
    "vocab_size": "with NullTokenizer theirs adds an id for the end of a document; here it is the last of these",
    "distributed_backend": "theirs is nccl",
    "tokenizer_type": "theirs is set by pretrain_gpt.py",
    "exit_signals": "theirs handles TERM only, with --exit-signal-handler",
    "use_checkpoint_args": "same; initial weights and sample order are not part of it",
    "rotary_base": "same; also takes fractions",
    "exit_duration_in_mins": "same; also takes fractions",
    "manual_gc": "theirs leaves collection to Python without it",
}


OTHER_NAMES: dict[str, str] = {  # what other programs call a flag: ours, for the hint beside an unknown flag
    "--learning-rate": "--lr",
    "--max-lr": "--lr",
    "--max-steps": "--train-iters",
    "--steps": "--train-iters",
    "--num-steps": "--train-iters",
    "--epochs": "--train-samples",
    "--warmup-steps": "--lr-warmup-iters",
    "--lr-scheduler": "--lr-decay-style",
    "--max-grad-norm": "--clip-grad",
    "--gradient-accumulation-steps": "--global-batch-size",
    "--per-device-train-batch-size": "--micro-batch-size",
    "--hidden-dim": "--hidden-size",
    "--d-model": "--hidden-size",
    "--n-embd": "--hidden-size",
    "--intermediate-size": "--ffn-hidden-size",
    "--n-layer": "--num-layers",
    "--num-hidden-layers": "--num-layers",
    "--num-heads": "--num-attention-heads",
    "--n-head": "--num-attention-heads",
    "--num-key-value-heads": "--num-query-groups",
    "--num-kv-heads": "--num-query-groups",
    "--context-length": "--seq-length",
    "--max-seq-len": "--seq-length",
    "--block-size": "--seq-length",
    "--rope-theta": "--rotary-base",
    "--rms-norm-eps": "--norm-epsilon",
    "--tp": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--gradient-checkpointing": "--recompute-granularity",
    "--tokenizer": "--tokenizer-model",
    "--tokenizer-path": "--tokenizer-model",
    "--dataset": "--data-path",
    "--data": "--data-path",
    "--output-dir": "--save",
    "--checkpoint-dir": "--save",
    "--save-steps": "--save-interval",
    "--logging-steps": "--log-interval",
    "--eval-steps": "--eval-interval",
    "--resume": "--load",
}
ELSEWHERE: dict[str, str] = {  # flags of other commands that text in --data-path makes one think of
    "--json-keys": "data preprocess --json-keys beforehand",
    "--skip-bad": "data preprocess --skip-bad beforehand, or data chat",
    "--encoding": "data preprocess --encoding beforehand, or data chat",
    "--append-eod": "data preprocess --append-eod beforehand; text in --data-path always gets it",
}


def options_of(kind: Any) -> tuple[Any, ...]:
    """The members of a union type, or the type itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return typing.get_args(kind)
    return (kind,)


def field_kinds(cls: type) -> dict[str, Any]:
    """Field name -> type of a dataclass, without ``Annotated``."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def section_classes(model_config: type) -> dict[str, type]:
    """Section name -> its dataclass."""
    return {
        name: model_config if name == "model" else kind
        for name, kind in field_kinds(RunConfig).items()
        if name in SECTIONS
    }


def is_own(model_config: type) -> bool:
    """Whether this is a team's own model configuration, whose flags are ``--model.FIELD``."""
    return not model_config.__module__.startswith("megatron_lite.config.")


def field_flags(model_config: type) -> dict[str, FieldFlag]:
    """Flag -> field, for every field of the schema with this model configuration."""
    found = [FieldFlag("--model", "", "architecture", str)]
    for section, cls in section_classes(model_config).items():
        prefix = "--model." if section == "model" and is_own(model_config) else "--"
        for name, kind in field_kinds(cls).items():
            dashed = name.replace("_", "-")
            negative = f"{prefix}no-{dashed}" if kind is bool else ""
            found.append(FieldFlag(prefix + dashed, section, name, kind, negative))
    return {f.flag: f for f in found}


ListName = Literal["implemented", "alias", "accepted without effect", "not in this version", "refused", "unknown"]


def list_of(flag: str, model_config: type) -> ListName:
    """Which list a flag is in."""
    if flag in ABSENT:
        return "not in this version"
    fields = field_flags(model_config)
    if flag in fields or any(flag == f.negative for f in fields.values()):
        return "implemented"
    if flag in ALIASES:
        return "alias"
    if flag in ACCEPTED:
        return "accepted without effect"
    return "refused" if refused_as(flag) else "unknown"


def refused_as(flag: str) -> str:
    """What a flag that we refuse on purpose asks for, or ""."""
    for prefix, what in REFUSED.items():
        if flag == prefix or (prefix.endswith("-") and flag.startswith(prefix)) or flag.startswith(prefix + "-"):
            return what
    return ""


def known_flags(model_config: type) -> list[str]:
    """Every flag that means something here, for naming the nearest one."""
    fields = field_flags(model_config)
    negatives = [f.negative for f in fields.values() if f.negative]
    return [*fields, *negatives, *ALIASES, *ACCEPTED, *ABSENT, "--config", "--help"]
