"""One rank's failure ends all, within seconds and with its error; nothing is left; a hang ends with a place."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import Job, free_port, job
from train_toys import MOCK, ROOT, environment, launched, torchrun, trained

from megatron_lite.config import exit_codes
from megatron_lite.config.problem import ConfigError, Problem
from megatron_lite.mesh.local import RankInfo
from megatron_lite.train.guard import Guard

FLAGS = f"{MOCK} --train-iters 200 --log-interval 1"
WITHIN = 15.0


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def listening() -> set[int]:
    """Ports on which somebody listens."""
    ports = set()
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def ends_with(run: Job, code: int, message: str, rank: int, traceback: bool) -> None:
    """The job ended with this rank's error, once, last and with its place."""
    began = time.monotonic()
    codes = run.codes(60)
    assert time.monotonic() - began < WITHIN + 20  # start-up included: the tests' own clock is below
    assert codes == [code] * len(codes), run.output
    assert last_line(run.output).startswith(f"rank {rank} on {socket.gethostname()} failed: "), run.output
    assert message in last_line(run.output), run.output
    assert ("Traceback" in run.output) == traceback, run.output
    assert run.output.count(f"rank {rank} on") == 1
    run.gone_within(5)


CASES = {
    "arguments": ("arguments", "RuntimeError", 1, exit_codes.ERROR),
    "wrong arguments": ("arguments", "ValueError", 1, exit_codes.CONFIGURATION),
    "data": ("data", "RuntimeError", 1, exit_codes.ERROR),
    "missing data": ("data", "ValueError", 1, exit_codes.CONFIGURATION),
    "step 3": ("step 3", "RuntimeError", 1, exit_codes.ERROR),
    "a bug that raises ValueError": ("step 2", "ValueError", 1, exit_codes.ERROR),
    "memory": ("step 2", "MemoryError", 0, exit_codes.ERROR),
    "logs": ("logs", "OSError", 0, exit_codes.ERROR),
}


@pytest.mark.parametrize("name", CASES)
def test_a_raise_on_one_rank(name: str, tmp_path: Path) -> None:
    where, kind, rank, code = CASES[name]
    fail = {"where": where, "kind": kind, "rank": rank}
    with job(2, f"{FLAGS} --log-dir {tmp_path}/log", tmp_path / "job", fail=fail) as run:
        ends_with(run, code, f"made to fail in {where}", rank, traceback=code == exit_codes.ERROR)


def test_a_raise_among_four_ranks_with_a_pipeline(tmp_path: Path) -> None:
    """The others wait in receives and reductions of different groups."""
    fail = {"where": "step 3", "kind": "RuntimeError", "rank": 2}
    flags = f"{FLAGS} --pipeline-model-parallel-size 2 --log-dir {tmp_path}/log"
    with job(4, flags, tmp_path / "job", fail=fail) as run:
        run.wait_for("step 2/200")
        began = time.monotonic()
        ends_with(run, exit_codes.ERROR, "RuntimeError: made to fail in step 3", 2, traceback=True)
        assert time.monotonic() - began < WITHIN


