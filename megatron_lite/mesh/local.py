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
import re
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
            _check_slurm_agrees(env, info)
        return info
    if srun:
        return _from_srun(env)
    return RankInfo(0, 1, 0, 1, socket.gethostname(), "plain")


def _from_torchrun(env: Mapping[str, str]) -> RankInfo:
    missing = [name for name in _TORCHRUN if name not in env]
    if missing:
        there = ", ".join(f"{name}={env[name]!r}" for name in _TORCHRUN if name in env)
        raise ValueError(
            f"{' and '.join(missing)} not set, though {there}: a launcher sets all of {', '.join(_TORCHRUN)}. "
            "Start with torchrun or srun, or unset them all to run one process"
        )
    world = _number(env, "WORLD_SIZE", at_least=1)
    rank = _number(env, "RANK", below=("WORLD_SIZE", world))
    local_world = _number(env, "LOCAL_WORLD_SIZE", at_least=1)
    local_rank = _number(env, "LOCAL_RANK", below=("LOCAL_WORLD_SIZE", local_world))
    if local_world > world:
        raise ValueError(
            f"LOCAL_WORLD_SIZE={local_world} is more than WORLD_SIZE={world}: a host has no more ranks than the job"
        )
    if local_rank > rank:
        raise ValueError(f"LOCAL_RANK={local_rank} is more than RANK={rank}: the ranks of a host are numbered in order")
    return RankInfo(rank, world, local_rank, local_world, socket.gethostname(), "torchrun")


def _from_srun(env: Mapping[str, str]) -> RankInfo:
    for name in ("SLURM_NTASKS", "SLURM_LOCALID"):
        if name not in env:
            raise ValueError(
                f"{name} not set, though SLURM_PROCID={env['SLURM_PROCID']!r}: srun sets both. Start with srun or torchrun"
            )
    world = _number(env, "SLURM_NTASKS", at_least=1)
    rank = _number(env, "SLURM_PROCID", below=("SLURM_NTASKS", world))
    local_rank = _number(env, "SLURM_LOCALID", below=("SLURM_NTASKS", world))
    local_world = _slurm_local_world(env, world)
    if local_rank >= local_world:
        raise ValueError(
            f"SLURM_LOCALID={local_rank} is not below the {local_world} tasks of this host ({_slurm_tasks_text(env)})"
        )
    return RankInfo(rank, world, local_rank, local_world, env.get("SLURMD_NODENAME") or socket.gethostname(), "srun")


def _check_slurm_agrees(env: Mapping[str, str], info: RankInfo) -> None:
    """torchrun's variables inside Slurm: legal are one torchrun on a node of each task, one inside a batch script, and
    tasks that export their own numbers as RANK and WORLD_SIZE. Anything else starts several jobs that each have a rank 0.
    """
    task = _number(env, "SLURM_PROCID")
    tasks = _number(env, "SLURM_NTASKS", at_least=1) if "SLURM_NTASKS" in env else 1
    if (task, tasks) == (info.rank, info.world_size):
        return  # the task's own numbers
    if tasks * info.local_world_size == info.world_size and task < tasks:
        return  # srun starts one torchrun on each node
    in_step = "SLURM_STEP_ID" in env or "SLURM_STEPID" in env
    if not in_step and task == 0 and "TORCHELASTIC_RUN_ID" in env:
        return  # torchrun in a batch script: that script is task 0
    raise ValueError(
        f"RANK={info.rank} of WORLD_SIZE={info.world_size} (LOCAL_WORLD_SIZE={info.local_world_size}) does not fit "
        f"SLURM_PROCID={task} of SLURM_NTASKS={tasks}: {tasks} tasks that each take these numbers would be several jobs. "
        "Use srun alone (unset RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE), or srun with one torchrun on a node "
        "(--ntasks-per-node=1, --nnodes equal to the number of tasks)"
    )


def _number(env: Mapping[str, str], name: str, at_least: int = 0, below: tuple[str, int] | None = None) -> int:
    text = env[name]
    if not re.fullmatch(r"[0-9]+", text):
        raise ValueError(f"{name}={text!r} is not a whole number of {at_least} or more")
    value = int(text)
    if value < at_least:
        raise ValueError(f"{name}={value} must be {at_least} or more")
    if below is not None and value >= below[1]:
        raise ValueError(f"{name}={value} is not below {below[0]}={below[1]}: ranks are 0 to {below[1] - 1}")
    return value


# ---- Slurm's texts


def _slurm_tasks_text(env: Mapping[str, str]) -> str:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        if env.get(name):
            return f"{name}={env[name]}"
    return "no SLURM_STEP_TASKS_PER_NODE"


