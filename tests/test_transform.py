"""Transforms of rows: keyed by sample, checked, the same however rows are read; and the examples."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.transforms import documents, fill_in_the_middle, mask_tokens, shuffle_sentences
from hypothesis import given, settings
from hypothesis import strategies as st
from train_toys import MOCK, assert_same_run, make_data, train_here, trained

from megatron_lite.config import exit_codes
from megatron_lite.config.schema_io import DataConfig
from megatron_lite.data.build import build_datasets
from megatron_lite.data.loader import Loader, SampleError
from megatron_lite.data.mock import MockDataset
from megatron_lite.data.row import Row
from megatron_lite.data.transform import Transform, TransformedRows, load_transform
from megatron_lite.train.build import Built

S, V = 24, 61


def noise(row: Row, generator: np.random.Generator) -> Row:
    """Other tokens altogether."""
    return replace(row, tokens=generator.integers(0, V, len(row.tokens), dtype=np.int32))


def rows(function: Any, seed: int = 1) -> TransformedRows:
    return TransformedRows(MockDataset(V, S, 1), Transform("m:f", function, ""), seed, V)


# ---- what is drawn


def test_randomness_is_keyed_by_seed_and_sample() -> None:
    data = rows(noise)
    first = [data.row(j) for j in range(20)]
    again = rows(noise)
    for j in reversed(range(20)):
        assert np.array_equal(again.row(j).tokens, first[j].tokens) and first[j].index == j
    assert len({tuple(r.tokens) for r in first}) == 20 and first[0].tokens.dtype == np.int64
    assert not np.array_equal(rows(noise, seed=2).row(0).tokens, first[0].tokens)


@pytest.mark.parametrize("workers", [0, 3])
def test_any_layout_and_any_start_gives_the_same_rows(workers: int) -> None:
    """And the digest is of what came out."""

    def digests(function: Any, begin: int, dp: int) -> tuple[list[Any], list[int]]:
        found, seen = [], []
        for d in range(dp):
            options: dict[str, Any] = {"micro_batch_size": 1, "seq_length": S, "dp_index": d, "dp_size": dp}
            with Loader(rows(function), num_workers=workers, **options) as loader:
                for step in range(begin, 4):
                    made = loader.step(4 * step, 4)
                    found += [(step, b.first_row, b.tokens.tolist()) for b in made.microbatches]
                    seen.append(made.digest)
        return sorted(found), seen

    whole, digest = digests(noise, 0, 1)
    assert digests(noise, 2, 1)[0] == [x for x in whole if x[0] >= 2]
    assert digests(noise, 0, 2)[0] == whole == digests(noise, 0, 4)[0]
    plain = digests(lambda row, _: row, 0, 1)[1]
    assert not set(digest) & set(plain)


# ---- what comes back


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda r, g: None, "gave NoneType, not a Row"),
        (lambda r, g: r.tokens, "gave ndarray, not a Row"),
        (lambda r, g: replace(r, tokens=r.tokens[:-1]), r"gave tokens that are int64 \[24\], not whole numbers \[25\]"),
        (lambda r, g: replace(r, tokens=r.tokens * 1.0), r"gave tokens that are float64 \[25\]"),
        (lambda r, g: replace(r, tokens=r.tokens.tolist()), "gave tokens that are list"),
        (lambda r, g: replace(r, tokens=r.tokens + V), "outside the vocabulary of 61 ids"),
        (lambda r, g: replace(r, tokens=r.tokens - V), "gave the token id -"),
        (lambda r, g: replace(r, starts=np.array([1, 2])), "gave starts of documents that are not ascending"),
        (lambda r, g: replace(r, starts=np.array([0, 5, 5])), "gave starts of documents"),
        (lambda r, g: replace(r, starts=np.array([0, 25])), "gave starts of documents"),
        (lambda r, g: replace(r, starts=[0]), "gave starts of documents"),
        (lambda r, g: replace(r, starts=np.array([], dtype=np.int64)), "gave starts of documents"),
        (lambda r, g: replace(r, cuts=np.array([0, 4])), "gave cuts that are not ascending positions from 1 to 23"),
        (lambda r, g: replace(r, loss_mask=np.ones(25)), r"gave a loss mask of shape \[25\], not \[24\]"),
        (lambda r, g: replace(r, loss_mask=np.full(24, 0.5)), "gave a loss mask with other values than 0 and 1"),
        (lambda r, g: replace(r, loss_mask=np.full(24, 2, np.uint8)), "gave a loss mask with other values than 0 and 1"),
        (lambda r, g: r.tokens.put(0, 1), r"ValueError: .*read-only"),
        (lambda r, g: r.starts.fill(0), r"ValueError: .*read-only"),
        (lambda r, g: sys.exit(3), r"SystemExit: 3 \(.*test_transform.py:\d+\)"),
        (lambda r, g: 1 / 0, r"ZeroDivisionError: division by zero \(.*test_transform.py:\d+\)"),
    ],
)
def test_what_is_no_row_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"--transform m:f, sample 7: .*{message}"):
        rows(function).row(7)
    loader = Loader(rows(function), micro_batch_size=1, seq_length=S, num_workers=0)
    with pytest.raises(SampleError, match=f"sample 3 .*--transform m:f, sample 3: .*{message}"):
        loader.step(3, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "give module:function"),
        (":f", "give module:function"),
        ("not_there:f", "no module not_there in "),
        ("team_t:g", r"team_t.py has no function g; it has f"),
        ("team_t:NUMBER", "has no function NUMBER"),
        ("team_broken:f", "team_broken.py, line 1"),
    ],
)
def test_what_cannot_be_loaded_says_why(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("team_t.py").write_text("def f(row, generator): return row\nNUMBER = 3\n")
    Path("team_broken.py").write_text("def f(:\n")
    with pytest.raises(ValueError, match=f"--transform {name}: .*{message}"):
        load_transform(name)
    config = DataConfig(seq_length=S, mock_data=True, transform=name)
    found = build_datasets(config, asked=(5, 0, 0), seed=1, vocab_size=V)
    assert message.split(" ")[0] in str(found.problems[0])


# ---- runs


def test_validation_rows_stay(tmp_path: Path) -> None:
    prefix = make_data(tmp_path)
    name = f"{noise.__module__}:noise"
    options: dict[str, Any] = {"seq_length": 16, "data_path": (prefix,), "split": "1,1"}
    changed = build_datasets(DataConfig(**options, transform=name), asked=(5, 5, 0), seed=1, vocab_size=V)
    plain = build_datasets(DataConfig(**options), asked=(5, 5, 0), seed=1, vocab_size=V)
    assert not changed.problems and changed.train and changed.valid and plain.train and plain.valid
    assert np.array_equal(changed.valid.row(1).tokens, plain.valid.row(1).tokens)
    assert not np.array_equal(changed.train.row(1).tokens, plain.train.row(1).tokens)
    assert changed.facts["transform"]["name"] == name and not plain.facts


def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, two ranks, and one that is stopped are the same run; another source of the function is named."""
    monkeypatch.chdir(tmp_path)
    text = "import numpy as np\nfrom dataclasses import replace\n"
    text += "def turn(row, generator):\n    return replace(row, tokens=np.roll(row.tokens, generator.integers(9)))\n"
    Path("team_turn.py").write_text(text)
    flags = f"{MOCK} --fp64 --train-iters 4 --transform team_turn:turn"
    assert train_here(f"{flags} --save one").code == 0
    assert [train_here(f"{flags} --save parts --load parts --exit-interval 2").code for _ in range(2)] == [exit_codes.LIMIT, 0]
    assert_same_run(tmp_path / "one", tmp_path / "parts", 4)
    assert trained(2, f"{flags} --save {tmp_path}/two")[0].code == 0
    assert_same_run(tmp_path / "one", tmp_path / "two", 4, tolerance=1e-12)
    Path("team_turn.py").write_text(text + "# another\n")
    again = train_here(f"{flags} --load one --log-dir again --train-iters 5 --lr-decay-iters 4")
    assert again.code == 0 and "the transform is not that of the checkpoint" in again.text


