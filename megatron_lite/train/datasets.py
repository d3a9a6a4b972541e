"""The data of a run as the loop uses it: a loader for each split, opened and checked on every rank alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lite.config.problem import ConfigError, Problem
from megatron_lite.config.schema import RunConfig
from megatron_lite.data.build import build_datasets
from megatron_lite.data.loader import Loader
from megatron_lite.data.megatron_order import samples_asked
from megatron_lite.data.row import Dataset
from megatron_lite.data.stage_dir import open_access
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.optim.batch_size import BatchSchedule
from megatron_lite.text.tokenizer import Tokenizer, tokenizer_of


@dataclass
class Data:
    """Loaders of one rank.

    Attributes:
        train: of the training split; valid, test: None where there is none, or none is asked for.
        summary: lines for the start-up text.
        decode: from ids to text, where the run has a tokenizer.
        tokenizer_facts: fingerprint and end-of-document id, stored in checkpoints.
    """

    train: Loader
    valid: Loader | None
    test: Loader | None
    summary: list[str]
    decode: Callable[[Sequence[int]], str] | None
    tokenizer_facts: dict[str, Any]

    def close(self) -> None:
        """Stop all threads."""
        for loader in (self.train, self.valid, self.test):
            if loader is not None:
                loader.close()


def tokenizer_of_run(config: RunConfig[Any]) -> Tokenizer | None:
    """The run's tokenizer, or None where no files are named (then ids are all there is)."""
    data = config.data
    if data.tokenizer_type == "NullTokenizer" or data.tokenizer_model or data.vocab_file:
        return tokenizer_of(data, getattr(config.model, "vocab_size", None))
    return None


def open_data(
    config: RunConfig[Any],
    mesh: ProcessMesh,
    batch: BatchSchedule,
    steps: int,
    samples: int,
    tell: Callable[[str], None] = lambda text: None,
) -> Data:
    """Open everything that the data section names; ``tell`` hears of what takes long.

    Raises:
        ConfigError: with every problem of the data, the same on every rank.
    """
    tokenizer = tokenizer_of_run(config)
    evaluation = config.evaluation
    asked = samples_asked(
        train_samples=samples,
        train_iters=steps,
        global_batch_size=batch.final,
        eval_interval=evaluation.eval_interval,
        eval_iters=evaluation.eval_iters,
    )
    try:
        access, lines = open_access(config.data, tell)
    except (OSError, ValueError) as error:
        raise ConfigError([Problem(str(error))]) from error
    found = build_datasets(
        config.data,
        asked=asked,
        seed=config.training.seed,
        vocab_size=getattr(config.model, "vocab_size", None) or None,
        eod_id=None if tokenizer is None else tokenizer.eod_id,
        fingerprint=None if tokenizer is None else tokenizer.fingerprint,
        access=access,
    )
    if found.problems:
        raise ConfigError(found.problems)

    def loader(dataset: Dataset | None) -> Loader | None:
        if dataset is None:
            return None
        return Loader(
            dataset,
            micro_batch_size=config.training.micro_batch_size,
            seq_length=config.data.seq_length,
            dp_index=mesh.coords.dp,
            dp_size=mesh.layout.dp,
            num_workers=config.data.num_workers,
            pin_memory=config.data.pin_memory,
            bytes_ahead=config.data.prefetch_mib << 20,
            device=mesh.device,
            document_mask=config.data.document_mask,
            eod_id=found.eod_id,
            eod_mask_loss=config.data.eod_mask_loss,
        )

    train = loader(found.train)
    assert train is not None, "build_datasets reports a missing training split"
    return Data(
        train=train,
        valid=loader(found.valid),
        test=loader(found.test),
        summary=[*found.summary, *lines, *found.notices],
        decode=None if tokenizer is None else tokenizer.decode,
        tokenizer_facts={"fingerprint": tokenizer.fingerprint if tokenizer else None, "eod_id": found.eod_id},
    )
