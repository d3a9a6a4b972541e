"""What a dataset was made of, as its ``.meta.json`` says it, and whether one that is there is what a run would make.

The record has the same size for any number of inputs, is the same on every machine (no times), and differs between the parts
of one run (``--part i/n``) in ``part`` alone, so that the parts joined have the record of the whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from megatron_lite.data.index_format import prefix_paths
from megatron_lite.data.indexed import IndexedDataset, open_mask
from megatron_lite.text.shares import Part


def made_of(inputs: Sequence[Path], part: Part | None, key: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a dataset of the texts under ``key``: its input by number, bytes, and a digest of names and sizes in order.

    Standard input is not among the files.
    """
    files = [(str(path), path.stat().st_size) for path in inputs if path.is_file()]
    found = {
        "files": len(files),
        "bytes": sum(size for _, size in files),
        "names_and_sizes": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
        "part": part,
        "key": key,
        "options": options,
    }
    return dict(json.loads(json.dumps(found)))


def found_complete(
    output: str, inputs: Sequence[Path], recorded: Mapping[str, Any], record: Mapping[str, Any], mask: bool, called: str
) -> str:
    """What is there, in words.

    Args:
        recorded: what ``.meta.json`` would say of the tokenizer; ``record``: of the input.
        mask: the run would write a loss mask.
        called: what a record of the input is.

    Raises:
        FileExistsError: this run would have made another dataset, as far as it can be seen.
    """
    instead = "Give another prefix, or --overwrite"
    try:
        with closing(IndexedDataset(output)) as dataset:
            size = f"{dataset.num_documents:,} {called}, {dataset.num_tokens:,} tokens"
            meta, has_mask = dataset.meta, open_mask(dataset) is not None
    except (OSError, ValueError) as error:
        raise FileExistsError(f"{output} is there and does not open ({error}): {instead[0].lower()}{instead[1:]}") from None
    if meta is None:
        differ = ["it has no .meta.json, which says how it was made"]
    elif meta.made_of is None:
        differ = ["its .meta.json does not say of what it was made"]
    else:
        differ = [f"{name}: {getattr(meta, name)} there, {now} now" for name, now in recorded.items() if getattr(meta, name) != now]
        differ += _differences(meta.made_of, record)
    if has_mask != mask:
        differ.append(f"it has {'a' if has_mask else 'no'} loss mask")
    made = prefix_paths(output)[1].stat().st_mtime
    for state, path in [] if differ else [(path.stat(), path) for path in inputs if path.is_file()]:
        if max(state.st_mtime, state.st_ctime) > made:  # what is moved or copied there may keep its old time of writing
            same = f"where its content is the same (it was copied or touched), `touch {prefix_paths(output)[1]}` says so"
            differ.append(f"{path} has changed since; {same}")
            break
    if differ:
        raise FileExistsError(f"{output} is there, and this run would have made another: {'; '.join(differ)}. {instead}")
    return f"{output} is complete: {size}; nothing is left to do"


def _differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two records, in words."""
    old, new = ({**record, **(record.get("options") or {}), "part": _called(record.get("part"))} for record in (there, now))
    names = [name for name in {**old, **new} if name not in ("files", "bytes", "names_and_sizes", "options")]
    differ = [f"{name}: {old.get(name)} there, {new.get(name)} now" for name in names if old.get(name) != new.get(name)]
    sizes = [f"{record.get('files')} files of {record.get('bytes'):,} bytes" for record in (old, new)]
    if sizes[0] != sizes[1]:
        differ.append(f"the input: {sizes[0]} there, {sizes[1]} now")
    elif old.get("names_and_sizes") != new.get("names_and_sizes"):
        differ.append(f"the input: other names, sizes or order of the {sizes[0]}")
    return differ


def _called(part: Sequence[int] | None) -> str:
    return "none" if part is None else f"{part[0]}/{part[1]}"
