"""Do all ranks run the same program with the same settings?

Ranks that differ in a setting compute different things without an error, or stop in a collective that the others never
call. ``agree`` compares digests at start and names the ranks and keys that differ; ``code_digest`` is one such value.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from megatron_lite.mesh.collectives import Axis
from megatron_lite.mesh.mesh import ProcessMesh

_SHOWN = 60  # characters of a value that an error shows


def code_digest(*folders: Path) -> str:
    """Digest of the Python sources under some folders: of their relative names and contents, in sorted order."""
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py"), key=lambda p: p.relative_to(folder).as_posix()):
            total.update(path.relative_to(folder).as_posix().encode() + b"\0")
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def agree(mesh: ProcessMesh, what: dict[str, Any]) -> None:
    """Check that every rank of the job gives the same; every rank calls it together.

    Args:
        mesh: the job.
        what: values that can be written as JSON, by name; nested dicts are compared key by key.

    Raises:
        ValueError: on every rank alike, naming each key that differs, the ranks and their values.
    """
    agree_over(mesh.axis("world"), what)


def agree_over(axis: Axis, what: dict[str, Any]) -> None:
    """:func:`agree` among the ranks of one axis."""
    if axis.size == 1:
        return
    mine = {key: [_digest(value), _short(value)] for key, value in _flat(what).items()}
    whole = [_digest(sorted((k, v[0]) for k, v in mine.items()))]
    if len({answer[0] for answer in axis.gather_json(whole)}) == 1:
        return  # one small message in the ordinary case
    everyone = axis.gather_json(mine)
    lines = []
    for key in sorted({key for answer in everyone for key in answer}):
        ranks_of: dict[str, list[int]] = {}
        shown: dict[str, str] = {}
        for rank, answer in zip(axis.ranks, everyone, strict=True):
            digest, text = answer.get(key, ["", "(not given)"])
            ranks_of.setdefault(digest, []).append(rank)
            shown[digest] = text
        if len(ranks_of) > 1:
            parts = [f"{shown[d]} on {_ranks_text(r)}" for d, r in sorted(ranks_of.items(), key=lambda x: -len(x[1]))]
            lines.append(f"  {key}: {'; '.join(parts)}")
    raise ValueError(
        "the ranks do not run the same program with the same settings:\n"
        + "\n".join(lines)
        + "\nStart every rank with the same flags and files, from the same version of the code"
    )


def _flat(what: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in what.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat.update(_flat(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... (digest {_digest(value)})"


def _ranks_text(ranks: list[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
