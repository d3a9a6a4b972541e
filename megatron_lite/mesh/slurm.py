"""What Slurm tells a task, read strictly: numbers, tasks of this node, the first host of a node list."""

from __future__ import annotations

import re
from collections.abc import Mapping


def number(env: Mapping[str, str], name: str, at_least: int = 0, below: tuple[str, int] | None = None) -> int:
    """The whole number in a variable.

    Args:
        env: where it is set.
        name: the variable.
        at_least: smallest legal value.
        below: name and value of what it must be less than.

    Raises:
        ValueError: names the variable and its value.
    """
    text = env[name]
    if not re.fullmatch(r"[0-9]+", text):
        raise ValueError(f"{name}={text!r} is not a whole number of {at_least} or more")
    value = int(text)
    if value < at_least:
        raise ValueError(f"{name}={value} must be {at_least} or more")
    if below is not None and value >= below[1]:
        raise ValueError(f"{name}={value} is not below {below[0]}={below[1]}: ranks are 0 to {below[1] - 1}")
    return value


def srun_numbers(env: Mapping[str, str]) -> tuple[int, int, int, int]:
    """(rank, world size, local rank, local world size) of this task."""
    for name in ("SLURM_NTASKS", "SLURM_LOCALID"):
        if name not in env:
            raise ValueError(
                f"{name} not set, though SLURM_PROCID={env['SLURM_PROCID']!r}: srun sets both. Start with srun or "
                "torchrun"
            )
    world = number(env, "SLURM_NTASKS", at_least=1)
    rank = number(env, "SLURM_PROCID", below=("SLURM_NTASKS", world))
    local_rank = number(env, "SLURM_LOCALID", below=("SLURM_NTASKS", world))
    local_world = _slurm_local_world(env, world)
    if local_rank >= local_world:
        raise ValueError(
            f"SLURM_LOCALID={local_rank} is not below the {local_world} tasks of this host ({_slurm_tasks_text(env)})"
        )
    return rank, world, local_rank, local_world


def check_torchrun_inside_slurm(env: Mapping[str, str], rank: int, world: int, local_world: int) -> None:
    """torchrun's variables inside Slurm must describe one job, not one for each task.

    Legal are: srun starts one torchrun on each node; torchrun runs in a batch script (which is task 0 of the job
    and no step of it); each task exports its own numbers as RANK and WORLD_SIZE.

    Raises:
        ValueError: for anything else: several jobs would run, each with a rank 0 that writes the same files.
    """
    task = number(env, "SLURM_PROCID")
    tasks = number(env, "SLURM_NTASKS", at_least=1) if "SLURM_NTASKS" in env else 1
    if (task, tasks) == (rank, world):
        return  # the task's own numbers
    if tasks * local_world == world and task < tasks:
        return  # srun starts one torchrun on each node
    in_step = "SLURM_STEP_ID" in env or "SLURM_STEPID" in env
    if not in_step and task == 0 and "TORCHELASTIC_RUN_ID" in env:
        return  # torchrun in a batch script: that script is task 0
    raise ValueError(
        f"RANK={rank} of WORLD_SIZE={world} (LOCAL_WORLD_SIZE={local_world}) does not "
        f"fit SLURM_PROCID={task} of SLURM_NTASKS={tasks}: tasks that each take these numbers would be several jobs. "
        "Use srun alone (unset RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE), or srun with one torchrun on a node "
        "(--ntasks-per-node=1, --nnodes equal to the number of tasks)"
    )


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
                f"SLURM_STEP_TASKS_PER_NODE not set, and SLURM_NTASKS={world} cannot be the same number on each of "
                f"SLURM_NNODES={nodes} nodes"
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
    return counts[number(env, "SLURM_NODEID", below=(f"the nodes of {name}", len(counts)))]


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
