"""Problems of what goes in and out: data, tokenizer, evaluation, checkpoints, logging. See :mod:`.check`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron_lite.config.derived import TOKENIZER_FILES
from megatron_lite.config.problem import Problem
from megatron_lite.config.schema import RunConfig
from megatron_lite.config.schema_io import DataConfig, EvaluationConfig, LoggingConfig
from megatron_lite.config.text_files import is_text_file

OWN_SPLITS = ("train_data_path", "valid_data_path", "test_data_path")


def data_problems(config: RunConfig[Any]) -> list[Problem]:
    """Sequence length, sources, split, tokenizer."""
    data, found = config.data, []
    if data.seq_length < 1:
        found.append(
            Problem(
                "--seq-length is required" if data.seq_length == 0 else f"--seq-length {data.seq_length}",
                rule="at least 1 token",
            )
        )
    for name, least in (("num_workers", 0), ("prefetch_mib", 1), ("remote_cache_gib", 1)):
        if getattr(data, name) < least:
            found.append(Problem(f"--{name.replace('_', '-')} {getattr(data, name)}", rule=f"{least} or more"))
    if not 0 < data.blend_temperature < math.inf:
        found.append(Problem(f"--blend-temperature {data.blend_temperature:g}", rule="above 0", nearest="1 changes nothing"))
    return found + source_problems(data, config.evaluation) + tokenizer_problems(config)


def source_problems(data: DataConfig, evaluation: EvaluationConfig) -> list[Problem]:
    """Where the tokens come from. (``--split`` is read, and checked, by :mod:`megatron_lite.data.sources`.)"""
    found = []
    own = [name for name in OWN_SPLITS if getattr(data, name)]
    if not data.mock_data:
        if data.data_path and own:
            flags = ", ".join("--" + name.replace("_", "-") for name in own)
            what = f"--data-path beside {flags}"
            found.append(Problem(what, rule="either one source that --split divides, or sources of their own"))
        elif not data.data_path and not own:
            found.append(Problem("there is no data", nearest="--data-path PREFIX, or --mock-data"))
        elif own and "train_data_path" not in own and not evaluation.skip_train:
            found.append(Problem("there is no training data", f"only {' and '.join(own)}", nearest="--train-data-path"))
    paths = [entry for name in ("data_path", *OWN_SPLITS) for entry in getattr(data, name)]
    if data.chat_template is not None and not any(map(is_text_file, paths)):
        what = f"--chat-template {data.chat_template}: there is no file of conversations in --data-path"
        found.append(Problem(what, rule="token files are rendered already", nearest="data chat --chat-template, for the token files"))
    for name in ("data_path", *OWN_SPLITS):
        found += blend_problems("--" + name.replace("_", "-"), getattr(data, name))
    return found


def blend_problems(flag: str, path: Sequence[str]) -> list[Problem]:
    """A blend is WEIGHT PREFIX pairs or prefixes only."""
    numbers = [_number(entry) for entry in path]
    if not any(n is not None for n in numbers):
        return []
    if len(path) == 1:
        return [Problem(f"{flag} {path[0]}: a weight without a prefix", nearest=f"{flag} {path[0]} PREFIX")]
    if len(path) % 2 or any(n is None for n in numbers[0::2]):
        rule = "WEIGHT PREFIX pairs, or prefixes only"
        return [Problem(f"{flag} {' '.join(path)}: weights and prefixes do not alternate", rule=rule)]
    weights = [n for n in numbers[0::2] if n is not None]
    if any(w < 0 for w in weights) or sum(weights) == 0:
        return [Problem(f"{flag}: weights {', '.join(path[0::2])}", rule="none negative, not all zero")]
    return []


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def tokenizer_problems(config: RunConfig[Any]) -> list[Problem]:
    """A tokenizer's files; without any the vocabulary size must be given."""
    data, found = config.data, []
    given = [name for name in ("vocab_file", "merge_file", "tokenizer_model") if getattr(data, name)]
    vocab_size = getattr(config.model, "vocab_size", None)
    others = "or, for data that are ids already, --vocab-size N alone"
    kind = data.tokenizer_type or ("HuggingFaceTokenizer" if data.tokenizer_model else "GPT2BPETokenizer")  # as to files
    missing = [name for name in TOKENIZER_FILES[kind] if not getattr(data, name)]
    if data.tokenizer_type is None and not given and not vocab_size:
        nearest = f"--tokenizer-model FILE or DIRECTORY, --vocab-file FILE --merge-file FILE, {others}"
        found.append(Problem("no tokenizer is named", nearest=nearest))
    elif missing and (given or not vocab_size):
        flags = " and ".join("--" + name.replace("_", "-") for name in missing)
        found.append(Problem(f"--tokenizer-type {kind} needs {flags}", nearest=f"{flags} FILE, {others}"))
    if data.tokenizer_type == "NullTokenizer" and vocab_size is not None and vocab_size < 2:
        rule = "the last id is the end of a document"
        found.append(Problem("--tokenizer-type NullTokenizer needs --vocab-size of at least 2", rule=rule))
    if data.tiktoken_pattern not in (None, "v1", "v2"):
        found.append(Problem(f"--tiktoken-pattern {data.tiktoken_pattern}", rule="v1 or v2"))
    return found


