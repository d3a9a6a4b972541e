"""The loop: when it saves, evaluates and stops; that evaluating changes nothing; what it keeps and what it reads."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shlex
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from train_toys import (
    MOCK,
    TINY,
    assert_same_run,
    evaluations_of,
    make_data,
    steps_of,
    tensors_of,
    train_here,
    trained,
)
from whole_model import make_whole

from megatron_lite.checkpoint import owner
from megatron_lite.cli.train import prepare, read
from megatron_lite.config import exit_codes
from megatron_lite.data.batch import make_batch
from megatron_lite.data.mock import MockDataset
from megatron_lite.mesh.local import RankInfo
from megatron_lite.model.protocol import load_definition
from megatron_lite.train.build import Built
from megatron_lite.train.step import BatchMismatch

TEN = f"{MOCK} --train-iters 10"
LAYOUTS = [
    (1, ""),
    (1, "--micro-batch-size 4"),
    (2, "--micro-batch-size 2 --use-distributed-optimizer"),
    (2, "--pipeline-model-parallel-size 2"),
    (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    (4, "--pipeline-model-parallel-size 2 --micro-batch-size 2"),
]


def saved(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in folder.glob("step_*"))


# ---- saving and stopping


def test_which_checkpoints_are_kept(tmp_path: Path) -> None:
    flags = f"{MOCK} --train-iters 11 --save {tmp_path}"
    assert train_here(f"{flags}/a --save-interval 2").code == 0
    assert train_here(f"{flags}/b --save-interval 2 --keep-last 2").code == 0
    assert train_here(f"{flags}/c --save-interval 2 --keep-last 1 --keep-every 4").code == 0
    assert train_here(f"{flags}/d --save-interval 5 --keep-last 1").code == 0
    assert train_here(f"{flags}/e").code == 0
    assert saved(tmp_path / "a") == [2, 4, 6, 8, 10, 11]
    assert saved(tmp_path / "b") == [10, 11]
    assert saved(tmp_path / "c") == [4, 8, 11]
    assert saved(tmp_path / "d") == saved(tmp_path / "e") == [11], "the last step is always saved"


@contextlib.contextmanager
def slow(built: Built, seconds: float) -> Iterator[None]:
    """Every step takes longer."""
    run = built.assembly.step.run

    def later(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return run(*args, **kwargs)

    built.assembly.step.run = later  # type: ignore[method-assign]
    yield


def test_saves_by_the_clock(tmp_path: Path) -> None:
    """Every 0.15 s with steps of 0.1 s and more: all ranks save after the same steps, which rank 0's clock decides."""
    flags = f"{MOCK} --train-iters 12 --save {tmp_path} --save-interval-minutes 0.0025 --use-distributed-optimizer"
    [outcome] = trained(2, (flags, slow, 0.1))
    steps = saved(tmp_path)
    assert outcome.code == 0 and 3 <= len(steps) <= 7 and steps[-1] == 12, steps


def test_stops_by_the_clock(tmp_path: Path) -> None:
    """--exit-duration-in-mins: code 7, the step is saved and not evaluated, the run goes on later as if nothing was."""
    flags = f"{MOCK} --train-iters 12 --use-distributed-optimizer --save {tmp_path}"
    whole, first = trained(2, f"{flags}/a", (f"{flags}/b --exit-duration-in-mins 0.02", slow, 0.2))
    assert (whole.code, first.code) == (0, exit_codes.LIMIT), first
    assert "by --exit-duration-in-mins" in first.text
    [last] = saved(tmp_path / "b")
    assert 0 < last < 12 and last == max(steps_of(tmp_path / "b"))
    [second] = trained(2, f"{flags}/b --load {tmp_path}/b")
    assert second.code == 0
    assert_same_run(tmp_path / "a", tmp_path / "b", 12)


