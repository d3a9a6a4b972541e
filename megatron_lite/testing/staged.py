"""A back end for tests: collectives that go through host memory, late, on a thread and a stream of their own.

Several ranks can share one GPU with it, where NCCL refuses, and on CPUs it makes gloo as asynchronous as NCCL is. Each
operation is queued to its group's thread. There, after a random delay, the inputs are copied to the host, the outputs are
filled with NaN, gloo does the work on the host copies, and after another delay the result is written. So a program that
reads an output before it has waited, writes to an input too early, or waits on the wrong stream, computes wrong numbers
instead of being lucky; and since works are not ordered between groups, so does one that relies on such an order.

On a GPU the copies run on a stream of the group, behind what the calling stream had in hand, through page-locked memory;
``wait`` orders the current stream behind the result. It also blocks the host until gloo is done, which NCCL's does not.
Nothing here calls an operation that torch's sync debug mode counts.

It is registered with torch.distributed under :data:`NAME`, as any third party's back end is.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.testing.equal import RankResult
from megatron_lite.testing.layouts import Case, run_case

NAME = "staged"
CYCLES_PER_SECOND = 1.5e9  # about a GPU's clock, for delays on a stream


@dataclass(frozen=True)
class Options:
    """How the back end behaves.

    Attributes:
        delay: longest of each of an operation's three delays, seconds.
        seed: of their lengths.
        forget: kinds of operations whose ``wait`` does nothing, as if the program had forgotten it: ``all_reduce``,
            ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``send``, ``recv``.
    """

    delay: float = 0.002
    seed: int = 0
    forget: frozenset[str] = frozenset()


class StagedWork:
    """An operation under way."""

    def __init__(self, kind: str, forgotten: bool) -> None:
        self.kind = kind
        self._forgotten = forgotten
        self._queued = threading.Event()  # the result is written, or its copy is on the stream
        self._done: torch.cuda.Event | None = None
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream (on a CPU: the host) after the operation. Raises what went wrong in it."""
        if self._forgotten:
            return True
        self._queued.wait()
        if self._error is not None:
            raise RuntimeError(f"{self.kind} failed on the staged back end: {self._error}") from self._error
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._queued.is_set() and (self._done is None or self._done.query())

    def _finish(self, done: torch.cuda.Event | None = None, error: BaseException | None = None) -> None:
        self._done, self._error = done, error
        self._queued.set()


@dataclass
class _Job:
    """What a group's thread needs for one operation.

    Attributes:
        inputs: tensors that are read.
        outputs: tensors that are written.
        poisoned: what holds no input, and is filled with NaN meanwhile.
        run: called with host tensors for inputs and outputs; gives gloo's work.
        begun: what the calling stream had in hand.
    """

    work: StagedWork
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    poisoned: Sequence[torch.Tensor]
    run: Callable[[list[torch.Tensor], list[torch.Tensor]], Any]
    begun: torch.cuda.Event | None = None


@dataclass
class _Lane:
    """A group's thread and stream."""

    options: Options
    random: random.Random
    jobs: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue)
    stream: torch.cuda.Stream | None = None
    device: torch.device | None = None  # the stream's

    def serve(self) -> None:
        """Do jobs in order until there is a None. After a failure the others fail too."""
        if self.stream is not None:
            torch.cuda.set_device(self.device)
        failed: BaseException | None = None
        while (job := self.jobs.get()) is not None:
            try:
                if failed is not None:
                    raise failed
                job.work._finish(self._do(job))
            except BaseException as error:
                failed = error
                job.work._finish(error=error)
            del job  # its tensors

    def _do(self, job: _Job) -> torch.cuda.Event | None:
        context = contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        with torch.no_grad(), context:
            if job.begun is not None:
                assert self.stream is not None
                self.stream.wait_event(job.begun)
            self._late()
            hosts = [self._host(t).copy_(t, non_blocking=True) for t in job.inputs]
            for t in job.poisoned:
                t.data.fill_(float("nan") if t.is_floating_point() else torch.iinfo(t.dtype).max)
            self._catch_up()
            time.sleep(self.random.random() * self.options.delay)
            results = [self._host(t) for t in job.outputs]
            gloo = job.run(hosts, results)
            if gloo is not None:
                gloo.wait()
            self._late()
            for t, result in zip(job.outputs, results, strict=True):
                t.data.copy_(result, non_blocking=True)  # past autograd's version check, as NCCL writes
            return None if self.stream is None else self.stream.record_event()

    def _late(self) -> None:
        """A delay of what follows, on the stream where there is one."""
        seconds = self.random.random() * self.options.delay
        if self.stream is None:
            time.sleep(seconds)
        else:
            torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND) + 1)

    def _catch_up(self) -> None:
        """Wait for the stream; not by a call that sync debug mode counts."""
        if self.stream is not None:
            self.stream.record_event().synchronize()

    def _host(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self.stream is not None)


_ProcessGroup: Any = dist.ProcessGroup  # its annotations change from release to release, and with them its overloads


