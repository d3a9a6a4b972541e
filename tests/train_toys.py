"""Whole training runs of a tiny model for the tests of the trainer: in this process, on the pool's ranks, or launched."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_lite.checkpoint.load import Reader
from megatron_lite.checkpoint.manifest import step_directory
from megatron_lite.cli.train import prepare, read
from megatron_lite.config.load import load
from megatron_lite.data.index_writer import IndexedWriter
from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.local import RankInfo
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.optim.batch_size import BatchSchedule
from megatron_lite.tensor.spec import Rectangle
from megatron_lite.testing.equal import EXACT_ZERO, STAYS
from megatron_lite.testing.ranks import run_ranks
from megatron_lite.train.build import Built, build
from megatron_lite.train.datasets import open_data
from megatron_lite.train.guard import Guard
from megatron_lite.train.loop import code_of, requests
from megatron_lite.train.metrics import read_lines
from megatron_lite.train.training import Training

ROOT = Path(__file__).resolve().parents[1]
TINY = (
    "--model llama --num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--seq-length 16 --max-position-embeddings 16 --init-method-std 0.1 --tokenizer-type NullTokenizer --vocab-size 61 "
    "--make-vocab-size-divisible-by 8 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 0.01 --lr-decay-style cosine --min-lr 0.001 --lr-warmup-iters 2 --eval-iters 0 "
    "--ddp-bucket-size 3000 --device cpu"
)
MOCK = f"{TINY} --mock-data"
SAMPLES = 23  # of the data set that make_data writes, in one epoch
# What must be the same in a run that was interrupted.
SAME = ("loss", "grad_norm", "learning_rate", "loss_scale", "skipped", "consumed_samples", "consumed_tokens")


def make_data(folder: Path) -> str:
    """A data set of 23 samples of 16 tokens for --data-path; returns its prefix."""
    rng = np.random.default_rng(3)
    prefix = str(folder / "toy_text_document")
    with IndexedWriter(prefix, vocab_size=61, eod_id=60) as writer:
        left = SAMPLES * 16 + 1
        while left:
            n = min(left, int(rng.integers(2, 30)))
            writer.add_document(np.append(rng.integers(0, 60, n - 1), 60))
            left -= n
    return prefix


@dataclasses.dataclass
class Outcome:
    """How a run on this rank ended."""

    code: int
    error: str = ""
    extra: Any = None
    text: str = ""  # what was printed


Patch = Callable[[Any], contextlib.AbstractContextManager[None]]


def info_here() -> RankInfo:
    """This rank, in the default group that is open, or alone."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return RankInfo(rank, world, rank, world, socket.gethostname(), "torchrun" if world > 1 else "plain")


