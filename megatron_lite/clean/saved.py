"""What is known of a directory that a corpus step saved, and what a pipeline does that is hardly meant.

Beside the buckets there is a file with three lines: the digest of the run's plan, the steps that stood before, as JSON, and the
seals of the buckets (:func:`.bucket_file.seal`), so that files of two saves are never mixed. Another
run that compares with the directory may have other steps before: the same text then looks different, and its copies stay. That
can be meant, so it is a warning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.clean.bucket_file import seal
from megatron_lite.clean.config import Pipeline, StepConfig
from megatron_lite.clean.step import SAVED_BY, CorpusOptions, bucket_path
from megatron_lite.config.values import plain


def steps_before(steps: Sequence[StepConfig], position: int) -> list[dict[str, Any]]:
    """The steps before one, as plain data, without the directories that corpus steps read and write."""
    return [
        {step.name: {name: value for name, value in plain(step.options).items() if name not in ("against", "save")}}
        for step in steps[:position]
    ]


def saved_by(known_as: str, before: Sequence[Mapping[str, Any]], directory: str, buckets: int) -> bytes:
    """The file that tells of the buckets that a step saved to a directory; ``before``: the steps before it."""
    seals = [seal(bucket_path(directory, bucket)) for bucket in range(buckets)]
    return f"{known_as}\n{json.dumps(before, ensure_ascii=False)}\n{json.dumps(seals)}\n".encode()


def is_saved_by(directory: str, known_as: str) -> bool:
    """Whether a run of this plan saved a directory."""
    try:
        return (Path(directory) / SAVED_BY).read_text(encoding="utf-8").split("\n")[0] == known_as
    except OSError:
        return False


def pipeline_warnings(pipeline: Pipeline) -> list[str]:
    """What runs, and is hardly meant: the order of the steps, and other steps before a step than before what it compares with."""
    return [*_order(pipeline), *_too_early(pipeline), *_others_before(pipeline)]


def _order(pipeline: Pipeline) -> list[str]:
    """Lines go before documents are compared as wholes."""
    lines, found = "", []
    for label, step in zip(pipeline.labels(), pipeline.steps, strict=True):
        unit = getattr(step.options, "unit", "document")
        if unit != "document":
            lines = lines or f"step {label} takes {unit}s out of documents before step"
        elif step.name == "minhash" and lines:
            why = "near copies lose what they share, look different then, and their remains stay; put minhash first"
            found.append(f"{lines} {label} compares them: {why}")
    return found


_JUDGES = ("quality", "language", "perplexity")  # by how a text is written


def _too_early(pipeline: Pipeline) -> list[str]:
    """A text is made plain, and its language told, before it is judged."""
    labels, names = pipeline.labels(), [step.name for step in pipeline.steps]
    found = []
    for position, (label, step) in enumerate(zip(labels, pipeline.steps, strict=True)):
        if step.name in _JUDGES and "normalise" in names and position < (first := names.index("normalise")):
            why = f"judges texts before step {labels[first]} makes them plain: pages of HTML are judged by their tags"
            found.append(f"step {label} {why}; put normalise first")
        if step.kind.needs_language(step.options) and "language" not in names[:position] and not pipeline.keys.language_key:
            later = f"step {labels[names.index('language')]}" if "language" in names else "a step language"
            why = "judges by the language of a document, which nothing tells by then: rules that need it are off"
            found.append(f"step {label} {why}; put {later} before it, or give the records' field of the language as language_key")
    return found


def _others_before(pipeline: Pipeline) -> list[str]:
    found = []
    for position, (label, step) in enumerate(zip(pipeline.labels(), pipeline.steps, strict=True)):
        against = step.options.against if isinstance(step.options, CorpusOptions) else ""
        if not against:
            continue
        if differing := _differing(_read(against), steps_before(pipeline.steps, position)):
            why = "a text that these steps change differently is not found"
            found.append(f"step {label}: other steps stood before it when {against} was saved: {differing}; {why}")
    return found


def _read(directory: str) -> list[dict[str, Any]]:
    """The steps before the one that saved a directory. Raises ValueError: the file that tells of them is none."""
    path = Path(directory) / SAVED_BY
    try:
        steps: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8").split("\n")[1])
    except (OSError, ValueError, IndexError) as error:
        raise ValueError(f"against {directory}: {path} is damaged ({error})") from None
    return steps


def _differing(then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    """How lists of steps differ, in words; empty: they do not."""
    names = [[next(iter(step)) for step in steps] for steps in (then, now)]
    if names[0] != names[1]:
        return f"{', '.join(names[0]) or 'none'} then, {', '.join(names[1]) or 'none'} now"
    return "; ".join(
        f"{name}.{option}: {old!r} then, {new!r} now"
        for before, after in zip(then, now, strict=True)
        for name in before
        for option in sorted({*before[name], *after[name]})
        if (old := before[name].get(option)) != (new := after[name].get(option))
    )
