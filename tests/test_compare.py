"""``megatron-lite compare``: the first step at which two runs part, what was set differently, the curves as a picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.cli.compare import first_difference, flatten, relative_difference
from megatron_lite.cli.main import main

CONFIG = {"model": {"num_layers": 2, "split": [1, 2]}, "optimizer": {"lr": 0.1}, "logging": {"log_dir": "a"}}

EQUAL = "no difference in loss or grad_norm above a relative 0"


def log(directory: Path, losses: dict[int, float | None], config: dict[str, Any] | None = CONFIG, **fields: float) -> Path:
    """A log directory with these losses by step."""
    directory.mkdir()
    lines = [{"step": step, "loss": loss, "grad_norm": 1.0 + step, **fields} for step, loss in losses.items()]
    lines.insert(1, {"step": 1, "eval_loss": 2.0, "split": "validation"})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config is not None:
        (directory / "run.json").write_text(json.dumps({"config": config, "starts": []}))
    return directory


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return log(tmp_path / "one", {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.5})


def compare(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, list[str], str]:
    """Exit code, lines printed, and what went to stderr."""
    code = main(["compare", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def test_equal_runs(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = compare(capsys, one, one)
    assert code == 0
    assert out == [
        "settings that differ: 0",
        "steps in common: 4 (1 to 4)",
        EQUAL,
    ]


def test_first_differing_step(one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = log(tmp_path / "two", {2: 3.0, 3: 2.0 * (1 + 1e-6), 4: 1.0, 5: 0.5})
    code, out, _ = compare(capsys, one, two)
    assert code == 1
    assert out[1] == "steps in common: 3 (2 to 4)"
    assert out[2] == "first difference: step 3, loss 2.0 | 2.000002 (relative 1e-06)"
    assert out[3] == "at step 4: loss 1.5 | 1.0"
    assert out[4] == "largest relative difference of a step: loss 0.333 (step 4), grad_norm 0 (step 4)"
    assert "--rtol" in out[5]


def test_rtol_decides_what_counts(one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = log(tmp_path / "two", {1: 4.0, 2: 3.0 * (1 + 1e-6), 3: 2.0 * (1 - 1e-6)})
    assert compare(capsys, one, two, "--rtol", 1e-5)[0] == 0
    assert compare(capsys, one, two, "--rtol", 1e-7)[0] == 1
    assert compare(capsys, two, one, "--rtol", 1e-7)[0] == 1
    code, _, err = compare(capsys, one, two, "--rtol", -1)
    assert code == 2 and "--rtol -1.0: 0 or more" in err


def test_the_gradient_norm_counts_too(one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = log(tmp_path / "two", {1: 4.0, 2: 3.0}, grad_norm=3.0)
    code, out, _ = compare(capsys, one, two)
    assert code == 1 and out[2] == "first difference: step 1, grad_norm 2.0 | 3.0 (relative 0.333)"


def test_a_loss_that_is_not_finite_is_null_and_differs(one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = log(tmp_path / "two", {1: 4.0, 2: None, 3: None})
    code, out, _ = compare(capsys, one, two, "--rtol", 0.5)
    assert code == 1 and out[2] == "first difference: step 2, loss 3.0 | None (relative inf)"
    assert compare(capsys, two, two)[0] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have(value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As another program may have written them: each equals itself and differs from every other value without end."""
    one, two = log(tmp_path / "one", {1: 4.0, 2: value, 3: 2.0}), log(tmp_path / "two", {1: 4.0, 2: 3.0, 3: None})
    code, out, _ = compare(capsys, one, two, "--rtol", 0.5)
    assert code == 1 and out[2] == f"first difference: step 2, loss {value} | 3.0 (relative inf)"
    assert out[4].startswith("largest relative difference of a step: loss inf (step 3)"), out
    assert compare(capsys, one, one)[0] == 0


