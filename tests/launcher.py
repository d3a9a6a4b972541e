"""Ranks in processes of their own that start in a moment: a launcher that has imported everything and forks.

``start(ranks, argv, folder, hooks)`` runs ``megatron-lite train`` on that many ranks as a launcher does that sets RANK
and the rest, waits, and leaves it to the ranks to end each other. Each job is a session of its own, its first process
stands for the launcher, everything that is printed goes to ``folder/output``, and ``folder/codes.json`` holds the exit
codes when all are gone. ``hooks`` change the program in the ranks, see :func:`apply_hooks`; a script started by another
launcher takes them from ``--hooks JSON`` in front of the flags.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


# ---- in the ranks


def apply_hooks(hooks: dict[str, Any], rank: int) -> None:
    """Change the program in this rank.

    Keys of ``hooks``:
        slow_step, slow_eval, slow_save, slow_data: seconds that each step, batch of an evaluation, writing of a checkpoint
            or opening of the data takes longer; ``SAVING n``, ``EVALUATING`` and ``OPENING`` are printed when the waiting
            begins.
        hang_seconds: of the watchdog.
        hang: {rank, step}: sleep for ever in this step.
        fail: {rank, where, kind}: raise an exception of this kind; where is ``arguments``, ``data``, ``step 3``,
            ``write`` or ``logs`` (which only rank 0 writes).
        differ: this rank's code has another digest.
    """
    from megatron_lite.checkpoint import save
    from megatron_lite.cli import train as cli
    from megatron_lite.train import build, loop, report, step

    fail = hooks.get("fail", {})
    mine = fail.get("rank") == rank

    def wrap(owner: Any, name: str, before: Any) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            before(*args, **kwargs)
            return inner(*args, **kwargs)

        setattr(owner, name, outer)

    def failing(*args: Any, **kwargs: Any) -> None:
        raise {"RuntimeError": RuntimeError, "MemoryError": MemoryError, "OSError": OSError, "ValueError": ValueError}[
            fail["kind"]
        ](f"made to fail in {fail['where']}")

    places = {
        "arguments": (cli, "prepare"),
        "data": (build, "open_data"),
        "write": (save, "write_fragment"),
        "logs": (report, "JsonLines"),
    }
    if mine and fail["where"] in places:
        wrap(*places[fail["where"]], failing)

    def before_step(*args: Any, step: int, **kwargs: Any) -> None:
        time.sleep(hooks.get("slow_step", 0))
        if mine and fail["where"] == f"step {step + 1}":
            failing()
        hang = hooks.get("hang")
        if hang and hang["rank"] == rank and hang["step"] == step + 1:
            time.sleep(1000)

    wrap(step.TrainStep, "run", before_step)
    if "slow_save" in hooks:

        def slow(*args: Any, **kwargs: Any) -> None:
            print(f"SAVING {rank}", flush=True)
            end = time.monotonic() + hooks["slow_save"]
            while (left := end - time.monotonic()) > 0:  # waits in C, as for a disk
                ctypes.CDLL(None).usleep(int(1e6 * min(left, 0.5)))

        wrap(save, "write_fragment", slow)
    if "slow_data" in hooks:

        def slow_data(*args: Any, **kwargs: Any) -> None:
            print("OPENING", flush=True)
            time.sleep(hooks["slow_data"])

        wrap(build, "open_data", slow_data)
    if "slow_eval" in hooks:

        def slow_batch(*args: Any, **kwargs: Any) -> None:
            if rank == 0:
                print("EVALUATING", flush=True)
            time.sleep(hooks["slow_eval"])

        wrap(sys.modules["megatron_lite.pipeline.runtime"].Runtime, "evaluate", slow_batch)
    if "differ" in hooks:
        build.code_digest = lambda *folders: str(rank)  # type: ignore[assignment]
    if "hang_seconds" in hooks:
        inner_guard = loop.Guard
        loop.Guard = lambda info, store, seconds: inner_guard(info, store, hooks["hang_seconds"])  # type: ignore[assignment,misc]


def rank_main(argv: list[str], hooks: dict[str, Any]) -> int:
    """The program of one rank."""
    import torch

    from megatron_lite.cli.main import main

    torch.set_num_threads(1)
    apply_hooks(hooks, int(os.environ.get("RANK", "0")))
    sys.argv = ["megatron-lite", "train", *argv]
    return main(["train", *argv])


# ---- the process that forks


def _run_rank(rank: int, request: dict[str, Any]) -> None:
    ranks = request["ranks"]
    if ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": request["port"]}
        os.environ.update({k: str(v) for k, v in names.items()})
    code = 1
    try:
        code = rank_main(request["argv"], request["hooks"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_job(request: dict[str, Any]) -> None:
    """The launcher of one job: never returns."""
    os.setsid()
    os.chdir(request["folder"])
    out = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    children = {}
    for rank in range(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            _run_rank(rank, request)
        children[pid] = rank
    Path("pids.tmp").write_text(json.dumps([os.getpid(), *children]))
    os.rename("pids.tmp", "pids.json")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it waits for its ranks, whatever comes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    codes = {}
    while children:
        pid, status = os.wait()
        codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
    Path("codes.tmp").write_text(json.dumps([codes[r] for r in sorted(codes)]))
    os.rename("codes.tmp", "codes.json")
    os._exit(0)


def serve() -> None:
    """Fork a job for each line of standard input, until it ends."""
    import torch.distributed  # noqa: F401

    import megatron_lite.cli.train
    import megatron_lite.train.loop
    from megatron_lite.mesh.local import die_with_parent
    from megatron_lite.model.protocol import load_definition
    from megatron_lite.testing.offline import refuse_network

    die_with_parent()
    refuse_network()
    load_definition("llama")
    assert megatron_lite.cli.train and megatron_lite.train.loop
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run_job(json.loads(line))


# ---- in the tests


@functools.cache
def _server() -> subprocess.Popen[str]:
    from train_toys import environment

    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(GLOO_SOCKET_IFNAME="lo"),
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Job:
    """A training on ranks of their own; ``pids`` are the launcher's and the ranks'."""

    def __init__(self, ranks: int, argv: str, folder: Path, hooks: dict[str, Any] | None = None) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.port = free_port()
        request = {
            "ranks": ranks,
            "argv": argv.split(),
            "folder": str(folder),
            "hooks": hooks or {},
            "port": self.port,
        }
        server = _server()
        assert server.stdin is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        self._until(lambda: (folder / "pids.json").exists(), 20, "no ranks")
        launcher, *self.ranks = json.loads((folder / "pids.json").read_text())
        self.launcher: int = launcher

    @property
    def output(self) -> str:
        """What was printed so far."""
        return (self.folder / "output").read_text(errors="replace")

    def _until(self, true: Any, seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, f"{what} within {seconds} s:\n{self.output}"
            time.sleep(0.02)

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Wait until this was printed."""
        done = self.folder / "codes.json"
        self._until(lambda: text in self.output or done.exists(), seconds, f"no {text!r}")
        assert text in self.output, f"ended before {text!r}:\n{self.output}"

    def codes(self, seconds: float = 60) -> list[int]:
        """Wait for all ranks; their exit codes in order of rank."""
        self._until(lambda: (self.folder / "codes.json").exists(), seconds, "not done")
        return list(json.loads((self.folder / "codes.json").read_text()))

    def send(self, name: str, *ranks: int) -> None:
        """Send a signal to some ranks; none named: to the whole session."""
        number = getattr(signal, f"SIG{name}")
        if not ranks:
            os.killpg(self.launcher, number)
        for rank in ranks:
            os.kill(self.ranks[rank], number)

    def alive(self) -> list[int]:
        """Processes of this job that live."""
        found = []
        for pid in (self.launcher, *self.ranks):
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                if fields[0] not in ("Z", "X"):
                    found.append(pid)
        return found

    def gone_within(self, seconds: float) -> None:
        """Wait until no process of this job is left."""
        self._until(lambda: not self.alive(), seconds, "processes are left")

    def kill(self) -> None:
        """End everything that is left."""
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def job(ranks: int, argv: str, folder: Path, **hooks: Any) -> Iterator[Job]:
    """A training that is killed at the end of the block if it still runs."""
    running = Job(ranks, argv, folder, hooks)
    try:
        yield running
    finally:
        running.kill()


if __name__ == "__main__":
    if len(sys.argv) > 1:  # started by torchrun: --hooks JSON FLAGS
        sys.exit(rank_main(sys.argv[3:], json.loads(sys.argv[2])))
    serve()