def test_stops_by_steps(tmp_path: Path) -> None:
    """--exit-interval at every third step; at the last step of the training it is done."""
    flags = f"{MOCK} --train-iters 6 --save {tmp_path} --load {tmp_path} --exit-interval 3"
    assert [train_here(flags).code for _ in range(3)] == [exit_codes.LIMIT, exit_codes.DONE, exit_codes.DONE]
    assert saved(tmp_path) == [3, 6] and sorted(steps_of(tmp_path)) == list(range(1, 7))


def test_nothing_to_do_is_done(tmp_path: Path) -> None:
    """A finished run that is started again trains nothing, and says so by its code."""
    flags = f"{MOCK} --train-iters 3 --save {tmp_path} --load {tmp_path}"
    train_here(flags)
    before = {p: p.stat().st_mtime for p in tmp_path.rglob("*.safetensors")}
    again = train_here(flags)
    assert again.code == 0 and {p: p.stat().st_mtime for p in tmp_path.rglob("*.safetensors")} == before


# ---- evaluation


def test_one_run_at_a_time_saves_to_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes second is told who was first, before anything is opened; who saves nothing does not mind."""
    monkeypatch.setattr(owner, "PATIENCE", 0.2)
    save = f"--save {tmp_path}/a --load {tmp_path}/a"
    first = owner.Owner(tmp_path / "a")
    first.take()
    refused = train_here(f"{MOCK} --train-iters 3 {save}")
    assert refused.code == exit_codes.CONFIGURATION
    assert refused.error.startswith(f"--save {tmp_path}/a is being written by another run (process {os.getpid()} on ")
    evaluated = f"{MOCK} --train-iters 3 --skip-train --eval-iters 1 --log-dir {tmp_path}/log"
    assert train_here(f"{evaluated} --save {tmp_path}/a").code == 0
    assert train_here(f"{evaluated} --save {tmp_path}/b").code == 0 and not (tmp_path / "b").exists()
    first.release()
    assert train_here(f"{MOCK} --train-iters 3 {save}").code == 0
    again = train_here(f"{MOCK} --train-iters 4 {save} --override-opt-param-scheduler")
    assert again.code == 0 and saved(tmp_path / "a") == [3, 4], "it lets go at its end"


def reference_loss(batches: int) -> float:
    """Mean loss over valid tokens of the first validation batches, by the whole model and nothing of the trainer."""
    info = RankInfo(0, 1, 0, 1, "here", "plain")
    config = prepare(read(shlex.split(f"{TEN} --fp64")), info, {})[0].config
    model = make_whole(load_definition("llama"), config.model, seed=config.training.seed, dtype=torch.float64)
    data = MockDataset(61, 16, config.training.seed, split="valid", eod_id=60)
    total, tokens = 0.0, 0
    with torch.no_grad():
        for i in range(4 * batches):
            batch = make_batch([data.row(i)], 0)
            total += float(model.loss(batch, seed=0, step=0, training=False))
            tokens += batch.valid_tokens
    return total / tokens


def test_validation_is_one_number(tmp_path: Path) -> None:
    """The same in every layout and microbatch size, dropout off, twice in a row; and that of the model alone."""
    expected = reference_loss(3)
    flags = f"{TEN} --fp64 --skip-train --eval-iters 3 --attention-dropout 0.3 --hidden-dropout 0.3"
    for number, (ranks, place) in enumerate(LAYOUTS):
        folder = tmp_path / str(number)
        outcomes = trained(ranks, *[f"{flags} {place} --log-dir {folder}"] * 2, timeout=60)
        assert [o.code for o in outcomes] == [0, 0] and not steps_of(folder)
        (_, split, first), (_, _, second) = evaluations_of(folder)
        assert split == "validation" and first == second
        assert first == pytest.approx(expected, rel=1e-12), place


@pytest.mark.parametrize(("ranks", "place"), [LAYOUTS[0], LAYOUTS[3], (2, "--bf16 --use-distributed-optimizer")])
def test_evaluating_changes_nothing(ranks: int, place: str, tmp_path: Path) -> None:
    """After every step, and two in a row at the end: bit by bit the run that never evaluates."""
    flags = f"{TEN} {place} --attention-dropout 0.1 --hidden-dropout 0.1 --save-interval 4"
    never, always = tmp_path / "never", tmp_path / "always"
    outcomes = trained(
        ranks, f"{flags} --save {never}", f"{flags} --save {always} --eval-interval 1 --eval-iters 2", timeout=90
    )
    assert [o.code for o in outcomes] == [0, 0]
    assert_same_run(never, always, 10)
    for step in (4, 8):
        for key, value in tensors_of(never, step).items():
            assert value.equal(tensors_of(always, step)[key]), (step, key)
    found = evaluations_of(always)
    assert [(s, split) for s, split, _ in found] == [(s, "validation") for s in range(1, 11)] + [(10, "test")]
    assert found[9][2] < found[0][2], "the model has learned"


def test_nothing_to_evaluate_on(tmp_path: Path) -> None:
    """An empty validation split, or no evaluation asked for: a notice, and no line."""
    data = f"{TINY} --data-path {make_data(tmp_path)} --split 1,0,0 --train-iters 3 --log-dir {tmp_path}/log"
    for flags in (f"{data} --eval-iters 2 --eval-interval 1", f"{MOCK} --train-iters 3 --log-dir {tmp_path}/log"):
        assert train_here(flags).code == 0
    outcome = train_here(f"{data} --eval-iters 2 --skip-train")
    assert outcome.code == 0 and "no validation data: nothing to evaluate" in outcome.text
    assert not evaluations_of(tmp_path / "log")


# ---- what a run keeps, and what it reads


def tensor_bytes() -> int:
    """Bytes of all tensors that Python can see, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@contextlib.contextmanager
