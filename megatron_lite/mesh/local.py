"""How this process learns which rank it is, and how it joins the others.

Three ways to start, one program: plain ``python`` (one rank), ``torchrun`` (RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE) and ``srun`` (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID; the first host of the node list is the
meeting point). ``rank_info`` reads them and takes no defaults: two processes that both believe to be rank 0 corrupt
files, so a variable that is missing, unreadable or at odds with another is an error that names it and its value.

``start`` opens the default process group (none for one rank) and ties the life of this rank to that of its launcher.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_lite.mesh.slurm import check_torchrun_inside_slurm, first_host, number, srun_numbers

if TYPE_CHECKING:
    import torch.distributed as dist

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_PR_SET_PDEATHSIG = 1
_FIRST_PORT, _PORTS = 15000, 16384  # below the range that Linux hands out by itself (32768 and up)


@dataclass(frozen=True)
class RankInfo:
    """Which rank this is.

    Attributes:
        rank: 0 .. world_size - 1 in the job.
        world_size: ranks of the job.
        local_rank: 0 .. local_world_size - 1 on this host; the index of its GPU.
        local_world_size: ranks on this host.
        host: name of this host.
        launcher: ``plain``, ``torchrun`` or ``srun``.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    launcher: str


def rank_info(env: Mapping[str, str]) -> RankInfo:
    """Which rank this is, from the launcher's variables; plain ``python`` is rank 0 of 1.

    Raises:
        ValueError: names the variable and its value when one is missing, not a number, out of range or at odds with
            another launcher's.
    """
    torchrun = any(name in env for name in _TORCHRUN)
    srun = "SLURM_PROCID" in env
    if torchrun:
        info = _from_torchrun(env)
        if srun:
            check_torchrun_inside_slurm(env, info.rank, info.world_size, info.local_world_size)
        return info
    if srun:
        return RankInfo(*srun_numbers(env), env.get("SLURMD_NODENAME") or socket.gethostname(), "srun")
    return RankInfo(0, 1, 0, 1, socket.gethostname(), "plain")


def _from_torchrun(env: Mapping[str, str]) -> RankInfo:
    missing = [name for name in _TORCHRUN if name not in env]
    if missing:
        there = ", ".join(f"{name}={env[name]!r}" for name in _TORCHRUN if name in env)
        raise ValueError(
            f"{' and '.join(missing)} not set, though {there}: a launcher sets all of {', '.join(_TORCHRUN)}. "
            "Start with torchrun or srun, or unset them all to run one process"
        )
    world = number(env, "WORLD_SIZE", at_least=1)
    rank = number(env, "RANK", below=("WORLD_SIZE", world))
    local_world = number(env, "LOCAL_WORLD_SIZE", at_least=1)
    local_rank = number(env, "LOCAL_RANK", below=("LOCAL_WORLD_SIZE", local_world))
    if local_world > world:
        raise ValueError(
            f"LOCAL_WORLD_SIZE={local_world} is more than WORLD_SIZE={world}: a host has no more ranks than the job"
        )
    if local_rank > rank:
        raise ValueError(f"LOCAL_RANK={local_rank} is more than RANK={rank}: the ranks of a host are numbered in order")
    return RankInfo(rank, world, local_rank, local_world, socket.gethostname(), "torchrun")


def meeting_point(info: RankInfo, env: Mapping[str, str]) -> tuple[str, int]:
    """Address and port where the ranks of a job meet (rank 0 listens there).

    MASTER_ADDR and MASTER_PORT, where set, are taken as they are. Under srun the first host of the step's node list
    stands in, and a port that follows from the job's id.

    Raises:
        ValueError: names the variable that is missing or wrong.
    """
    address = env.get("MASTER_ADDR", "")
    if not address and info.launcher == "srun":
        lists = [env[n] for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if env.get(n)]
        if not lists:
            raise ValueError("SLURM_JOB_NODELIST not set: the ranks need it (or MASTER_ADDR) to find rank 0")
        address = first_host(lists[0])
    if not address:
        raise ValueError(
            f"MASTER_ADDR={env.get('MASTER_ADDR')!r}: {info.world_size} ranks need the host of rank 0; torchrun sets it"
        )
    if "MASTER_PORT" in env:
        port = number(env, "MASTER_PORT", at_least=1)
        if port > 65535:
            raise ValueError(f"MASTER_PORT={port} is not a port: 1 to 65535")
        return address, port
    if info.launcher != "srun":
        raise ValueError("MASTER_PORT not set: the ranks need it to find rank 0; torchrun sets it")
    job = number(env, "SLURM_JOB_ID") if "SLURM_JOB_ID" in env else 0
    return address, _FIRST_PORT + job % _PORTS


