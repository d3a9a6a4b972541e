"""Ranks as threads, tensors cut into rectangles, and children that die at a chosen moment, for the tests of checkpoints."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_lite.checkpoint.load import Reader
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.mesh.collectives import Axis
from megatron_lite.optim.shares import Share
from megatron_lite.tensor.spec import Rectangle

KINDS = ("weight", "exp_avg", "exp_avg_sq")
State = dict[tuple[str, str], torch.Tensor]  # (kind, name) -> full tensor


class ThreadWorld(Axis):
    """The world axis of one of several ranks that are threads of this process."""

    def __init__(self, index: int, size: int, barrier: threading.Barrier, table: list[str]) -> None:
        super().__init__("world", tuple(range(size)), index, group="threads")
        self._barrier, self._table = barrier, table

    def gather_json(self, obj: Any) -> list[Any]:
        self._table[self.index] = json.dumps(obj)
        self._barrier.wait(30)
        answers = [json.loads(text) for text in self._table]
        self._barrier.wait(30)
        return answers


def on_ranks(size: int, function: Callable[[ThreadWorld], Any]) -> list[Any]:
    """What ``function`` gives or raises on each rank."""
    barrier, table = threading.Barrier(size), [""] * size
    results: list[Any] = [None] * size

    def rank(index: int) -> None:
        try:
            results[index] = function(ThreadWorld(index, size, barrier, table))
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def whole(shape: Sequence[int]) -> Rectangle:
    return Rectangle((0,) * len(shape), tuple(shape))


def cut(box: Rectangle, generator: random.Random, pieces: int) -> list[Rectangle]:
    """The box in about so many boxes, some of them maybe empty."""
    if pieces <= 1 or not box.size:
        return [box]
    dim = generator.randrange(len(box.size))
    at = generator.randint(0, box.size[dim])
    first = Rectangle(box.start, (*box.size[:dim], at, *box.size[dim + 1 :]))
    start = (*box.start[:dim], box.start[dim] + at, *box.start[dim + 1 :])
    second = Rectangle(start, (*box.size[:dim], box.size[dim] - at, *box.size[dim + 1 :]))
    left = generator.randint(1, pieces - 1)
    return cut(first, generator, left) + cut(second, generator, pieces - left)


def part(full: torch.Tensor, box: Rectangle) -> torch.Tensor:
    return full[tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))].reshape(-1).clone()


def share(key: tuple[str, str], full: torch.Tensor, box: Rectangle) -> Share:
    return Share(*key, tuple(full.shape), box, part(full, box))


def deal(state: Mapping[tuple[str, str], torch.Tensor], ranks: int, seed: int, pieces: int = 4) -> list[list[Share]]:
    """The tensors of a model cut at random and given to ranks."""
    generator = random.Random(seed)
    dealt: list[list[Share]] = [[] for _ in range(ranks)]
    for key, full in state.items():
        for box in cut(whole(full.shape), generator, generator.randint(1, pieces)):
            dealt[generator.randrange(ranks)].append(share(key, full, box))
    return dealt


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> State:
    """A few tensors with moments."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed.tokens.weight": (7, 4),
        "blocks.0.mlp.up.weight": (6, 4),
        "blocks.1.mlp.up.weight": (6, 4),
        "head.norm.weight": (4,),
    }
    return {
        (kind, name): torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for kind, (name, shape) in product(KINDS, shapes.items())
    }


def save(root: Path, step: int, state: State, ranks: int = 1, seed: int = 0, **extra: Any) -> Path:
    """Save on threads; the directory. Raises what rank 0 raised."""
    dealt = deal(state, ranks, seed)
    stored = {"config": {}, "note": step, **extra}
    results = on_ranks(ranks, lambda world: save_checkpoint(root, step, dealt[world.index], stored, world))
    if isinstance(results[0], BaseException):
        raise results[0]
    assert len(set(results)) == 1
    directory: Path = results[0]
    return directory


def read_all(directory: Path) -> State:
    """Every tensor of a checkpoint, whole."""
    reader = Reader(directory)
    found = {}
    for (kind, name), pieces in reader.tensors.items():
        stored = pieces[0][1]
        dtype = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[stored.dtype]
        found[kind, name] = torch.full(stored.full_shape, torch.nan, dtype=dtype)
        reader.read(kind, name, whole(stored.full_shape), found[kind, name])
    return found


def equal(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def in_child(function: Callable[[], Any]) -> int:
    """Exit status of a forked child that runs the function: 0, 1 after an exception, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # threads of the parent are not there: whatever waits for one does not wait for ever
        try:
            function()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


SYSTEM_CALLS = ("replace", "fsync", "mkdir", "unlink", "rmdir", "rename")


def killed_at_each_call(function: Callable[[Callable[[], None]], Any], limit: int = 400) -> Iterator[int]:
    """Run the function in children that are killed before their n-th change of the disk, n = 0, 1, ... until one survives.

    The function gets something to call where a change is made in another way (bytes written). Yields after each death.
    """
    for moment in range(limit):
        if in_child(lambda moment=moment: _die_at(moment, function)) == 0:  # type: ignore[misc]
            return
        yield moment
    raise AssertionError(f"still dying after {limit} calls")


def _die_at(moment: int, function: Callable[[Callable[[], None]], Any]) -> None:
    count = 0

    def tick() -> None:
        nonlocal count
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tick()
            return real(*args, **kwargs)

        return call

    patches = [mock.patch.object(os, name, counted(getattr(os, name))) for name in SYSTEM_CALLS]
    for patch in patches:
        patch.start()
    function(tick)
