"""Several datasets as one, document after document; :mod:`.divide` cuts one into several."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from megatron_lite.data.index_format import DatasetMeta, mask_prefix
from megatron_lite.data.index_writer import IndexedWriter
from megatron_lite.data.indexed import IndexedDataset


def merge(
    prefixes: Sequence[str | Path], out: str | Path, *, overwrite: bool = False, masks: bool = False
) -> DatasetMeta:
    """Join datasets into one, document after document; with ``masks``, their loss masks too.

    Memory does not grow with their size. End-of-document id, tokenizer and vocabulary size of those that have a
    ``.meta.json`` must agree, and are recorded when all have one.

    Raises:
        ValueError: nothing to join, different dtypes, different ids or tokenizers.
        FileExistsError: the output is there and ``overwrite`` is off.
    """
    with contextlib.ExitStack() as stack:
        mask = None
        if masks:
            mask = _joined([mask_prefix(str(p)) for p in prefixes], mask_prefix(str(out)), overwrite)
            stack.callback(mask.abort)  # does nothing once it has been finished
        return _joined(prefixes, out, overwrite, mask).finish()


def _joined(
    prefixes: Sequence[str | Path], out: str | Path, overwrite: bool, mask: IndexedWriter | None = None
) -> IndexedWriter:
    """All documents, not yet published."""
    if not prefixes:
        raise ValueError(f"nothing to join into {out}")
    facts: dict[str, dict[object, str]] = {"dtype": {}, "eod_id": {}, "tokenizer": {}, "vocab_size": {}}
    described = True
    for prefix in prefixes:
        with contextlib.closing(IndexedDataset(prefix)) as dataset:
            facts["dtype"].setdefault(dataset.dtype, str(prefix))
            described = described and dataset.meta is not None
            for name in ("eod_id", "tokenizer", "vocab_size"):
                if dataset.meta is not None:
                    facts[name].setdefault(getattr(dataset.meta, name), str(prefix))
    for name, values in facts.items():
        if len(values) > 1:
            listed = ", ".join(f"{value} in {prefix}" for value, prefix in values.items())
            raise ValueError(f"datasets of different {name} cannot be joined: {listed}")
    common = {name: next(iter(values), None) for name, values in facts.items() if described or name == "dtype"}
    writer = IndexedWriter(out, **common, overwrite=overwrite, mask=mask)  # type: ignore[arg-type]
    try:
        for prefix in prefixes:
            writer.add_dataset(prefix)
    except BaseException:
        writer.abort()
        raise
    return writer
