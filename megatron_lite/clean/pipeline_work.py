"""The work directory: what the parts of one run share, and what lets a run that was ended go on.

Whatever is finished is a directory under its final name, renamed from a temporary one when it was complete::

    plan.json                   options and inputs; the same for everybody who works here
    stage-0/part-0/             documents, keys and counts of a part after a stage
    stage-0/decided/bucket-07/  what the corpus step after the stage decided about a bucket
    scratch-3/                  what the corpus step at position 3 keeps by itself

Anybody may finish anything that is still missing: the content follows from the plan alone, so two that do the same work
write the same bytes, and the first to rename wins.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron_lite.clean.shards import write_whole
from megatron_lite.data.locked_file import naming

_OWN = re.compile(r"plan\.(json|\d+\.tmp)|part-\d+\.lock|(stage|scratch)-\d+")  # names in the directory
PLAN = ".index/plan.json"  # in what a run has made: what it follows from
_MOST_TOLD = 20  # differences between two plans, parts that are missing
_POLL = 0.5  # seconds between looks at what others have finished


class PlanDiffers(ValueError):
    """The work directory belongs to a run with other options or inputs."""


class PartsMissing(RuntimeError):
    """Other parts have not come as far; ``parts`` says which."""

    def __init__(self, parts: Sequence[int], stage: int) -> None:
        super().__init__(f"{_called(parts)} has not come as far (stage {stage + 1})")
        self.parts = list(parts)


@dataclass(frozen=True)
class WorkDirectory:
    """The work directory, from one part's side.

    Attributes:
        path: of the directory.
        part, parts: which one this is, from 0, and of how many.
    """

    path: Path
    part: int
    parts: int

    @contextmanager
    def joined(self, plan: Mapping[str, Any]) -> Iterator[None]:
        """Be the one process that works at this part, in the run that works here; or begin that run.

        Raises:
            PlanDiffers: it is another run's.
            FileExistsError: another process works at the same part; something else is there, which would be removed at the end.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if strange := sorted(name for name in os.listdir(self.path) if not _OWN.fullmatch(name)):
            raise FileExistsError(f"{self.path} holds {strange[0]}, which is not a run's: give --work a directory of its own")
        text = _plan_text(plan)
        file = self.path / "plan.json"
        if not file.exists():
            write_whole(file, text.encode(), self.path / f"plan.{self.part}.tmp")
        found = json.loads(file.read_text(encoding="utf-8"))
        if found != json.loads(text):
            told = _told(_differences(found, json.loads(text), ""))
            raise PlanDiffers(f"{self.path} belongs to a run with other options or inputs{told}\nto start over, remove it")
        with open(self.path / f"part-{self.part}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FileExistsError(
                    f"{self.path}: another process works at part {self.part} of {self.parts}"
                ) from None
            except OSError:
                pass  # a file system without locks
            yield

    def part_directory(self, stage: int, part: int | None = None) -> Path:
        """Where a part (this one) leaves its work of a stage."""
        return self.path / f"stage-{stage}" / f"part-{self.part if part is None else part}"

    def all_parts(self, stage: int) -> list[Path]:
        """The directories of all parts, in the order of the corpus."""
        return [self.part_directory(stage, part) for part in range(self.parts)]

    def decided(self, stage: int, buckets: int) -> list[Path]:
        """The directories of all decisions after a stage."""
        return [self.path / f"stage-{stage}" / "decided" / f"bucket-{bucket:02d}" for bucket in range(buckets)]

    def scratch(self, position: int) -> Path:
        """A directory for what the corpus step at a position of the pipeline keeps by itself."""
        path = self.path / f"scratch-{position}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def drops(self, stage: int) -> Path:
        """The file of what an earlier corpus step drops of this part's documents, for a stage that begins with that."""
        return self.path / f"stage-{stage}" / f"drops-{self.part}"

    def draft(self, directory: Path) -> Path:
        """Where this part makes a directory before it has its name."""
        return directory.with_name(f"{directory.name}.{self.part}.tmp")

    @contextmanager
    def finishing(self, directory: Path) -> Iterator[Path]:
        """A temporary directory, empty, that becomes ``directory`` at the end; nothing when that is there by then."""
        draft = self.draft(directory)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            with naming(draft):
                yield draft
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        try:
            os.rename(draft, directory)
        except OSError:
            if not directory.is_dir():
                raise
            shutil.rmtree(draft, ignore_errors=True)

    def share(self, total: int) -> Iterator[int]:
        """Numbers of pieces of common work in the order in which this part takes them: its own share, then the others'."""
        start = self.part * total // self.parts
        yield from range(start, total)
        yield from range(start)

    def wait_for_parts(self, stage: int, seconds: float, say: Callable[[str], None]) -> None:
        """Return when all parts have finished a stage. Raises PartsMissing after ``seconds``."""
        until, said = time.monotonic() + seconds, False
        while True:
            missing = [p for p in range(self.parts) if not self.part_directory(stage, p).is_dir()]
            if not missing:
                return
            if time.monotonic() >= until:
                raise PartsMissing(missing, stage)
            if not said:
                say(f"waiting for {_called(missing)}")
                said = True
            time.sleep(min(_POLL, max(0.0, until - time.monotonic())))


