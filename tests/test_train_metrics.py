"""What a run reports: metrics.jsonl against docs/metrics.md, TensorBoard, W&B, run.json, the lines on the terminal."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train_toys import MOCK, ROOT, Outcome, environment, state_of, steps_of, tensors_of, train_here, trained

from megatron_lite.config import exit_codes
from megatron_lite.config.transformer import LlamaConfig
from megatron_lite.model.flops import transformer_flops
from megatron_lite.train.metrics import (
    STEP_FIELDS,
    Console,
    JsonLines,
    format_seconds,
    last_lines,
    peak_tflops,
    read_lines,
    read_metrics,
)
from megatron_lite.train.provenance import git_state, write_run_json

SIX = f"{MOCK} --train-iters 6 --eval-iters 2 --eval-interval 2"
TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "float": (float,),
    "float or null": (float, type(None)),
    "boolean": (bool,),
    "string": (str,),
    "object": (dict,),
}


def schema(title: str) -> dict[str, tuple[str, bool]]:
    """Field -> (type, optional) of a table in docs/metrics.md."""
    text = (ROOT / "docs" / "metrics.md").read_text().split(f"### {title}")[1].split("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([\w ]+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    assert rows and all(unit.strip() and meaning.strip() for _, _, unit, meaning in rows)
    return {name: (kind, meaning.startswith("optional")) for name, kind, _, meaning in rows}


def check_line(record: dict[str, Any], fields: dict[str, tuple[str, bool]]) -> None:
    assert not record.keys() - fields.keys(), f"not in docs/metrics.md: {record.keys() - fields.keys()}"
    missing = {name for name, (_, optional) in fields.items() if not optional} - record.keys()
    assert not missing, missing
    for name, value in record.items():
        assert type(value) in TYPES[fields[name][0]], (name, value)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A run on two ranks with everything that can be logged."""
    folder = tmp_path_factory.mktemp("run")
    more = f"--log-params-norm --log-num-zeros-in-grad --tensorboard-dir {folder}/board --log-timers-to-tensorboard"
    more += " --log-memory-to-tensorboard --log-validation-ppl-to-tensorboard --log-interval 2 --peak-tflops 0.5"
    [outcome] = trained(2, f"{SIX} --fp64 --use-distributed-optimizer --save {folder} {more}")
    assert outcome.code == 0, outcome
    return folder, outcome


# ---- metrics.jsonl


def test_lines_are_as_the_documentation_says(run: tuple[Path, Outcome]) -> None:
    of_steps, of_evaluations = schema("Lines of steps"), schema("Lines of evaluations")
    assert set(STEP_FIELDS) == {name for name, (_, optional) in of_steps.items() if not optional}
    records = list(read_lines(run[0] / "metrics.jsonl"))
    steps = [r for r in records if "eval_loss" not in r]
    for record in steps:
        check_line(record, of_steps)
    for record in records:
        if "eval_loss" in record:
            check_line(record, of_evaluations)
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6], "one line per step, whatever --log-interval is"
    assert [(r["step"], r["split"]) for r in records if "eval_loss" in r] == [
        (2, "validation"),
        (4, "validation"),
        (6, "validation"),
        (6, "test"),
    ]
    assert [r["time"] for r in records] == sorted(r["time"] for r in records)
    assert abs(records[-1]["time"] - time.time()) < 3600 and {r["run"] for r in records} == {0}
    assert {"params_norm", "num_zeros_in_grad"} <= steps[0].keys()


def test_rates_follow_from_the_step(run: tuple[Path, Outcome]) -> None:
    """Tokens/s of the whole job; FLOPs by the formula; MFU against the given peak; no number twice."""
    model = LlamaConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        vocab_size=61,
        max_position_embeddings=16,
    )
    flops = transformer_flops(model, 64, 16, None)
    for step, line in steps_of(run[0]).items():
        seconds = line["step_seconds"]
        assert line["consumed_samples"] == 4 * step and line["consumed_tokens"] == 64 * step
        assert line["tokens_per_second"] == pytest.approx(64 / seconds)
        assert line["tflops_per_gpu"] == pytest.approx(flops.model_full / seconds / 2 / 1e12)
        assert 0 < line["tflops_computed"] < line["tflops_per_gpu"]
        assert line["mfu"] == pytest.approx(line["tflops_per_gpu"] / 0.5)
        assert 0 <= line["data_wait_seconds"] <= seconds and line["memory_gib"] > 0.01


