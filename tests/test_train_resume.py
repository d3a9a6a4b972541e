"""A run that was interrupted is the run that was not: bit by bit in the same layout, in fp64 to rounding in others."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from train_toys import (
    MOCK,
    SAMPLES,
    TINY,
    Outcome,
    assert_same_run,
    bad_steps,
    launched,
    make_data,
    state_of,
    steps_of,
    tensors_of,
    torchrun,
    train_here,
    trained,
)

from megatron_lite.config import exit_codes
from megatron_lite.optim.schedule import LrSchedule

STEPS, AT = 10, 5
FP16 = "--fp16 --initial-loss-scale 1024 --loss-scale-window 4 --hysteresis 2"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
RAMP = "--global-batch-size 8 --rampup-batch-size 2 2 12"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce"


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix: ranks and flags; steps whose gradients are made infinite."""

    ranks: int
    flags: str
    bad: tuple[int, ...] = ()

    def __str__(self) -> str:
        words = self.flags.replace("--", "").replace("model-parallel-size ", "").replace("pipeline", "pp")
        return f"{self.ranks}ranks {words} {'bad' if self.bad else ''}"


PP = "--pipeline-model-parallel-size 2"
DEFAULT = [
    Cell(1, f"--fp32 {DROPOUT} {RAMP}"),
    Cell(1, f"{FP16} {DROPOUT}", (2, 5)),  # hysteresis used up, saved right after a skipped step
    Cell(2, f"{FP16} {ZERO}", (2,)),  # half of the hysteresis used, saved after 3 good steps of the window's 4
    Cell(2, f"--bf16 {ZERO} {DROPOUT} {RAMP}"),
    Cell(2, f"--fp32 {PP} {DROPOUT} --on-nan skip", (5,)),
    Cell(4, f"--bf16 {PP} {ZERO} {DROPOUT} --micro-batch-size 2"),
    Cell(4, f"{FP16} {PP} {ZERO} {RAMP} {DROPOUT}", (4, 5)),
    Cell(2, f"--bf16 --tensor-model-parallel-size 2 --sequence-parallel {DROPOUT}"),
    Cell(2, f"--fp32 --deterministic --zero-stage 0 {DROPOUT}"),
]
MATRIX = [
    Cell(ranks, " ".join([precision, place, dropout, batch]), bad)
    for precision, bad in (("--fp32", ()), ("--bf16", ()), (FP16, (2, 5)), (FP16, (2,)))
    for ranks, place in ((1, ""), (2, PP), (2, ZERO), (4, f"{PP} {ZERO}"), (2, "--zero-stage 0"))
    for dropout in ("", DROPOUT)
    for batch in ("--global-batch-size 4", "--global-batch-size 12", RAMP)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of a run over real files whose epoch ends in the middle of a step."""
    assert (AT * 4) % SAMPLES and STEPS * 4 > SAMPLES
    return f"{TINY} --data-path {make_data(tmp_path_factory.mktemp('data'))} --split 1,0,0"


def check_cell(cell: Cell, data: str, folder: Path) -> None:
    whole, parts = folder / "whole", folder / "parts"
    flags = f"{data} {cell.flags} --train-iters {STEPS}".replace("--fp32", "")
    outcomes = trained(
        cell.ranks,
        (f"{flags} --save {whole}", bad_steps, cell.bad),
        (f"{flags} --save {parts} --exit-interval {AT}", bad_steps, cell.bad),
        (f"{flags} --save {parts} --load {parts}", bad_steps, cell.bad),
    )
    assert [o.code for o in outcomes] == [exit_codes.DONE, exit_codes.LIMIT, exit_codes.DONE], outcomes
    assert_same_run(whole, parts, STEPS)
    steps = steps_of(parts)
    assert [s for s in steps if steps[s]["skipped"]] == list(cell.bad)
    assert {steps[s]["run"] for s in range(1, AT + 1)} == {0} and {steps[s]["run"] for s in range(AT + 1, STEPS + 1)} == {1}


@pytest.mark.parametrize("cell", DEFAULT, ids=str)
def test_five_and_five_steps_are_ten(cell: Cell, data: str, tmp_path: Path) -> None:
    check_cell(cell, data, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("cell", MATRIX, ids=str)
def test_five_and_five_steps_are_ten_in_the_whole_matrix(cell: Cell, data: str, tmp_path: Path) -> None:
    check_cell(cell, data, tmp_path)


def test_the_scaler_goes_on_where_it_was(data: str, tmp_path: Path) -> None:
    """The scale has fallen to 256, hysteresis is half used, and 2 of 4 good steps are counted: F04's case."""
    flags = f"{data} {FP16} --train-iters 16"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    bad = (1, 2, 3, 8)
    # 1: hysteresis 1; 2: 512; 3: 256; 4-7: good, 512 and hysteresis 2; 8: hysteresis 1; 9, 10: two good steps
    trained(
        1,
        (f"{flags} --save {whole}", bad_steps, bad),
        (f"{flags} --save {parts} --exit-interval 10", bad_steps, bad),
        (f"{flags} --save {parts} --load {parts}", bad_steps, bad),
    )
    scales = [steps_of(parts)[s]["loss_scale"] for s in range(1, 17)]
    assert scales == [1024, 1024, 512, 256, 256, 256, 256, 512, 512, 512, 512, 512, 1024, 1024, 1024, 1024]
    at = state_of(parts, 10)["scaler"]
    assert (at["scale"], at["good_steps"], at["hysteresis_left"], at["skips"]) == (512, 2, 1, 4)
    assert_same_run(whole, parts, 16)


def test_a_skipped_step_moves_the_data_and_not_the_schedules(data: str, tmp_path: Path) -> None:
    """Skips at 1, 2 and 5 of 8: the learning rate follows updates, the position follows steps, with and without resume."""
    flags = f"{data} {FP16} --train-iters 8 --lr-warmup-iters 4"
    bad = (1, 2, 5)
    whole, parts, none = (tmp_path / name for name in ("whole", "parts", "none"))
    trained(
        1,
        (f"{flags} --save {none}", bad_steps, ()),
        (f"{flags} --save {whole}", bad_steps, bad),
        (f"{flags} --save {parts} --exit-interval 5", bad_steps, bad),
        (f"{flags} --save {parts} --load {parts}", bad_steps, bad),
    )
    assert_same_run(whole, parts, 8)
    rates = [steps_of(none)[s]["learning_rate"] for s in range(1, 9)]
    ours = [steps_of(parts)[s]["learning_rate"] for s in range(1, 9)]
    assert ours == [rates[u] for u in (0, 0, 0, 1, 2, 2, 3, 4)]
    progress = state_of(parts, 8)["progress"]
    assert (progress["step"], progress["updates"]) == (8, 5)
    assert (progress["consumed_samples"], progress["scheduled_samples"]) == (32, 20)


def test_one_step_at_a_time(data: str, tmp_path: Path) -> None:
    """Interrupted after every step, over the border of an epoch and of the ramp."""
    flags = f"{data} --fp64 {DROPOUT} {RAMP} --train-iters {STEPS}"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trained(2, f"{flags} {ZERO} --save {whole}", *[f"{flags} {ZERO} --save {parts} --load {parts} --exit-interval 1"] * STEPS)
    assert_same_run(whole, parts, STEPS)
    assert [steps_of(parts)[s]["run"] for s in range(1, STEPS + 1)] == list(range(STEPS))


LAYOUTS = [
    (2, f"{PP} --micro-batch-size 2"),
    (2, ZERO),
    (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    (4, f"{PP} {ZERO}"),
    (4, "--tensor-model-parallel-size 4 --pipeline-schedule gpipe"),
]


def test_resumed_in_other_layouts(data: str, tmp_path: Path) -> None:
    """Saved in one layout, resumed in others, in the middle of a ramp: equal in fp64 to 1e-12, with the same masks."""
    flags = f"{data} --fp64 {DROPOUT} {RAMP} --train-iters {STEPS}"
    whole, first = tmp_path / "whole", tmp_path / "first"
    trained(1, f"{flags} --save {whole}")
    trained(2, f"{flags} {ZERO} --save {first} --exit-interval {AT}")
    for number, (ranks, place) in enumerate(LAYOUTS):
        there = tmp_path / f"layout{number}"
        shutil.copytree(first, there)
        [done] = trained(ranks, f"{flags} {place} --save {there} --load {there}")
        assert done.code == exit_codes.DONE, done
        assert_same_run(whole, there, STEPS, tolerance=1e-12)


def test_resumed_by_a_new_process(data: str, tmp_path: Path) -> None:
    """The same with processes of its own, two ranks under torchrun."""
    flags = f"{data} --bf16 {PP} {DROPOUT} --train-iters {STEPS}"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trained(2, f"{flags} --save {whole}")
    command = [*torchrun(2), "-m", "megatron_lite", "train", *f"{flags} --save {parts} --load {parts}".split()]
    with launched([*command, "--exit-interval", str(AT)], tmp_path / "a") as run:
        run.wait()
        assert f"stopped after step {AT} by --exit-interval" in run.output
    with launched(command, tmp_path / "b") as run:
        assert run.wait() == 0, run.output
    assert_same_run(whole, parts, STEPS)


# ---- schedules


def test_schedules_at_resume(tmp_path: Path) -> None:
    """The learning rates of ten further steps under each way to resume."""
    base = MOCK.replace("--lr 0.01", "").replace("--min-lr 0.001", "")
    cosine = f"{base} --lr 1e-3 --min-lr 1e-4 --train-iters 20"
    other = f"{base} --lr 5e-4 --lr-decay-style constant --train-iters 20".replace("--lr-decay-style cosine", "")
    start = tmp_path / "start"
    trained(1, f"{cosine} --save {start} --exit-interval 10")
    shape = LrSchedule(max_lr=1e-3, min_lr=1e-4, style="cosine", warmup_samples=8, decay_samples=80)
    constant = LrSchedule(max_lr=5e-4, style="constant", warmup_samples=8, decay_samples=80)
    cases = {
        "same": (f"{cosine}", [shape.at(4 * s) for s in range(10, 20)]),
        "override": (f"{other} --override-opt-param-scheduler", [constant.at(4 * s) for s in range(10, 20)]),
        "checkpoint": (f"{other} --use-checkpoint-opt-param-scheduler", [shape.at(4 * s) for s in range(10, 20)]),
        "finetune": (f"{other} --finetune", [constant.at(4 * s) for s in range(20)]),
        "no-load-optim": (f"{other} --no-load-optim", [constant.at(4 * s) for s in range(10, 20)]),
        "dp2": (f"{cosine} {ZERO}", [shape.at(4 * s) for s in range(10, 20)]),
    }
    for name, (flags, rates) in cases.items():
        there = tmp_path / name
        [done] = trained(2 if name == "dp2" else 1, f"{flags} --load {start} --save {there}")
        assert done.code == exit_codes.DONE, (name, done)
        assert [line["learning_rate"] for _, line in sorted(steps_of(there).items())] == rates, name
    [refused] = trained(1, f"{other} --load {start} --save {tmp_path / 'refused'}")
    assert refused.code == exit_codes.CONFIGURATION
    for part in ("max_lr", "0.001", "0.0005", "--override-opt-param-scheduler"):
        assert part in refused.error, refused.error


def test_what_has_no_effect_is_no_conflict(tmp_path: Path) -> None:
    """A longer training changes no number of a constant rate, so it needs no flag; a decay that was given stays too."""
    base = f"{MOCK} --lr-decay-style constant".replace("--lr-decay-style cosine", "").replace("--min-lr 0.001", "")
    save = f"--save {tmp_path} --load {tmp_path}"
    outcomes = trained(1, f"{base} --train-iters 4 {save}", f"{base} --train-iters 6 {save}")
    assert [o.code for o in outcomes] == [0, 0], outcomes
    assert sorted(steps_of(tmp_path)) == list(range(1, 7))


# ---- what is loaded


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("saved")
    trained(1, f"{MOCK} --train-iters 6 --save-interval 2 --save {folder}")
    return folder


def load(flags: str, **kwargs: object) -> Outcome:
    [outcome] = trained(1, f"{MOCK} --train-iters 6 {flags}", **kwargs)
    return outcome


def test_an_empty_directory_that_is_also_saved_to_starts_fresh(tmp_path: Path) -> None:
    outcome = load(f"--load {tmp_path}/x/../new --save {tmp_path}/new")
    assert outcome.code == 0, outcome
    assert sorted(steps_of(tmp_path / "new")) == [1, 2, 3, 4, 5, 6]
    assert "holds no checkpoint and is the same as --save: starting fresh" in outcome.text


def test_no_checkpoint_where_one_is_needed(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for flags in (
        f"--load {tmp_path}/missing --save {tmp_path}/s",
        f"--load {tmp_path}/empty --save {tmp_path}/s",
        f"--load {tmp_path}/empty",
        f"--load {tmp_path}/s --save {tmp_path}/s --exit-on-missing-checkpoint",
    ):
        outcome = load(flags)
        assert outcome.code == exit_codes.CONFIGURATION and "--load" in outcome.error, (flags, outcome)
    assert not (tmp_path / "s").exists() or not list((tmp_path / "s").glob("step_*"))


def damage(folder: Path, step: int, how: str) -> None:
    directory = folder / f"step_{step:08d}"
    [file] = directory.glob("rank*.safetensors")
    if how == "truncated":
        with open(file, "r+b") as f:
            f.truncate(file.stat().st_size - 1)
    elif how == "a changed byte":
        with open(file, "r+b") as f:
            f.seek(file.stat().st_size - 3)
            byte = f.read(1)
            f.seek(-1, 1)
            f.write(bytes([byte[0] ^ 1]))
    elif how == "no marker":
        (directory / "COMPLETE").unlink()
    else:
        (directory / "manifest.json").write_text("{}")


@pytest.mark.parametrize("how", ["truncated", "a changed byte", "no marker", "another manifest"])
def test_a_broken_newest_gives_way_to_an_older_one(how: str, saved: Path, tmp_path: Path) -> None:
    there = tmp_path / "run"
    shutil.copytree(saved, there)
    damage(there, 6, how)
    outcome = load(f"--load {there} --save {there}")
    assert outcome.code == 0, outcome
    assert "step_00000004 (the newest" in outcome.text and "step_00000006" in outcome.text, outcome.text
    runs = {step: line["run"] for step, line in steps_of(there).items()}
    assert runs == {1: 0, 2: 0, 3: 0, 4: 0, 5: 1, 6: 1}
    for key, value in tensors_of(saved, 6).items():
        assert value.equal(tensors_of(there, 6)[key]), key


def test_only_broken_ones_are_an_error(saved: Path, tmp_path: Path) -> None:
    for how in ("truncated", "a changed byte"):
        there = tmp_path / how.replace(" ", "-")
        shutil.copytree(saved, there)
        for step in (2, 4, 6):
            damage(there, step, how)
        outcome = load(f"--load {there} --save {there}")
        assert outcome.code == exit_codes.CONFIGURATION, outcome
        assert "step_00000002" in outcome.error and ("step_00000006" in outcome.error or how != "truncated")


def test_the_checkpoint_of_another_model(saved: Path, tmp_path: Path) -> None:
    outcome = load(f"--load {saved} --save {tmp_path} --num-layers 3 --ffn-hidden-size 48")
    assert outcome.code == exit_codes.CONFIGURATION
    for part in ("another model", "blocks.2.", "not in the checkpoint", "in the checkpoint"):
        assert part in outcome.error, outcome.error


def test_a_step_by_number(saved: Path, tmp_path: Path) -> None:
    assert load(f"--load {saved} --save {tmp_path}/a --ckpt-step 2").code == 0
    assert sorted(steps_of(tmp_path / "a")) == [3, 4, 5, 6]
    for key, value in tensors_of(saved, 6).items():
        assert value.equal(tensors_of(tmp_path / "a", 6)[key]), key
    missing = load(f"--load {saved} --save {tmp_path}/b --ckpt-step 3")
    assert missing.code == exit_codes.CONFIGURATION and "2, 4, 6" in missing.error
    broken = tmp_path / "broken"
    shutil.copytree(saved, broken)
    damage(broken, 4, "a changed byte")
    asked = load(f"--load {broken} --save {tmp_path}/c --ckpt-step 4")
    assert asked.code == exit_codes.CONFIGURATION and "step_00000004" in asked.error, "what was asked for, or nothing"


def test_finetune_takes_weights_only(saved: Path, tmp_path: Path) -> None:
    """The first loss is that of the loaded weights on the first batch; counters, moments and schedule are new."""
    assert load(f"--load {saved} --save {tmp_path} --finetune --lr 0.02 --seed 7").code == 0
    assert sorted(steps_of(tmp_path)) == [1, 2, 3, 4, 5, 6]
    progress = state_of(tmp_path, 6)["progress"]
    assert (progress["step"], progress["updates"], progress["consumed_samples"]) == (6, 6, 24)
    assert steps_of(tmp_path)[1]["loss"] < 0.97 * steps_of(saved)[1]["loss"], "the weights were trained"


def test_weights_without_moments(saved: Path, tmp_path: Path) -> None:
    """--no-save-optim leaves moments out; loading them needs a word; --no-load-optim starts them afresh."""
    small = tmp_path / "small"
    assert load(f"--save {small} --no-save-optim --exit-interval 3").code == exit_codes.LIMIT
    assert {kind for kind, _ in tensors_of(small, 3)} == {"weight"}
    outcome = load(f"--load {small} --save {tmp_path}/a")
    assert outcome.code == exit_codes.CONFIGURATION and "--no-load-optim" in outcome.error
    assert load(f"--load {small} --save {tmp_path}/b --no-load-optim").code == 0
    assert sorted(steps_of(tmp_path / "b")) == [4, 5, 6]
    progress = state_of(tmp_path / "b", 6)["progress"]
    assert (progress["step"], progress["updates"], progress["consumed_samples"]) == (6, 3, 24)
    again = load(f"--load {saved} --ckpt-step 2 --save {tmp_path}/c --no-load-optim")
    assert again.code == 0
    assert state_of(tmp_path / "c", 6)["progress"]["updates"] == 4


def test_settings_from_the_checkpoint(saved: Path, tmp_path: Path) -> None:
    """--use-checkpoint-args takes the model from the checkpoint; one that is given must be the same."""
    after = f"--train-iters 6 --load {saved} --ckpt-step 4 --save {tmp_path}"
    flags = f"{MOCK.replace('--num-layers 2', '--num-layers 1')} {after}"
    rest = f"{MOCK.replace('--num-layers 2', '').replace('--model llama', '')} {after} --use-checkpoint-args"
    wrong, refused, right = trained(1, flags, f"{flags} --use-checkpoint-args", rest)
    assert wrong.code == exit_codes.CONFIGURATION and "another model" in wrong.error
    assert refused.code == exit_codes.CONFIGURATION and "num-layers 1 given, 2 in the checkpoint" in refused.error
    assert right.code == 0, right
    for key, value in tensors_of(saved, 6).items():
        assert value.equal(tensors_of(tmp_path, 6)[key]), key


def test_other_data_are_named(saved: Path, tmp_path: Path) -> None:
    """Nothing forbids other data, but a run does not change them without a word."""
    outcome = load(f"--load {saved} --ckpt-step 4 --save {tmp_path} --seed 7")
    assert outcome.code == 0, outcome
    assert "seed 1234 in the checkpoint, 7 now" in outcome.text and "goes on at sample 16" in outcome.text


def test_a_model_that_would_compute_something_else(data: str, tmp_path: Path) -> None:
    """Weights of the same shapes, another function: refused, with both values; a note for a start of its own."""
    save, other = tmp_path / "save", tmp_path / "other"
    data += " --lr-decay-iters 8"
    trained(1, f"{data} --train-iters 1 --save {save}")
    go_on = f"{data} --save {save} --load {save} --kv-channels 8 --ffn-hidden-size 64 --hidden-dropout 0.1"  # sizes as they were
    afresh = f"{data} --save {other} --load {save} --finetune --train-iters 1 --rotary-base 500"
    done, wrong, tuned = trained(
        1, f"{go_on} --train-iters 2", f"{go_on} --train-iters 3 --rotary-base 500 --norm-epsilon 0.1", afresh
    )
    assert done.code == exit_codes.DONE, done.error
    assert wrong.code == exit_codes.CONFIGURATION, wrong
    for part in ("another model: ", "rotary_base 10000.0 in the checkpoint, 500.0 now", "norm_epsilon 1e-05 in the checkpoint, 0.1"):
        assert part in wrong.error, wrong.error
    assert tuned.code == exit_codes.DONE and "NOTE: " in tuned.text and "rotary_base 10000.0" in tuned.text, tuned


STATEFUL = """
from examples.my_model import MyModel
import torch

class Model(MyModel):
    def make_block(self, index):
        block = super().make_block(index)
        block.register_buffer("seen", torch.zeros(1), persistent=PERSISTENT)
        block.register_forward_pre_hook(lambda module, inputs: module.seen.add_(1) and None)
        return block
"""


@pytest.mark.parametrize("persistent", [True, False])
def test_state_outside_of_parameters(persistent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that steps change would be lost in a checkpoint: the run ends after its first step and names it."""
    name = f"stateful_{persistent}"
    (tmp_path / f"{name}.py").write_text(STATEFUL.replace("PERSISTENT", str(persistent)))
    monkeypatch.syspath_prepend(str(tmp_path))
    sizes = "--model.num-layers 2 --model.hidden-size 32 --model.num-attention-heads 4 --model.vocab-size 61"
    its = f"--model {name}:Model {sizes} --model.max-position-embeddings 16 --seq-length 16 --micro-batch-size 1 --lr 1e-3"
    run = f"{its} --mock-data --tokenizer-type NullTokenizer --train-iters 2 --eval-iters 0 --device cpu --log-dir {tmp_path}"
    done = train_here(run)
    if persistent:
        assert done.code == exit_codes.CONFIGURATION and "blocks.0.seen, blocks.1.seen: a buffer that a step changes" in done.error
    else:
        assert done.code == exit_codes.DONE, done