def test_what_cannot_be_read_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that raises on one of two ranks, a disk that fails in an evaluation: steps up to there are saved on both."""
    monkeypatch.chdir(tmp_path)
    broken = tmp_path / "broken"
    text = f"from pathlib import Path\ndef f(row, generator):\n    if row.index == 9 and Path({str(broken)!r}).exists():\n"
    Path("team_raises.py").write_text(text + "        raise KeyError('no such thing')\n    return row\n")
    flags = f"{MOCK} --fp64 --train-iters 4 --transform team_raises:f"
    assert train_here(f"{flags} --save whole").code == 0
    broken.touch()
    outcome = trained(2, f"{flags} --save {tmp_path}/two --zero-stage 1")[0]
    assert outcome.code == exit_codes.CONFIGURATION and outcome.error.startswith("step 3: sample 9 (data-parallel rank 1) could not be")
    assert "KeyError: 'no such thing'" in outcome.error and "team_raises.py:4" in outcome.error and "step 2: saved" in outcome.text
    broken.unlink()
    assert trained(2, f"{flags} --save {tmp_path}/two --load {tmp_path}/two --zero-stage 1")[0].code == 0
    assert_same_run(tmp_path / "whole", tmp_path / "two", 4, tolerance=1e-12)
    evaluated = f"{MOCK} --train-iters 4 --eval-interval 3 --eval-iters 1 --save {tmp_path}/eval"
    outcome = trained(2, (evaluated, no_held_out_data))[0]
    assert outcome.code == exit_codes.CONFIGURATION and "step 3: saved" in outcome.text
    assert outcome.error.startswith("validation after step 3: sample 1 (data-parallel rank 1) could not be read: OSError: gone")


@contextlib.contextmanager
def no_held_out_data(built: Built) -> Iterator[None]:
    """Rank 1 cannot read the validation data."""

    def row(j: int) -> Row:
        raise OSError("gone")

    if built.mesh.rank == 1:
        assert built.data.valid is not None
        built.data.valid.dataset.row = row  # type: ignore[method-assign]
    yield


def test_a_function_that_does_not_return_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("megatron_lite.data.loader._PATIENCE", 0.1)

    def slow(row: Row, generator: np.random.Generator) -> Row:
        if row.index == 6:
            time.sleep(0.9)
        return row

    with Loader(rows(slow), micro_batch_size=2, seq_length=S, num_workers=1, dp_index=1, dp_size=2) as loader:
        loader.step(4, 4)
    lines = capsys.readouterr().err.splitlines()
    said = r"waiting \d s for sample 6 \(data-parallel rank 1\), in --transform m:f"
    assert lines and all(re.fullmatch(said, line) for line in lines), lines


def test_steps_without_loss_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, the second and the fourth of them."""
    monkeypatch.chdir(tmp_path)
    text = "import numpy as np\nfrom dataclasses import replace\ndef mask(row, generator):\n"
    Path("team_mask.py").write_text(text + "    return replace(row, loss_mask=np.zeros(len(row.tokens) - 1, dtype=np.uint8))\n")
    found = train_here(f"{MOCK} --train-iters 5 --transform team_mask:mask")
    warned = [line for line in found.text.splitlines() if "carries loss, so nothing is learned" in line]
    assert found.code == 0 and [line.split(" of step ")[1][0] for line in warned] == ["1", "2", "4"], found.text
    assert "such steps" not in train_here(f"{MOCK} --train-iters 2").text