def test_norm_of_weights_and_zeros_of_gradients(run: tuple[Path, Outcome], tmp_path: Path) -> None:
    """Every element once, in any layout."""
    weights = [t for (kind, _), t in tensors_of(run[0], 6).items() if kind == "weight"]
    norm = math.sqrt(sum(float((t**2).sum()) for t in weights))
    line = steps_of(run[0])[6]
    assert line["params_norm"] == pytest.approx(norm, rel=1e-12)
    more = "--fp64 --log-params-norm --log-num-zeros-in-grad"
    for ranks, place in ((1, ""), (2, "--tensor-model-parallel-size 2"), (2, "--pipeline-model-parallel-size 2")):
        folder = tmp_path / place.strip("-")[:8]
        trained(ranks, f"{MOCK} --train-iters 6 --log-dir {folder} {place} {more}")
        other = steps_of(folder)[6]
        assert other["params_norm"] == pytest.approx(norm, rel=1e-12)
        assert other["num_zeros_in_grad"] == line["num_zeros_in_grad"], place


def test_starts_are_counted_and_steps_repeat(tmp_path: Path) -> None:
    """A kill loses the steps after the last save; the next start does them again and the last line counts."""
    flags = f"{MOCK} --train-iters 8 --save {tmp_path} --load {tmp_path} --save-interval 3"
    train_here(f"{flags} --exit-interval 5")
    shutil.rmtree(tmp_path / "step_00000005")
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"run": 0, "step": 6, "lo')
    assert train_here(flags).code == 0
    records = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [(r["run"], r["step"]) for r in records] == [(0, s) for s in range(1, 6)] + [(1, s) for s in range(4, 9)]
    steps, evaluations = read_metrics(tmp_path / "metrics.jsonl")
    assert sorted(steps) == list(range(1, 9)) and not evaluations
    assert {s: line["run"] for s, line in steps.items()} == dict.fromkeys((1, 2, 3), 0) | dict.fromkeys(range(4, 9), 1)
    for step in (4, 5):
        first, again = (r for r in records if r["step"] == step)
        assert first["loss"] == again["loss"]
    train_here(flags + " --train-iters 9 --override-opt-param-scheduler")
    assert steps_of(tmp_path)[9]["run"] == 2


def test_a_file_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    for expected in range(3):
        lines = JsonLines(path)
        assert lines.run == expected
        lines.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "x": 0.1 + 0.2})
        lines.close()
    records = list(read_lines(path))
    assert [r["run"] for r in records] == [0, 1, 2]
    assert records[0]["loss"] is None and records[0]["grad_norm"] is None and records[0]["x"] == 0.1 + 0.2
    path.write_bytes(path.read_bytes()[:-5])  # cut off in the last line, which had run 2
    assert [r["run"] for r in last_lines(path, size=220)] == [1]
    lines = JsonLines(path)
    lines.write({"step": 2})
    lines.close()
    assert lines.run == 2 and [r["step"] for r in read_lines(path)] == [1, 1, 2]
    path.write_bytes(b'\xff\xfe not ours\n[1]\n7\n{"run": "a"}\n')
    assert JsonLines(path).run == 0 and list(read_lines(path)) == [{"run": "a"}]


def test_a_log_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = train_here(f"{SIX} --log-dir {tmp_path}/file/logs")
    assert outcome.code == exit_codes.CONFIGURATION and "--log-dir" in outcome.error


@pytest.mark.parametrize("in_the_way", ["run.json", "run.json.tmp", "metrics.jsonl"])
def test_what_is_in_the_way_of_a_log(in_the_way: str, tmp_path: Path) -> None:
    (tmp_path / in_the_way).mkdir()
    outcome = train_here(f"{SIX} --log-dir {tmp_path}")
    assert outcome.code == exit_codes.CONFIGURATION, outcome
    assert str(tmp_path / in_the_way).removesuffix(".tmp") in outcome.error and len(outcome.error.splitlines()) == 1
    assert "Is a directory" in outcome.error and not (tmp_path / "run.json.tmp").is_file()


# ---- a disk that is full


