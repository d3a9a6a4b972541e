"""The journal of a run: up to where its output is finished, so that a killed run can go on.

``PREFIX.journal.tmp``, a line of JSON first for what the run is (inputs, options, tokenizer), then one for each finished
part of the work: the place in the input where the next one begins, the counts so far, and the state of each output's
temporary files; the last one, without these states, says that all temporaries are complete and have only to be renamed.
Outputs are on the disk before their line is. A last line that is cut off is as if it had not been written; what the
outputs hold beyond the last line is cut away. It is removed, or left, with the temporaries.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_lite.data.index_writer import WriterState
from megatron_lite.data.locked_file import LockedFile
from megatron_lite.text.encode import Counts
from megatron_lite.text.shares import Place

Identity = dict[str, Any]  # what must be the same for a run to go on; JSON


@dataclass(frozen=True)
class Finished:
    """Where a run goes on, and what it has: bytes read on the disk, its counts, and its outputs in order (none: complete)."""

    place: Place
    taken: int
    counts: Counts
    outputs: list[WriterState]

    @property
    def complete(self) -> bool:
        """Whether the temporaries have only to be renamed."""
        return not self.outputs


class Journal:
    """Writes the journal of a run; ``keep``: :meth:`end` leaves it to a run that resumes."""

    def __init__(self, prefix: str, identity: Identity, keep: bool) -> None:
        self.keep = keep
        self._file = LockedFile(prefix + ".journal")
        self._identity = json.loads(json.dumps(identity))
        self._size = 0  # of what was found

    @property
    def found(self) -> bool:
        """Whether :meth:`find` found a journal."""
        return self._size > 0

    def find(self) -> Finished | None:
        """What the journal that is there says last; :meth:`open` goes on with it.

        Raises ValueError: it is of a run with other inputs or options.
        """
        lines = _whole_lines(self._file.path)
        if lines and (differ := _differences(json.loads(lines[0]), self._identity)):
            raise ValueError(
                f"--resume: {self._file.path} is of a run with other inputs or options: {'; '.join(differ)}. "
                "Give the same, or leave --resume out to start anew"
            )
        self._size = sum(map(len, lines))
        return _finished(json.loads(lines[-1])) if len(lines) > 1 else None

    def kept(self) -> int:
        """Documents that are lost when :meth:`open` begins anew, without :meth:`find`."""
        with contextlib.suppress(ValueError, LookupError, TypeError):  # not a journal
            if len(lines := _whole_lines(self._file.path)) > 1:
                return _finished(json.loads(lines[-1])).counts.documents
        return 0

    def open(self) -> None:
        """Begin the journal, or go on with the one that was found. Raises FileExistsError: its run has not ended."""
        self._file.path.parent.mkdir(parents=True, exist_ok=True)
        self._file.open(self._size)
        if not self._size:
            self._write(self._identity)

    def add(self, finished: Finished) -> None:
        """A part of the work is finished; without outputs, all of it."""
        self._write(asdict(replace(finished, counts=Counts())) | {"counts": vars(finished.counts)})  # `asdict` spoils a Counter

    def end(self, done: bool = False) -> None:
        """The run has ended."""
        if self.keep and not done:
            self._file.close()
        else:
            self._file.remove()

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.sync()


def _whole_lines(path: Path) -> list[bytes]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


def _finished(entry: dict[str, Any]) -> Finished:
    read: dict[str, Any] = {name: Counter(n) if isinstance(n, dict) else n for name, n in entry["counts"].items()}
    return Finished(Place(**entry["place"]), entry["taken"], Counts(**read), [WriterState(**o) for o in entry["outputs"]])


def _differences(then: Identity, now: Identity) -> list[str]:
    """What differs, in words."""
    differ = [f"{k}: {then.get(k)} then, {now.get(k)} now" for k in now if k != "inputs" and then.get(k) != now[k]]
    files = ({path: facts for path, *facts in run.get("inputs", [])} for run in (then, now))
    before, after = files
    differ += [f"{path} was not an input then" for path in after if path not in before]
    differ += [f"{path} is no input now" for path in before if path not in after]
    for path in after:
        if path in before and before[path] != after[path]:
            time, same = before[path][1], before[path][0] == after[path][0]
            back = f"touch -d @{time // 10**9}.{time % 10**9:09} {path}"
            differ.append(f"{path} has {f'another time (where its content is the same: `{back}`)' if same else 'changed'}")
    if not differ and then != now:
        differ.append("the order of the inputs")
    return differ