# ---- the examples

PRE, SUF, MID, EOD = 90, 91, 92, 9
row_values = st.tuples(
    st.lists(st.sampled_from([1, 2, 3, 4, EOD]), min_size=S + 1, max_size=S + 1),
    st.lists(st.integers(1, S - 1), max_size=3),
    st.integers(0, 1000),
)


def made(tokens: list[int], cuts: list[int], mask: np.ndarray | None = None) -> Row:
    """A row whose documents end with EOD."""
    found = np.array(tokens)
    starts = np.union1d([0], np.flatnonzero(found[:-1] == EOD) + 1)
    return Row(found, starts, 0, mask, np.setdiff1d(cuts, starts) if cuts else None)


def unfilled(text: list[int]) -> list[int]:
    """What a changed document was made of."""
    assert text[0] == PRE
    s, m = text.index(SUF), text.index(MID)
    if s == 1 and text[1] == SUF:
        # SPM, or PSM without a prefix: both put what is behind the middle sentinel before the suffix
        return text[m + 1 :] + text[2:m]
    return text[1:s] + text[m + 1 :] + text[s + 1 : m]


@given(row_values, st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=150, deadline=None)
def test_fill_in_the_middle(values: tuple[list[int], list[int], int], spm: float) -> None:
    """Each document is there, but for three tokens before its end; borders are where they were; all of them or none."""
    tokens, cuts, seed = values
    row = made(tokens, cuts)
    fim = partial(fill_in_the_middle, prefix_id=PRE, suffix_id=SUF, middle_id=MID, eod_id=EOD, spm=spm)
    result = TransformedRows(_One(row), Transform("m:fim", partial(fim, rate=1.0), ""), seed, 93).row(0)
    borders = np.union1d(row.starts, [] if row.cuts is None else row.cuts).tolist()
    assert sorted({*result.starts.tolist(), *([] if result.cuts is None else result.cuts.tolist())}) == borders
    for start, stop in documents(row):
        before, after = row.tokens[start:stop].tolist(), result.tokens[start:stop].tolist()
        ended = before[-1] == EOD
        body = before[:-1] if ended else before
        if len(body) < 4:
            assert after == before
            continue
        assert not ended or after.pop() == EOD
        assert unfilled(after) == body[:-3]
        assert (spm < 1 or after[1] == SUF) and start in result.starts
        assert stop > S or stop in result.starts
    same = fim(row, np.random.default_rng(seed), rate=0.0)
    assert np.array_equal(same.tokens, row.tokens) and np.array_equal(same.starts, row.starts)


