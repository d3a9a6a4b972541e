"""The *megatron* order: the document shuffle of Megatron-LM's GPT dataset, for teams who move a run over.

Enough epochs of document numbers for the samples asked for are shuffled together (the last epoch on its own when few of
its samples are needed), the shuffled documents are read as one stream, sample k takes S + 1 tokens of it from token
k * S on, and the samples are shuffled in turn, all with one NumPy ``RandomState``. A "document" here is a sequence of
the index, as there. The order depends on the number of samples asked for, so that number is part of the run.

Unlike the windows order this needs arrays of the size of documents and samples. Their slow part is done by a compiled
helper where it has been built (the NumPy form below gives the same numbers), and with a cache directory they are built
once and mapped by all ranks of a node (:mod:`megatron_lite.data.order_cache`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_lite.data.indexed import IndexedDataset, check_ids
from megatron_lite.data.order_cache import Arrays, cached_arrays
from megatron_lite.data.row import Row
from megatron_lite.ops.library import index_module

_index = index_module()[0]

EXTRA = 1  # tokens of a sample beyond S: the last target
SEPARATE_BELOW = 0.80  # the last epoch is shuffled on its own when less than this share of its samples is needed


def samples_asked(
    *,
    global_batch_size: int,
    train_iters: int | None,
    train_samples: int | None,
    eval_interval: int | None,
    eval_iters: int,
) -> tuple[int, int, int]:
    """Samples that a run asks of its training, validation and test data.

    Args:
        train_iters: steps of the run; with ``train_samples``, the steps that these amount to.
        eval_interval: steps between evaluations; 0 or None: one evaluation only, at the end.
    """
    train = train_samples or (train_iters or 0) * global_batch_size
    steps = train_iters if train_iters is not None else train // global_batch_size
    evaluations = (steps // eval_interval if eval_interval else 0) + 1
    return train, evaluations * eval_iters * global_batch_size, eval_iters * global_batch_size


@dataclass(frozen=True)
class EpochPlan:
    """How many epochs, and whether the last is shuffled on its own.

    Attributes:
        epochs: E, the least with E * T >= n * S + 1.
        samples: N, all samples in E epochs.
        prior: samples in the first E - 1 epochs if the last is ``separate``, else N.
    """

    epochs: int
    samples: int
    prior: int
    separate: bool


def plan_epochs(tokens: int, seq_length: int, asked: int | None) -> EpochPlan:
    """The plan for T = ``tokens`` an epoch and n = ``asked`` samples (None: one epoch)."""
    epochs = 1 if asked is None else max(1, -(-(asked * seq_length + EXTRA) // tokens))
    samples = (epochs * tokens - EXTRA) // seq_length
    if epochs == 1:
        return EpochPlan(1, samples, samples, False)
    assert asked is not None
    prior = ((epochs - 1) * tokens - EXTRA) // seq_length
    separate = asked - prior < int(SEPARATE_BELOW * ((tokens - EXTRA) // seq_length))
    return EpochPlan(epochs, samples, prior if separate else samples, separate)


def document_index(documents: int, plan: EpochPlan, random: np.random.RandomState) -> np.ndarray:
    """Document numbers [0, documents) of all epochs, shuffled: int32 (int64 where they do not fit) [E * documents]."""
    dtype = np.int32 if documents <= np.iinfo(np.int32).max else np.int64
    one = np.arange(documents, dtype=dtype)
    if not plan.separate:
        every = np.tile(one, plan.epochs)
        random.shuffle(every)
        return every
    first = np.tile(one, plan.epochs - 1)
    random.shuffle(first)
    random.shuffle(one)
    return np.concatenate((first, one))


def sample_index(lengths: np.ndarray, order: np.ndarray, seq_length: int, samples: int) -> np.ndarray:
    """Where each sample starts in the shuffled documents.

    Args:
        lengths: int32 [documents], tokens of each document.
        order: document numbers in reading order.

    Returns:
        int64 [samples + 1, 2]: place in ``order`` and offset in that document of token k * S, for k = 0 ... samples.
    """
    if _index is not None:
        return _index.build_sample_index(lengths, order, seq_length, samples, EXTRA)
    ends = np.cumsum(lengths[order], dtype=np.int64)
    tokens = np.arange(samples + 1, dtype=np.int64) * seq_length
    places = np.searchsorted(ends, tokens, side="right")
    result = np.empty((samples + 1, 2), dtype=np.int64)
    result[:, 0] = places
    result[:, 1] = tokens - ends[places] + lengths[order[places]]
    result[0] = 0  # the walk begins at the first document even if that is empty
    return result


def shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> np.ndarray:
    """The order of the samples: uint32 (int64 where they do not fit) [N]."""
    dtype = np.uint32 if plan.samples < np.iinfo(np.uint32).max - 1 else np.int64
    first = np.arange(plan.prior, dtype=dtype)
    random.shuffle(first)
    if plan.prior == plan.samples:
        return first
    last = np.arange(plan.prior, plan.samples, dtype=dtype)
    random.shuffle(last)
    return np.concatenate((first, last))


class MegatronDataset:
    """Rows of the sequences ``part`` of a dataset in the megatron order.

    Args:
        seq_length: S.
        asked: samples that the run asks for; None: one epoch.
        eod_id: documents inside a row end after this id (there is no other trace of them in this order); None: a row is
            one document.
        vocab_size: rows with ids outside the vocabulary are refused; None: not checked.
        cache: directory in which the order is kept; None: it is built here.
        tell: gets what is worth knowing about the cache.

    Raises:
        ValueError: too few tokens for one sample.
        OSError: the cache cannot be written.
    """

    endless = False

    def __init__(
        self,
        dataset: IndexedDataset,
        part: range,
        seq_length: int,
        asked: int | None,
        seed: int,
        *,
        eod_id: int | None = None,
        vocab_size: int | None = None,
        name: str = "",
        cache: Path | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.dataset, self.part, self.name = dataset, part, name or dataset.prefix
        self.seq_length, self.eod_id, self.vocab_size, self.asked = seq_length, eod_id, vocab_size, asked
        self.num_tokens = dataset.start_of(part.stop) - dataset.start_of(part.start)
        if self.num_tokens < seq_length + EXTRA:
            raise ValueError(
                f"{self.name}: {self.num_tokens} tokens are too few for one sample: a sequence length of {seq_length} "
                f"takes {seq_length + EXTRA}"
            )
        self.plan = plan_epochs(self.num_tokens, seq_length, asked)
        if cache is None:
            arrays = self._build(seed)
        else:
            key = {
                "order": "megatron", "index": dataset.index_digest, "part": [part.start, part.stop],
                "seq_length": seq_length, "asked": asked, "seed": seed, "rules": [EXTRA, SEPARATE_BELOW],
            }  # fmt: skip
            path = cache / "orders" / Path(dataset.prefix).name
            arrays = cached_arrays(path, key, lambda: self._build(seed), tell)
        self.order, self.samples, self.shuffle = arrays["order"], arrays["samples"], arrays["shuffle"]

    def _build(self, seed: int) -> Arrays:
        random = np.random.RandomState(seed)
        order = document_index(len(self.part), self.plan, random)
        lengths = np.array(self.dataset.lengths[self.part.start : self.part.stop], dtype=np.int32)
        samples = sample_index(lengths, order, self.seq_length, self.plan.samples)
        return {"order": order, "samples": samples, "shuffle": shuffle_index(self.plan, random)}

    def __len__(self) -> int:
        return self.plan.samples

    def row(self, j: int) -> Row:
        """Sample j."""
        if not 0 <= j < self.plan.samples:
            raise IndexError(f"{self.name}: sample {j} of {self.plan.samples}; the run asked for {self.asked}")
        tokens = self._tokens(int(self.shuffle[j]))
        if self.vocab_size is not None:
            check_ids(tokens, self.vocab_size, f"{self.name}: sample {j}")
        return Row(tokens, eod_starts(tokens, self.eod_id), j)

    def _tokens(self, k: int) -> np.ndarray:
        """Sample k before the second shuffle: int64 [S + 1]."""
        (first, begin), (last, end) = self.samples[k].tolist(), self.samples[k + 1].tolist()
        documents = self.order[first : last + 1].astype(np.int64) + self.part.start
        starts = self.dataset.pointers[documents] // self.dataset.dtype.itemsize
        stops = starts + self.dataset.lengths[documents]
        stops[-1] = starts[-1] + end + EXTRA
        starts[0] += begin
        result = np.empty(self.seq_length + EXTRA, dtype=np.int64)
        at = 0
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            result[at : at + stop - start] = self.dataset.raw(start, stop)
            at += stop - start
        assert at == len(result), (at, len(result))
        return result


def eod_starts(tokens: np.ndarray, eod_id: int | None) -> np.ndarray:
    """Starts of a row's documents where each ends after an ``eod_id`` among the inputs: int64, the first is 0."""
    if eod_id is None:
        return np.zeros(1, dtype=np.int64)
    return np.concatenate(([0], np.flatnonzero(tokens[:-1] == eod_id) + 1))
