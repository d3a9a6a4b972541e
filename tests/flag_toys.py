"""Whole runs of a tiny model, and everything about them that a flag can change: for tests/test_flags_effect.py."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import shutil
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from train_toys import TINY, bad_steps, make_data, train_here, trained

from megatron_lite.checkpoint.load import Reader
from megatron_lite.data.index_writer import IndexedWriter
from megatron_lite.data.row import Row
from megatron_lite.train import training
from megatron_lite.train.metrics import read_lines

RUN = f"{TINY} --split 2,1,1 --train-iters 4"
CLOCK = {
    "time",
    "step_seconds",
    "data_wait_seconds",
    "tokens_per_second",
    "tflops_per_gpu",
    "tflops_computed",
    "memory_gib",
}


@dataclass
class Finished:
    """What a run left behind.

    Attributes:
        code, error, text: how it ended and what it printed.
        steps: the lines of metrics.jsonl without what a clock decides, by step.
        evaluations: (step, split, loss).
        files: paths below the scratch directory.
        inside: what :func:`watch` saw.
        board: tags of the scalars in TensorBoard's files.
        kinds: of tensors in the last checkpoint.
    """

    code: int
    error: str
    text: str
    steps: dict[int, dict[str, Any]]
    evaluations: list[tuple[int, str, float]]
    files: list[str]
    inside: dict[str, Any]
    board: set[str]
    kinds: set[str]

    @property
    def losses(self) -> list[float]:
        """Of the training steps."""
        return [record["loss"] for record in self.steps.values()]

    @property
    def saved(self) -> list[str]:
        """Checkpoints below ``save``."""
        return sorted({f.split("/")[1] for f in self.files if f.startswith("save/step_")})


def finish(argv: str, ranks: int, folder: Path, bad: tuple[int, ...] = ()) -> Finished:
    """Train in this process or on the pool's ranks; what was in the scratch directory before is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    argv = f"{argv} --log-dir {folder / 'log'}" if "--log-dir" not in argv else argv
    with fake_wandb() as calls:
        outcome = trained(ranks, (argv, watch, bad))[0] if ranks > 1 else train_here(argv, watch, bad)
    records = list(read_lines(folder / "log" / "metrics.jsonl"))
    steps = {r["step"]: {k: v for k, v in r.items() if k not in CLOCK} for r in records if "eval_loss" not in r}
    evaluations = [(r["step"], r["split"], r["eval_loss"]) for r in records if "eval_loss" in r]
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    inside = {**(outcome.extra or {}), "wandb": calls}
    done = Finished(
        outcome.code, outcome.error, outcome.text, steps, evaluations, files, inside, board(folder, files), set()
    )
    if done.saved:
        done.kinds = {kind for kind, _ in Reader(folder / "save" / done.saved[-1]).tensors}
    return done


@contextlib.contextmanager
def watch(built: Any, bad: tuple[int, ...]) -> Iterator[None]:
    """Look over a run's shoulder; ``bad`` steps are not finite."""
    assembly, loader = built.assembly, built.data.train
    gradients, runtime = assembly.gradients, assembly.runtime
    source = getattr(getattr(loader.dataset, "stream", None), "dataset", None)
    found: dict[str, Any] = {
        "workers": loader._pool._max_workers if loader._pool else 0,
        "bytes ahead": loader._bytes_ahead,
        "pinned": loader.pin_memory,
        "mapped": source is not None and source._tokens is not None,
        "memory": assembly.optimizer.memory(),
        "replica checks": 0,
        "early buckets": 0,
        "collections": 0,
        "profiled": [],
    }
    built.found = found
    finish_sums, collect, differences, run = (
        gradients.finish,
        gc.collect,
        training.replica_differences,
        assembly.step.run,
    )
    steps = [0]

    def count_early() -> None:
        found["early buckets"] = max(found["early buckets"], gradients._next)
        finish_sums()

    def count_collections(*args: Any) -> int:
        found["collections"] += 1
        return collect(*args)

    def count_checks(*args: Any) -> list[str]:
        found["replica checks"] += 1
        return differences(*args)

    def count_steps(*args: Any, **kwargs: Any) -> Any:
        steps[0] += 1
        return run(*args, **kwargs)

    class Profile:
        """Notes where it begins and ends instead of recording."""

        def __enter__(self) -> None:
            found["profiled"].append(steps[0])

        def __exit__(self, *_: object) -> None:
            found["profiled"].append(steps[0])

        def export_chrome_trace(self, path: str) -> None:
            Path(path).touch()

    gradients.finish, assembly.step.run = count_early, count_steps
    with (
        mock.patch.object(gc, "collect", count_collections),
        mock.patch.object(training, "replica_differences", count_checks),
        mock.patch.object(torch.profiler, "profile", Profile),
        bad_steps(built, bad),
    ):
        yield
    found["traffic"] = {key: value for key, value in built.mesh.traffic.counts.items() if key[0] != "world"}
    found["schedules"] = sorted({name for name, _ in runtime._plans})