class StagedGroup(_ProcessGroup):  # type: ignore[misc]
    """One process group: gloo behind a thread. Made by torch.distributed (see :func:`register`)."""

    def __init__(self, options: Options, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._options, self._size, self._index = options, size, rank
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._lane = _Lane(options, random.Random(f"{options.seed} {rank}"))
        self._thread: threading.Thread | None = None
        self._name = ""
        weakref.finalize(self, self._lane.jobs.put, None)

    # ---- what torch.distributed asks of a group

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def rank(self) -> int:
        """This rank's place in the group."""
        return self._index

    def getBackendName(self) -> str:
        """The back end's name."""
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """The name that torch.distributed gave the group."""
        return self._name

    def shutdown(self) -> None:
        """Do what is queued, and end the thread."""
        self._lane.jobs.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> StagedWork:
        """In place."""
        (t,) = tensors
        return self._start("all_reduce", [t], [t], [t], lambda ins, outs: self._gloo.allreduce(_same(outs, ins), opts))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> StagedWork:
        """In place."""
        (t,) = tensors
        poisoned = [] if opts.rootRank == self._index else [t]
        return self._start(
            "broadcast", [t], [t], poisoned, lambda ins, outs: self._gloo.broadcast(_same(outs, ins), opts)
        )

    def all_gather_single(self, out: torch.Tensor, t: torch.Tensor, opts: Any = None) -> StagedWork:
        """Every member's ``t``, end to end."""
        n = t.numel()
        own = slice(self._index * n, (self._index + 1) * n)
        flat = out.view(-1)
        inside = flat[own].data_ptr() == t.data_ptr()  # the own share may be read while it lies in its place
        poisoned = [flat[: own.start], flat[own.stop :]] if inside else [flat]
        run = lambda ins, outs: self._gloo._allgather_base(outs[0], ins[0])  # noqa: E731
        return self._start("all_gather", [t.view(-1)], [flat], poisoned, run)

    def reduce_scatter_single(self, out: torch.Tensor, t: torch.Tensor, opts: Any) -> StagedWork:
        """This member's share of the sum."""
        run = lambda ins, outs: self._gloo._reduce_scatter_base(outs[0], ins[0], opts)  # noqa: E731
        return self._start("reduce_scatter", [t.view(-1)], [out.view(-1)], [out], run)

    def all_to_all_single(
        self, out: torch.Tensor, t: torch.Tensor, out_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> StagedWork:
        """Equal blocks."""
        run = lambda ins, outs: self._gloo.alltoall_base(outs[0], ins[0], out_sizes, sizes)  # noqa: E731
        return self._start("all_to_all", [t.view(-1)], [out.view(-1)], [out], run)

    # Names of the same operations before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> StagedWork:
        """To a member of the group."""
        return self._start("send", tensors, [], [], lambda ins, outs: self._gloo.send(ins, dst, tag))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> StagedWork:
        """From a member of the group."""
        return self._start("recv", [], tensors, tensors, lambda ins, outs: self._gloo.recv(outs, src, tag))

    # ---- inside

    def _start(
        self,
        kind: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        poisoned: Sequence[torch.Tensor],
        run: Callable[[list[torch.Tensor], list[torch.Tensor]], Any],
    ) -> StagedWork:
        device = (*inputs, *outputs)[0].device
        job = _Job(StagedWork(kind, kind in self._options.forget), inputs, outputs, poisoned, run)
        if self._thread is None:
            if device.type == "cuda":
                self._lane.stream, self._lane.device = torch.cuda.Stream(device), device
            self._thread = threading.Thread(target=self._lane.serve, name="staged", daemon=True)
            self._thread.start()
        stream = self._lane.stream
        assert (stream is None) == (device.type == "cpu"), f"a group works on one device, not on {device} too"
        if stream is not None:
            job.begun = torch.cuda.current_stream(device).record_event()
            for t in (*inputs, *outputs):
                t.record_stream(stream)
        self._lane.jobs.put(job)
        return job.work


def _same(outs: list[torch.Tensor], ins: list[torch.Tensor]) -> list[torch.Tensor]:
    """Host outputs that start as the inputs, for what works in place."""
    outs[0].copy_(ins[0])
    return outs


def register(options: Options) -> None:
    """Make the back end known to torch.distributed in this process; groups that are opened from now on have ``options``."""
    dist.Backend.register_backend(NAME, partial(StagedGroup, options), devices=["cpu", "cuda"])


def stand_in_for_default_group(options: Options) -> None:
    """Close the default group that is open, and open one of the same ranks on this back end. Collective."""
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.barrier()  # a rank that is still connecting must not find that another one has left
    dist.destroy_process_group()
    register(options)
    dist.init_process_group(NAME, store=dist.PrefixStore("staged", store), rank=rank, world_size=size)


def run_case_staged(case: Case, options: Options, device: str = "cpu") -> RankResult:
    """:func:`megatron_lite.testing.layouts.run_case` over this back end, on a rank of ``testing.ranks``."""
    if case.layout.world_size > 1:
        stand_in_for_default_group(options)
    return run_case(case, backend=NAME, device=device)
