"""Taking items in a thread of its own, before they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from queue import Full, Queue
from typing import Any, TypeVar

T = TypeVar("T")


def ahead(items: Iterator[T], most: int) -> Generator[T, None, None]:
    """The items in order, up to ``most`` of them taken ahead; what ``items`` raises comes after those before it.

    The thread ends with the generator that this is, when it is exhausted or closed.
    """
    queue: Queue[tuple[bool, Any]] = Queue(most)
    closed = threading.Event()

    def put(entry: tuple[bool, Any]) -> None:
        while not closed.is_set():
            try:
                queue.put(entry, timeout=0.1)
                return
            except Full:
                pass

    def take() -> None:
        try:
            for item in items:
                put((True, item))
                if closed.is_set():
                    return
            put((False, None))
        except BaseException as error:  # it is raised where the items are used
            put((False, error))

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        while True:
            is_item, value = queue.get()
            if is_item:
                yield value
            elif value is not None:
                raise value
            else:
                return
    finally:
        closed.set()