@contextlib.contextmanager
def fake_wandb() -> Iterator[list[dict[str, Any]]]:
    """The client of Weights & Biases, as far as it is called."""
    calls: list[dict[str, Any]] = []
    module = types.ModuleType("wandb")

    def init(**options: Any) -> Any:
        calls.append({k: v for k, v in options.items() if k != "config"})
        return mock.Mock()

    module.init = init  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"wandb": module}):
        yield calls


def board(folder: Path, files: list[str]) -> set[str]:
    """Tags of the scalars in TensorBoard's files."""
    paths = [folder / f for f in files if "tfevents" in f]
    if not paths:
        return set()
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = [event for path in paths for event in EventFileLoader(str(path)).Load()]
    return {value.tag for event in events if event.HasField("summary") for value in event.summary.value}


# ---- what runs are given


def turned(row: Row, _: np.random.Generator) -> Row:
    """A transform: the tokens from the last to the first."""
    return replace(row, tokens=row.tokens[::-1])


def make_places(folder: Path) -> dict[str, str]:
    """Files that flags name: data, tokenizers and a checkpoint of 4 steps, saved after 2 and 4."""
    places = {"scratch": str(folder / "scratch"), "data": make_data(folder)}
    places["other"] = str(folder / "other_text_document")
    rng = np.random.default_rng(4)
    with IndexedWriter(places["other"], vocab_size=61, eod_id=60) as writer:
        for _ in range(40):
            writer.add_document(np.append(rng.integers(0, 60, 12), 60))
    places["curriculum"] = str(folder / "curriculum.yaml")
    Path(places["curriculum"]).write_text("stages:\n- {at: 0, seq_length: 8}\n")
    places["template"], places["chat"] = str(folder / "numbers.jinja"), str(folder / "chat.jsonl")
    Path(places["template"]).write_text("{% for m in messages %}{{ m.content }} 60 {% endfor %}")
    Path(places["chat"]).write_text('{"prompt": "1 2", "completion": "3 4 5"}\n' * 99)
    places["checkpoint"] = str(folder / "checkpoint")
    saving = f"--data-path {places['data']} --save {places['checkpoint']} --save-interval 2"
    assert train_here(f"{RUN} {saving}").code == 0
    return places | _tokenizers(folder)


def _tokenizers(folder: Path) -> dict[str, str]:
    from test_tokenizer import sentence_piece_model

    places = {name: str(folder / name) for name in ("sp", "sp2", "tik", "vocab", "vocab2", "merges", "merges2")}
    Path(places["sp"]).write_bytes(sentence_piece_model())
    Path(places["sp2"]).write_bytes(sentence_piece_model(eos_id=1, bos_id=2))
    tokens = [bytes([b]) for b in range(256)] + [b"12", b"1234", b"aB"]
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)
    ]
    places["tik"] = f"{folder / 'tik'}.json"
    Path(places["tik"]).write_text(json.dumps(entries))
    ids = {"a": 5, "b": 4, "c": 3, "ab": 0, "bc": 1, "<eod>": 2, "<|endoftext|>": 6}
    Path(places["vocab"]).write_text(json.dumps(ids))
    Path(places["vocab2"]).write_text(json.dumps({**ids, "a": 4, "b": 5}))
    Path(places["merges"]).write_text("#version: 0.2\nb c\na b\n")
    Path(places["merges2"]).write_text("#version: 0.2\na b\nb c\n")
    return places
