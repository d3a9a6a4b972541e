"""The sections of a run's configuration that say what goes in and what comes out: data, evaluation, checkpoint, logging.

See :mod:`megatron_lite.config.schema`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TokenizerType = Literal[
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "NullTokenizer",
]


@dataclass(frozen=True)
class DataConfig:
    """What to train on: token files, their blend and split, the tokenizer, and how rows are made of documents."""

    seq_length: int = 0
    """Tokens of one sample (required)."""
    data_path: tuple[str, ...] = ()
    """PREFIX or file of text, several weighted by their lengths, or WEIGHT PREFIX pairs; divided by --split."""
    train_data_path: tuple[str, ...] = ()
    """Training data of its own, in the form of --data-path."""
    valid_data_path: tuple[str, ...] = ()
    """Validation data of its own, in the form of --data-path."""
    test_data_path: tuple[str, ...] = ()
    """Test data of its own, in the form of --data-path."""
    split: str = "969,30,1"
    """Shares of --data-path for training, validation, test."""
    blend_temperature: float = 1.0
    """Sources are drawn by weight^(1/T), without weights by tokens^(1/T): above 1 small sources more often."""
    curriculum: str | None = None
    """YAML file of stages: weights of sources and sequence lengths by consumed tokens (docs/datasets.md)."""
    transform: str | None = None
    """MODULE:FUNCTION, a team's own, through which every training row passes (docs/datasets.md)."""
    mock_data: bool = False
    """Made-up tokens instead of files."""
    sample_order: Literal["windows", "megatron"] = "windows"
    """windows: permuted windows of one token stream; megatron: the order of Megatron-LM's GPT dataset."""
    packing: Literal["windows", "best-fit"] = "windows"
    """windows: rows cut out of one token stream; best-fit: whole documents packed into rows, the rest is padding."""
    document_mask: bool = True
    """on|off: documents in a row do not see each other, and positions restart (--reset-position-ids mean on)."""
    eod_mask_loss: bool = False
    """No loss where the input is the end-of-document token."""
    num_workers: int = 2
    """Threads of each rank that read and build batches ahead; 0 reads in the training loop."""
    data_access: Literal["mmap", "pread"] = "mmap"
    """mmap: map .bin files; pread: read each row (--no-mmap-bin-files), for parallel file systems where mapping is slow."""
    data_cache_path: str | None = None
    """Directory for what is computed of the data once and found later: orders, tokens of text; local to a node or shared."""
    stage_dir: str | None = None
    """Directory on each node's own disk to which the data are copied before training; later starts find the copies."""
    remote_cache_gib: int = 64
    """What blocks of remote data (s3://...) may take under --data-cache-path."""
    prefetch_mib: int = 32
    """Batches kept built ahead of the step, on each rank: as many steps as fit, at least 2 and at most 8."""
    pin_memory: bool = True
    """Build batches in page-locked memory, from which a GPU copies while it computes; no effect on CPUs."""
    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer. Default: the one that its files are, by their names."""
    tokenizer_model: str | None = None
    """Tokenizer file or directory (Hugging Face, SentencePiece, tiktoken)."""
    tiktoken_pattern: str | None = None
    """tiktoken: v1 or v2, how text is cut before merging."""
    vocab_file: str | None = None
    """GPT-2: vocab.json."""
    merge_file: str | None = None
    """GPT-2: merges.txt."""
    chat_template: str | None = None
    """Jinja file, in place of the tokenizer's own chat template, for files of conversations in --data-path."""
    eod_token: str | None = None
    """Text of the end-of-document token, where the tokenizer declares none."""


@dataclass(frozen=True)
class EvaluationConfig:
    """When to evaluate, and on how much."""

    eval_interval: int = 1000
    """Steps between evaluations on the validation data."""
    eval_iters: int = 100
    """Global batches of one evaluation; 0 does not evaluate."""
    skip_train: bool = False
    """Load, evaluate and exit."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What to save, how often, what to keep, and what to load."""

    save: str | None = None
    """Directory for checkpoints."""
    save_interval: int | None = None
    """Steps between saves (the last step is saved in any case)."""
    save_interval_minutes: float | None = None
    """Minutes between saves; besides --save-interval."""
    keep_last: int | None = None
    """Keep this many of the newest checkpoints. Default: all."""
    keep_every: int | None = None
    """With --keep-last: also keep each checkpoint whose step this divides (--save-retain-interval)."""
    save_optim: bool = True
    """Save the optimizer's moments; --no-save-optim saves weights only."""
    load: str | None = None
    """Directory of checkpoints to start from; the same as --save and empty: start fresh."""
    ckpt_step: int | None = None
    """Load the checkpoint of this step. Default: the newest complete one."""
    load_optim: bool = True
    """Load the optimizer's moments and schedules; --no-load-optim loads weights only."""
    finetune: bool = False
    """Load weights only and start at step 0."""
    exit_on_missing_checkpoint: bool = False
    """Exit with code 2 when --load holds no checkpoint, also where it is the same as --save."""
    use_checkpoint_args: bool = False
    """Take the model's and the tokenizer's options from the checkpoint."""
    override_opt_param_scheduler: bool = False
    """Where the checkpoint's schedules differ from the flags, the flags win. Default: an error that lists them."""
    use_checkpoint_opt_param_scheduler: bool = False
    """Where the checkpoint's schedules differ from the flags, the checkpoint wins."""


@dataclass(frozen=True)
class LoggingConfig:
    """What to report, where, and how often."""

    log_interval: int = 100
    """Steps between printed lines (metrics.jsonl has every step)."""
    log_dir: str | None = None
    """Directory of metrics.jsonl and run.json. Default: --save, else runs/DATE-TIME."""
    log_params_norm: bool = False
    """Report the L2 norm of all parameters."""
    log_num_zeros_in_grad: bool = False
    """Report how many gradient elements are zero."""
    tensorboard_dir: str | None = None
    """Directory of TensorBoard event files."""
    log_timers_to_tensorboard: bool = False
    """Step time and data wait in TensorBoard."""
    log_memory_to_tensorboard: bool = False
    """Memory in TensorBoard."""
    log_validation_ppl_to_tensorboard: bool = False
    """Validation perplexity in TensorBoard."""
    wandb_project: str | None = None
    """Weights & Biases project; asks for W&B."""
    wandb_exp_name: str | None = None
    """W&B name of the run."""
    wandb_save_dir: str | None = None
    """Directory of W&B's local files. Default: --log-dir."""
    profile: bool = False
    """Write a profiler trace of the steps below to --log-dir."""
    profile_step_start: int = 10
    """First profiled step."""
    profile_step_end: int = 12
    """The step before which profiling ends."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that profile."""
    peak_tflops: float | None = None
    """Dense peak of one device in TFLOP/s, for MFU. Default: by device name; unknown devices report no MFU."""
