"""Programs that start in a moment: ``python``, ``torchrun`` and ``megatron-lite`` of a process that has imported torch and forks.

Importing torch costs each program more than most of them do after it. ``programs(folder)`` puts programs into a directory for the
PATH of a test that runs commands as a user would. Each is a process of its own with the arguments, directory, environment and files
that it was started with, and ends with the same status; what started it may kill it. Command lines other than ``-m MODULE`` and
``FILE.py`` go to the real Python. What such a program cannot show is what happens before torch is imported; tests that start real
ones do (test_cli.py, test_check_cli.py, test_train_resume.py, test_examples_cluster.py), and with ``--nightly`` all are real.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
# What stands in for Python: hands over what it was started with, waits for the status.
CLIENT = """#!{python} -IS
import json, os, sys
arguments = [a for a in sys.argv[1:] if a != "-u"]
if not arguments or not (arguments[0] == "-m" or arguments[0].endswith(".py")):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
import socket
with socket.socket(socket.AF_UNIX) as s:
    s.connect({address!r})
    socket.send_fds(s, [b"."], [0, 1, 2])
    s.sendall(json.dumps((arguments, os.getcwd(), {{"PYTHON_EXEC": sys.argv[0], **os.environ}})).encode())  # torchrun's Python
    s.shutdown(socket.SHUT_WR)
    status = s.recv(16)
os._exit(int(status or 1))
"""


def programs(folder: Path, warm: bool = True) -> str:
    """Make the directory; it is to stand first on the PATH.

    Args:
        folder: is made.
        warm: False: the same names, for the real Python.
    """
    folder.mkdir()
    python = sys.executable
    if warm:
        python = str(folder / "warm")
        Path(python).write_text(CLIENT.format(python=sys.executable, address=_server()))
    ways = {"python": "", "python3": "", "megatron-lite": "-m megatron_lite", "torchrun": "-m torch.distributed.run"}
    for name, module in ways.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(python)} {module} "$@"\n')
    for program in folder.iterdir():
        program.chmod(0o755)
    return str(folder)


@functools.cache
def _server() -> str:
    """Start the process that forks; where it listens. It ends with this one."""
    from train_toys import environment

    command = [sys.executable, str(HERE)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(CUDA_VISIBLE_DEVICES=""))
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return f"\0programs-{process.pid}"


# ---- the process that forks


def serve() -> None:
    """Fork a program for each connection."""
    import torch.distributed.run

    import megatron_lite.cli.train
    import megatron_lite.train.loop
    from megatron_lite.mesh.local import die_with_parent
    from megatron_lite.testing.offline import refuse_network

    assert torch.distributed.run and megatron_lite.cli.train and megatron_lite.train.loop
    die_with_parent()
    refuse_network()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0programs-{os.getpid()}")  # an abstract name: no file is left
        listener.listen(64)
        print("ready", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _look_after(connection)
            connection.close()


def _look_after(connection: socket.socket) -> None:
    """Start the program, tell its status; kill it when who asked for it is gone. Never returns."""
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    request = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    program = os.fork()
    if program == 0:
        connection.close()
        _run(*json.loads(request), files)
    for file in files:
        os.close(file)
    ends = os.pidfd_open(program)
    poll = select.poll()
    poll.register(ends, select.POLLIN)
    poll.register(connection, select.POLLHUP)
    if not any(file == ends for file, _ in poll.poll()):
        os.kill(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(OSError):
        connection.sendall(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def _run(arguments: list[str], directory: str, environment: dict[str, str], files: list[int]) -> None:
    """Become the program. Never returns."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", errors="backslashreplace", buffering=1)  # noqa: SIM115
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    code: Any = 1
    try:
        if arguments[0] == "-m":
            sys.path[0] = directory
            sys.argv = arguments[1:]
            sys.modules.pop(arguments[1], None)  # runpy warns of it
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(arguments[0]).resolve().parent)
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve()