def _called(parts: Sequence[int]) -> str:
    """The first of some parts, and how many more there are."""
    more = f" (and {len(parts) - _MOST_TOLD:,} more)" if len(parts) > _MOST_TOLD else ""
    return f"part {', '.join(map(str, parts[:_MOST_TOLD]))}{more}"


def _plan_text(plan: Mapping[str, Any]) -> str:
    return json.dumps(plan, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def lasting(plan: Mapping[str, Any]) -> bytes:
    """A plan as a file, without what changes nothing of what is written: how many parts there are, and where the shards go."""
    return _plan_text({key: plan[key] for key in plan if key not in ("parts", "outputs")}).encode()


def digest(plan: Mapping[str, Any]) -> str:
    """By what a plan is known."""
    return sha256(lasting(plan)).hexdigest()


def not_from(what: str, directory: Path, plan: Mapping[str, Any]) -> FileExistsError:
    """The error that a directory is there and another run's; its :data:`PLAN`, if it has one, tells what differs."""
    told = "; "
    with suppress(OSError, ValueError):
        if found := _differences(json.loads((directory / PLAN).read_bytes()), json.loads(lasting(plan)), ""):
            told = f"{_told(found)}\n"
    return FileExistsError(f"{what} is there, and not from this run{told}remove it or give another")


def _told(differences: Sequence[str]) -> str:
    """The first of them, as lines behind a sentence."""
    more = [f"(and {len(differences) - _MOST_TOLD:,} more)"] * (len(differences) > _MOST_TOLD)
    return "\n  ".join([":", *differences[:_MOST_TOLD], *more])


def _differences(old: Any, new: Any, where: str) -> list[str]:
    """What differs, in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in [*old, *(k for k in new if k not in old)]:
            place = f"{where}.{key}" if where else str(key)
            if key not in old or key not in new:
                found.append(f"{place}: {'now' if key in new else 'then'} {new.get(key, old.get(key))!r}, else nothing")
            elif old[key] != new[key]:
                found += _differences(old[key], new[key], place)
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True), 1)
        return [line for number, (a, b) in pairs if a != b for line in _differences(a, b, f"{where} {number}")]
    if isinstance(old, list) and isinstance(new, list):
        names = [[str(v.get("path", next(iter(v), ""))) if isinstance(v, dict) else str(v) for v in some] for some in (old, new)]
        told = f"{where}: {len(old):,} then, {len(new):,} now"
        for what, some, others in (("gone", *names), ("new", *reversed(names))):
            known = set(others)
            only = [name for name in some if name not in known]
            told += f"; {what}: {', '.join(only[:_MOST_TOLD])}{' ...' * (len(only) > _MOST_TOLD)}" if only else ""
        return [told]
    return [f"{where}: {old!r} then, {new!r} now"]


def file_state(path: str) -> dict[str, Any]:
    """By what a change of a file is noticed. ValueError: its name is no UTF-8, which plan and report are."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path!r}: the name of the file is not UTF-8; rename it") from None
    state = os.stat(path)
    return {"path": path, "bytes": state.st_size, "changed": state.st_mtime_ns}
