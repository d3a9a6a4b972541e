"""Messages between neighbouring stages of a pipeline.

A :class:`Queue` is one edge of the pipeline in one direction, for one kind of message (hidden states forward, their
gradients backward). The model that schedules are verified against is exactly this: messages arrive in the order they
were sent; an operation waits for those before it in its queue and for its partner, and for nothing else; there are no
tags. That holds on NCCL and gloo alike because a queue has a communicator of its two ranks to itself, opened and used
once at start.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.mesh.collectives import Handle, Traffic


class Queue:
    """One edge of the pipeline in one direction: messages arrive in the order they were sent.

    A queue has a communicator of two ranks of its own, so that it waits for nothing but its own earlier messages and
    its partner. A sent tensor is kept alive until it is known to have gone: when its handle was waited for, or, where
    the back end can tell without blocking (NCCL), at a later ``send``. Do not write to it before that.

    Args:
        name: ``forward`` or ``backward``: the axis that its traffic is counted under.
        group: process group of the two ranks.
        peer: the other rank.
        sends: whether this rank is the sending end.
        numbered: every message is preceded by its number, checked on arrival (tests).
    """

    def __init__(self, name: str, group: Any, peer: int, *, sends: bool, traffic: Traffic, numbered: bool = False):
        self.name = name
        self.peer = peer
        self.sends = sends
        self.traffic = traffic
        self.numbered = numbered
        self._group = group
        self._count = 0
        self._pending: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, t: torch.Tensor, label: int = 0) -> Handle:
        """Start to send ``t`` (any shape, contiguous). ``label`` (a microbatch) is compared on a numbered queue."""
        assert self.sends, f"this {self.name} queue is the receiving end"
        assert t.is_contiguous(), t.shape
        self._drop_sent()
        self.traffic.add(self.name, "send", t.numel() * t.element_size())
        works = []
        if self.numbered:
            header = torch.tensor([self._count, label, t.numel()], dtype=torch.int64, device=t.device)
            works.append(self._isend(header))
        self._count += 1
        works.append(self._isend(t))
        return Handle(works)

    def recv(self, t: torch.Tensor, label: int = 0) -> Handle:
        """Start to receive the next message into ``t`` (same number of elements and dtype as was sent)."""
        assert not self.sends, f"this {self.name} queue is the sending end"
        assert t.is_contiguous(), t.shape
        self.traffic.add(self.name, "recv", t.numel() * t.element_size())
        works, finish = [], None
        if self.numbered:
            header = torch.empty(3, dtype=torch.int64, device=t.device)
            works.append(dist.irecv(header, src=self.peer, group=self._group))
            expected = [self._count, label, t.numel()]
            finish = lambda: self._compare(header, expected)  # noqa: E731
        self._count += 1
        works.append(dist.irecv(t, src=self.peer, group=self._group))
        return Handle(works, (t,), finish)

    def flush(self) -> None:
        """Wait for everything sent."""
        while self._pending:
            self._pending.popleft()[0].wait()

    @property
    def unsent(self) -> int:
        """Messages that are still kept alive (headers of numbered messages included)."""
        self._drop_sent()
        return len(self._pending)

    def _isend(self, t: torch.Tensor) -> Any:
        work = _SentOnce(dist.isend(t, dst=self.peer, group=self._group))
        self._pending.append((work, t))
        return work

    def _drop_sent(self) -> None:
        while self._pending and self._pending[0][0].is_completed():
            self._pending.popleft()

    def _compare(self, header: torch.Tensor, expected: list[int]) -> None:
        if header.is_meta:
            return
        got = header.tolist()
        assert got == expected, (
            f"{self.name} queue from rank {self.peer}: message (number, label, elements) {got}, expected {expected}"
        )


class _SentOnce:
    """A send's work that remembers having been waited for (gloo's works do not tell by themselves).

    After ``wait`` the tensor may go: the host, or on a GPU the stream that would reuse its memory, is behind the send.
    """

    __slots__ = ("_work", "done")

    def __init__(self, work: Any):
        self._work = work
        self.done = False

    def wait(self) -> None:
        if not self.done:
            self._work.wait()
            self.done = True

    def is_completed(self) -> bool:
        return self.done or self._work.is_completed()