def evaluation_problems(evaluation: EvaluationConfig) -> list[Problem]:
    """Intervals."""
    found = []
    if evaluation.eval_interval < 1:
        found.append(
            Problem(
                f"--eval-interval {evaluation.eval_interval}",
                rule="at least 1 step",
                nearest="--eval-iters 0 does not evaluate",
            )
        )
    if evaluation.eval_iters < 0:
        found.append(Problem(f"--eval-iters {evaluation.eval_iters}", rule="0 or more"))
    return found


def checkpoint_problems(config: RunConfig[Any]) -> list[Problem]:
    """Intervals, and flags of loading that have nothing to load."""
    its, found = config.checkpoint, []
    for name in ("save_interval", "save_interval_minutes", "keep_last", "keep_every"):
        value = getattr(its, name)
        if value is not None and value <= 0:
            found.append(Problem(f"--{name.replace('_', '-')} {value:g}", rule="above 0"))
    if not its.load:
        wanting = [
            name for name in ("finetune", "use_checkpoint_args", "exit_on_missing_checkpoint") if getattr(its, name)
        ]
        wanting += ["ckpt_step"] if its.ckpt_step is not None else []
        found += [Problem(f"--{name.replace('_', '-')} without --load", nearest="--load DIRECTORY") for name in wanting]
    if its.ckpt_step is not None and its.ckpt_step < 0:
        found.append(Problem(f"--ckpt-step {its.ckpt_step}", rule="0 or more"))
    if its.override_opt_param_scheduler and its.use_checkpoint_opt_param_scheduler:
        what = "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler are given together"
        found.append(Problem(what, rule="either the flags' schedules win or the checkpoint's"))
    return found


def logging_problems(its: LoggingConfig, world_size: int) -> list[Problem]:
    """Intervals, profile range and ranks."""
    found = []
    if its.log_interval < 1:
        found.append(Problem(f"--log-interval {its.log_interval}", rule="at least 1 step"))
    if its.peak_tflops is not None and its.peak_tflops <= 0:
        found.append(Problem(f"--peak-tflops {its.peak_tflops:g}", rule="above 0"))
    if its.profile:
        if not 0 <= its.profile_step_start < its.profile_step_end:
            numbers = f"start {its.profile_step_start}, end {its.profile_step_end}"
            found.append(Problem("the profile has no steps", numbers, "0 <= start < end"))
        beyond = [rank for rank in its.profile_ranks if not 0 <= rank < world_size]
        if beyond:
            numbers = f"{', '.join(map(str, beyond))} of {world_size} ranks"
            found.append(Problem("--profile-ranks names ranks that do not exist", numbers, f"0 to {world_size - 1}"))
    return found
