"""The order of a stage's forward and backward passes. A new schedule is one generator here.

Each yields the compute actions of one stage; what has to be communicated follows from them. Any number of microbatches
is legal, fewer than stages too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_lite.pipeline.action import Backward, Forward

Schedule = Callable[[int, int, int], Iterator[Forward | Backward]]


def gpipe(stage: int, pp: int, microbatches: int) -> Iterator[Forward | Backward]:
    """All forward passes, then all backward passes (Huang et al., arXiv:1811.06965). Keeps every microbatch's activations."""
    yield from (Forward(m) for m in range(microbatches))
    yield from (Backward(m) for m in range(microbatches))


def one_f_one_b(stage: int, pp: int, microbatches: int) -> Iterator[Forward | Backward]:
    """One forward, one backward in turn (PipeDream-Flush; Narayanan et al., arXiv:2006.09503, section 2.2).

    A stage runs ahead by as many microbatches as there are stages behind it, so that it keeps the activations of at most
    ``pp - stage`` of them, whatever the number of microbatches. The bubble is GPipe's.
    """
    ahead = min(pp - stage - 1, microbatches)
    yield from (Forward(m) for m in range(ahead))
    for m in range(ahead, microbatches):
        yield Forward(m)
        yield Backward(m - ahead)
    yield from (Backward(m) for m in range(microbatches - ahead, microbatches))


def forward_only(stage: int, pp: int, microbatches: int) -> Iterator[Forward | Backward]:
    """Evaluation."""
    yield from (Forward(m) for m in range(microbatches))


SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_f_one_b, "forward": forward_only}
