"""Faults that using the program from outside brought to light, one test for each kind."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron_lite.cli import generate, preprocess
from megatron_lite.cli.train import problem_functions
from megatron_lite.config.check import check, check_files, value_problems
from megatron_lite.config.load import load
from megatron_lite.config.problem import ConfigError, format_problems
from megatron_lite.config.summary import notices
from megatron_lite.mesh.local import rank_info

GOOD = shlex.split(
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 32 --seq-length 16 "
    "--max-position-embeddings 16 --train-iters 2 --lr 0.01 --mock-data --tokenizer-type NullTokenizer "
    "--attention-dropout 0 --save d"
)


def problems(*argv: str) -> str:
    return format_problems(check(load([*GOOD, *argv]).config, 1, problem_functions()))


def test_the_base_has_no_problem() -> None:
    assert check(load(GOOD).config, 1, problem_functions()) == []


@pytest.mark.parametrize(
    "flag", ["--init-method-std", "--norm-epsilon", "--exit-duration-in-mins", "--save-interval-minutes", "--peak-tflops"]
)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_are_finite(flag: str, value: str) -> None:
    assert flag in problems(flag, value)
    assert "finite" in problems(flag, value)


def test_a_number_that_a_room_refuses_is_refused_once() -> None:
    assert problems("--clip-grad", "nan").count("clip-grad") == 1
    assert value_problems(load([*GOOD, "--lr", "nan"]).config)


@pytest.mark.parametrize("flag", ["--save", "--load", "--log-dir", "--tensorboard-dir"])
def test_a_variable_that_is_not_set_is_no_directory(flag: str) -> None:
    assert f"{flag} is given an empty text" in problems(flag, "")


@pytest.mark.parametrize("flag", ["--save", "--tensorboard-dir"])
def test_what_cannot_be_written_is_told_before_training(flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/below/it")):
        assert f"{flag} {path} cannot be written" in format_problems(
            check_files(load([*GOOD, flag, str(path)]).config)
        )
    assert check_files(load([*GOOD, flag, str(tmp_path / "new" / "one")]).config) == []
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_pattern_without_a_parameter_is_an_error() -> None:
    assert "'*.atention.*' matches no parameter" in problems("--no-weight-decay-patterns", "*.mlp.*", "*.atention.*")


@pytest.mark.parametrize("text", ["016", "0o16", "0x10", "0b11", "1:30", "-016"])
def test_numbers_of_a_file_are_decimal(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"training:\n  global_batch_size: {text}\noptimizer:\n  lr: 0.5\n  min_lr: 0\n")
    with pytest.raises(ConfigError, match="expected a whole number"):
        load([*GOOD, "--config", str(path)])


@pytest.mark.parametrize("text", ["training: {seed: &a [*a]}", "training:\n  seed: !!python/name:os.system ''", "a: &a [*a]"])
def test_what_yaml_cannot_construct_is_a_problem(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load([*GOOD, "--config", str(path)])


@pytest.mark.parametrize(
    "typed",
    [
        "--rotary-percent 0.5",
        "--rotary-base 500000",
        "--num-query-groups 2",
        "--position-embedding-type rope --rope-scaling-factor 4",
        "--lr-scaling-base-batch 64",
        "--manual-gc-interval 5",
        "--profile",
    ],
)
def test_what_has_no_effect_is_said(typed: str) -> None:
    assert len(notices(load([*GOOD, *typed.split()]).config)) == 1


def test_a_prompt_that_is_not_utf8_is_a_problem() -> None:
    args = generate.parser().parse_args(["--load", "d", "--prompt", "good", "--prompt", "a\udcff"])
    with pytest.raises(ValueError, match="prompt 2 is not UTF-8"):
        generate.prepare(args, rank_info({}))


def test_an_empty_output_prefix_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        preprocess.main(["--input", "x.jsonl", "--output-prefix", "", "--tokenizer-type", "NullTokenizer"])
    assert "--output-prefix is given an empty text" in capsys.readouterr().err