def short_of(free: dict[str, int]) -> Callable[[int, bytes], int]:
    """An ``os.write`` for disks with this many bytes left, by a part of the path. As the system's, it writes what fits."""
    write = os.write

    def short(fd: int, data: bytes) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        part = next((part for part in free if part in path), None)
        if part is None:
            return write(fd, data)
        if not free[part]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(fd, data[: free[part]])
        free[part] -= done
        return done

    return short


def test_a_line_is_written_in_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write({"step": 1})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    free = {"metrics.jsonl": 20}
    monkeypatch.setattr(os, "write", short_of(free))
    for _ in range(2):  # the second finds no room at all
        with pytest.raises(OSError, match="No space left"):
            lines.write({"step": 2})
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
    monkeypatch.undo()
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    lines.write({"step": 3})
    lines.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 3]


def test_a_cut_line_on_a_full_disk_is_an_error_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"run": 0, "st')
    monkeypatch.setattr(os, "write", short_of({"metrics.jsonl": 0}))
    with pytest.raises(ValueError, match=r"metrics\.jsonl cannot be written \(No space left on device\)"):
        JsonLines(tmp_path / "metrics.jsonl")


def test_training_goes_on_without_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said once; the steps, the evaluations and the save follow, and the file ends with a whole line."""
    monkeypatch.setattr(os, "write", short_of({"metrics.jsonl": 1500}))
    outcome = train_here(f"{SIX} --save {tmp_path} --log-interval 1")
    assert outcome.code == 0, outcome
    said = f"{tmp_path}/metrics.jsonl cannot be written any more: No space left on device; the run goes on without it"
    assert outcome.text.count("cannot be written") == outcome.text.count(said) == 1, outcome.text
    assert "step 6/6" in outcome.text and "test loss" in outcome.text and state_of(tmp_path, 6)["progress"]["step"] == 6
    text = (tmp_path / "metrics.jsonl").read_text()
    steps = [json.loads(line)["step"] for line in text.splitlines()]
    assert text.endswith("\n") and steps[0] == 1 and len(steps) < 6


@pytest.mark.parametrize("fails_in", ["log", "finish"])
def test_training_goes_on_without_weights_and_biases(fails_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Run:
        def log(self, record: dict[str, Any], step: int) -> None:
            calls.append(step)
            if fails_in == "log":
                raise RuntimeError("its service is gone")

        def finish(self) -> None:
            raise RuntimeError("its service is gone")

    fake = types.ModuleType("wandb")
    fake.init = lambda **_: Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    outcome = train_here(f"{SIX} --log-dir {tmp_path} --wandb-project p")
    assert outcome.code == 0 and sorted(steps_of(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert outcome.text.count("for Weights & Biases cannot be written any more: RuntimeError: its service is gone") == 1
    assert (calls == [1]) == (fails_in == "log")


LIMITED = """
import resource, sys
from megatron_lite.cli.main import main
import megatron_lite.train.{place} as place
{name} = place.{name}
def limited(*args, **kwargs):
    resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, resource.RLIM_INFINITY))
    return {name}(*args, **kwargs)
place.{name} = limited
sys.exit(main(sys.argv[1:]))
"""


def limited(size: int, name: str, flags: str, folder: Path, place: str = "build") -> subprocess.CompletedProcess[str]:
    """A training whose files cannot grow beyond a size from the call of a function of a module on."""
    script = LIMITED.format(size=size, name=name, place=place)
    command = [sys.executable, "-c", script, "train", *flags.split(), "--log-dir", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)


@pytest.mark.parametrize("size", [0, 1000])
def test_no_room_for_run_json(size: int, tmp_path: Path) -> None:
    done = limited(size, "write_run_json", SIX, tmp_path)
    assert done.returncode == exit_codes.CONFIGURATION, done
    assert f"{tmp_path}/run.json cannot be written (File too large)" in done.stderr and "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_no_room_for_tensorboard(tmp_path: Path) -> None:
    done = limited(0, "TensorBoard", f"{SIX} --tensorboard-dir {tmp_path}/board", tmp_path, "report")
    assert done.returncode == exit_codes.CONFIGURATION, done
    assert f"--tensorboard-dir {tmp_path}/board cannot be written (File too large)" in done.stderr
    assert "Traceback" not in done.stderr


def test_training_goes_on_without_tensorboard(tmp_path: Path) -> None:
    """Metrics too, on a disk that takes no more than run.json: one line for each, no traceback of TensorBoard's thread."""
    run_json = 12_000
    flags = f"{MOCK} --train-iters 60 --tensorboard-dir {tmp_path}/board --log-interval 1"
    done = limited(run_json, "Reporter", flags, tmp_path)
    assert done.returncode == 0, done
    for what in (f"{tmp_path}/metrics.jsonl", f"TensorBoard's file in {tmp_path}/board"):
        assert done.stdout.count(f"{what} cannot be written any more: File too large; the run goes on without it") == 1
    assert "step 60/60" in done.stdout and "Traceback" not in done.stderr
    written = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == list(range(1, len(written) + 1)) and 10 < len(written) < 60


