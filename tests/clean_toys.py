"""Small corpora with duplicates, and a driver that takes them through one corpus step as the pipeline does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatron_lite.clean.config import Pipeline, StepConfig, step_class
from megatron_lite.clean.pipeline import Run, RunOptions
from megatron_lite.clean.pipeline_work import PartsMissing
from megatron_lite.clean.saved import saved_by
from megatron_lite.clean.step import SAVED_BY, CorpusStep, Document, bucket_path

HAN = [chr(c) for c in range(0x4E00, 0x4E00 + 400)]
WORDS = [f"word{i}" for i in range(300)] + ["Straße", "École", "日本", "한국어", "x_y", "—"]


def text(rng: random.Random, length: int) -> str:
    """A text of some words, or of three times as many Chinese characters."""
    if rng.random() < 0.4:
        return "".join(rng.choice(HAN) + ("，" if rng.random() < 0.1 else "") for _ in range(3 * length))
    return " ".join(rng.choice(WORDS) for _ in range(length))


def changed(rng: random.Random, old: str, share: float) -> str:
    """A text with a share of its words or characters replaced."""
    pieces = old.split(" ") if " " in old else list(old)
    new = [rng.choice(WORDS if " " in old else HAN) if rng.random() < share else piece for piece in pieces]
    return (" " if " " in old else "").join(new)


def corpus(seed: int, size: int, length: int = 40) -> list[str]:
    """Texts of which some are copies of earlier ones and some are copies with changes, few or many."""
    rng = random.Random(seed)
    texts: list[str] = []
    for _ in range(size):
        kind = rng.random()
        if texts and kind < 0.15:
            texts.append(rng.choice(texts))
        elif texts and kind < 0.5:
            texts.append(changed(rng, rng.choice(texts), rng.choice([0.002, 0.01, 0.03, 0.1])))
        else:
            texts.append(text(rng, rng.randrange(1, length)))
    return texts


def drive(
    make: Callable[[], CorpusStep],
    texts: Sequence[str],
    scratch: Path,
    *,
    block: int = 7,
    against: str = "",
    save: str = "",
) -> list[Document]:
    """The documents after a step, those that were dropped too.

    Args:
        block: documents whose keys are made at a time, by two workers in turn.
        against, save: directories of saved buckets.
    """
    documents = [Document(t, number=n) for n, t in enumerate(texts, 1)]
    workers, decider = [make(), make()], make()
    for step in (*workers, decider):
        step.scratch = str(scratch)
    keys = [workers[n % 2].keys(documents[at : at + block]) for n, at in enumerate(range(0, len(texts), block))]
    if decider.needs_barrier:
        keys = [np.concatenate(keys)]
    if against:
        for bucket in range(decider.buckets):
            decider.load(bucket, bucket_path(against, bucket))
    dropped = []
    for some in keys:
        for bucket in range(decider.buckets):
            of_bucket = some[some["bucket"] == bucket]
            if len(of_bucket) or decider.needs_barrier:
                dropped.append(of_bucket[decider.decide(bucket, of_bucket)])
    if save:
        Path(save).mkdir()
        for bucket in range(decider.buckets):
            decider.save(bucket, bucket_path(save, bucket))
        Path(save, SAVED_BY).write_bytes(saved_by("", [], save, decider.buckets))
    units: dict[int, list[int]] = {}
    for keys_of_bucket in dropped:
        names = keys_of_bucket.dtype.names or ()
        for key in keys_of_bucket:
            units.setdefault(int(key["number"]), []).append(int(key["unit"]) if "unit" in names else 0)
    for document in documents:
        if document.number in units:
            decider.apply(document, np.array(sorted(units[document.number]), np.uint32))
    return documents


def kept(documents: Sequence[Document]) -> list[int]:
    """The places (from 0) of the documents that are left."""
    return [d.number - 1 for d in documents if d.dropped is None]


def run_pipeline(
    directory: Path, name: str, files: Sequence[Path], steps: dict[str, dict], *, workers: int = 1, parts: int = 1
) -> Path:
    """Run a pipeline of steps over JSON lines; the directory of its output."""
    configs = []
    for step, options in steps.items():
        kind = step_class(step)
        configs.append(StepConfig(step, kind.Options(**options), kind))
    output = directory / name
    for _ in range(2 * len(steps) + 2):
        for part in range(parts):
            options = RunOptions(part=part, parts=parts, workers=workers)
            try:
                Run(Pipeline(tuple(configs)), files, output, options, lambda line: None).run()
            except PartsMissing:
                continue
        if output.is_dir():
            return output
    raise AssertionError("the parts did not finish")


def write_lines(path: Path, texts: Sequence[str]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts), encoding="utf-8")
    return path


def contents(directory: Path) -> dict[str, bytes]:
    """Name and bytes of each file of a directory."""
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir()) if p.is_file()}
