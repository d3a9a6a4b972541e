"""Numbers that are not finite: found on every rank alike, named by place, and handled as the policy says."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_toys import (
    MOCK,
    assert_same_run,
    bad_steps,
    nan_weight,
    poisoned,
    state_of,
    steps_of,
    tensors_of,
    trained,
    without_samples,
)

from megatron_lite.config import exit_codes

TEN = f"{MOCK} --train-iters 10"
PP = "--pipeline-model-parallel-size 2"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"


# ---- the place


@pytest.mark.parametrize("flags", ["", "--bf16", "--fp64"])
def test_a_weight_that_is_not_a_number_is_named(flags: str, tmp_path: Path) -> None:
    weight = "blocks.1.mlp.down.weight"
    [outcome] = trained(1, (f"{TEN} {flags} --log-dir {tmp_path}", nan_weight, weight))
    assert outcome.code == exit_codes.NON_FINITE
    for part in ("step 1,", "microbatch 0,", "rank 0:", "output of blocks.1.mlp.down in the forward pass", weight):
        assert part in outcome.error, outcome.error
    [line] = steps_of(tmp_path).values()
    assert line["skipped"] and line["loss"] is None and line["grad_norm"] is None, "the failing step has its line"


@pytest.mark.parametrize(
    ("ranks", "flags", "rank"),
    [(2, PP, 1), (2, TP, 0), (2, "--use-distributed-optimizer", 0), (4, f"{PP} {TP}", 2)],
    ids=["pp2", "tp2", "dp2", "pp2-tp2"],
)
def test_a_weight_is_named_in_every_layout(ranks: int, flags: str, rank: int, tmp_path: Path) -> None:
    """The place is the first in the model's order, whichever rank saw it; no rank waits for another."""
    weight = "blocks.1.attention.output.weight"
    [outcome] = trained(ranks, (f"{TEN} {flags} --log-dir {tmp_path}", nan_weight, weight), timeout=60)
    assert outcome.code == exit_codes.NON_FINITE
    for part in ("step 1,", "microbatch 0,", f"rank {rank}:", "output of blocks.1.attention.output in", weight):
        assert part in outcome.error, outcome.error


@pytest.mark.parametrize(
    ("ranks", "flags", "expected"),
    [
        (1, "", "microbatch 2, rank 0"),
        (2, PP, "microbatch 2, rank 1"),
        (2, "", "microbatch 1, rank 0"),
        (2, TP, "microbatch 2, rank 1"),
    ],
    ids=["one", "pp2", "dp2", "tp2"],
)
def test_a_module_in_one_microbatch(ranks: int, flags: str, expected: str, tmp_path: Path) -> None:
    """Sample 10 is in the third step, microbatch 2 of 4 (or 1 of 2 on dp rank 0); under tp only rank 1 has it."""
    tp_rank = 1 if "tensor" in flags else None
    args = ("blocks.1.mlp_norm", "forward", (10,), float("inf"), tp_rank)
    flags = f"{TEN} {flags} --log-dir {tmp_path} --attention-dropout 0.1 --hidden-dropout 0.1"
    [outcome] = trained(ranks, (flags, poisoned, *args), timeout=60)
    assert outcome.code == exit_codes.NON_FINITE
    expected = f"step 3, {expected}: the output of blocks.1.mlp_norm in the forward pass"
    assert expected in outcome.error and "weights that are not finite" not in outcome.error, outcome.error


@pytest.mark.parametrize(
    ("ranks", "flags", "expected"),
    [
        (1, "", "microbatch 3, rank 0"),
        (1, "--recompute-granularity full", "microbatch 3, rank 0"),
        (2, f"{PP} --decoder-last-pipeline-num-layers 1", "microbatch 3, rank 0"),
        (2, "--use-distributed-optimizer --overlap-grad-reduce", "microbatch 1, rank 1"),
    ],
    ids=["one", "recompute", "pp2", "dp2-zero1"],
)
def test_a_gradient_in_one_microbatch(ranks: int, flags: str, expected: str, tmp_path: Path) -> None:
    """The forward pass is finite, the gradient of block 0's output is not: its last parameter is where it began."""
    args = ("blocks.0", "backward", (11,))
    [outcome] = trained(ranks, (f"{TEN} {flags} --log-dir {tmp_path}", poisoned, *args), timeout=60)
    assert outcome.code == exit_codes.NON_FINITE
    text = f"step 3, {expected}: every output of the forward pass is finite, the gradient of blocks.0.mlp.down.weight is not"
    assert text in outcome.error, outcome.error