def _slurm_local_world(env: Mapping[str, str], world: int) -> int:
    """Tasks on this host: from ``4(x2),3`` and the number of the node, or the same for all."""
    name, _, text = _slurm_tasks_text(env).partition("=")
    if not text:
        nodes = int(env["SLURM_NNODES"]) if env.get("SLURM_NNODES", "").isdigit() else 1
        if nodes < 1 or world % nodes:
            raise ValueError(
                f"SLURM_STEP_TASKS_PER_NODE not set, and SLURM_NTASKS={world} is not the same on SLURM_NNODES={nodes} nodes"
            )
        return world // nodes
    counts = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip())
        if not found:
            raise ValueError(f"{name}={text!r} is not a list like 4(x2),3")
        counts += [int(found[1])] * int(found[2] or 1)
    if len(counts) == 1:
        return min(counts[0], world)
    if "SLURM_NODEID" not in env:
        raise ValueError(f"SLURM_NODEID not set, though {name}={text!r} has {len(counts)} nodes")
    return counts[_number(env, "SLURM_NODEID", below=(f"the nodes of {name}", len(counts)))]


def first_host(node_list: str) -> str:
    """First host of a Slurm node list: ``node[007-009,12],login`` is ``node007``; ``r[1-2]n[3,5]`` is ``r1n3``.

    Raises:
        ValueError: if the brackets do not match or a list is empty.
    """
    host, rest = "", node_list.strip()
    while rest and rest[0] != ",":
        if rest[0] == "[":
            inside, closed, rest = rest[1:].partition("]")
            number = re.match(r"[0-9]+", inside)
            if not closed or not number:
                raise ValueError(f"cannot read the node list {node_list!r}: expected something like node[001-004,007]")
            host += number[0]
        elif rest[0] == "]":
            raise ValueError(f"cannot read the node list {node_list!r}: ']' without '['")
        else:
            host, rest = host + rest[0], rest[1:]
    if not host:
        raise ValueError(f"cannot read the node list {node_list!r}: it names no host")
    return host


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
        port = _number(env, "MASTER_PORT", at_least=1)
        if port > 65535:
            raise ValueError(f"MASTER_PORT={port} is not a port: 1 to 65535")
        return address, port
    if info.launcher != "srun":
        raise ValueError("MASTER_PORT not set: the ranks need it to find rank 0; torchrun sets it")
    job = _number(env, "SLURM_JOB_ID") if "SLURM_JOB_ID" in env else 0
    return address, _FIRST_PORT + job % _PORTS


# ---- joining


def start(
    info: RankInfo, backend: str, timeout_minutes: float, env: Mapping[str, str], *, die: bool = True
) -> dist.Store | None:
    """Open the default process group; one rank opens none. On NCCL this rank is bound to the GPU of its local rank.

    Args:
        info: from :func:`rank_info`.
        backend: ``gloo``, ``nccl`` or another name registered with torch.distributed.
        timeout_minutes: of every collective, and of waiting for the others here.
        env: for MASTER_ADDR and MASTER_PORT, see :func:`meeting_point`.
        die: end this process when its launcher ends.

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
                f"local rank {info.local_rank} of {info.local_world_size} on {info.host} has no GPU: {count} are visible. "
                "Start no more ranks than GPUs on a host, or use --distributed-backend gloo"
            )
        device = torch.device("cuda", info.local_rank)
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    store = _meet(info, timeout, env)
    dist.init_process_group(
        backend, store=store, rank=info.rank, world_size=info.world_size, timeout=timeout, device_id=device
    )
    return store


def _meet(info: RankInfo, timeout: datetime.timedelta, env: Mapping[str, str]) -> dist.Store:
    """The store that all ranks share (torchrun's own, or one that rank 0 opens)."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    address, port = meeting_point(info, env)
    host = f"[{address}]" if ":" in address else address
    try:
        store, _, _ = next(rendezvous(f"tcp://{host}:{port}", info.rank, info.world_size, timeout=timeout))
    except (dist.DistError, RuntimeError, OSError) as error:
        text = str(error)
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            raise ValueError(
                f"port {port} on {address} is in use (rank {info.rank} on {info.host} cannot listen there): another job or an "
                "earlier one of yours is still running. End it, or choose another port (MASTER_PORT, torchrun --master-port)"
            ) from error
        raise ValueError(
            f"rank {info.rank} of {info.world_size} on {info.host} found nobody at {address}:{port} within "
            f"{timeout.total_seconds() / 60:g} minutes: {text.splitlines()[0] if text else type(error).__name__}. Check that "
            f"all {info.world_size} ranks were started, that the host name resolves and that no firewall is between"
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
