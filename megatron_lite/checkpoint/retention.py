"""Which checkpoints are kept.

Run by one rank after each save, when the marker is on the disk. Whatever the settings, the newest complete checkpoint
is never removed, and directories that a save left half-way are, once they are older than it. What cannot be removed is
told and left: the checkpoint that was just saved is complete all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from megatron_lite.checkpoint.manifest import REPLACED, StepDirectory, incomplete_reason, list_steps, remove_directory


def _print(text: str) -> None:
    """Where nobody listens: this is rank 0, whose lines are for people."""
    print(text, flush=True)


def prune(
    root: Path,
    keep_last: int | None,
    keep_every: int | None,
    protect: Iterable[int] = (),
    say: Callable[[str], None] = _print,
) -> list[int]:
    """Remove old checkpoints; returns the steps of the directories removed, ascending.

    Args:
        root: directory of the checkpoints.
        keep_last: how many complete ones of those saved last are kept; None keeps all.
        keep_every: every step that this divides is kept too.
        protect: further steps that are kept.
        say: hears what could not be removed, and why.

    Without a complete checkpoint nothing is removed, nor is anything that is younger than the newest complete one.
    """
    removed = set()
    try:
        for d in _superfluous(root, keep_last, keep_every, set(protect)):
            try:
                remove_directory(d.path)
                removed.add(d.step)
            except OSError as error:
                say(f"{d.path} is not needed any more and cannot be removed: {error}")
    except OSError as error:
        say(f"{root} cannot be searched for checkpoints to remove: {error}")
    return sorted(removed)


def _superfluous(root: Path, keep_last: int | None, keep_every: int | None, protected: set[int]) -> list[StepDirectory]:
    """What goes."""
    steps = list_steps(root)
    by_name = {d.path.name: d for d in steps}

    def left_over(d: StepDirectory) -> bool:
        """A save that did not finish, or an older save whose replacement did."""
        if d.suffix != REPLACED or d.saved_at is None:
            return d.saved_at is None
        replacement = by_name.get(d.path.name.removesuffix(REPLACED))
        return replacement is not None and incomplete_reason(replacement.path) is None

    whole = (d for d in steps if not left_over(d) and incomplete_reason(d.path) is None)
    newest = list(islice(whole, keep_last or 1))
    if not newest:
        return []

    def keep(d: StepDirectory) -> bool:
        if left_over(d):
            return d.step > newest[0].step  # may be younger
        if (d.saved_at or 0.0) > (newest[0].saved_at or 0.0):
            return True  # younger, but broken
        named = d.step in protected or bool(keep_every and d.step % keep_every == 0)
        return keep_last is None or d in newest or named

    return [d for d in steps if not keep(d)]
