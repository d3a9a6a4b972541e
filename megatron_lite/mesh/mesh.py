"""The groups of ranks that a layout needs, opened once.

``ProcessMesh.open`` makes communicators only for groups of more than one rank, and one for each *set* of groups: where
two axes have the same members (``dp`` and ``dp_cp`` without context parallelism) they share one, and the job's default
group is the ``world`` axis and any other that spans the job. No second world-wide group is opened, in particular no
gloo group beside NCCL.

On NCCL a set of groups comes from one split of the bound default communicator; elsewhere each group is opened by
``new_group``, which only its members connect. torch's ``DeviceMesh`` makes the same two calls. We make them ourselves
because it also opens groups of one rank, composes axes through a private method only, and has no place for the
overlapping pairs of a pipeline.

Pipeline queues are communicators of two ranks, one for each edge and direction, all opened and used once at
start, so that no communicator is set up lazily in the middle of a schedule, where it could wait for a peer that waits.

A mesh of one rank opens nothing. On the ``fake`` back end the other ranks do not exist: collectives leave shapes as
they are and values without meaning, tensors may be on the meta device, and a job of a thousand ranks opens
in one process in milliseconds. ``backend`` may be any name registered with torch.distributed.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.config.problem import ConfigError
from megatron_lite.mesh.collectives import Axis, Traffic
from megatron_lite.mesh.layout import Layout, layout_problems
from megatron_lite.mesh.queues import Queue

Groups = tuple[tuple[int, ...], ...]

# Named axes of every mesh, as the coordinates that vary inside a group. kv_replica is added where it is needed.
COMPOSITION: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("cp", "dp"),
    "tp_pp": ("tp", "pp"),
    "world": ("tp", "cp", "dp", "pp"),
}


class ProcessMesh:
    """This process's view of the job: its coordinates, its axes and its pipeline queues.

    Attributes:
        layout: the sizes.
        rank: this process's rank.
        coords: where that is.
        device: where this rank's tensors live.
        backend: name of the back end (``none`` with one rank).
        traffic: what was sent so far, by axis and kind.
    """

    def __init__(
        self, layout: Layout, rank: int, device: torch.device, backend: str, timeout: datetime.timedelta | None
    ):
        self.layout = layout
        self.rank = rank
        self.coords = layout.coords(rank)
        self.device = device
        self.backend = backend
        self.traffic = Traffic()
        self._timeout = timeout
        self._axes: dict[str, Axis] = {}
        self._queues: dict[tuple[int, int, str], Queue] = {}
        self._opened: dict[Groups, Any] = {}  # partition -> this rank's group (None: it is in none)
        self._queue_groups: list[Any] = []
        self._owns_default = False

    @classmethod
    def open(
        cls,
        layout: Layout,
        *,
        backend: str = "gloo",
        device: torch.device | str | None = None,
        kv_heads: int | None = None,
        timeout: datetime.timedelta | None = None,
        rank: int | None = None,
        numbered: bool = False,
    ) -> ProcessMesh:
        """Open the groups of a layout; every rank calls this together.

        Args:
            layout: sizes of the axes; their product is the size of the default group.
            backend: ``gloo``, ``nccl``, ``fake`` or any other registered with torch.distributed.
            device: default: ``meta`` for fake, the current GPU for nccl (and, where there is one, for back ends we
                do not know), else the CPU.
            kv_heads: key/value heads of the model, for the ``kv_replica`` axis.
            timeout: of the collectives of the groups opened here; None: torch's default for the back end.
            rank: which rank to be, on the fake back end only (elsewhere the default group tells).
            numbered: queues number their messages and check them on arrival (tests).

        Raises:
            ConfigError: if the default group has another size than the layout.
        """
        if backend == "fake":
            opened_default = _open_fake(layout, rank)
        else:
            assert rank is None, "the rank is that of the default group"
            opened_default = False
        world = dist.get_world_size() if dist.is_initialized() else 1
        problems = layout_problems(layout, world)
        if problems:
            raise ConfigError(problems)
        me = dist.get_rank() if dist.is_initialized() else 0
        mesh = cls(layout, me, _device(backend, device), backend if world > 1 else "none", timeout)
        if mesh.device.type == "cuda" and torch.cuda.is_available():
            torch.cuda.set_device(mesh.device)  # "the current stream" is this device's from here on, on any back end
        mesh._owns_default = opened_default
        mesh._open_axes(kv_heads)
        mesh._open_queues(numbered)
        return mesh

    def axis(self, name: str) -> Axis:
        """The axis of this name: tp, cp, dp, pp, dp_cp, tp_pp, world, kv_replica."""
        if name not in self._axes:
            raise KeyError(f"no axis {name!r}: there are {', '.join(self._axes)}")
        return self._axes[name]

    def queue(self, src_stage: int, dst_stage: int, kind: str | None = None) -> Queue:
        """The queue from one pipeline rank to a neighbour; this rank is at one of its ends.

        ``kind`` is ``forward`` (hidden states) or ``backward`` (their gradients). It may be left out unless pp is 2
        with virtual stages, where both kinds go both ways.
        """
        if kind is None:
            kinds = [k for (a, b, k) in self._queues if (a, b) == (src_stage, dst_stage)]
            assert len(kinds) == 1, (
                f"queue {src_stage}->{dst_stage} of stage {self.coords.pp}: kinds {kinds}, say which"
            )
            kind = kinds[0]
        return self._queues[src_stage, dst_stage, kind]

    def tie_axis(self, stages: Sequence[int]) -> Axis:
        """The ranks of these pipeline ranks with my tp, cp and dp: holders of one tied tensor.

        Collective: every rank of the job calls it, in the same order. A rank on another stage gets a single axis.
        """
        return self._make("tie", tuple(self.layout.stage_groups(sorted(set(stages)))))

    def close(self, failed: bool = False) -> None:
        """Let go of every group opened here, once all messages have gone (at once if this rank ``failed``)."""
        for queue in self._queues.values():
            if not failed:
                queue.flush()
        default = dist.group.WORLD if dist.is_initialized() else None
        for group in (*self._opened.values(), *self._queue_groups):
            if group is not None and group is not default:
                dist.destroy_process_group(group)
        self._opened.clear()
        self._queue_groups.clear()
        self._queues.clear()
        self._axes.clear()
        if self._owns_default and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_default = False

    def __enter__(self) -> ProcessMesh:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)

    # ---- opening

    def _open_axes(self, kv_heads: int | None) -> None:
        for name, axes in COMPOSITION.items():
            self._axes[name] = self._make(name, tuple(self.layout.groups(axes)))
        replicas = self.layout.kv_replica_groups(kv_heads) if kv_heads else ((self.rank,),)
        self._axes["kv_replica"] = self._make("kv_replica", tuple(replicas))

    def _make(self, name: str, groups: Groups) -> Axis:
        """The axis of this rank among these disjoint groups, opened and used once if that is not done yet."""
        if all(len(g) == 1 for g in groups):
            return self._single(name)
        is_new = groups not in self._opened
        if is_new:
            whole = len(groups) == 1 and len(groups[0]) == self.layout.world_size
            self._opened[groups] = dist.group.WORLD if whole else self._open_group(groups, name)
        ranks = next((g for g in groups if self.rank in g), (self.rank,))
        if len(ranks) == 1:
            return self._single(name)
        group, index, imaginary = self._opened[groups], ranks.index(self.rank), self.backend == "fake"
        # Small tensors of the axis' own are read back: on the CPU where there is no device.
        own = torch.device("cpu") if self.device.type == "meta" else self.device
        if is_new:
            warming = Axis(name, ranks, index, group, device=own, imaginary=imaginary)  # counts for itself
            warming.all_reduce(torch.zeros(1, device=own))
        return Axis(name, ranks, index, group, traffic=self.traffic, device=own, imaginary=imaginary)

    def _single(self, name: str) -> Axis:
        return Axis.single(name, self.rank, self.traffic)

    def _open_group(self, groups: Groups, name: str) -> Any:
        """This rank's group among disjoint ``groups``; collective over the job. None if it is in none of them."""
        default = dist.group.WORLD
        assert default is not None
        device = default.bound_device_id
        if device is not None and default._get_backend(device).supports_splitting:
            return dist.split_group(default, [list(g) for g in groups], timeout=self._timeout, group_desc=name)
        mine = None
        for ranks in groups:
            if self.backend == "fake" and self.rank not in ranks:
                continue  # nobody is there to keep in step with
            group = dist.new_group(list(ranks), timeout=self._timeout, backend=self.backend, group_desc=name)
            if self.rank in ranks:
                mine = group
        return mine

    def _open_queues(self, numbered: bool) -> None:
        pp, ring = self.layout.pp, self.layout.virtual > 1
        if pp == 1:
            return
        last = pp if ring else pp - 1
        for kind, step in (("forward", 1), ("backward", -1)):
            for colour in range(3):
                # Edges of one colour share no rank, so that one split opens them all and no wait can be circular.
                edges = [s for s in range(last) if _edge_colour(s, pp) == colour]
                pairs = [((s, (s + 1) % pp) if step == 1 else ((s + 1) % pp, s)) for s in edges]
                if pairs:
                    self._open_pairs(pairs, kind, numbered)

    def _open_pairs(self, pairs: list[tuple[int, int]], kind: str, numbered: bool) -> None:
        """Open and use once the queues of these (source, destination) pairs, of which this rank is in one at most."""
        groups = tuple(g for pair in pairs for g in self.layout.stage_groups(pair))
        group = self._open_group(groups, f"queue_{kind}")
        self._queue_groups.append(group)  # never shared, not even by two queues between the same ranks
        for src, dst in pairs:
            if self.coords.pp not in (src, dst):
                continue
            sends = self.coords.pp == src
            c = self.coords
            peer = self.layout.rank(c.tp, c.cp, c.dp, dst if sends else src)
            queue = Queue(kind, group, peer, sends=sends, traffic=self.traffic, numbered=numbered)
            token = torch.zeros(1, device=self.device)
            (queue.send if sends else queue.recv)(token).wait()
            self._queues[src, dst, kind] = queue
        self.traffic.reset()


def _edge_colour(first_stage: int, pp: int) -> int:
    """Colour of the ring edge (s, s+1): neighbours differ, also around a ring of odd length."""
    if first_stage == pp - 1 and pp % 2 == 1:
        return 2
    return first_stage % 2


def _device(backend: str, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if backend == "fake":
        return torch.device("meta")
    if backend != "gloo" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _open_fake(layout: Layout, rank: int | None) -> bool:
    """A default group whose other ranks do not exist. True if it was opened here."""
    if layout.world_size == 1 or dist.is_initialized():
        assert rank is None or not dist.is_initialized() or rank == dist.get_rank(), (rank, dist.get_rank())
        return False
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank or 0, world_size=layout.world_size, store=FakeStore())
    return True
