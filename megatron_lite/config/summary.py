"""What a start says before it trains: the layout, the size of the model, where the numbers differ from Megatron-LM's (at a
first start), which flags have no effect and why, and what each batch-size rule would make of the learning rate.

The same script must not train another objective without a word: :func:`differences` lists every line of the table of
intended differences (docs/configuration.md) that is in force under this configuration.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_lite.config.derived import bucket_parameters, count_parameters, precision
from megatron_lite.config.load import Loaded, changed
from megatron_lite.config.schema import RunConfig
from megatron_lite.config.transformer import TransformerConfig

if TYPE_CHECKING:
    from megatron_lite.mesh.layout import Layout

# item, whether ours is in force, ours, theirs, the flag that sets theirs
DIFFERENCE_TABLE: tuple[tuple[str, Callable[[RunConfig[Any]], bool], str, str, str], ...] = (
    (
        "documents in a row",
        lambda c: c.data.document_mask,
        "do not see each other, positions restart",
        "see each other, unless --reset-position-ids and --reset-attention-mask",
        "--document-mask off",
    ),
    (
        "target across a border",
        lambda c: c.data.document_mask,
        "not trained",
        "trained, unless --eod-mask-loss",
        "--document-mask off",
    ),
    (
        "objective",
        lambda c: c.training.loss_normalization == "token",
        "loss sum / valid tokens of the global batch",
        "mean of the microbatches' means, unless --calculate-per-token-loss",
        "--loss-normalization microbatch",
    ),
    (
        "padded vocabulary",
        lambda c: c.training.mask_padded_vocab,
        "outside the softmax",
        "inside the softmax",
        "--mask-padded-vocab off",
    ),
    ("initial weights", lambda c: True, "keyed by name, the same in any layout", "depend on tp and pp", ""),
    (
        "sample order",
        lambda c: c.data.sample_order == "windows" and c.data.packing == "windows",
        "permuted windows of one token stream",
        "shuffled documents",
        "--sample-order megatron",
    ),
    (
        "rows of --packing best-fit",
        lambda c: c.data.packing == "best-fit",
        "whole documents and padding, permuted",
        "cut out of shuffled documents",
        "--packing windows --sample-order megatron",
    ),
    (
        "initial loss scale",
        lambda c: c.training.fp16 and c.optimizer.loss_scale is None and c.optimizer.initial_loss_scale != 2.0**32,
        "2^16 unless given",
        "2^32",
        "--initial-loss-scale 4294967296",
    ),
)


def differences(config: RunConfig[Any]) -> list[str]:
    """One line for each intended difference from Megatron-LM that is in force."""
    lines = []
    for item, in_force, ours, theirs, flag in DIFFERENCE_TABLE:
        if in_force(config):
            lines.append(f"{item}: {ours} (Megatron-LM: {theirs}{'; ' + flag if flag else ''})")
    return lines


def notices(config: RunConfig[Any]) -> list[str]:
    """Values that were given and do nothing here, or cost something one should know."""
    parallel, training, optimizer = config.parallel, config.training, config.optimizer
    found = []
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        found.append("--sequence-parallel has no effect at tensor-model-parallel-size 1")
    if training.recompute_granularity is None and (training.recompute_method or training.recompute_num_layers):
        found.append(
            "--recompute-method and --recompute-num-layers have no effect without --recompute-granularity full"
        )
    if optimizer.lr_decay_style != "WSD" and (optimizer.lr_wsd_decay_iters or optimizer.lr_wsd_decay_samples):
        found.append("--lr-wsd-decay-iters and -samples have no effect without --lr-decay-style WSD")
    if optimizer.lr_scaling_rule == "none" and optimizer.lr_scaling_base_batch:
        found.append("--lr-scaling-base-batch has no effect without --lr-scaling-rule")
    if training.manual_gc_interval and not training.manual_gc:
        found.append("--manual-gc-interval has no effect without --manual-gc")
    found += _model_notices(config.model)
    if not training.mask_padded_vocab:
        found.append(
            "--mask-padded-vocab off: padded rows start at zero, are trained and are stored in the checkpoint as "
            "<name>.padding; equality over tp and resharding over tp are not promised"
        )
    if getattr(config.model, "attention_dropout", 0) > 0:
        found.append(
            f"--attention-dropout {config.model.attention_dropout:g}: attention runs on the plain reference, which keeps "
            "the weights of every pair of positions (slower, and more memory at long sequences)"
        )
    found += _output_notices(config)
    return found


def _model_notices(model: Any) -> list[str]:
    """Options of a transformer that another one has to turn on."""
    found: list[str] = []
    if not isinstance(model, TransformerConfig):
        return found
    default = {field.name: field.default for field in dataclasses.fields(model)}
    scaling = [name for name in default if name.startswith("rope_scaling_")]
    for names, on, switch in (
        (["num_query_groups"], model.group_query_attention, "--group-query-attention"),
        (["rotary_base", "rotary_percent"], model.position_embedding_type == "rope", "--position-embedding-type rope"),
        (scaling, model.use_rope_scaling, "--use-rope-scaling"),
    ):
        given = ["--" + name.replace("_", "-") for name in names if not on and getattr(model, name) != default[name]]
        if given:
            found.append(f"{', '.join(given)}: no effect without {switch}")
    return found


def _output_notices(config: RunConfig[Any]) -> list[str]:
    checkpoint, logging, found = config.checkpoint, config.logging, []
    if config.data.mock_data and config.data.data_path:
        found.append("--data-path is not read: --mock-data makes up tokens")
    if not checkpoint.save and not config.evaluation.skip_train:
        found.append("nothing is saved: --save is not given")
    if checkpoint.keep_every and not checkpoint.keep_last:
        found.append("--keep-every has no effect without --keep-last: all checkpoints are kept")
    steps = config.training.train_iters
    if logging.profile and steps is not None and logging.profile_step_start >= steps:
        found.append(f"--profile writes no trace: --profile-step-start {logging.profile_step_start} of {steps} steps")
    if not logging.tensorboard_dir:
        names = ("log_timers_to_tensorboard", "log_memory_to_tensorboard", "log_validation_ppl_to_tensorboard")
        given = ["--" + name.replace("_", "-") for name in names if getattr(logging, name)]
        if given:
            found.append(f"{', '.join(given)} without --tensorboard-dir: no effect")
    if logging.wandb_exp_name and not logging.wandb_project:
        found.append("--wandb-exp-name without --wandb-project: W&B is not used")
    return found


def megabytes(parameters: int, bytes_each: int) -> str:
    """``160.0 MB (40,000,000 parameters of 4 bytes)``."""
    return f"{parameters * bytes_each / 1e6:,.1f} MB ({parameters:,} parameters of {bytes_each} bytes)"


def summary(
    loaded: Loaded,
    layout: Layout,
    *,
    lines: Sequence[str] = (),
    lr_by_rule: Mapping[str, float] | None = None,
    environment: Mapping[str, str] | None = None,
    first_start: bool = True,
) -> str:
    """The start-up text. What is to be warned of (:func:`notices`) is said later, directly before training.

    Args:
        loaded: the configuration and the flags without effect.
        layout: of the job.
        lines: what other rooms have to say (schedules, the vocabulary, ...).
        lr_by_rule: learning rate under each ``--lr-scaling-rule``, see :mod:`megatron_lite.optim.batch_size`.
        environment: variables that were set from the configuration.
        first_start: not of a run that goes on: differences from Megatron-LM are told.
    """
    config = loaded.config
    parts = [f"model {config.architecture}: {_size(config)}", f"layout: {layout.describe()}"]
    kind = precision(config.training)
    zero = f"ZeRO stage {config.parallel.zero_stage}"
    overlap = "overlapped with backward" if config.parallel.overlap_grad_reduce else "after backward"
    parts.append(f"precision {kind}, {zero}, gradients reduced {overlap}")
    width = 8 if kind == "fp64" else 4
    bucket = bucket_parameters(config.parallel, layout.dp)
    bucket = min(bucket, count_parameters(config.model)) if isinstance(config.model, TransformerConfig) else bucket
    parts.append(f"gradient bucket: at most {megabytes(bucket, width)}")
    parts += lines
    parts.append(_wrapped("not at their defaults: " + ", ".join(_settings(config))))
    if lr_by_rule:
        rules = ", ".join(f"{rule} {value:g}" for rule, value in lr_by_rule.items())
        parts.append(f"learning rate by --lr-scaling-rule (in force: {config.optimizer.lr_scaling_rule}): {rules}")
    text = "\n".join(parts)
    blocks = (
        ("differs from Megatron-LM on purpose:", differences(config) if first_start else []),
        ("accepted without effect:", [f"{flag}: {reason}" for flag, reason in loaded.accepted]),
        ("environment set from the configuration:", [f"{k}={v}" for k, v in (environment or {}).items()]),
    )
    return "\n".join([text, *(line for head, its in blocks for line in listed(head, its))])


def listed(head: str, lines: Sequence[str]) -> list[str]:
    """Lines under a heading; nothing where there are none."""
    return [head, *(f"  - {line}" for line in lines)] if lines else []


def _settings(config: RunConfig[Any]) -> list[str]:
    return [
        f"{name} {' '.join(map(str, v)) if isinstance(v, tuple) else v}"
        for (_, name), (v, _) in changed(config).items()
    ]


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 118, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _size(config: RunConfig[Any]) -> str:
    model = config.model
    if not isinstance(model, TransformerConfig):
        return type(model).__name__
    kv = f", {model.kv_heads} key/value heads" if model.kv_heads != model.num_attention_heads else ""
    return (
        f"{count_parameters(model):,} parameters ({model.num_layers} layers, hidden {model.hidden_size}, "
        f"ffn {model.ffn_size}, {model.num_attention_heads} heads{kv}, vocabulary {model.vocab_size:,}), "
        f"sequence {config.data.seq_length}"
    )
