"""The cluster scripts: the CPU demo computes what one process does, nodes and flags are looked at first, srun starts ranks.

Slurm is played by ``slurm_stand_in.py`` under the names srun and scontrol, GPUs by an ``nvidia-smi`` that lists some.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import warm
from train_toys import ROOT, Launched, assert_same_run, environment, launched, state_of, steps_of, tensors_of, trained

from megatron_lite.checkpoint.manifest import incomplete_reason
from megatron_lite.cli.main import main
from megatron_lite.config import exit_codes
from megatron_lite.config.argv import cut

SCRIPT = ROOT / "examples" / "pretrain_gpt_tp8_pp4.sh"
BATCH = ROOT / "examples" / "slurm" / "pretrain.sbatch"
HOST = socket.gethostname()
# Of the cluster's flags only these may differ in the demo.
SIZES = {"--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings"}
SIZES |= {"--global-batch-size", "--train-iters", "--save-interval", "--eval-interval", "--eval-iters"}
DTYPE, BACK_END = {"--bf16", "--fp64"}, {"--distributed-backend", "--device"}
PATHS = {"--data-path", "--vocab-file", "--merge-file", "--save", "--load"}
LAYOUT = {"--tensor-model-parallel-size", "--pipeline-model-parallel-size"}
# Makes the cluster's flags a tiny run of 4 ranks on a CPU.
TINY = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --num-attention-heads 4 "
    "--seq-length 16 --max-position-embeddings 16 --init-method-std 0.1 --global-batch-size 4 --lr 0.01 --eval-iters 0 "
    "--no-bf16 --fp64 --distributed-backend gloo --device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 61"
).split()
# What no rank needs, and what would cost each of 32 ranks a second or its memory.
NOT_IMPORTED = {
    "transformers",
    "matplotlib",
    "tensorboard",
    "torch.utils.tensorboard",
    "wandb",
    "pandas",
    "sympy",
    "torch._dynamo",
}


def programs(folder: Path, gpus: str = "0") -> str:
    """A PATH on which nvidia-smi lists so many GPUs (an expression of the shell), and Slurm's programs are ours."""
    folder.mkdir(exist_ok=True)
    smi = folder / "nvidia-smi"
    smi.write_text(f'#!/bin/bash\nfor ((i = 0; i < {gpus}; i++)); do echo "GPU $i: none such"; done\n')
    smi.chmod(0o755)
    for name in ("srun", "scontrol"):
        program = folder / name
        program.write_text(
            f"#!{sys.executable}\n" + (ROOT / "tests" / "slurm_stand_in.py").read_text().partition("\n")[2]
        )
        program.chmod(0o755)
    return os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])


def edited(folder: Path, **settings: str) -> Path:
    """A copy of the script with other settings, in a directory that looks like a checkout."""
    text = SCRIPT.read_text()
    for name, value in settings.items():
        text, n = re.subn(rf"^{name}=(\(.*?\)|\S+)", lambda _, s=f"{name}={value}": s, text, count=1, flags=re.M)
        assert n == 1, name
    (folder / "examples").mkdir(parents=True)
    (folder / "megatron_lite").symlink_to(ROOT / "megatron_lite")
    copy = folder / "examples" / SCRIPT.name
    copy.write_text(text)
    return copy