# ---- joining


def start(
    info: RankInfo,
    backend: str,
    timeout_minutes: float,
    env: Mapping[str, str],
    *,
    die: bool = True,
    met: Callable[[dist.Store], None] = lambda store: None,
) -> dist.Store | None:
    """Open the default process group; one rank opens none. On NCCL this rank is bound to the GPU of its local rank.

    Args:
        info: from :func:`rank_info`.
        backend: ``gloo``, ``nccl`` or another name registered with torch.distributed.
        timeout_minutes: of every collective, and of waiting for the others here.
        env: for MASTER_ADDR and MASTER_PORT, see :func:`meeting_point`.
        die: end this process when its launcher ends.
        met: called with a connection of its own to the job's store once this rank has reached it, before it waits for
            the others. (A thread that shares a connection waits while another waits on it.)

    Returns:
        The job's key-value store, or None with one rank.

    Raises:
        ValueError: for a missing GPU, a wrong address, a port in use or ranks that did not come, with the remedy.
    """
    if info.world_size == 1:
        return None
    import torch
    import torch.distributed as dist

    if die:
        die_with_parent()
    device = None
    if backend == "nccl":
        count = torch.cuda.device_count()
        if info.local_rank >= count:
            raise ValueError(
                f"local rank {info.local_rank} of {info.local_world_size} on {info.host} has no GPU: {count} are "
                "visible. Start no more ranks than GPUs on a host, or use --distributed-backend gloo"
            )
        device = torch.device("cuda", info.local_rank)
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    store = meet(info, timeout_minutes, env)
    met(store.clone())  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=info.rank, world_size=info.world_size, timeout=timeout, device_id=device
    )
    return store


def leave() -> None:
    """Close the default process group, where :func:`start` opened one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def meet(info: RankInfo, timeout_minutes: float, env: Mapping[str, str]) -> dist.Store:
    """The store that all ranks share (torchrun's own, or one that rank 0 opens); ValueError as :func:`start`."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    timeout = datetime.timedelta(minutes=timeout_minutes)
    address, port = meeting_point(info, env)
    host = f"[{address}]" if ":" in address else address
    try:
        store, _, _ = next(rendezvous(f"tcp://{host}:{port}", info.rank, info.world_size, timeout=timeout))
    except (dist.DistError, RuntimeError, OSError) as error:
        text = str(error) or type(error).__name__
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            raise ValueError(
                f"MASTER_PORT={port} on {address} is in use (rank {info.rank} on {info.host} cannot listen there): "
                "another job, or an earlier one of yours, is still running. End it, or choose another port "
                "(MASTER_PORT, torchrun --master-port)"
            ) from error
        raise ValueError(
            f"rank {info.rank} of {info.world_size} on {info.host} found nobody at {address}:{port} within "
            f"{timeout.total_seconds() / 60:g} minutes: {text.splitlines()[0]}. Check "
            f"that all {info.world_size} ranks were started, that the name resolves and that no firewall is between"
        ) from error
    store.set_timeout(timeout)
    return store


def die_with_parent(parent: int | None = None) -> int:
    """Ask the kernel to end this process (SIGKILL) when the one that started it ends; Linux only, elsewhere nothing.

    Args:
        parent: the parent's process id, where known; if it is gone already, this process ends here.

    Returns:
        The parent's process id, for :func:`parent_alive`.
    """
    expected = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if not parent_alive(expected):  # it ended before the kernel was asked
        os._exit(1)
    return expected


def parent_alive(parent: int) -> bool:
    """Whether the process that started this one, as :func:`die_with_parent` told it, is still its parent."""
    return os.getppid() == parent