def train_here(
    argv: str, patch: Callable[..., contextlib.AbstractContextManager[None]] | None = None, *args: Any
) -> Outcome:
    """Run one training on this rank as the program does, without its guard's thread.

    Args:
        argv: the flags.
        patch: called as ``patch(built, *args)``: a context manager around the run; what it sets as ``built.found``
            is the outcome's ``extra``.
    """
    info = info_here()
    guard = Guard(info, None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.ExitStack() as closing:
            loaded, _ = prepare(read(shlex.split(argv)), info, {})
            built = build(loaded.config, info, "gloo", guard, closing)
            signals = requests(loaded.config, guard)
            began = time.monotonic()
            training = Training(loaded.config, info, built, guard, signals, parent=os.getppid(), began=began)
            with contextlib.nullcontext() if patch is None else patch(built, *args):
                code = training.run()
        return Outcome(code, "", getattr(built, "found", None), printed.getvalue())
    except Exception as error:
        if code_of(error) == 1:
            raise
        return Outcome(code_of(error), str(error), None, printed.getvalue())
    finally:
        torch.set_num_threads(threads)


def opened_in(folders: list[str], flags: str) -> str:
    """What this rank says when it opens its data in a directory of its own: the start-up text, or the error."""
    info = info_here()
    with contextlib.chdir(folders[info.rank]):
        config, mesh = load(shlex.split(flags)).config, ProcessMesh.open(Layout(dp=info.world_size))
        try:
            data = open_data(config, mesh, BatchSchedule.constant(4), 4, 16)
            data.close()
        except ValueError as error:
            return f"error: {error}"
        finally:
            mesh.close()
    return "\n".join([*data.summary, *data.notices])


def several_here(runs: list[tuple[Any, ...]]) -> list[Outcome]:
    """Several trainings, one after the other, each given as the arguments of :func:`train_here`."""
    return [train_here(*run) for run in runs]


def trained(ranks: int, *runs: Any, timeout: float = 120) -> list[Outcome]:
    """The outcomes of trainings on the pool's ranks, rank 0's; every rank must have the same code."""
    jobs = [run if isinstance(run, tuple) else (run,) for run in runs]
    answers = run_ranks(ranks, several_here, jobs, timeout=timeout)
    for answer in answers:
        assert [o.code for o in answer] == [o.code for o in answers[0]], answers
    return answers[0]


@contextlib.contextmanager
def bad_steps(built: Built, steps: tuple[int, ...]) -> Iterator[None]:
    """The gradients of these steps (from 1) are not finite."""
    step, optimizer = built.assembly.step, built.assembly.optimizer
    run, norm = step.run, optimizer.norm_squared
    current = [0]

    def run_step(*args: Any, **kwargs: Any) -> Any:
        current[0] = kwargs["step"] + 1
        return run(*args, **kwargs)

    def norm_squared() -> torch.Tensor:
        return norm() + (float("inf") if current[0] in steps else 0.0)

    step.run, optimizer.norm_squared = run_step, norm_squared  # type: ignore[method-assign]
    yield


# ---- what a run left behind


def steps_of(folder: Path) -> dict[int, dict[str, Any]]:
    """The last line of each step in metrics.jsonl."""
    return {r["step"]: r for r in read_lines(folder / "metrics.jsonl") if "eval_loss" not in r}


def evaluations_of(folder: Path) -> list[tuple[int, str, float]]:
    """(step, split, loss) of each evaluation."""
    lines = read_lines(folder / "metrics.jsonl")
    return [(r["step"], r["split"], r["eval_loss"]) for r in lines if "eval_loss" in r]


def tensors_of(folder: Path, step: int) -> dict[tuple[str, str], torch.Tensor]:
    """Every full tensor of a checkpoint, by kind and name."""
    reader = Reader(step_directory(folder, step))
    found = {}
    for kind, name in reader.tensors:
        shape = reader.names(kind)[name]
        found[kind, name] = torch.empty(shape, dtype=torch.float64)
        reader.read(kind, name, Rectangle((0,) * len(shape), tuple(shape)), found[kind, name].view(-1))
    return found


def state_of(folder: Path, step: int) -> dict[str, Any]:
    """The JSON state of a checkpoint."""
    return Reader(step_directory(folder, step)).state


def assert_same_run(a: Path, b: Path, last: int, *, tolerance: float = 0.0, only: tuple[str, ...] = SAME) -> None:
    """Two directories hold the same run: metrics of every step, and tensors and counters after the last."""
    ours, theirs = steps_of(a), steps_of(b)
    assert sorted(ours) == sorted(theirs) == list(range(1, last + 1)), (sorted(ours), sorted(theirs))
    for step in ours:
        for name in only:
            x, y = ours[step][name], theirs[step][name]
            close = x == y or (x is not None and y is not None and abs(x - y) <= tolerance * max(abs(x), abs(y)))
            assert close, f"step {step}: {name} {x!r} and {y!r}"
    left, right = tensors_of(a, last), tensors_of(b, last)
    assert left.keys() == right.keys()
    for key, value in left.items():
        worst = float((value - right[key]).abs().max())
        size = float(value.abs().max())
        # Key biases without RoPE have no gradient in theory: they stay at zero but for rounding (docs/equivalence.md).
        rounding = key[1].endswith(EXACT_ZERO) and size <= STAYS
        assert worst <= tolerance * (1.0 if rounding else size), f"{key} differs by {worst}"
    for name in ("progress", "scaler"):
        assert state_of(a, last)[name] == state_of(b, last)[name]


# ---- launched runs


def environment(**changes: str) -> dict[str, str]:
    """The environment of a launched run, on this tree."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "SLURM"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        keep.pop(name, None)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), keep.get("PYTHONPATH", "")])
    return {**keep, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **changes}


def torchrun(ranks: int) -> list[str]:
    """The launcher, on a free port of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return [*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--shutdown-timeout", "60"]


class Launched:
    """A training in processes of its own. Its standard output and error go to one file.

    Args:
        command: what to start.
        folder: where the output goes.
        variables: of the environment.
    """

    def __init__(self, command: list[str], folder: Path, **variables: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"output{len(list(folder.glob('output*')))}"
        with open(self.path, "w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment(**variables), cwd=folder, start_new_session=True
            )

    @property
    def output(self) -> str:
        """What was printed so far."""
        return self.path.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = 90) -> None:
        """Wait until this was printed."""
        end = time.monotonic() + seconds
        while text not in self.output:
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.output}"
            assert time.monotonic() < end, f"no {text!r} within {seconds} s:\n{self.output}"
            time.sleep(0.05)

    def wait(self, seconds: float = 90) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not done within {seconds} s:\n{self.output}") from None

    def family(self) -> list[int]:
        """Processes that this one started, and theirs, at any depth; itself too."""
        parents: dict[int, int] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        found = [self.process.pid]
        for pid in found:  # grows while it is walked through
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def ranks(self) -> list[int]:
        """The processes of the ranks, in order of rank."""
        found = {}
        for pid in _living(self.path.parent):
            with contextlib.suppress(OSError):
                env = dict(v.partition("=")[::2] for v in Path(f"/proc/{pid}/environ").read_text().split("\0"))
                if "RANK" in env:
                    found[int(env["RANK"])] = pid
        return [found[r] for r in sorted(found)] or [self.process.pid]

    def kill(self) -> None:
        """End everything that is left."""
        for pid in _living(self.path.parent):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.process.wait(10)

    def assert_nothing_left(self, seconds: float = 5) -> None:
        """No process of this run is alive."""
        end = time.monotonic() + seconds
        while left := _living(self.path.parent):
            assert time.monotonic() < end, f"processes {left} are left"
            time.sleep(0.1)


def _living(folder: Path) -> list[int]:
    """Living processes that work in a folder: a launched run and its ranks, which are in sessions of their own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                if Path(os.readlink(entry / "cwd")) == folder.resolve():
                    fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                    if fields[0] not in ("Z", "X"):
                        found.append(int(entry.name))
    return found


@contextlib.contextmanager
def launched(command: list[str], folder: Path, **variables: str) -> Iterator[Launched]:
    """A launched training that is killed at the end of the block if it still runs."""
    run = Launched(command, folder, **variables)
    try:
        yield run
    finally:
        run.kill()


# ---- numbers that are not finite


@contextlib.contextmanager
def poisoned(
    built: Built,
    module: str,
    how: str,
    samples: tuple[int, ...] = (),
    factor: float = float("nan"),
    tp_rank: int | None = None,
) -> Iterator[None]:
    """The output of a module, or the gradient of its output, is multiplied by ``factor``.

    Args:
        module: name in the stage; nothing happens on stages that do not have it.
        how: ``forward`` or ``backward``.
        samples: only in microbatches with one of these samples; none: always.
        factor: nan, or another number.
        tp_rank: on this tp rank only.
    """
    loader, stage, coords = built.data.train, built.assembly.stage, built.mesh.coords
    step, found = loader.step, dict(stage.named_modules()).get(module)
    wanted: list[bool] = [not samples]
    batches: dict[int, bool] = {}

    def load(*args: Any) -> Any:
        result = step(*args)
        batches.clear()
        for batch, ids in zip(result.microbatches, result.samples, strict=True):
            batches[id(batch)] = bool(set(samples) & set(ids))
        return result

    def before(_module: Any, args: tuple[Any, ...]) -> None:
        wanted[0] = not samples or batches.get(id(args[-1].batch), False)

    def after(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not wanted[0] or (tp_rank is not None and coords.tp != tp_rank):
            return None
        if how == "forward":
            return output * factor
        if output.requires_grad:
            output.register_hook(lambda g: g * factor)
        return None

    loader.step = load  # type: ignore[method-assign]
    for name, part in stage.named_modules():
        if name in ("embed", "head") or (name.startswith("blocks.") and name.count(".") == 1):
            part.register_forward_pre_hook(before)
    if found is not None:
        found.register_forward_hook(after)
    yield


@contextlib.contextmanager
def nan_weight(built: Built, name: str, rank: int | None = None) -> Iterator[None]:
    """One element of a parameter is NaN (and of its master), on the ranks that hold its first element."""
    optimizer = built.assembly.optimizer
    for share in optimizer.targets():
        first = all(s == 0 for s in share.rectangle.start)
        if share.kind == "weight" and share.name == name and first:
            share.tensor[0] = float("nan")
    optimizer.refresh_weights()
    yield


@contextlib.contextmanager
def without_samples(built: Built, first: int, end: int) -> Iterator[None]:
    """These samples are not in the data."""
    built.data.train.skip(first, end)
    yield
