"""What is in a checkpoint, for people and for ``megatron-lite inspect``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.load import CorruptCheckpoint, Reader
from megatron_lite.checkpoint.manifest import MARKER, TEMPORARY, incomplete_reason, list_steps
from megatron_lite.tensor.spec import Rectangle

_BLOCK_NUMBER = re.compile(r"\bblocks\.(\d+)\.")


def is_step_directory(path: Path) -> bool:
    """Whether a directory is that of one save (complete or not), rather than one that holds several."""
    return (path / "manifest.json").exists() or (path / MARKER).exists() or any(path.glob("rank*.json"))


def describe(directory: Path, *, checksums: bool = False) -> dict[str, Any]:
    """What a step's directory holds.

    Args:
        directory: of one save, complete or not.
        checksums: also read every byte and compare.

    Returns:
        A dictionary that JSON can hold: ``directory, complete, reason`` (why it is not), ``files, bytes``; of a
        complete one also ``step, saved_at`` (Unix seconds), ``ranks`` (that wrote it), ``layout, progress, config``
        (as the run stored them, or None), ``parameters`` (elements of all weights), ``kinds``, ``tensors`` (name ->
        ``shape, dtype, pieces``), ``problems`` (what is damaged).
    """
    files = [p for p in directory.iterdir() if p.is_file()]
    found: dict[str, Any] = {
        "directory": str(directory),
        "complete": False,
        "reason": incomplete_reason(directory),
        "files": len(files),
        "bytes": sum(p.stat().st_size for p in files),
    }
    if found["reason"] is not None:
        return found
    try:
        reader = Reader(directory)
    except CorruptCheckpoint as error:
        return {**found, "reason": str(error)}
    state, tensors = reader.state, {}
    for name in reader.names():
        pieces = [piece for _, piece in reader.tensors["weight", name]]
        tensors[name] = {"shape": list(pieces[0].full_shape), "dtype": pieces[0].dtype, "pieces": len(pieces)}
    saved_at = next((d.saved_at for d in list_steps(directory.parent) if d.path.name == directory.name), None)
    return {
        **found,
        "complete": True,
        "step": reader.step,
        "saved_at": saved_at,
        "ranks": sum(name.endswith(".safetensors") for name in reader.manifest["files"]),
        "layout": state.get("layout"),
        "progress": state.get("progress"),
        "config": state.get("config"),
        "parameters": sum(_numel(shape) for shape in reader.names().values()),
        "kinds": sorted({kind for kind, _ in reader.tensors}),
        "tensors": dict(sorted(tensors.items(), key=lambda item: _natural(item[0]))),
        "problems": list(reader.problems()) if checksums else [],
    }


def describe_root(root: Path, *, checksums: bool = False) -> dict[str, Any]:
    """What a run's directory of checkpoints holds: each save, and the newest complete one in full (or None)."""
    saves, newest = [], None
    for d in list_steps(root):
        reason = "a save that is under way, or did not finish" if d.suffix == TEMPORARY else incomplete_reason(d.path)
        saves.append({"step": d.step, "name": d.path.name, "saved_at": d.saved_at, "reason": reason})
        if newest is None and reason is None:
            newest = describe(d.path, checksums=checksums)
    return {"directory": str(root), "saves": saves, "newest": newest}


def _numel(shape: tuple[int, ...]) -> int:
    return Rectangle((0,) * len(shape), shape).numel


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key in which blocks.2 comes before blocks.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def text(found: dict[str, Any]) -> str:
    """:func:`describe` for people; equal tensors of all blocks are one line."""
    lines = [f"checkpoint {found['directory']}"]
    size = f"{found['bytes']:,} bytes in {found['files']} files"
    if not found["complete"]:
        return "\n".join([*lines, f"  not complete: {found['reason']}", f"  {size}"])
    lines += [f"  step {found['step']}, complete", f"  {size}, written by {found['ranks']} rank(s)"]
    for name in ("layout", "progress"):
        if found[name]:
            lines.append(f"  {name}: " + _settings(found[name]))
    config = found["config"] or {}
    if "architecture" in config:
        model = dict(config.get("model", {}))
        if model.get("group_query_attention") is False:  # then its groups are not looked at
            model.pop("num_query_groups", None)
        lines.append(f"  model: {config['architecture']}, " + _settings(model))
    for name in ("training", "data"):
        if name in config:
            lines.append(f"  {name}: " + _settings(config[name]))
    count = f"{found['parameters']:,} parameters in {len(found['tensors'])} tensors"
    lines.append(f"  {count}; stored: {', '.join(found['kinds'])}")
    lines += [f"    {line}" for line in _tensor_lines(found["tensors"])]
    lines += [f"  DAMAGED: {problem}" for problem in found["problems"]]
    return "\n".join(lines)


def text_root(found: dict[str, Any]) -> str:
    """:func:`describe_root` for people."""
    lines = [f"{found['directory']}: {len(found['saves'])} save(s), the newest first"]
    lines += [f"  {save['name']}: {save['reason'] or 'complete'}" for save in found["saves"]]
    if found["newest"] is None:
        return "\n".join([*lines, "no complete checkpoint"])
    return "\n".join([*lines, "", text(found["newest"])])


def _settings(values: dict[str, Any]) -> str:
    """What is set, in one line."""

    def unset(value: Any) -> bool:
        return value is None or value is False or (isinstance(value, (str, list, tuple, dict)) and not value)

    return ", ".join(f"{key} {value}" for key, value in values.items() if not unset(value))


def _tensor_lines(tensors: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Name, shape and dtype; the blocks that have the same under the same name are one line."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for name, tensor in tensors.items():
        number = _BLOCK_NUMBER.search(name)
        pattern = _BLOCK_NUMBER.sub("blocks.*.", name, count=1)
        group = groups.setdefault((pattern, " x ".join(map(str, tensor["shape"])) or "scalar", tensor["dtype"]), [])
        group += [int(number.group(1))] if number else []
    for (pattern, shape, dtype), blocks in groups.items():
        yield f"{pattern.replace('*', _ranges(blocks), 1)}  {shape}  {dtype}"


def _ranges(numbers: list[int]) -> str:
    """``0-3,5``."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