def watching_memory(built: Built, leak: bool) -> Iterator[None]:
    """Tensor bytes at the start of every 20th step go to ``built.found``; ``leak``: a graph is kept in each step."""
    step = built.assembly.step
    run, found, kept = step.run, {}, []
    built.found = found  # type: ignore[attr-defined]

    def watched(*args: Any, **kwargs: Any) -> Any:
        if kwargs["step"] % 20 == 0:
            found[kwargs["step"]] = tensor_bytes()
        if leak:
            kept.append(torch.zeros(100, requires_grad=True) + 1)
        return run(*args, **kwargs)

    step.run = watched  # type: ignore[method-assign]
    yield


def test_tensors_do_not_pile_up(tmp_path: Path) -> None:
    """200 steps with evaluations, saves and logging: not a byte more after step 20 than at the end."""
    flags = f"{MOCK} --num-layers 1 --global-batch-size 2 --bf16 --train-iters 201 --num-workers 0 --keep-last 1"
    flags += f" --eval-interval 15 --eval-iters 2 --save-interval 25 --log-interval 10 --tensorboard-dir {tmp_path}/t"
    flags += " --log-params-norm --recompute-granularity full"
    outcome = train_here(f"{flags} --save {tmp_path}/a", watching_memory, False)
    assert outcome.code == 0 and sorted(outcome.extra) == list(range(0, 201, 20))
    assert len({outcome.extra[s] for s in range(20, 201, 20)}) == 1, outcome.extra
    leaking = train_here(f"{flags} --train-iters 41 --save {tmp_path}/b", watching_memory, True)
    assert leaking.extra[40] - leaking.extra[20] >= 20 * 400, "the watch sees a leak"


def reader() -> str | None:
    """The function of ours that reads, or None if it does so on the CPU only."""
    names = [f.name for f in traceback.extract_stack(limit=20) if "megatron_lite" in f.filename]
    return None if {"_check_ids", "_check_targets"} & set(names) else (names or ["?"])[-1]


