"""Small steps, a corpus that exercises them, the pipeline written as one plain loop, and runs that die at a chosen moment."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.clean.config import Pipeline, StepConfig
from megatron_lite.clean.pipeline import Run, RunOptions
from megatron_lite.clean.shards import ShardReader
from megatron_lite.clean.step import CorpusOptions, CorpusStep, Document, Facts, LocalStep
from megatron_lite.clean.steps.normalise import Normalise, NormaliseOptions
from megatron_lite.text.blocks import InputOptions

WORDS = "alpha beta gamma delta 中文 かな the of and \x07bell".split(" ")


@dataclass(frozen=True)
class ShortOptions:
    """Options of :class:`Short`."""

    words: int = 3
    """Fewest words."""


class Short(LocalStep):
    """Drops short texts, and notes the longest."""

    name = "short"
    Options = ShortOptions

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.longest = 0

    def apply(self, documents: Sequence[Document]) -> None:
        for document in documents:
            words = len(document.text.split())
            self.longest = max(self.longest, words)
            self.count("words seen", words)
            if words < self.options.words:
                document.dropped = f"fewer than {self.options.words} words"

    def take_notes(self) -> Any:
        noted, self.longest = self.longest, 0
        return noted

    @staticmethod
    def merge_notes(options: Any, left: Any, right: Any) -> Any:
        return max(left, right)

    @staticmethod
    def facts(options: Any, notes: Any) -> Facts:
        return Facts({"longest": notes}, {"words": {"all": notes or 0}}, [f"the longest has {notes} words"])


def hash_of(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class Once(CorpusStep):
    """Keeps the first of equal texts; decides while it reads."""

    name = "once"
    Options = CorpusOptions
    key_dtype = np.dtype([("number", "<u8"), ("bucket", "<u2"), ("hash", "<u8")])
    buckets = 5

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.seen: dict[int, set[int]] = {}

    def keys(self, documents: Sequence[Document]) -> np.ndarray:
        hashes = np.array([hash_of(d.text) for d in documents], dtype=np.uint64)
        keys = np.zeros(len(documents), self.key_dtype)
        keys["number"], keys["hash"], keys["bucket"] = [d.number for d in documents], hashes, hashes % np.uint64(self.buckets)
        return keys

    def decide(self, bucket: int, keys: np.ndarray) -> np.ndarray:
        seen, found = self.seen.setdefault(bucket, set()), []
        for value in keys["hash"].tolist():
            found.append(value in seen)
            seen.add(value)
        self.count("keys decided", len(found))
        return np.array(found, dtype=bool)

    def apply(self, document: Document, units: np.ndarray) -> None:
        assert not len(units)
        document.dropped = "seen before"

    def bucket_facts(self, bucket: int) -> dict[str, float]:
        return {"kept": len(self.seen.get(bucket, ())), "expected": len(self.seen.get(bucket, ())) / 7}

    def save(self, bucket: int, path: str) -> None:
        Path(path).write_text(json.dumps(sorted(self.seen.get(bucket, ()))))

    def load(self, bucket: int, path: str) -> None:
        self.seen[bucket] = set(json.loads(Path(path).read_text()))


class OnceByLine(Once):
    """Keeps the first of equal lines; wants all keys first."""

    name = "once by line"
    key_dtype = np.dtype([("number", "<u8"), ("bucket", "<u2"), ("unit", "<u4"), ("hash", "<u8")])
    needs_barrier = True

    def keys(self, documents: Sequence[Document]) -> np.ndarray:
        lines = [(d.number, i, hash_of(line)) for d in documents for i, line in enumerate(d.text.split("\n"))]
        return np.array([(number, h % self.buckets, i, h) for number, i, h in lines], dtype=self.key_dtype)

    def apply(self, document: Document, units: np.ndarray) -> None:
        gone = set(units.tolist())
        document.text = "\n".join(line for i, line in enumerate(document.text.split("\n")) if i not in gone)
        self.count("lines", len(gone))


def pipeline() -> Pipeline:
    """Two local steps, one that decides while it reads, a local one, one that waits for all keys, a local one."""
    chosen: list[tuple[Any, Any]] = [
        (Normalise, NormaliseOptions()),
        (Short, ShortOptions(2)),
        (Once, CorpusOptions()),
        (Short, ShortOptions(3)),
        (OnceByLine, CorpusOptions()),
        (Short, ShortOptions(3)),
    ]
    return Pipeline(tuple(StepConfig(kind.name, options, kind) for kind, options in chosen))


def write_corpus(directory: Path, documents: int = 400) -> list[Path]:
    """Five files, one of them packed and one empty, with repeated documents and lines."""
    chance, directory = random.Random(1), directory / "in"
    directory.mkdir()
    texts: list[str] = []
    for number in range(documents):
        lines = [" ".join(chance.choices(WORDS, k=chance.randrange(6))) for _ in range(chance.randrange(4))]
        texts.append(chance.choice(texts) if texts and chance.random() < 0.2 else "\n".join([*lines, f"number {number // 3}"]))
        if chance.random() < 0.05:
            texts[-1] = " \n"
    paths = []
    for index, share in enumerate((0.1, 0.5, 0.15, 0.0, 0.25)):
        here, texts = texts[: round(share * documents)], texts[round(share * documents) :]
        found = [{"id": n, "text": text, "meta": {"big": 2**70, "n": [n]}} for n, text in enumerate(here)]
        data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in found).encode()
        paths.append(directory / (f"{index}.jsonl.gz" if index == 2 else f"{index}.jsonl"))
        paths[-1].write_bytes(gzip.compress(data, mtime=0) if index == 2 else data)
    return paths


def records(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """What is in the files."""
    found = []
    for path in paths:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found += [json.loads(line) for line in data.splitlines()]
    return found


def plain_loop(wanted: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What :func:`pipeline` keeps, computed in the plainest way."""
    kept = []
    for record in wanted:
        text = "\n".join(line.rstrip() for line in record["text"].replace("\x07", "").split("\n"))
        while "\n\n\n" in text:
            text = text.replace("\n\n\n", "\n\n")
        if len(text.split()) >= 2:
            kept.append({**record, "text": text.strip("\n")})
    texts: set[str] = set()
    lines: set[str] = set()
    result = []
    for record in kept:
        if record["text"] in texts:
            continue
        texts.add(record["text"])
        if len(record["text"].split()) < 3:
            continue
        left = []
        for line in record["text"].split("\n"):
            if line not in lines:
                left.append(line)
            lines.add(line)
        if len("\n".join(left).split()) >= 3:
            result.append({**record, "text": "\n".join(left)})
    return result