def test_a_sum_that_is_too_large(tmp_path: Path) -> None:
    [outcome] = trained(1, (f"{TEN} --log-dir {tmp_path}", bad_steps, (2,)))
    assert outcome.code == exit_codes.NON_FINITE and "step 2: a sum over ranks" in outcome.error


# ---- policies


@pytest.mark.parametrize("ranks", [1, 2])
def test_skip_leaves_the_step_out(ranks: int, tmp_path: Path) -> None:
    """The weights are those of a run without these samples, up to its schedule; the skip is said and counted."""
    flags = f"{TEN} --bf16 --on-nan skip"
    a, b = tmp_path / "a", tmp_path / "b"
    outcome, _ = trained(
        ranks,
        (f"{flags} --save {a}", poisoned, "blocks.0.mlp_norm", "forward", (9,)),
        (f"{flags} --save {b} --train-iters 9 --lr-decay-iters 10", without_samples, 8, 12),
    )
    assert outcome.code == 0 and "step 3: not finite, the update is skipped (loss nan" in outcome.text
    assert [s for s, line in steps_of(a).items() if line["skipped"]] == [3]
    assert state_of(a, 10)["progress"]["updates"] == 9 and state_of(a, 10)["scaler"]["skips"] == 1
    for key, value in tensors_of(b, 9).items():
        assert value.equal(tensors_of(a, 10)[key]), key


def test_skipping_ends(tmp_path: Path) -> None:
    """A broken model is not skipped for ever, in any precision: 50 in a row, or the smallest scale."""
    flags = f"{MOCK} --train-iters 60 --log-dir {tmp_path}"
    weight = (nan_weight, "blocks.0.attention.query.weight")
    fp32, fixed, dynamic = trained(
        1,
        (f"{flags}/a --on-nan skip", *weight),
        (f"{flags}/b --fp16 --loss-scale 64", *weight),
        (f"{flags}/c --fp16 --initial-loss-scale 256 --min-loss-scale 4", *weight),
    )
    for outcome, folder in ((fp32, "a"), (fixed, "b")):
        assert outcome.code == exit_codes.NON_FINITE, outcome
        assert "50 steps in a row were not finite" in outcome.error
        assert "weights that are not finite: blocks.0.attention.query.weight" in outcome.error
        assert sorted(steps_of(tmp_path / folder)) == list(range(1, 51))
    assert dynamic.code == exit_codes.NON_FINITE and "smallest loss scale, 4" in dynamic.error
    assert "step 8," in dynamic.error and "blocks.0.attention.query.weight" in dynamic.error
    scales = [line["loss_scale"] for line in steps_of(tmp_path / "c").values()]
    assert scales == [256, 256, 128, 64, 32, 16, 8, 4]


def test_a_loss_that_is_too_large_for_fp16(tmp_path: Path) -> None:
    """The scale comes down until gradients fit, and the run goes on; where none is small enough it says so."""
    flags = f"{TEN} --fp16 --hysteresis 1 --save {tmp_path}"
    [outcome] = trained(1, (f"{flags}/a --train-iters 20", poisoned, "head", "forward", (), 1e4))
    lines = steps_of(tmp_path / "a")
    skipped = [s for s, line in lines.items() if line["skipped"]]
    assert outcome.code == 0 and skipped[:5] == [1, 2, 3, 4, 5] and len(skipped) < 17, outcome
    assert [lines[s]["loss_scale"] for s in skipped] == [2.0 ** (16 - i) for i in range(len(skipped))]
    assert state_of(tmp_path / "a", 20)["progress"]["updates"] == 20 - len(skipped)
    [outcome] = trained(1, (f"{flags}/b --train-iters 60", poisoned, "head", "forward", (), 1e6))
    assert outcome.code == exit_codes.NON_FINITE and "smallest loss scale, 1" in outcome.error
    assert "every output of the forward pass is finite, the gradient of " in outcome.error, outcome.error


# ---- rollback


