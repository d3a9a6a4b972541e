"""Worker processes that ask while they work; tests of the plain kind are beside those of preprocessing."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from typing import Any

import pytest

from megatron_lite.text.pool import OrderedPool, WorkerDied, WorkerFailed, without_workers


def make_adder() -> Callable[[int], Any]:
    return add_what_is_said


def add_what_is_said(n: int) -> Any:
    """Asks as often as the remainder by 3 says, with megabytes now and then; some die or raise between two questions."""
    total = 0
    for turn in range(n % 3):
        time.sleep(0.002 * (n % 5))
        total += yield n, turn, b"x" * (3_000_000 if n % 7 == 0 else 1)
        if n in (100, 101):
            os._exit(4)
        if n in (200, 201):
            raise KeyError(n)
    return n, total


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_pool_answers_questions_in_the_order_of_the_items(workers: int) -> None:
    asked: list[tuple[int, int]] = []

    def answer(question: tuple[int, int, bytes]) -> int:
        asked.append(question[:2])
        return 10 * question[0] + question[1]

    if not workers:
        results = list(without_workers(add_what_is_said, range(40), answer))
    else:
        with OrderedPool(workers, make_adder) as pool:
            results = list(pool.map(iter(range(40)), answer))
            for n, wanted in ((101, WorkerDied), (200, WorkerFailed)):
                with pytest.raises(wanted), OrderedPool(workers, make_adder) as another:
                    list(another.map(iter([1, n, 2, 5, 8, 11, 14]), answer))
    assert results == [(n, sum(10 * n + turn for turn in range(n % 3))) for n in range(40)]
    for turn in range(2):
        numbers_of_turn = [n for n, its in asked if its == turn and n < 40][: len([n for n in range(40) if n % 3 > turn])]
        assert numbers_of_turn == [n for n in range(40) if n % 3 > turn]


def make_filler() -> Callable[[int], bytes]:
    return bytes


@pytest.mark.parametrize("items", [[1, b"x" * 100_000], [1, 100_000]])
def test_memory_that_cannot_be_had_is_named(items: list[Any]) -> None:
    """Too much is said to a worker, and by one."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        told = pytest.raises((OSError, WorkerFailed), match="File too large: 'memory that worker processes share'")
        with told, OrderedPool(1, make_filler) as pool:
            list(pool.map(iter(items)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