def start(script: Path, *arguments: str, path: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script that ends by itself."""
    names = {"PATH": path, **variables}
    env = {k: v for k, v in environment(**names).items() if k != "CUDA_VISIBLE_DEVICES" or k in variables}
    return subprocess.run(["bash", str(script), *arguments], env=env, text=True, capture_output=True, timeout=300)


def flags_in(text: str) -> set[str]:
    """Flags of the table of differences."""
    return set(re.findall(r"^  (--[\w-]+)", text, re.M))


# ---- the CPU demo


def assert_equal_weights(one: Path, other: Path, step: int, tolerance: float) -> None:
    """By the measure of DESIGN: relative to the largest element, or to a thousandth of the mean size of all weights."""
    ours, reference = tensors_of(one, step), tensors_of(other, step)
    assert ours.keys() == reference.keys()
    kinds = {kind for kind, _ in reference}
    assert "weight" in kinds and len(kinds) == 3
    for kind in kinds:
        its = {name: t for (k, name), t in reference.items() if k == kind}
        mean = (sum(float((t**2).sum()) for t in its.values()) / sum(t.numel() for t in its.values())) ** 0.5
        for name, t in its.items():
            worst = float((ours[kind, name] - t).abs().max()) / max(float(t.abs().max()), 1e-3 * mean)
            assert worst <= tolerance, f"{kind} {name} differs by a relative {worst}"


def assert_same_numbers(demo: Path, single: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(demo), str(single), "--rtol", "1e-9"]) == 0, capsys.readouterr().out
    steps = steps_of(demo)
    assert sorted(steps) == list(range(1, 11)) and steps[10]["loss"] < steps[1]["loss"] - 0.03
    assert_equal_weights(demo, single, 10, 1e-9)


def test_the_demo_computes_what_one_process_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unasked, where there is no GPU; 8 processes of the 32 (real ones in the whole demo), and its own place for what it writes."""
    path = os.pathsep.join([warm.programs(tmp_path / "python"), programs(tmp_path / "bin")])
    (tmp_path / "tmp").mkdir()
    done = start(SCRIPT, "--demo-layout", "2", "4", path=path, TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "No GPU is visible" in done.stdout and "as 8 processes" in done.stdout and "8 microbatches of 1" in done.stdout
    )
    differ = flags_in(done.stdout)
    assert differ == SIZES | DTYPE | BACK_END | PATHS | LAYOUT - {"--pipeline-model-parallel-size"}
    [out] = (tmp_path / "tmp").glob("gpt_*")
    config = state_of(out / "checkpoints", 10)["config"]
    assert (
        config["parallel"]["sequence_parallel"] and config["parallel"]["zero_stage"] == 1 and config["training"]["fp64"]
    )
    printed = start(SCRIPT, "--cpu-demo", "--demo-layout", "1", "1", "--out", str(out), "--print-flags", path=path)
    flags = [*printed.stdout.splitlines(), "--save", str(tmp_path / "single"), "--load", str(tmp_path / "single")]
    [single] = trained(1, shlex.join(flags))
    assert single.code == 0, single
    assert_same_numbers(out / "checkpoints", tmp_path / "single", capsys)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_whole_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = programs(tmp_path / "bin")
    began = time.monotonic()
    done = subprocess.run(
        ["bash", str(SCRIPT), "--cpu-demo", "--out", str(tmp_path / "demo")],
        env=environment(PATH=path),
        text=True,
        capture_output=True,
        timeout=800,
    )
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as 32 processes" in done.stdout and flags_in(done.stdout) == SIZES | DTYPE | BACK_END | PATHS
    data = str(tmp_path / "demo" / "data" / "corpus_text_document")
    one = start(
        SCRIPT, "--cpu-demo", "--demo-layout", "1", "1", "--out", str(tmp_path / "one"), "--data-path", data, path=path
    )
    assert one.returncode == 0, one.stdout + one.stderr
    assert_same_numbers(tmp_path / "demo" / "checkpoints", tmp_path / "one" / "checkpoints", capsys)
    assert seconds < 360, f"{seconds:.0f} s"


def test_the_demo_has_the_same_flags(tmp_path: Path) -> None:
    """Sequence parallelism and ZeRO-1 too; only sizes, dtype, back end and paths have other values."""
    path = programs(tmp_path / "bin")
    cluster, demo = (
        dict(cut(start(SCRIPT, *options, "--print-flags", path=path).stdout.split())[0])
        for options in ([], ["--cpu-demo"])
    )
    assert cluster.keys() ^ demo.keys() == DTYPE
    assert {flag for flag in cluster.keys() & demo.keys() if cluster[flag] != demo[flag]} == SIZES | BACK_END | PATHS
    assert (
        "--sequence-parallel" in demo
        and "--use-distributed-optimizer" in demo
        and demo["--tensor-model-parallel-size"] == ["8"]
    )


def test_an_earlier_demo_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    done = start(SCRIPT, "--cpu-demo", "--out", str(tmp_path / "out"), path=programs(tmp_path / "bin"))
    assert done.returncode == exit_codes.CONFIGURATION and "earlier run" in done.stderr


# ---- nodes and flags that do not fit


@pytest.mark.parametrize(
    ("gpus", "variables"),
    [
        (0, {"PBS_JOBID": "1.server"}),
        (0, {"edit": "other hosts"}),
        (3, {}),
        (3, {"edit": "other hosts"}),
        (8, {"CUDA_VISIBLE_DEVICES": "0,1", "PBS_JOBID": "1.server"}),
        (9, {}),
    ],
    ids=str,
)
def test_a_node_without_eight_gpus(gpus: int, variables: dict[str, str], tmp_path: Path) -> None:
    """No demo then: exit status 2, host and count."""
    hosts = variables.pop("edit", "") and f"({HOST} b c d)"
    script = edited(tmp_path / "checkout", NODE_ADDRESSES=hosts) if hosts else SCRIPT
    done = start(script, path=programs(tmp_path / "bin", str(gpus)), **variables)
    seen = 2 if "CUDA_VISIBLE_DEVICES" in variables else gpus
    assert done.returncode == exit_codes.CONFIGURATION and not done.stdout, done.stdout + done.stderr
    assert f"host {HOST}: {seen} GPUs are visible, 8 are needed on each of 4 nodes" in done.stderr


def test_a_node_that_is_not_in_the_list(tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", "8")
    done = start(SCRIPT, path=path)
    assert done.returncode == exit_codes.CONFIGURATION
    assert f"host {HOST} is none of NODE_ADDRESSES (node0 node1 node2 node3)" in done.stderr
    done = start(edited(tmp_path / "few", NODE_ADDRESSES="(a b)"), path=path)
    assert done.returncode == exit_codes.CONFIGURATION and "there are 2 NODE_ADDRESSES (a b) for NODES=4" in done.stderr


def test_flags_are_checked_before_anything_starts(tmp_path: Path) -> None:
    """All problems at once, for the ranks of the whole job."""
    script = edited(tmp_path / "checkout", NODE_ADDRESSES=f"({HOST} b c)", NODES="3")
    done = start(script, "--no-bf16", "--num-attention-heads", "36", path=programs(tmp_path / "bin", "8"))
    assert done.returncode == exit_codes.CONFIGURATION and "Traceback" not in done.stderr, done.stderr
    for part in ("24 processes", "36", "/data/corpus_text_document.bin", "/data/gpt2-vocab.json"):
        assert part in done.stderr, done.stderr


def test_check_only_prints_what_a_start_would_say(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*TINY, "--sequence-parallel", "--micro-batch-size", "1", "--train-iters", "3"]
    assert main(["train", "--check-only", "8", *flags]) == exit_codes.DONE
    assert "tp 2 x cp 1 x dp 2 x pp 2 = 8 ranks" in capsys.readouterr().out
    for wrong in (["--check-only", "6", *flags], ["--check-only", "many", *flags], [*flags, "--check-only"]):
        assert main(["train", *wrong]) == exit_codes.CONFIGURATION
        assert capsys.readouterr().err


# ---- torchrun on nodes


def recorded(folder: Path, launcher: str = "") -> Path:
    """A Python that prints the arguments of torchrun; ``launcher``: the text of torchrun's own file, where not the real one."""
    folder.mkdir(parents=True)
    (folder / "run.py").write_text(launcher)
    which = f"{folder}/run.py" if launcher else ""
    program = folder / "python"
    program.write_text(
        f"""#!/bin/bash
        case "$*" in
            *torch.distributed.run*) trap -p; printf '%s\\n' "$@" ;;
            -c*find_spec*) [ -n "{which}" ] && echo "{which}" || exec {sys.executable} "$@" ;;
            *--check-only*) exit 0 ;;
            *) exec {sys.executable} "$@" ;;
        esac
        """
    )
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("options", [[], ["--node-rank", "3"]], ids=["by name", "by option"])
def test_torchrun_on_a_node(options: list[str], tmp_path: Path) -> None:
    """Its place in the list is its rank; the first of the list is where all meet."""
    hosts = f"(first {HOST} c d)"
    script = edited(
        tmp_path / "checkout", NODE_ADDRESSES=hosts, PYTHON=str(recorded(tmp_path / "python")), MASTER_PORT="12345"
    )
    done = start(script, *options, "--seed", "7", path=programs(tmp_path / "bin", "8"))
    assert done.returncode == 0, done.stderr
    launcher, _, flags = done.stdout.partition("\nmegatron_lite\n")
    given = dict(cut(launcher.split("torch.distributed.run\n")[1].split())[0])
    expected = {
        "--nnodes": "4",
        "--nproc-per-node": "8",
        "--node-rank": "3" if options else "1",
        "--shutdown-timeout": "900",
    }
    expected |= {"--master-addr": "first", "--master-port": "12345"}
    assert {flag: given[flag][0] for flag in expected} == expected
    assert "SIGUSR1" in given["--signals-to-handle"][0] and "SIGUSR2" not in given["--signals-to-handle"][0]
    assert flags.split()[0] == "train" and flags.split()[-2:] == ["--seed", "7"]


def test_a_torchrun_without_a_shutdown_timeout(tmp_path: Path) -> None:
    python = recorded(tmp_path / "python", "# --max-restarts")
    script = edited(tmp_path / "checkout", NODE_ADDRESSES=f"({HOST} b c d)", PYTHON=str(python))
    done = start(script, path=programs(tmp_path / "bin", "8"))
    assert (
        done.returncode == 0 and "--shutdown-timeout\n" not in done.stdout and "--signals-to-handle" not in done.stdout
    )
    assert "no --shutdown-timeout: it kills its ranks 30 s after a stop signal" in done.stdout


# ---- Slurm


def slurm(nodes: int, tasks: int) -> dict[str, str]:
    """The environment of a batch script; the job's id is one whose port is free."""
    while True:
        job = random.randrange(1, 16384)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", 15000 + job))
            break
    hosts = ",".join(["localhost", *(f"node{n}" for n in range(1, nodes))])
    names = {"SLURM_JOB_ID": job, "SLURM_NNODES": nodes, "SLURM_NTASKS": tasks, "SLURM_JOB_NODELIST": hosts}
    names |= {
        "SLURM_PROCID": 0,
        "SLURM_NODEID": 0,
        "SLURM_LOCALID": 0,
        "SLURM_CPUS_PER_TASK": 1,
        "SLURM_SUBMIT_DIR": ROOT,
    }
    return {"GLOO_SOCKET_IFNAME": "lo", **{k: str(v) for k, v in names.items()}}


def ranks_of(run: Launched) -> dict[int, int]:
    """Process of each rank that srun started."""
    found = {}
    for pid in run.family():
        with contextlib.suppress(OSError):
            if b"megatron_lite\0train\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                env = dict(v.partition("=")[::2] for v in Path(f"/proc/{pid}/environ").read_text().split("\0"))
                if "SLURM_STEP_ID" in env:
                    found[int(env["SLURM_PROCID"])] = pid
    return found


def complete(folder: Path) -> list[int]:
    """Steps of the checkpoints, all of which are complete."""
    found = list(folder.glob("step_*"))
    assert all(incomplete_reason(p) is None for p in found)
    return sorted(int(p.name.removeprefix("step_")) for p in found)


def tiny_run(save: Path, steps: int) -> list[str]:
    return [*TINY, "--train-iters", str(steps), "--save-interval", "1000", "--save", str(save), "--load", str(save)]


def test_ranks_that_srun_starts_save_are_requeued_and_go_on(tmp_path: Path) -> None:
    """USR1 before the time limit; the second start ends by itself, and both together are the run that nobody stopped."""
    path, save = programs(tmp_path / "bin"), tmp_path / "save"
    flags, requeued = tiny_run(save, 40), tmp_path / "bin" / "requeued"
    variables = slurm(1, 4) | {"PATH": path}
    with launched(["bash", str(BATCH), *flags], tmp_path / "first", **variables) as run:
        run.wait_for("step 3/40")
        os.kill(run.process.pid, signal.SIGUSR1)  # to the batch script alone
        assert run.wait(60) == 0, run.output
        run.assert_nothing_left()
        last = max(steps_of(save))
        assert f"stopped after step {last} by a signal" in run.output and complete(save) == [last] and 3 <= last < 40
    assert requeued.read_text() == f"requeue {variables['SLURM_JOB_ID']}\n"
    variables["PATH"] = os.pathsep.join([warm.programs(tmp_path / "python"), path])
    with launched(["bash", str(BATCH), *flags], tmp_path / "second", **variables) as run:
        assert run.wait(90) == 0, run.output
        run.assert_nothing_left()
    assert complete(save) == [last, 40] and len(requeued.read_text().splitlines()) == 1, "done: not requeued"
    printed = start(SCRIPT, "--print-flags", *flags, path=path).stdout.splitlines()
    [whole] = trained(4, shlex.join([*printed, "--save", str(tmp_path / "whole"), "--load", str(tmp_path / "whole")]))
    assert whole.code == 0, whole
    assert_same_run(tmp_path / "whole", save, 40)


def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    """It is not requeued. On the way: what ranks import."""
    path = programs(tmp_path / "bin")
    flags = tiny_run(tmp_path / "save", 2000)
    with launched(
        ["bash", str(BATCH), *flags], tmp_path / "job", PATH=path, **slurm(1, 4), PYTHONPROFILEIMPORTTIME="1"
    ) as run:
        run.wait_for("step 2/2000")
        os.kill(ranks_of(run)[2], signal.SIGKILL)
        began = time.monotonic()
        assert run.wait(30) == 128 + signal.SIGKILL, run.output
        assert time.monotonic() - began < 15
        run.assert_nothing_left()
        assert "rank 2 on node0" in run.output.strip().splitlines()[-1] and "died without a word" in run.output
        imported = {name.strip() for name in re.findall(r"import time:.*\|(.*)", run.output)}
    assert not (tmp_path / "bin" / "requeued").exists()
    assert "torch" in imported and not imported & NOT_IMPORTED


def wrong_flags(run: Launched) -> None:
    assert (
        run.wait(60) == exit_codes.CONFIGURATION and "unknown flag --seeed" in run.output and "step" not in run.output
    )


def cancelled(run: Launched) -> None:
    run.wait_for("step 2/2000")
    for pid in run.family():  # as scancel does
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert run.wait(60) == exit_codes.SIGNAL and "by a signal" in run.output, run.output
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("more", "what"),
    [(["--seeed", "3"], wrong_flags), pytest.param([], cancelled, marks=pytest.mark.nightly)],
    ids=["wrong flags", "cancelled"],
)
def test_what_is_not_requeued(more: list[str], what: Callable[[Launched], None], tmp_path: Path) -> None:
    flags = [*tiny_run(tmp_path / "save", 2000), *more]
    path = programs(tmp_path / "bin")
    with launched(["bash", str(BATCH), *flags], tmp_path / "job", PATH=path, **slurm(1, 4)) as run:
        what(run)
    assert not (tmp_path / "bin" / "requeued").exists()


def spooled(folder: Path) -> Path:
    """The script as sbatch runs it: a copy elsewhere, made when it was submitted, here for nodes of 2 GPUs."""
    copy = edited(folder, GPUS_PER_NODE="2")
    return copy.rename(folder.parent / "slurm_script")


def test_torchrun_on_each_node_of_an_allocation(tmp_path: Path) -> None:
    """Two nodes of two ranks; a warning before the time limit is passed on, saved, and ends in torchrun's own code."""
    save, path = tmp_path / "save", programs(tmp_path / "bin", "2")
    command = ["bash", str(spooled(tmp_path / "checkout")), *tiny_run(save, 2000)]
    with launched(command, tmp_path / "job", PATH=path, **slurm(2, 2)) as run:
        run.wait_for("step 3/2000")
        os.kill(run.process.pid, signal.SIGUSR1)  # srun by now
        assert run.wait(60) == exit_codes.ERROR, run.output
        run.assert_nothing_left()
        last = max(steps_of(save))
        assert f"stopped after step {last} by a signal" in run.output and complete(save) == [last]
    assert "tp 2 x cp 1 x dp 1 x pp 2 = 4 ranks" in run.output


def test_a_node_of_an_allocation_without_enough_gpus(tmp_path: Path) -> None:
    """The other node has them: nothing starts, the status is 2."""
    path = programs(tmp_path / "bin", "2 - ${SLURM_NODEID:-0}")
    done = start(spooled(tmp_path / "checkout"), *tiny_run(tmp_path / "save", 5), path=path, **slurm(2, 2))
    assert done.returncode == exit_codes.CONFIGURATION and "step" not in done.stdout, done.stdout + done.stderr
    assert f"host {HOST}: 1 GPUs are visible, 2 are needed on each of 2 nodes" in done.stderr