def test_a_step_without_a_loss_differs(one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = log(tmp_path / "two", {1: 4.0})
    with open(two / "metrics.jsonl", "a") as f:
        f.write('{"step": 2, "grad_norm": 3.0}\n')
    code, out, _ = compare(capsys, one, two)
    assert code == 1 and out[2] == "first difference: step 2, loss 3.0 | None (relative inf)"
    assert out[4] == "largest relative difference of a step: loss inf (step 2), grad_norm 0 (step 2)"


@pytest.mark.parametrize("step", ["a", "7", 2.5, True, None, [1], {"a": 1}])
def test_lines_whose_step_is_no_whole_number_are_passed_over(
    step: Any, one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = log(tmp_path / "two", {1: 4.0, 2: 3.0})
    with open(two / "metrics.jsonl", "a") as f:
        for field in ("loss", "eval_loss"):
            f.write(json.dumps({"step": step, field: 9.0, "grad_norm": 1.0, "split": "validation"}) + "\n")
        f.write('{"loss": 9.0}\n')
    assert compare(capsys, one, two)[:2] == (0, ["settings that differ: 0", "steps in common: 2 (1 to 2)", EQUAL])
    three = log(tmp_path / "three", {})
    (three / "metrics.jsonl").write_text(json.dumps({"step": step, "loss": 1.0}) + "\n")
    code, _, err = compare(capsys, three, three)
    assert code == 2 and "holds no step" in err


def test_repeated_steps_count_by_their_last_line(one: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    two = log(tmp_path / "two", {1: 4.0, 2: 9.0})
    with open(two / "metrics.jsonl", "a") as f:
        f.write(json.dumps({"step": 2, "run": 1, "loss": 3.0, "grad_norm": 3.0}) + '\n{"step": 3, "lo')
    assert compare(capsys, one, two)[0] == 0


def test_settings_that_differ(one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model": {"num_layers": 4, "split": [1, 3]}, "optimizer": {"lr": 0.1, "new": None}, "logging": {"log_dir": "b"}}
    two = log(tmp_path / "two", {1: 4.0}, config)
    code, out, _ = compare(capsys, one, two)
    assert code == 0, "settings alone make no difference"
    assert out[:4] == [
        "settings that differ: 3",
        "  logging.log_dir: 'a' | 'b'",
        "  model.num_layers: 2 | 4",
        "  model.split: [1, 2] | [1, 3]",
    ]
    three = log(tmp_path / "three", {1: 4.0}, None)
    code, out, _ = compare(capsys, one, three)
    assert code == 0 and out[0] == "settings that differ: 4", "without run.json every setting is unknown"


@pytest.mark.parametrize("name", ["curves.png", "curves.svg"])
def test_curves_are_drawn(one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    two = log(tmp_path / "two", {1: 4.0, 2: None, 3: 2.5})
    picture = tmp_path / name
    code, out, _ = compare(capsys, one, two, "--plot", picture)
    assert code == 1 and out[-1] == f"curves: {picture}"
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG") if name.endswith("png") else b"<svg" in data
    assert len(data) > 5000


def test_a_picture_that_cannot_be_written(one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, text in ((tmp_path / "no" / "a.png", "No such file"), (tmp_path / "a.what", "not supported")):
        code, _, err = compare(capsys, one, one, "--plot", path)
        assert code == 2 and text in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("break_it", "text"),
    [
        (lambda d: None, "there is no directory"),
        (lambda d: d.mkdir(), "holds no metrics.jsonl: give the --log-dir of a run"),
        (lambda d: (d.mkdir(), (d / "metrics.jsonl").write_text("")), "holds no step"),
        (lambda d: log(d, {7: 1.0}), "no step in common: steps 1 to 4 and 7 to 7"),
        (lambda d: (log(d, {1: 1.0}), (d / "run.json").write_text("{")), "is not the record of a run"),
        (lambda d: (log(d, {1: 1.0}), (d / "run.json").write_text("[]")), "is not the record of a run"),
        (lambda d: log(d, {1: "x"}), "is not the record of a run: loss of step 1 is 'x'"),
        (lambda d: log(d, {1: True}), "is not the record of a run: loss of step 1 is True"),
        (lambda d: (d / "metrics.jsonl").mkdir(parents=True), "metrics.jsonl cannot be read: Is a directory"),
        (lambda d: (log(d, {1: 1.0}, None) / "run.json").mkdir(), "run.json cannot be read: Is a directory"),
    ],
)
def test_what_is_no_run(break_it: Any, text: str, one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    break_it(tmp_path / "two")
    code, _, err = compare(capsys, one, tmp_path / "two")
    assert code == 2 and text in err and len(err.splitlines()) == 1


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["compare", "--help"])
    assert end.value.code == 0 and "--rtol" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(["compare", "one"])
    assert end.value.code == 2


NUMBERS = st.one_of(st.none(), st.floats(width=32))


@given(NUMBERS, NUMBERS)
def test_relative_difference_is_symmetric_and_zero_for_equals(a: float | None, b: float | None) -> None:
    assert relative_difference(a, b) == relative_difference(b, a) >= 0
    assert (relative_difference(a, b) == 0) == (a == b or (a != a and b != b))
    finite = a is not None and b is not None and math.isfinite(a) and math.isfinite(b)
    assert relative_difference(a, b) in (0, math.inf) or (finite and relative_difference(a, b) <= 2)


@given(st.dictionaries(st.integers(1, 9), NUMBERS), st.dictionaries(st.integers(1, 9), NUMBERS), st.floats(0, 1))
def test_first_difference_against_a_search(a: dict[int, Any], b: dict[int, Any], rtol: float) -> None:
    rows = [{step: {"loss": loss, "grad_norm": 1.0} for step, loss in losses.items()} for losses in (a, b)]
    want = min((s for s in a.keys() & b.keys() if relative_difference(a[s], b[s]) > rtol), default=math.inf)
    found = first_difference(rows[0], rows[1], rtol)
    assert (math.inf if found is None else found[0]) == want


def test_flatten() -> None:
    assert dict(flatten(CONFIG)) == {"model.num_layers": 2, "model.split": [1, 2], "optimizer.lr": 0.1, "logging.log_dir": "a"}
