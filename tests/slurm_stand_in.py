#!/usr/bin/env python3
"""Stands in for srun, sbatch and scontrol, by the name under which it is started, on one machine.

``srun`` starts the tasks of its command line (or of the job) as processes of this machine, with the variables that Slurm sets for
a task, passes the signals that it gets on to all of them, and ends with the highest exit code. As Slurm's it ends the other
tasks when one has failed under ``--kill-on-bad-exit=1``, and so many seconds after the first has ended under ``--wait``.
``sbatch`` runs a job, or each task of an array, before it returns; one whose dependency (``afterok``) has failed never runs. It adds
a line to the file ``jobs`` in the directory of this program: number, exit code or ``never``, options.
``scontrol requeue JOB`` adds a line to the file ``requeued`` in the directory of this program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

FORWARDED = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2")


def cut(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Options, all of them as ``--name=value``, and the command."""
    options = {}
    for i, argument in enumerate(arguments):
        if not argument.startswith("--"):
            return options, arguments[i:]
        name, _, value = argument.removeprefix("--").partition("=")
        options[name] = value
    raise SystemExit("srun: no command")


def variables(options: dict[str, str]) -> list[dict[str, str]]:
    """What Slurm sets for each task."""
    nodes = int(options.get("nodes", os.environ["SLURM_NNODES"]))
    tasks = int(options.get("ntasks", os.environ["SLURM_NTASKS"]))
    each = tasks // nodes
    assert each * nodes == tasks and int(options.get("ntasks-per-node", each)) == each, options
    names = [f"node{n}" for n in range(nodes)]
    return [
        {
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task % each),
            "SLURM_NODEID": str(task // each),
            "SLURM_NTASKS": str(tasks),
            "SLURM_NNODES": str(nodes),
            "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
            "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})" if nodes > 1 else str(each),
            "SLURMD_NODENAME": names[task // each],
        }
        for task in range(tasks)
    ]


def srun(arguments: list[str]) -> int:
    """Start the tasks and wait for them."""
    options, command = cut(arguments)
    tasks = [subprocess.Popen(command, env=os.environ | its) for its in variables(options)]

    def forward(number: int, frame: FrameType | None) -> None:
        for task in tasks:
            if task.poll() is None:
                task.send_signal(number)

    for name in FORWARDED:
        signal.signal(getattr(signal, f"SIG{name}"), forward)
    first_end = None
    while any(task.poll() is None for task in tasks):
        time.sleep(0.05)
        ended = [task.returncode for task in tasks if task.returncode is not None]
        first_end = first_end or (time.monotonic() if ended else None)
        waited = first_end is not None and "wait" in options and time.monotonic() - first_end > int(options["wait"])
        if waited or (options.get("kill-on-bad-exit") == "1" and any(ended)):
            forward(signal.SIGTERM, None)
            time.sleep(0.2)
            forward(signal.SIGKILL, None)
    return max(128 - task.returncode if task.returncode < 0 else task.returncode for task in tasks)


def sbatch(arguments: list[str]) -> int:
    """Run the job now."""
    options, (script, *rest) = cut(arguments)
    home = Path(sys.argv[0]).parent
    jobs = (home / "jobs").read_text().splitlines() if (home / "jobs").exists() else []
    number = str(101 + len(jobs))
    spooled = home / f"job{number}"  # Slurm runs a copy
    spooled.write_text(Path(script).read_text())
    kind, _, needed = options.get("dependency", "").partition(":")
    code: int | str = "never"
    if not needed or (kind == "afterok" and any(line.startswith(f"{needed} 0 ") for line in jobs)):
        first, _, last = options.get("array", "").partition("-")
        tasks = [{"SLURM_ARRAY_TASK_ID": str(i)} for i in range(int(first), int(last or first) + 1)] if first else [{}]
        its = {"SLURM_JOB_ID": number, "SLURM_SUBMIT_DIR": os.getcwd(), "SLURM_CPUS_PER_TASK": "1"}
        with open(home / f"job{number}.log", "w") as log:
            codes = [
                subprocess.run(["bash", spooled, *rest], env=os.environ | its | task, stdout=log, stderr=log).returncode
                for task in tasks
            ]
        code = max(codes)
    with open(home / "jobs", "a") as f:
        f.write(f"{number} {code} {options}\n")
    print(number if "parsable" in options else f"Submitted batch job {number}")
    return 0


def main() -> int:
    """By the name of this file."""
    if Path(sys.argv[0]).name == "sbatch":
        return sbatch(sys.argv[1:])
    if Path(sys.argv[0]).name == "srun":
        return srun(sys.argv[1:])
    with open(Path(sys.argv[0]).parent / "requeued", "a") as f:
        f.write(" ".join(sys.argv[1:]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
