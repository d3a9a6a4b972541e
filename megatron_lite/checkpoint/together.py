"""Work that may fail on any rank, and then fails on all: nobody waits for a rank that has stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_lite.mesh.collectives import Axis

_SHOWN = 4  # different failures in one message


class SaveError(RuntimeError):
    """A checkpoint could not be written; the previous one is untouched."""


def everyone(
    world: Axis,
    work: Callable[[], Any],
    only: int | None = None,
    *,
    error: Callable[[str], Exception] = SaveError,
) -> list[Any]:
    """Do ``work`` on every rank (or one), tell all ranks how it went, and raise on all when it failed on any.

    Args:
        world: the axis of all ranks; all of them call this.
        work: gives something that JSON can hold.
        only: the one rank that does it.
        error: makes the exception of a text that names the ranks and their errors.

    Returns what each rank's work gave (None for those that did nothing).
    """
    answer: dict[str, Any] = {"ok": None}
    if only is None or world.index == only:
        try:
            answer["ok"] = work()
        except Exception as failure:  # every kind must reach the other ranks, which would wait for ever otherwise
            answer["error"] = f"{type(failure).__name__}: {failure}"
    answers = world.gather_json(answer)
    ranks_of: dict[str, list[int]] = {}
    for rank, a in enumerate(answers):
        if "error" in a:
            ranks_of.setdefault(a["error"], []).append(rank)
    if ranks_of:
        texts = [f"{_ranks(ranks)}: {text}" for text, ranks in ranks_of.items()]
        more = f"; and {len(texts) - _SHOWN} different errors more" if len(texts) > _SHOWN else ""
        raise error("; ".join(texts[:_SHOWN]) + more)
    return [a["ok"] for a in answers]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}" + (", ..." if len(ranks) > _SHOWN else "")
