"""Augmentation in the loader: a function of a team's own changes each training row, before batches are made of it.

``--transform module:function`` names any callable ``(row, generator) -> row``. What it draws comes from the generator, which
is keyed by (seed, number of the sample): the same row on every rank that reads it, after every restart, and with any
number of threads, and another one each time the data are read again. It must keep no state, since threads call it.
The arrays of the row it is given are read-only. Its result is checked for being a row of the same length.

Rows of validation and test data are not changed: their losses stay comparable.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_lite.config.own_code import import_own, own_digest
from megatron_lite.data.permutation import key64
from megatron_lite.data.row import Dataset, Row

Function = Callable[[Row, np.random.Generator], Row]


@dataclass(frozen=True)
class Transform:
    """A function and where it comes from.

    Attributes:
        name: ``module:function``.
        function: what it names.
        digest: of the source files of its module's package.
    """

    name: str
    function: Function
    digest: str


def load_transform(name: str) -> Transform:
    """The function behind ``--transform``; ValueError where there is none."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ValueError(f"--transform {name}: give module:function")
    try:
        module = import_own(module_name)
    except ValueError as error:
        raise ValueError(f"--transform {name}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"--transform {name}: {module.__file__} has no function {attribute}; it has {', '.join(own) or 'none'}")
    return Transform(name, function, own_digest(module_name))


class TransformedRows:
    """The rows of a dataset, each changed by a function.

    Args:
        dataset: what to read.
        transform: what changes it.
        seed: of the generators.
        vocab_size: ids are below it; None: not checked.
    """

    def __init__(self, dataset: Dataset, transform: Transform, seed: int, vocab_size: int | None = None) -> None:
        self.dataset, self.transform, self.vocab_size = dataset, transform, vocab_size
        self.endless = dataset.endless
        self._key = key64("transform", seed)

    def __len__(self) -> int:
        return len(self.dataset)

    def row(self, j: int) -> Row:
        """Sample j. ValueError where the function fails or its result is no row like the one it was given."""
        before, what = _read_only(self.dataset.row(j)), f"--transform {self.transform.name}, sample {j}"
        generator = np.random.Generator(np.random.Philox(key=np.array([self._key, j], dtype=np.uint64)))
        try:
            after = self.transform.function(before, generator)
        except (Exception, SystemExit) as error:  # sys.exit in it would end a process without a word of where
            raise ValueError(f"{what}: {type(error).__name__}: {error}{_place(error)}") from error
        wrong = row_problem(after, len(before.tokens) - 1, self.vocab_size)
        if wrong is not None:
            raise ValueError(f"{what}: the function gave {wrong}")
        return replace(after, tokens=np.ascontiguousarray(after.tokens, dtype=np.int64), index=before.index)


def _read_only(row: Row) -> Row:
    """The same row, whose arrays cannot be written: its memory may be that of a file, or of another sample."""
    arrays: dict[str, Any] = {name: array.view() for name, array in vars(row).items() if isinstance(array, np.ndarray)}
    for array in arrays.values():
        array.flags.writeable = False
    return replace(row, **arrays)


def _place(error: BaseException) -> str:
    """Where it was raised, unless that is our call."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "" if last.filename == __file__ else f" ({last.filename}:{last.lineno})"


def row_problem(row: Any, seq_length: int, vocab_size: int | None) -> str | None:
    """What makes ``row`` no row of a sequence length, or None."""
    if not isinstance(row, Row):
        return f"{type(row).__name__}, not a Row"
    tokens, starts = row.tokens, row.starts
    if not isinstance(tokens, np.ndarray) or tokens.dtype.kind not in "iu" or tokens.shape != (seq_length + 1,):
        shown = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else type(tokens).__name__
        return f"tokens that are {shown}, not whole numbers [{seq_length + 1}]"
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        return f"the token id {low if low < 0 else high}, outside the vocabulary of {vocab_size} ids"
    if not _places(starts, 0, seq_length) or not len(starts) or starts[0] != 0:
        return f"starts of documents that are not ascending positions from 0 to {seq_length}, the first 0: {starts}"
    if row.cuts is not None and not _places(row.cuts, 1, seq_length - 1):
        return f"cuts that are not ascending positions from 1 to {seq_length - 1}: {row.cuts}"
    if row.loss_mask is not None and np.shape(row.loss_mask) != (seq_length,):
        return f"a loss mask of shape {list(np.shape(row.loss_mask))}, not [{seq_length}]"
    if row.loss_mask is not None and not ((row.loss_mask == 0) | (row.loss_mask == 1)).all():
        return "a loss mask with other values than 0 and 1: the loss is a mean over the targets that count"
    return None


def _places(values: Any, low: int, high: int) -> bool:
    """Whether these are ascending whole numbers in [low, high]."""
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
        return False
    return not len(values) or bool(values[0] >= low and values[-1] <= high and (np.diff(values.astype(np.int64)) > 0).all())