@pytest.mark.parametrize(("ranks", "flags"), [(1, ""), (2, PP), (2, "--bf16 --use-distributed-optimizer")])
def test_rollback_leaves_the_samples_out(ranks: int, flags: str, tmp_path: Path) -> None:
    """Sample 29 is bad: step 8 goes back to step 6, and samples 24 to 31 are never read. Then it is resumed."""
    flags = f"{TEN} {flags} --on-nan rollback"
    bad = (poisoned, "blocks.0.mlp_norm", "forward", (29,))
    a, b = tmp_path / "a", tmp_path / "b"
    outcomes = trained(
        ranks,
        (f"{flags} --save {a} --save-interval 3 --exit-interval 9", *bad),
        (f"{flags} --save {a} --load {a}", *bad),
        (f"{flags} --save {b}", without_samples, 24, 32),
    )
    assert [o.code for o in outcomes] == [exit_codes.LIMIT, 0, 0], outcomes
    assert "rolled back to step 6 (1 of 3), samples 24 to 31 are skipped" in outcomes[0].text
    assert "step 8, microbatch" in outcomes[0].text and "blocks.0.mlp_norm" in outcomes[0].text
    progress = state_of(a, 10)["progress"]
    assert progress["skipped_ranges"] == [[24, 32]] and progress["rollbacks"] == 1
    assert progress["consumed_samples"] == 48 and progress["scheduled_samples"] == 40
    # Everything but the record of the rollback is as if the samples had never been there.
    ours, theirs = steps_of(a), steps_of(b)
    for step in range(1, 11):
        for name in ("loss", "grad_norm", "learning_rate", "consumed_samples"):
            assert ours[step][name] == theirs[step][name], (step, name)
    for key, value in tensors_of(b, 10).items():
        assert value.equal(tensors_of(a, 10)[key]), key


def test_rollback_at_most_three_times(tmp_path: Path) -> None:
    bad = (poisoned, "blocks.0.mlp_norm", "forward", (24, 28, 33, 38, 43))
    [outcome] = trained(1, (f"{TEN} --on-nan rollback --save {tmp_path} --save-interval 3", *bad))
    assert outcome.code == exit_codes.NON_FINITE
    assert "3 rollbacks did not get past it" in outcome.error and outcome.text.count("rolled back to step 6") == 3
    assert "samples 24 to 27 are" in outcome.text and "samples 24 to 35 are" in outcome.text
    for step in (3, 6):
        assert state_of(tmp_path, step)["progress"]["rollbacks"] == 0


def test_rollback_needs_a_checkpoint_of_this_run(tmp_path: Path) -> None:
    """Neither nothing, nor the source of a fine-tuning. (A directory with another run's checkpoints is refused.)"""
    bad = (poisoned, "blocks.0.mlp_norm", "forward", (5,))
    flags = f"{TEN} --on-nan rollback --save-interval 3"
    old = tmp_path / "old"
    outcomes = trained(
        1,
        f"{flags} --save {old}",
        (f"{flags} --save {tmp_path}/new", *bad),
        (f"{flags} --save {tmp_path}/tuned --load {old} --finetune", *bad),
    )
    for outcome in outcomes[1:]:
        assert outcome.code == exit_codes.NON_FINITE and "no checkpoint yet to roll back to" in outcome.error, outcome


def test_rollback_to_what_was_loaded(tmp_path: Path) -> None:
    """Before the first save of this start, the checkpoint that it loaded is the one to go back to."""
    flags = f"{TEN} --on-nan rollback --save {tmp_path} --load {tmp_path}"
    bad = (poisoned, "blocks.0.mlp_norm", "forward", (18,))
    outcomes = trained(1, f"{flags} --exit-interval 4", (flags, *bad))
    assert outcomes[1].code == 0 and "rolled back to step 4" in outcomes[1].text
    assert state_of(tmp_path, 10)["progress"]["skipped_ranges"] == [[16, 20]]


def test_data_that_do_not_repeat_end_cleanly(tmp_path: Path) -> None:
    """In the megatron order there are only as many samples as were asked for: leaving some out ends the run early."""
    from train_toys import TINY, make_data

    flags = f"{TINY} --data-path {make_data(tmp_path)} --split 1,0,0 --sample-order megatron --train-iters 17"
    bad = (poisoned, "blocks.0.mlp_norm", "forward", (18,))
    save = f"--on-nan rollback --save {tmp_path}/s --save-interval 3"
    clean, outcome = trained(1, f"{flags} --save {tmp_path}/clean", (f"{flags} {save}", *bad))
    assert clean.code == 0 and sorted(steps_of(tmp_path / "clean")) == list(range(1, 18))
    assert outcome.code == 0, outcome
    last = max(steps_of(tmp_path / "s"))
    assert f"training ends after step {last} of 17" in outcome.text and last < 17
    assert state_of(tmp_path / "s", last)["progress"]["step"] == last


def test_same_run_helper_sees_a_difference(tmp_path: Path) -> None:
    """The comparison on which these tests and those of resuming stand is not empty."""
    trained(1, f"{TEN} --save {tmp_path}/a", f"{TEN} --save {tmp_path}/b --seed 5")
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "a", tmp_path / "b", 10)
