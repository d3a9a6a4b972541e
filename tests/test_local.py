"""How a process learns its rank: every launcher, every broken set of variables, real starts, and the parent's end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from megatron_lite.mesh.local import RankInfo, meeting_point, parent_alive, rank_info, start
from megatron_lite.mesh.slurm import first_host

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_NODEID": "1",
}


def numbers(info: RankInfo) -> tuple:
    return info.rank, info.world_size, info.local_rank, info.local_world_size, info.launcher


def test_plain_python_is_one_rank() -> None:
    info = rank_info({"PATH": "/bin", "SLURM_JOB_ID": "5", "MASTER_ADDR": "somewhere"})
    assert numbers(info) == (0, 1, 0, 1, "plain")
    assert info.host == socket.gethostname()
    assert start(info, "gloo", 1.0, {}) is None  # no group


def test_torchrun_and_srun() -> None:
    assert numbers(rank_info(TORCHRUN)) == (3, 8, 1, 2, "torchrun")
    assert numbers(rank_info(SRUN)) == (3, 8, 1, 2, "srun")
    assert rank_info(SRUN | {"SLURMD_NODENAME": "node7"}).host == "node7"


@pytest.mark.parametrize(
    ("change", "local_world"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "5,3", "SLURM_NODEID": "1"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,2(x3),1", "SLURM_NODEID": "3"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_NNODES": "2"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, 8),  # one node
    ],
)
def test_tasks_of_this_node(change: dict, local_world: int) -> None:
    assert rank_info(SRUN | change).local_world_size == local_world


@pytest.mark.parametrize(
    ("env", "change", "said"),
    [
        (TORCHRUN, {"RANK": ""}, r"RANK=''"),
        (TORCHRUN, {"RANK": "x"}, r"RANK='x'"),
        (TORCHRUN, {"RANK": "-1"}, r"RANK='-1'"),
        (TORCHRUN, {"RANK": "1.0"}, r"RANK='1.0'"),
        (TORCHRUN, {"RANK": None, "WORLD_SIZE": "2"}, r"RANK not set, though WORLD_SIZE='2'"),
        (TORCHRUN, {"WORLD_SIZE": None}, r"WORLD_SIZE not set"),
        (TORCHRUN, {"LOCAL_RANK": None}, r"LOCAL_RANK not set"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": None}, r"LOCAL_WORLD_SIZE not set"),
        (TORCHRUN, {"RANK": "2", "WORLD_SIZE": "2"}, r"RANK=2 is not below WORLD_SIZE=2: ranks are 0 to 1"),
        (TORCHRUN, {"WORLD_SIZE": "0"}, r"WORLD_SIZE=0"),
        (TORCHRUN, {"LOCAL_RANK": "2"}, r"LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "9"}, r"LOCAL_WORLD_SIZE=9 is more than WORLD_SIZE=8"),
        (TORCHRUN, {"RANK": "0"}, r"LOCAL_RANK=1 is more than RANK=0"),
        (SRUN, {"SLURM_PROCID": ""}, r"SLURM_PROCID=''"),
        (SRUN, {"SLURM_PROCID": "8"}, r"SLURM_PROCID=8 is not below SLURM_NTASKS=8"),
        (SRUN, {"SLURM_NTASKS": None}, r"SLURM_NTASKS not set, though SLURM_PROCID='3'"),
        (SRUN, {"SLURM_NTASKS": "eight"}, r"SLURM_NTASKS='eight'"),
        (SRUN, {"SLURM_LOCALID": None}, r"SLURM_LOCALID not set"),
        (SRUN, {"SLURM_LOCALID": "2"}, r"SLURM_LOCALID=2 .*SLURM_STEP_TASKS_PER_NODE=2\(x4\)"),
        (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "2*4"}, r"SLURM_STEP_TASKS_PER_NODE='2\*4'"),
        (SRUN, {"SLURM_NODEID": "4"}, r"SLURM_NODEID=4"),
        (SRUN, {"SLURM_NODEID": None}, r"SLURM_NODEID not set"),
        (SRUN, {"SLURM_STEP_TASKS_PER_NODE": None, "SLURM_NNODES": "3"}, r"SLURM_NTASKS=8 .*SLURM_NNODES=3"),
    ],
)
def test_a_broken_variable_is_named_with_its_value(env: dict, change: dict, said: str) -> None:
    merged = {k: v for k, v in (env | change).items() if v is not None}
    with pytest.raises(ValueError, match=said):
        rank_info(merged)


@pytest.mark.parametrize(
    ("rank", "slurm", "legal"),
    [
        # srun starts one torchrun on each of 4 nodes, 2 ranks each; the order of nodes need not be Slurm's.
        (TORCHRUN, {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, True),
        (TORCHRUN, {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, True),
        # each task exports its own numbers
        (TORCHRUN, {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}, True),
        # torchrun in a batch script that asked for 8 tasks
        (TORCHRUN, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "TORCHELASTIC_RUN_ID": "none"}, True),
        # each of 8 tasks inherits the same RANK
        (TORCHRUN, {"SLURM_PROCID": "4", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}, False),
        # each of 2 tasks starts a torchrun of its own: two jobs, both with a rank 0
        (TORCHRUN, {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "TORCHELASTIC_RUN_ID": "a"}, False),
        (TORCHRUN, {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "TORCHELASTIC_RUN_ID": "a"}, False),
        # a stale export of one rank
        (
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
            False,
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
            False,
        ),
    ],
)
def test_torchruns_variables_inside_slurm(rank: dict, slurm: dict, legal: bool) -> None:
    if legal:
        assert rank_info(rank | slurm).launcher == "torchrun"
        return
    with pytest.raises(ValueError, match=rf"RANK={rank['RANK']}.*SLURM_PROCID={slurm['SLURM_PROCID']}"):
        rank_info(rank | slurm)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[001-004,007]", "node001"),
        ("node[9,12-14]", "node9"),
        ("gpu-a[07],login", "gpu-a07"),
        ("rack[2-3]n[05-08]-ib,x", "rack2n05-ib"),
        ("a-b-c.site.org", "a-b-c.site.org"),
    ],
)
def test_first_host_of_a_node_list(text: str, host: str) -> None:
    assert first_host(text) == host


@pytest.mark.parametrize("text", ["", ",a", "node[1-2", "node]1", "node[]", "node[a-b]"])
def test_a_node_list_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        first_host(text)


def test_where_the_ranks_meet() -> None:
    torchrun, srun = rank_info(TORCHRUN), rank_info(SRUN)
    assert meeting_point(torchrun, {"MASTER_ADDR": "h", "MASTER_PORT": "123"}) == ("h", 123)
    slurm = {"SLURM_JOB_NODELIST": "n[08-09]", "SLURM_JOB_ID": "1000005"}
    host, port = meeting_point(srun, slurm)
    assert host == "n08" and 1024 < port < 32768
    assert meeting_point(srun, slurm) == (host, port)  # the same on every rank
    assert meeting_point(srun, slurm | {"SLURM_JOB_ID": "1000006"})[1] != port
    assert meeting_point(srun, slurm | {"SLURM_STEP_NODELIST": "n09"})[0] == "n09"  # a step on a part of the job
    assert meeting_point(srun, slurm | {"MASTER_ADDR": "h", "MASTER_PORT": "5"}) == ("h", 5)
    for info, env, said in (
        (torchrun, {"MASTER_PORT": "1"}, "MASTER_ADDR=None"),
        (torchrun, {"MASTER_ADDR": "", "MASTER_PORT": "1"}, "MASTER_ADDR=''"),
        (torchrun, {"MASTER_ADDR": "h"}, "MASTER_PORT not set"),
        (torchrun, {"MASTER_ADDR": "h", "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
        (torchrun, {"MASTER_ADDR": "h", "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        (srun, {}, "SLURM_JOB_NODELIST not set"),
        (srun, {"SLURM_JOB_NODELIST": "n["}, r"n\["),
    ):
        with pytest.raises(ValueError, match=said):
            meeting_point(info, env)


# ---- starting


def test_a_port_in_use_is_named_with_a_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with pytest.raises(ValueError, match=f"MASTER_PORT={port} on 127.0.0.1 is in use.*choose another port"):
            start(RankInfo(0, 2, 0, 2, "here", "torchrun"), "gloo", 0.05, env, die=False)


def test_ranks_that_do_not_come_are_an_error_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.raises(ValueError, match=f"rank 1 of 2 on here found nobody at 127.0.0.1:{port} within 0.03 minutes"):
        start(RankInfo(1, 2, 1, 2, "here", "torchrun"), "gloo", 0.03, env, die=False)


def test_nccl_without_a_gpu_is_refused() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    with pytest.raises(ValueError, match="local rank 1 of 2 on here has no GPU: 0 are visible"):
        start(RankInfo(1, 2, 1, 2, "here", "torchrun"), "nccl", 1, {}, die=False)


PROGRAM = """
    import os, sys
    from megatron_lite.mesh.layout import Layout
    from megatron_lite.mesh.local import rank_info, start
    from megatron_lite.mesh.mesh import ProcessMesh
    info = rank_info(os.environ)
    start(info, "gloo", 1.0, os.environ)
    mesh = ProcessMesh.open(Layout(dp=info.world_size))
    seen = mesh.axis("world").gather_json([info.rank, info.launcher])
    if info.rank == 0:
        print(seen, flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


def environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MASTER", "RANK", "LOCAL_", "WORLD_"))}
    return clean | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | more


def test_three_ways_to_start_one_program(program: Path) -> None:
    plain = subprocess.run([sys.executable, program], env=environment(), capture_output=True, text=True, timeout=60)
    assert plain.stdout == "[[0, 'plain']]\n", plain.stderr

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    torchrun = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert torchrun.stdout == "[[0, 'torchrun'], [1, 'torchrun']]\n", torchrun.stderr

    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid())}
    tasks = [
        subprocess.Popen(
            [sys.executable, program],
            env=environment(SLURM_PROCID=str(i), SLURM_LOCALID=str(i), **slurm),
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [task.communicate(timeout=60)[0] for task in tasks]
    assert outputs == ["[[0, 'srun'], [1, 'srun']]\n", ""]


# ---- the parent's end


def gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_killed_parent_leaves_no_rank_behind(tmp_path: Path) -> None:
    child = (
        "import time; from megatron_lite.mesh.local import die_with_parent; die_with_parent(); "
        "print('ready', flush=True); time.sleep(60)"
    )
    parent = (
        "import subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, text=True)\n"
        "p.stdout.readline(); print(p.pid, flush=True); p.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert not gone(pid, 0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert gone(pid, 5)


def test_a_parent_that_is_gone_already_ends_the_process() -> None:
    code = "from megatron_lite.mesh.local import die_with_parent; die_with_parent(parent=1 << 30); print('still here')"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")


def test_parent_alive() -> None:
    assert parent_alive(os.getppid())
    assert not parent_alive(1 << 30)


def test_reading_the_rank_needs_no_torch() -> None:
    code = "import sys, megatron_lite.mesh.local, megatron_lite.mesh.layout; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=30)
    assert done.stdout == "False\n", done.stderr