class _One:
    endless = True

    def __init__(self, row: Row) -> None:
        self.only = row

    def __len__(self) -> int:
        return 1

    def row(self, j: int) -> Row:
        return self.only


def test_what_does_not_count_stays() -> None:
    """Conversations, and the padding of packed rows."""
    mask = np.ones(S, dtype=np.uint8)
    mask[3], mask[20:] = 0, 0
    row = made([1] * 7 + [EOD] + [2] * 7 + [EOD] + [3] * 9, [], mask)
    result = fill_in_the_middle(row, np.random.default_rng(1), prefix_id=PRE, suffix_id=SUF, middle_id=MID, eod_id=EOD, rate=1)
    assert list(documents(row)) == [(8, 16)]
    assert np.array_equal(result.tokens[:8], row.tokens[:8]) and np.array_equal(result.tokens[16:], row.tokens[16:])
    assert {PRE, SUF, MID} <= set(result.tokens[8:16].tolist())


def test_rates_of_fill_in_the_middle() -> None:
    data = [made([1, 2, 3, 4] * 6 + [1], []) for _ in range(400)]
    draw = np.random.default_rng(0)
    fim = partial(fill_in_the_middle, prefix_id=PRE, suffix_id=SUF, middle_id=MID, eod_id=EOD)
    changed = [r for r in (fim(row, draw).tokens.tolist() for row in data) if PRE in r]
    assert 340 <= len(changed) <= 380  # 0.9 of 400, and four standard deviations
    assert 150 <= sum(r[1] == SUF for r in changed) <= 240  # half, and PSM without a prefix


@given(row_values)
@settings(max_examples=60, deadline=None)
def test_the_two_that_harm(values: tuple[list[int], list[int], int]) -> None:
    tokens, cuts, seed = values
    row, draw = made(tokens, cuts), np.random.default_rng(seed)
    masked = mask_tokens(row, draw, mask_id=MID, eod_id=EOD, rate=0.5)
    hidden = masked.tokens == MID
    assert np.array_equal(masked.tokens[~hidden], row.tokens[~hidden]) and not hidden[row.tokens == EOD].any()
    assert masked.loss_mask is not None and np.array_equal(masked.loss_mask == 0, hidden[1:])
    shuffled = shuffle_sentences(row, draw, end_ids=[3], eod_id=EOD)
    for start, stop in documents(row):
        before, after = row.tokens[start:stop].tolist(), shuffled.tokens[start:stop].tolist()
        assert sorted(before) == sorted(after) and (before[-1] != EOD or after[-1] == EOD)


def test_sentences_stay_whole() -> None:
    row = made([1, 3, 2, 2, 3, 4, 4, 4, 3, EOD] + [1] * 15, [])
    seen = {tuple(shuffle_sentences(row, np.random.default_rng(i), end_ids=[3], eod_id=EOD).tokens[:10]) for i in range(40)}
    parts = ([1, 3], [2, 2, 3], [4, 4, 4, 3])
    assert seen == {(*a, *b, *c, EOD) for a, b, c in itertools.permutations(parts)}