SMALL_BLOCKS = InputOptions(block_bytes=700, whole=True)


def silent(line: str) -> None:
    """Takes what a run says."""


def one_run(directory: Path, paths: Sequence[Path], part: int = 0, parts: int = 1, steps: Pipeline | None = None, **options: Any) -> Any:
    """One part's run into ``directory/out``, with dropped documents and JSON."""
    chosen: dict[str, Any] = {"shard_bytes": 6000, "keep_dropped": directory / "dropped", "json": directory / "report.json"}
    chosen = {**chosen, "reading": SMALL_BLOCKS, **options}
    return Run(steps or pipeline(), paths, directory / "out", RunOptions(part, parts, **chosen), silent).run()


def lines_of(directory: Path) -> list[dict[str, Any]]:
    """The records of a directory of shards."""
    reader = ShardReader(directory)
    return [json.loads(reader.line(n)) for n in range(len(reader))]


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, but those that parts share while they work."""
    found = {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}
    return {name: data for name, data in found.items() if not name.startswith("out.work/")}


CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "shutil.move")


def killed_at(moment: int, work: Callable[[], object]) -> int | None:
    """Run ``work`` in a child that is killed before its ``moment``-th change of the file system.

    Returns the child's exit status, or None when it was killed.
    """
    child = os.fork()
    if child == 0:
        left = moment

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            opened = event == "open" and isinstance(arguments[1], str) and "w" in arguments[1]
            if opened or event in CHANGES:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            sys.addaudithook(count)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
