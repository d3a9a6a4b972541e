"""The data of a run as the loop uses it: a loader for each split, opened and checked on every rank alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_lite.config.problem import ConfigError, Problem
from megatron_lite.config.schema import RunConfig
from megatron_lite.data.blend import BlendedDataset
from megatron_lite.data.build import Datasets, build_datasets
from megatron_lite.data.by_source import BySource
from megatron_lite.data.curriculum import Curriculum
from megatron_lite.data.loader import Loader
from megatron_lite.data.megatron_order import samples_asked
from megatron_lite.data.mix import Mix
from megatron_lite.data.row import Dataset
from megatron_lite.data.stage_dir import open_access
from megatron_lite.mesh.agreement import agree
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.optim.batch_size import BatchSchedule
from megatron_lite.text.chat_template import template_directory
from megatron_lite.text.corpus_cache import CorpusCache, names_text, renamed, with_tokens
from megatron_lite.text.tokenizer import Tokenizer, tokenizer_of


@dataclass
class Data:
    """Loaders of one rank.

    Attributes:
        train: of the training split; valid, test: None where there is none, or none is asked for.
        summary: lines for the start-up text; notices: what is to be warned of.
        decode: from ids to text, where the run has a tokenizer.
        facts: what decides about samples besides files and flags (the tokenizer's fingerprint and end-of-document id, the
            stages of a curriculum, the source of a transform), stored in checkpoints.
        mix: what training samples are drawn from (None: made up); curriculum: of the training data.
        masked: there are data with a loss mask.
    """

    train: Loader
    valid: Loader | None
    test: Loader | None
    summary: list[str]
    notices: list[str]
    decode: Callable[[Sequence[int]], str] | None
    facts: dict[str, Any]
    mix: Mix | None = None
    curriculum: Curriculum | None = None
    masked: bool = False

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


def find_data(
    config: RunConfig[Any],
    batch: BatchSchedule,
    steps: int,
    samples: int,
    tokenizer: Tokenizer | None,
    tell: Callable[[str], None] = lambda text: None,
) -> Datasets:
    """Everything that the data section names, copied and computed ahead as it asks; ``tell`` hears of what takes long.

    Raises:
        ConfigError: with every problem of the data.
    """
    evaluation = config.evaluation
    asked = samples_asked(
        train_samples=samples,
        train_iters=steps,
        global_batch_size=batch.final,
        eval_interval=evaluation.eval_interval,
        eval_iters=evaluation.eval_iters,
    )
    try:
        tokens, made = _tokens_of_text(config, tokenizer, tell)
        access, lines = open_access(renamed(config.data, tokens), tell)
    except (OSError, ValueError) as error:
        raise ConfigError([Problem(str(error))]) from error
    of_text = {file: access.staged.get(prefix, prefix) for file, prefix in tokens.items()}  # sources keep their names
    access = replace(access, staged={**access.staged, **of_text})
    ids = config.data.tokenizer_type == "NullTokenizer"  # are taken as they are, whichever tokenizer they are of
    try:
        found = build_datasets(
            config.data,
            asked=asked,
            seed=config.training.seed,
            vocab_size=getattr(config.model, "vocab_size", None) or None,
            eod_id=None if tokenizer is None else tokenizer.eod_id,
            fingerprint=None if ids or tokenizer is None else tokenizer.fingerprint,
            tokenizer_flags=(tokenizer and tokenizer.flags) or "",
            access=access,
        )
    except OSError as error:  # of the directory of orders, or of a store
        numbers = "" if config.data.data_cache_path is None else f"--data-cache-path {config.data.data_cache_path}"
        raise ConfigError([Problem(f"the data cannot be read, or their orders not be kept: {error}", numbers)]) from error
    if found.problems:
        raise ConfigError(found.problems)
    found.summary = [*made, *lines, *found.summary]
    return found


def _tokens_of_text(
    config: RunConfig[Any], tokenizer: Tokenizer | None, tell: Callable[[str], None]
) -> tuple[dict[str, str], list[str]]:
    """The dataset that stands for each file of text that the data section names, and lines for the start-up text."""
    data = config.data
    if not names_text(data) or data.mock_data:
        return {}, []
    if tokenizer is None:
        remedy = "--tokenizer-model FILE or DIRECTORY"
        raise ValueError(f"--data-path names a file of text, and no tokenizer is given: {remedy}")
    make = partial(tokenizer_of, data, getattr(config.model, "vocab_size", None))
    directory = None if data.data_cache_path is None else Path(data.data_cache_path)
    beside = template_directory(data.tokenizer_model or data.vocab_file)
    template = None if data.chat_template is None else Path(data.chat_template)
    return with_tokens(data, CorpusCache(make, tokenizer, directory, tell, beside, template))


def open_data(
    config: RunConfig[Any],
    mesh: ProcessMesh,
    batch: BatchSchedule,
    steps: int,
    samples: int,
    tell: Callable[[str], None] = lambda text: None,
) -> Data:
    """The loaders of this rank.

    Raises:
        ConfigError: with every problem of the data, the same on every rank.
    """
    tokenizer: Tokenizer | None = None
    problems: list[Problem] = []
    said: list[list[str]] = [[], []]
    try:
        tokenizer = tokenizer_of_run(config)
        found = find_data(config, batch, steps, samples, tokenizer, tell)
        said = [found.summary, found.notices]
    except ConfigError as error:
        problems = error.problems
    except ValueError as error:  # of the tokenizer
        problems = [Problem(str(error))]
    everywhere = mesh.axis("world").gather_json([[asdict(p) for p in problems], *said])
    for others, *_ in everywhere:  # what went wrong on one node is told by all
        if others:
            raise ConfigError([Problem(**p) for p in others])
    agree(mesh, {"data": found.facts, "datasets": found.seen})

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

    def held_out(dataset: Dataset | None) -> Loader | None:
        """A loader of evaluation data; those of several sources come one source after the other."""
        if isinstance(dataset, BlendedDataset):
            unit = config.training.micro_batch_size * mesh.layout.dp
            dataset = BySource(dataset, config.evaluation.eval_iters * batch.final, unit)
        return loader(dataset)

    # Whichever rank has copied or made something tells of it.
    summary, notices = (list(dict.fromkeys(line for of_rank in everywhere for line in of_rank[kind])) for kind in (1, 2))
    train = loader(found.train)
    assert train is not None, "build_datasets reports a missing training split"
    return Data(
        train=train,
        valid=held_out(found.valid),
        test=held_out(found.test),
        summary=summary,
        notices=notices,
        decode=None if tokenizer is None else tokenizer.decode,
        facts={
            "tokenizer": {"fingerprint": tokenizer.fingerprint if tokenizer else None, "eod_id": found.eod_id},
            **found.facts,
        },
        mix=found.mix,
        curriculum=found.curriculum,
        masked=found.masked,
    )