def test_a_save_that_fails(tmp_path: Path) -> None:
    """Code 5 on every rank, with the rank whose disk it was; earlier checkpoints stay."""
    save = tmp_path / "save"
    trained(2, f"{FLAGS} --save {save} --exit-interval 2")
    fail = {"where": "write", "kind": "OSError", "rank": 1}
    flags = f"{FLAGS} --save {save} --load {save} --save-interval 3"
    with job(2, flags, tmp_path / "job", fail=fail) as run:
        assert run.codes() == [exit_codes.SAVE_FAILED] * 2, run.output
        for part in ("checkpoint of step 3 could not be written", "rank 1: OSError: made to fail in write", "untouched"):
            assert part in last_line(run.output), run.output
        assert "Traceback" not in run.output
    assert [p.name for p in save.glob("step_*")] == ["step_00000002"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(rank: int, tmp_path: Path) -> None:
    with job(2, f"{FLAGS} --log-dir {tmp_path}/log", tmp_path / "job", slow_step=0.1) as run:
        run.wait_for("step 2/200")
        killed = run.ranks[rank]
        os.kill(killed, signal.SIGKILL)
        run.gone_within(WITHIN)
        codes = run.codes()
        assert codes[rank] == -signal.SIGKILL and codes[1 - rank] == exit_codes.ERROR, run.output
        if rank == 1:
            text = f"rank 1 on {socket.gethostname()} (process {killed}) died without a word"
        else:  # which held the job's store
            text = f"rank 1 on {socket.gethostname()}"
        assert text in last_line(run.output), run.output


def test_a_killed_launcher(tmp_path: Path) -> None:
    """Its ranks end too, also in the middle of a step, and nobody listens any more."""
    with job(2, f"{FLAGS} --log-dir {tmp_path}/log", tmp_path / "job", slow_step=0.1) as run:
        run.wait_for("step 2/200")
        assert run.port in listening()
        os.kill(run.launcher, signal.SIGKILL)
        run.gone_within(WITHIN)
    end = time.monotonic() + 5
    while run.port in listening():
        assert time.monotonic() < end, "somebody still listens"
        time.sleep(0.1)


def test_a_hang_of_a_single_process(tmp_path: Path) -> None:
    flags = f"{FLAGS} --log-dir {tmp_path}/log"
    with job(1, flags, tmp_path / "job", hang={"rank": 0, "step": 2}, hang_seconds=1.5) as run:
        assert run.codes(40) == [exit_codes.HANG]
        assert "rank 0 on" in last_line(run.output) and "hang-rank00000.txt" in last_line(run.output), run.output


def test_a_hang_ends_with_a_place(tmp_path: Path) -> None:
    """A rank that sleeps in step 2: code 4, and the stacks of every rank."""
    hang = {"rank": 1, "step": 2}
    with job(2, f"{FLAGS} --log-dir {tmp_path}/log", tmp_path / "job", hang=hang, hang_seconds=3) as run:
        assert run.codes(40) == [exit_codes.HANG] * 2, run.output
        assert "no progress for" in last_line(run.output) and "in: step 2" in last_line(run.output), run.output
    stacks = [(tmp_path / "log" / f"hang-rank0000{rank}.txt").read_text() for rank in (0, 1)]
    assert "before_step" in stacks[1] and "time.sleep" not in stacks[0]
    assert all("training.py" in text and "_one_step" in text and "most recent call first" in text for text in stacks)


def test_slow_is_not_hung(tmp_path: Path) -> None:
    """An evaluation in pieces that together take longer than the watchdog's patience, and data that are slow to open."""
    flags = f"{MOCK} --train-iters 3 --save {tmp_path}/save --eval-iters 4 --eval-interval 3 --log-dir {tmp_path}/log"
    hooks = {"slow_eval": 0.8, "slow_step": 0.8, "slow_data": 4, "hang_seconds": 2.5}
    with job(2, flags, tmp_path / "job", **hooks) as run:
        assert run.codes(60) == [0, 0], run.output


def test_torchrun_shows_the_first_error(tmp_path: Path) -> None:
    """The error file has it with rank and host, torchrun's summary prints it, and our own last line is the same."""
    fail = json.dumps({"fail": {"where": "step 3", "kind": "RuntimeError", "rank": 1}})
    script = [str(ROOT / "tests" / "launcher.py"), "--hooks", fail, *f"{FLAGS} --log-dir {tmp_path}/log".split()]
    command = [*torchrun(2), "--log-dir", str(tmp_path / "elastic"), *script]
    with launched(command, tmp_path / "job") as run:
        run.wait_for("step 2/200")
        began = time.monotonic()
        assert run.wait(60) == 1
        assert time.monotonic() - began < WITHIN + 5
        run.assert_nothing_left()
        output = run.output
    message = f"rank 1 on {socket.gethostname()}: RuntimeError: made to fail in step 3"
    files = [json.loads(p.read_text()) for p in (tmp_path / "elastic").rglob("error.json")]
    assert len(files) == 2 and all(message in f["message"]["message"] for f in files), files
    assert any("before_step" in f["message"]["extraInfo"]["py_callstack"] for f in files)
    ours, _, summary = output.rpartition("failed: RuntimeError: made to fail in step 3")
    assert ours.rstrip().endswith(f"rank 1 on {socket.gethostname()}")
    assert f"RankFailure: {message}" in summary and "Root Cause" in summary


def test_torchrun_repeats_no_configuration_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has found it, and torchrun shows a traceback for each: the list stands once, above all that."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    error = ConfigError([Problem("one"), Problem("two")])
    assert Guard(RankInfo(0, 1, 0, 1, "here", "torchrun"), None).fail(error, exit_codes.CONFIGURATION) == 2
    shown = str(ChildFailedError("megatron_lite", {0: ProcessFailure(0, 1, 2, str(path))}))
    assert "traceback : 2 problems in the configuration (printed in full above)\n" in shown, shown


@pytest.mark.parametrize("text", ["can't allocate memory: you tried to allocate 1 bytes", "CUDA out of memory. Tried ...", ""])
def test_full_memory_has_advice(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = RuntimeError(text) if text else MemoryError()
    assert Guard(RankInfo(0, 1, 0, 1, "here", "plain"), None).fail(error, exit_codes.ERROR) == exit_codes.ERROR
    said = capsys.readouterr().err
    assert "--recompute-granularity full" in said.splitlines()[-1] and type(error).__name__ in said


@pytest.mark.nightly
@pytest.mark.parametrize("who", ["rank", "launcher"])
def test_killed_under_torchrun(who: str, tmp_path: Path) -> None:
    command = [*torchrun(2), "-m", "megatron_lite", "train", *f"{FLAGS} --log-dir {tmp_path}/log".split()]
    with launched(command, tmp_path / "job") as run:
        run.wait_for("step 2/200")
        os.kill(run.process.pid if who == "launcher" else run.ranks()[1], signal.SIGKILL)
        assert run.wait(WITHIN) != 0
        run.assert_nothing_left(WITHIN)


# ---- before anything starts


def plain(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_lite", "train", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**variables), timeout=120)


def test_errors_of_people_have_no_traceback(tmp_path: Path) -> None:
    """Both precisions, a broken YAML file, unreadable ranks: exit code 2, one message."""
    (tmp_path / "garbage.yaml").write_text("model: [1, 2\n\t: }{ \x00")
    cases = [
        ((*FLAGS.split(), "--bf16", "--fp16"), {}, "--bf16 and --fp16"),
        (("--config", str(tmp_path / "garbage.yaml")), {}, "garbage.yaml"),
        (tuple(FLAGS.split()), {"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "RANK='x'"),
        (tuple(FLAGS.split()), {"RANK": "", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "RANK=''"),
        (tuple(FLAGS.split()), {"WORLD_SIZE": "2"}, "RANK"),
        (tuple(FLAGS.split()), {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "RANK=2"),
        (tuple(FLAGS.split()), {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK"),
    ]
    for flags, variables, part in cases:
        done = plain(*flags, **variables)
        assert done.returncode == exit_codes.CONFIGURATION, done
        assert part in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        port = str(taken.getsockname()[1])
        ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        flags = f"{FLAGS} --log-dir {tmp_path}".split()
        done = plain(*flags, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **ranks)
    assert done.returncode == exit_codes.CONFIGURATION
    assert f"MASTER_PORT={port} on 127.0.0.1 is in use" in done.stderr and "Traceback" not in done.stderr


def test_one_rank_prints_what_all_have_found(tmp_path: Path) -> None:
    with job(2, f"{FLAGS} --tensor-model-parallel-size 3 --bf16 --fp16", tmp_path / "job") as run:
        assert run.codes(30) == [exit_codes.CONFIGURATION] * 2
        assert run.output.count("--bf16 and --fp16") == 1 and "Traceback" not in run.output
        assert "problems in the configuration" in run.output


def test_ranks_that_were_started_differently(tmp_path: Path) -> None:
    """Each rank's flags are read from one place here, so the code's digest stands for any difference."""
    with job(2, f"{FLAGS} --log-dir {tmp_path}/log", tmp_path / "job", differ=True) as run:
        assert run.codes(30) == [exit_codes.CONFIGURATION] * 2
        assert "do not run the same program" in run.output and "Traceback" not in run.output