def test_a_standard_output_that_is_full(tmp_path: Path) -> None:
    """Said once on standard error; nothing is left over that fails at exit."""
    script = (
        "from megatron_lite.train.metrics import Console\n"
        "console = Console(0, 9, 1, enabled=True)\n"
        "for n in range(3): console.say(f'line {n}')\n"
        "print('more')\n"
        "console.close()\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, env=environment())
    said = "standard output cannot be written any more: No space left on device; the run goes on without it\n"
    assert (done.returncode, done.stderr) == (0, said)


# ---- TensorBoard, W&B


def tags(folder: Path) -> dict[str, dict[int, float]]:
    """Scalars by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_same_numbers(run: tuple[Path, Outcome]) -> None:
    found, lines = tags(run[0] / "board"), steps_of(run[0])
    assert set(found) == (set(STEP_FIELDS) - {"step", "run", "time"}) | {
        "params_norm",
        "num_zeros_in_grad",
        "eval_loss",
        "eval_ppl",
    }
    for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second", "memory_gib"):
        assert found[name] == {s: pytest.approx(lines[s][name], rel=1e-6) for s in (2, 4, 6)}
    assert found["eval_ppl"][4] == pytest.approx(math.exp(found["eval_loss"][4]), rel=1e-5)


def test_tensorboard_shows_timers_and_memory_only_when_asked(tmp_path: Path) -> None:
    train_here(f"{SIX} --log-dir {tmp_path} --tensorboard-dir {tmp_path}/board --log-interval 3")
    found = tags(tmp_path / "board")
    hidden = {"step_seconds", "data_wait_seconds", "tokens_per_second", "memory_gib", "eval_ppl", "mfu"}
    assert not hidden & set(found) and sorted(found["loss"]) == [3, 6] and "eval_loss" in found


def test_tensorboard_after_a_restart(tmp_path: Path) -> None:
    """What the first start wrote of steps that are done again is not shown."""
    flags = f"{MOCK} --train-iters 6 --save {tmp_path} --load {tmp_path} --save-interval 2 --log-interval 1"
    flags += f" --tensorboard-dir {tmp_path}/board"
    train_here(f"{flags} --exit-interval 5")
    shutil.rmtree(tmp_path / "step_00000005")
    train_here(f"{flags} --lr 0.02 --override-opt-param-scheduler")
    found, lines = tags(tmp_path / "board"), steps_of(tmp_path)
    assert found["learning_rate"] == {s: pytest.approx(lines[s]["learning_rate"], rel=1e-6) for s in range(1, 7)}


def test_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    outcome = train_here(f"{SIX} --log-dir {tmp_path} --wandb-project p")
    assert outcome.code == exit_codes.CONFIGURATION and "pip install wandb" in outcome.error
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    outcome = train_here(f"{SIX} --log-dir {tmp_path} --tensorboard-dir {tmp_path}/board")
    assert outcome.code == exit_codes.CONFIGURATION and "pip install tensorboard" in outcome.error


@pytest.mark.parametrize("reachable", [True, False])
def test_weights_and_biases(reachable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is sent, with the configuration; without a server the run is recorded offline."""
    inits: list[dict[str, Any]] = []
    logged: list[tuple[int, dict[str, Any]]] = []
    finished: list[bool] = []

    class Run:
        def log(self, record: dict[str, Any], step: int) -> None:
            logged.append((step, record))

        def finish(self) -> None:
            finished.append(True)

    def init(**kwargs: Any) -> Run:
        inits.append(kwargs)
        if not reachable and kwargs.get("mode") != "offline":
            raise ConnectionError("no network")
        return Run()

    fake = types.ModuleType("wandb")
    fake.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    outcome = train_here(f"{SIX} --log-dir {tmp_path} --wandb-project p --wandb-exp-name n --wandb-save-dir {tmp_path}/w")
    assert outcome.code == 0 and finished == [True]
    assert inits[0]["project"] == "p" and inits[0]["name"] == "n" and inits[0]["dir"] == f"{tmp_path}/w"
    assert inits[0]["config"]["training"]["train_iters"] == 6
    assert (len(inits) == 1) == reachable and ("recorded offline" in outcome.text) != reachable
    losses = {step: record["loss"] for step, record in logged if "loss" in record}
    assert losses == {s: line["loss"] for s, line in steps_of(tmp_path).items()}
    assert [step for step, record in logged if "eval_loss" in record] == [2, 4, 6, 6]


# ---- run.json


def test_run_json(run: tuple[Path, Outcome], tmp_path: Path) -> None:
    document = json.loads((run[0] / "run.json").read_text())
    assert document["config"]["model"]["num_layers"] == 2 and document["config"]["training"]["fp64"] is True
    [start] = document["starts"]
    text = (ROOT / "docs" / "metrics.md").read_text().split("## `run.json`")[1]
    documented = {name for row in re.findall(r"^\| (`.+?`) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert set(start) == documented
    assert start["layout"] == {"tp": 1, "cp": 1, "dp": 2, "pp": 1, "virtual": 1} and len(start["hosts"]) == 2
    assert {"megatron_lite", "python", "torch", "numpy"} <= start["versions"].keys()
    assert start["loaded"] is None and start["first_step"] == 0 and start["run"] == 0
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    if commit.returncode == 0:
        assert len(start["git"]["commit"]) == len(commit.stdout.strip())
        assert isinstance(start["git"]["changed_files"], int)
    assert git_state(tmp_path) is None or not (tmp_path / ".git").exists()


def test_run_json_keeps_every_start(tmp_path: Path) -> None:
    flags = f"{MOCK} --train-iters 4 --save {tmp_path} --load {tmp_path}"
    train_here(f"{flags} --exit-interval 2")
    train_here(flags)
    first, second = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert (first["first_step"], second["first_step"], second["run"]) == (0, 2, 1)
    assert second["loaded"] == str(tmp_path / "step_00000002")
    (tmp_path / "run.json").write_text("[1, 2")
    write_run_json(tmp_path, {"a": 1}, ["h"], {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, {})
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["config"] == {"a": 1} and len(document["starts"]) == 1
    assert document["starts"][0]["environment_set"] == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert document["starts"][0]["command"] == sys.argv


# ---- lines for people


def test_lines_on_the_terminal(run: tuple[Path, Outcome]) -> None:
    text = run[1].text
    shown = re.findall(r"^step (\d)/6 \| loss \d+\.\d{4} \| lr .* tokens/s .* MFU .* GiB \| ETA ", text, re.MULTILINE)
    assert shown == ["2", "4", "6"], text
    for part in (
        "ln V of a model that knows nothing is 4.1109",
        "is finite and not zero",
        "of the targets carry no loss",
        "first sample: ",
        "step 4: validation loss",
        "step 6: test loss",
        f"step 6: saved {run[0]}/step_00000006",
    ):
        assert text.count(part) == 1, part
    assert state_of(run[0], 6)["progress"]["step"] == 6


def test_the_peak_is_that_of_the_device() -> None:
    for name, peak in (
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A800 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H800", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA H20-3e", 148),
        ("NVIDIA H200", 989),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ):
        assert peak_tflops(name) == peak, name
    assert peak_tflops("cpu", 0.1) == 0.1


def test_times_for_people() -> None:
    assert [format_seconds(s) for s in (0, 11.6, 250, 11100, 93600)] == ["0s", "12s", "4m10s", "3h05m", "1d02h"]


def test_the_console_after_a_rollback(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps that are done again take time again; the time that is left stays a time."""
    record = {"loss": 1.0, "learning_rate": 0.1, "tokens_per_second": 1.0, "step_seconds": 1.0, "memory_gib": 1.0}
    console = Console(10, 20, 1, enabled=True)
    for step in (11, 8, 9, 20):
        console.step({"step": step, **record})
    console.close()
    text = capsys.readouterr().out
    assert text.count("ETA") == 4 and "-" not in "".join(re.findall(r"ETA (\S+)", text))