class HostReads(TorchDispatchMode):
    """Notes operations that make the host wait for the device."""

    WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if any(name.startswith(waiting) for waiting in self.WAITING):
            self.seen += [f"{name} in {place}"] if (place := reader()) else []
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watching_reads(built: Built) -> Iterator[None]:
    """``built.found`` gets, for each step, what was read before the one read, and how many of those there were."""
    step, found = built.assembly.step, []
    built.found = found  # type: ignore[attr-defined]
    run, read = step.run, step.read
    state: dict[str, Any] = {}

    def reading(numbers: torch.Tensor) -> torch.Tensor:
        state["reads"] += 1
        with contextlib.ExitStack() as stack:  # what it reads is on the host from here on
            stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
            return read(numbers)

    def watched(*args: Any, **kwargs: Any) -> Any:
        state["reads"] = 0
        converted: list[str] = []
        patch = pytest.MonkeyPatch()
        with patch.context() as m, HostReads() as mode:
            for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "cpu"):
                inner = getattr(torch.Tensor, name)

                def convert(self: torch.Tensor, *a: Any, _inner: Any = inner, _name: str = name, **k: Any) -> Any:
                    if not state["reads"] and threading.current_thread() is threading.main_thread() and (place := reader()):
                        converted.append(f"{_name} in {place}")
                    return _inner(self, *a, **k)

                m.setattr(torch.Tensor, name, convert)
            report = run(*args, **kwargs)
        found.append((state["reads"], [*mode.seen, *converted]))
        return report

    step.run, step.read = watched, reading  # type: ignore[method-assign]
    yield


@pytest.mark.parametrize(
    ("ranks", "place"),
    [
        (1, "--bf16"),
        (2, "--use-distributed-optimizer --overlap-grad-reduce --fp16"),
        (2, "--pipeline-model-parallel-size 2 --clip-grad-value 0.1 --recompute-granularity full"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --bf16 --deterministic"),
    ],
)
def test_the_host_reads_once_in_a_step(ranks: int, place: str, tmp_path: Path) -> None:
    flags = f"{MOCK} --train-iters 3 --log-dir {tmp_path} {place} --attention-dropout 0.1 --hidden-dropout 0.1"
    [outcome] = trained(ranks, (flags, watching_reads))
    assert outcome.code == 0 and outcome.extra == [(1, [])] * 3, outcome.extra


# ---- odds and ends


@contextlib.contextmanager
def other_samples(built: Built, rank: int) -> Iterator[None]:
    """One rank reads the next batch instead."""
    loader = built.data.train
    step = loader.step
    if built.mesh.rank == rank:
        loader.step = lambda consumed, size: step(consumed + size, size)  # type: ignore[method-assign]
    yield


def test_ranks_that_read_different_samples(tmp_path: Path) -> None:
    """Tensor-parallel peers must compute on the same batch; the error names them and what to do."""
    flags = f"{TEN} --tensor-model-parallel-size 2 --log-dir {tmp_path}"
    [outcome] = trained(2, (flags, other_samples, 1))
    assert outcome.code == exit_codes.CONFIGURATION
    for part in ("ranks 0 and 1", "data-parallel rank 0", "checksums"):
        assert part in outcome.error, outcome.error
    assert issubclass(BatchMismatch, ValueError)


def test_traces(tmp_path: Path) -> None:
    """Of the asked steps and ranks, also where the run ends before they do."""
    flags = f"{MOCK} --profile --profile-step-start 1 --profile-ranks 1"
    outcomes = trained(
        2,
        f"{flags} --train-iters 4 --profile-step-end 3 --log-dir {tmp_path}/a",
        f"{flags} --train-iters 3 --profile-step-end 9 --log-dir {tmp_path}/b",
    )
    assert [o.code for o in outcomes] == [0, 0]
    for name in ("a", "b"):
        [trace] = (tmp_path / name).glob("trace-*")
        assert trace.name == "trace-rank00001.json"
        events = json.loads(trace.read_text())["traceEvents"]
        assert any("aten::" in e.get("name", "") for e in events)
