"""Curricula: the file read strictly, stages of blends exact at every position, shorter rows, resumes across borders."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train_toys import MOCK, SAMPLES, TINY, assert_same_run, make_data, opened_in, steps_of, train_here, trained

from megatron_lite.config.problem import ConfigError
from megatron_lite.config.schema_io import DataConfig
from megatron_lite.data.batch import make_batch
from megatron_lite.data.blend import WindowsBlend
from megatron_lite.data.build import build_datasets
from megatron_lite.data.curriculum import Curriculum, ShorterRows, Stage, StagedBlend, load_curriculum, staged_blend
from megatron_lite.data.index_writer import IndexedWriter
from megatron_lite.data.loader import Loader
from megatron_lite.data.row import Row
from megatron_lite.testing.ranks import run_ranks

S = 12


def write(folder: Path, text: str) -> str:
    (folder / "c.yaml").write_text(text)
    return str(folder / "c.yaml")


# ---- the file


def test_a_file(tmp_path: Path) -> None:
    """What a stage does not name stays as it was; a stage begins at the first sample not below its tokens."""
    text = "stages:\n- {at: 0, seq_length: 4}\n- at: 1K\n  weights: {a: 3, b: 0.5}\n- {at: 0.002M, seq_length: 12}\n"
    found = load_curriculum(write(tmp_path, text), S)
    ab = {"a": 3.0, "b": 0.5}
    assert [(s.first, s.at, s.seq_length, s.weights, s.line) for s in found.stages] == [
        (0, 0, 4, None, 2),
        (84, 1000, 4, ab, 3),
        (167, 2000, 12, ab, 5),
    ]
    assert [found.at(j).seq_length for j in (0, 83, 84, 166, 167, 10**12)] == [4, 4, 4, 4, 12, 12]
    assert [s.first for s in found.mixes] == [0, 84] and found.draws("a") and not found.draws("c")
    assert found.describe()[1] == "  from 1,000 tokens (sample 84): rows of 4 tokens, 3 a, 0.5 b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "c.yaml:1: stages are missing"),
        ("stages: []", "c.yaml:1: stages are missing"),
        ("stages: {at: 0}", "c.yaml:1: stages are missing"),
        ("steps: []", "c.yaml:1: steps: unknown field"),
        ("stages:\n- {at: 5}", "c.yaml:2: at: 5\n      rule:    the first stage begins at 0"),
        ("stages:\n- {seq_length: 4}", "c.yaml:2: at: is required"),
        ("stages:\n- {at: 0}\n- {at: -3}", "c.yaml:3: at: '-3' is not an amount"),
        ("stages:\n- {at: 0}\n- {at: 10Q}", "c.yaml:3: at: '10Q' is not an amount"),
        ("stages:\n- {at: 0}\n- {at: 0.0001K}", "c.yaml:3: at: '0.0001K' is not whole"),
        ("stages:\n- {at: 0}\n- {at: 60}\n- {at: 60}", "c.yaml:4: at: 60"),
        ("stages:\n- {at: 0}\n- {at: 9999999T}", "c.yaml:3: at: 9,999,999,000,000,000,000\n      rule:    at most 9,007,"),
        ("stages:\n- {at: 0}\n- {at: !!python/tuple [1]}", "c.yaml:3: at: could not determine a constructor [^\n]*$"),
        ("stages:\n- {at: 0}\n- {at: 37}\n- {at: 48}", "c.yaml:4: at: 48\n      rule:    a stage has at least one sample"),
        ("stages:\n- {at: 0, seq_length: 5}", "c.yaml:2: seq_length: 5\n.*\n      try:     4 or 6"),
        ("stages:\n- {at: 0, seq_length: 24}", "c.yaml:2: seq_length: 24"),
        ("stages:\n- {at: 0, seq_length: long}", "c.yaml:2: seq_length: 'long'\n      rule:    expected a whole number"),
        ("stages:\n- {at: 0, length: 4}", "c.yaml:2: length: unknown field\n      try:     seq_length"),
        ("stages:\n- {at: 0, at: 1}", "c.yaml:2: stages.at is given twice"),
        ("stages:\n- at: 0\n  weights: {a: 1, a: 2}", "c.yaml:3: weights.a is given twice"),
        ("stages:\n- at: 0\n  weights:\n    a: -1\n    b: 1", "c.yaml:4: weights.a: -1"),
        ("stages:\n- at: 0\n  weights: {a: .nan}", "c.yaml:3: weights.a: nan"),
        ("stages:\n- at: 0\n  weights: {a: much}", "c.yaml:3: weights.a: 'much'"),
        ("stages:\n- at: 0\n  weights: {a: 0, b: 0}", "c.yaml:3: weights: no source is drawn"),
        ("stages:\n- at: 0\n  weights: [1, 2]", "c.yaml:3: weights: expected fields"),
        ("stages: [", "--curriculum .*c.yaml:1: not YAML"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_curriculum(write(tmp_path, text), S)


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_curriculum(write(tmp_path, "stages:\n- {at: 0, seq_length: 5}\n- {at: x, weight: 1}\nmore: 1\n"), S)
    assert len(caught.value.problems) == 4
    text = "stages:\n- {at: 0, weights: {a: 1, z: 1}}\n- at: 60\n  weights:\n- {at: 24, seq_length: 5}\n- {at: x}\n"
    text += "- {at: 90, weights: {y: 1}}\n"
    with pytest.raises(ConfigError) as caught:
        load_curriculum(write(tmp_path, text), S, ["a", "b"])
    found = "\n".join(map(str, caught.value.problems))
    assert len(caught.value.problems) == 6, found
    for part in ("4: weights: no source is drawn", "5: at: 24\n", "one before at 60", "5: seq_length: 5", "6: at: 'x'"):
        assert part in found, part
    assert "2: weights.z: no source" in found and "7: weights.y: no source" in found
    with pytest.raises(ConfigError) as caught:
        load_curriculum(write(tmp_path, "stages:\n- {at: 5}\n- {at: 3}\n"), S)
    assert [str(p).count("one before at 5") for p in caught.value.problems] == [0, 1]
    with pytest.raises(ConfigError, match="missing.yaml: cannot be read"):
        load_curriculum("missing.yaml", S)


# ---- blends one after the other

weights = st.lists(st.sampled_from([0.0, 1e-3, 0.2, 1.0, 3.0]), min_size=3, max_size=3).filter(any)


@given(st.lists(st.tuples(st.integers(1, 70), weights), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_stages_go_on_where_members_were_left(stages: list[tuple[int, list[float]]]) -> None:
    """Position by position: the member is that of the stage's own blend, its sample the count of all before."""
    firsts = np.cumsum([0, *(n for n, _ in stages)]).tolist()
    blend = StagedBlend([(first, WindowsBlend(w, 16)) for first, (_, w) in zip(firsts, stages, strict=False)])
    seen, counts = [], Counter({0: 0, 1: 0, 2: 0})
    for first, (length, w) in zip(firsts, stages, strict=False):
        alone, inside = WindowsBlend(w, 16), Counter()
        for i in range(length):
            member = alone.locate(i)[0]
            if i % 16 == 0:
                assert all(abs(inside[d] - i * w[d] / sum(w)) <= 1 for d in range(3))
            assert blend.consumed(first + i) == [counts[d] for d in range(3)]
            seen.append((member, counts[member]))
            counts[member] += 1
            inside[member] += 1
    assert [blend.locate(i) for i in range(len(seen))] == seen
    assert blend.consumed(len(seen)) == [counts[d] for d in range(3)]
    again = StagedBlend([(first, WindowsBlend(w, 16)) for first, (_, w) in zip(firsts, stages, strict=False)])
    assert [again.locate(i) for i in reversed(range(len(seen)))] == seen[::-1]


def test_a_change_of_length_alone_makes_no_new_blend() -> None:
    mix = {"a": 1.0, "b": 2.0}
    found = Curriculum("c", S, (Stage(0, 0, 4, mix), Stage(5, 60, 12, mix)))
    assert isinstance(staged_blend(found, ["a", "b"], [1, 1]), WindowsBlend)


# ---- shorter rows


class Rows:
    """Random rows with documents of random lengths."""

    endless = True

    def __len__(self) -> int:
        return 100

    def row(self, j: int) -> Row:
        rng = np.random.default_rng(j)
        inner = np.flatnonzero(rng.random(S) < 0.25) + 1
        mask = (rng.random(S) < 0.8).astype(np.uint8) if j % 2 else None
        return Row(rng.integers(0, 9, S + 1), np.concatenate(([0], inner)), j, mask)


@pytest.mark.parametrize("length", [1, 3, 4, 6])
@pytest.mark.parametrize("document_mask", [True, False])
def test_a_cut_row_is_a_batch_of_shorter_windows(length: int, document_mask: bool) -> None:
    """Every field: tokens, targets, positions, what is seen of what, which targets count; across a cut they do."""
    cut = ShorterRows(Rows(), Curriculum("c", S, (Stage(0, 0, length),)))
    for j in range(30):
        row, short = Rows().row(j), []
        for k in range(0, S, length):
            starts = np.union1d([0], row.starts[(row.starts > k) & (row.starts <= k + length)] - k)
            mask = None if row.loss_mask is None else row.loss_mask[k : k + length]
            short.append(Row(row.tokens[k : k + length + 1], starts, j, mask))
        options: dict[str, Any] = {"document_mask": document_mask, "eod_id": 3, "eod_mask_loss": j % 3 == 0}
        one, many = make_batch([cut.row(j)], **options), make_batch(short, **options)
        for name in ("tokens", "targets", "positions", "cu_seqlens", "loss_mask"):
            assert torch.equal(getattr(one, name), getattr(many, name)), name
        assert (one.num_documents, one.max_seqlen, one.valid_tokens) == (many.num_documents, many.max_seqlen, many.valid_tokens)
        if not document_mask and row.loss_mask is None and not options["eod_mask_loss"]:
            assert one.valid_tokens == S and one.max_seqlen == length  # no target is lost


# ---- the position is one number


def sources(folder: Path) -> list[str]:
    """Two sources whose tokens tell them apart."""
    found = []
    for number in range(2):
        found.append(str(folder / f"s{number}"))
        with IndexedWriter(found[-1], dtype="int32", eod_id=999) as writer:
            for n in range(40):
                writer.add_document(np.arange(9 + n % 5) + 400 * number)
    return found


def batches(path: str, data: list[str], micro: int, dp: int, begin: int, steps: int) -> list[list[Any]]:
    """Rows of each step of all ranks together, in order, from a fresh start at a number of consumed samples."""
    config = DataConfig(seq_length=S, data_path=("1", data[0], "1", data[1]), split="1", curriculum=path)
    built = build_datasets(config, asked=(60, 0, 0), seed=1)
    assert not built.problems and built.blend is not None and built.train is not None, built.problems
    found = []
    for step in range(begin, begin + steps):
        places: dict[int, Any] = {}
        for d in range(dp):
            with Loader(built.train, micro_batch_size=micro, seq_length=S, dp_index=d, dp_size=dp, num_workers=0) as loader:
                for b in loader.step(4 * step, 4).microbatches:
                    fields = (b.tokens, b.targets, b.positions, b.loss_mask)
                    for r in range(b.rows):
                        places[b.first_row + r] = [f.view(b.rows, S)[r].tolist() for f in fields]
        found.append([places[i] for i in range(4)])
    return found


def test_any_stop_and_any_layout_gives_the_same_batches(tmp_path: Path) -> None:
    """Stages begin inside steps, at samples 6 and 17."""
    data = sources(tmp_path)
    text = f"stages:\n- {{at: 0, seq_length: 4, weights: {{{data[0]}: 1}}}}\n- {{at: 70, seq_length: 6}}\n"
    path = write(tmp_path, text + f"- at: {17 * S}\n  seq_length: 12\n  weights: {{{data[0]}: 1, {data[1]}: 3}}\n")
    whole = batches(path, data, 2, 1, 0, 9)
    for step in range(8):
        assert batches(path, data, 1, 2, step, 1) == whole[step : step + 1]
        assert batches(path, data, 4, 1, step, 2) == whole[step : step + 2]
    rows = [row for step in whole for row in step]
    second = [row[0][0] >= 400 for row in rows]
    assert not any(second[:17]) and 13 <= sum(second[17:]) <= 16
    longest = [max(row[2]) + 1 for row in rows]
    assert max(longest[:6]) == 4 and max(longest[6:17]) == 6 and max(longest[17:]) > 6


def test_what_a_curriculum_asks_of_the_data(tmp_path: Path) -> None:
    data = sources(tmp_path)
    path = write(tmp_path, f"stages:\n- at: 0\n  weights: {{{data[0]}: 1, {data[1]}x: 1}}\n")

    def problems(**options: Any) -> str:
        config = DataConfig(**{"seq_length": S, "data_path": tuple(data), "split": "1", "curriculum": path, **options})
        built = build_datasets(config, asked=(60, 0, 0), seed=1, vocab_size=1000)
        assert built.train is None or built.problems
        return "\n".join(map(str, built.problems))

    assert f"c.yaml:2: weights.{data[1]}x: no source" in problems() and f"try:     {data[1]}" in problems()
    assert "2 sources have this name" in problems(data_path=(data[0], data[0], data[1]))
    assert "with --sample-order megatron" in problems(sample_order="megatron")
    assert "--mock-data has none" in problems(mock_data=True, data_path=())
    assert "c.yaml: cannot be read" in problems(curriculum="no/c.yaml")


def test_a_source_of_a_later_stage(tmp_path: Path) -> None:
    """Weight 0 on the command line and a weight in a stage: it is opened, and counted where it is drawn."""
    data = sources(tmp_path)
    path = write(tmp_path, f"stages:\n- at: 0\n- at: {40 * S}\n  weights: {{{data[1]}: 1}}\n")
    config = DataConfig(seq_length=S, data_path=("1", data[0], "0", data[1]), split="1", curriculum=path)
    built = build_datasets(config, asked=(60, 0, 0), seed=1)
    assert built.blend is not None and built.blend.consumed(60) == {data[0]: 40, data[1]: 20}
    assert any(line.startswith(f"  66.7% {data[0]}: 40 samples; ") for line in built.summary), built.summary


@pytest.mark.parametrize("options", [{"sample_order": "megatron"}, {"packing": "best-fit"}])
def test_shorter_rows_of_other_orders(options: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, f"stages:\n- {{at: 0, seq_length: 3}}\n- {{at: {2 * S}, seq_length: {S}}}\n")
    config = DataConfig(seq_length=S, data_path=(sources(tmp_path)[0],), split="1", curriculum=path, **options)
    built = build_datasets(config, asked=(20, 0, 0), seed=1)
    assert not built.problems and built.train is not None
    batch = make_batch([built.train.row(0), built.train.row(1)])
    assert batch.max_seqlen == 3 and built.train.row(2).cuts is None and built.curriculum is not None


def test_ranks_that_read_other_stages_are_told_apart(tmp_path: Path) -> None:
    texts = ["stages:\n- {at: 0, seq_length: 8}\n", "stages:\n- {seq_length: 8, at: 0}\n", "stages:\n- {at: 0, seq_length: 4}\n"]
    for name, text in zip("abc", texts, strict=True):
        (tmp_path / name).mkdir()
        write(tmp_path / name, text)
    a, b, c = (str(tmp_path / name) for name in "abc")
    flags = f"{MOCK} --train-iters 4 --curriculum c.yaml"
    assert not any(said.startswith("error: ") for said in run_ranks(2, opened_in, [a, b], flags, timeout=120))
    for said in run_ranks(2, opened_in, [a, c], flags, timeout=120):
        assert "data.curriculum: " in said and "on rank 0" in said and "on rank 1" in said


# ---- whole runs


def test_a_run_with_stages_is_resumed_exactly(tmp_path: Path) -> None:
    """Stopped inside each stage; on one rank and on two; and another file is named when the run goes on."""
    data = [make_data(tmp_path), str(tmp_path / "other")]
    with IndexedWriter(data[1], vocab_size=61, eod_id=60) as writer:
        for n in range(60):
            writer.add_document([*range(n % 30, n % 30 + 12), 60])
    text = f"stages:\n- {{at: 0, seq_length: 4}}\n- {{at: {10 * 16}, seq_length: 16, weights: {{{data[1]}: 3, {data[0]}: 1}}}}\n"
    flags = f"{TINY} --fp64 --split 1 --data-path {' '.join(data)} --train-iters 6 --curriculum {write(tmp_path, text)}"
    whole = f"{flags} --save {tmp_path}/whole"
    assert train_here(whole).code == 0
    parts = f"{flags} --save {tmp_path}/parts --load {tmp_path}/parts --exit-interval 2"
    assert [train_here(parts).code for _ in range(3)][-1] == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 6)
    assert trained(2, f"{flags} --save {tmp_path}/two")[0].code == 0
    assert_same_run(tmp_path / "whole", tmp_path / "two", 6, tolerance=1e-12)
    write(tmp_path, text.replace("seq_length: 4", "seq_length: 8"))
    again = train_here(f"{flags} --load {tmp_path}/whole --log-dir {tmp_path}/again --train-iters 7 --lr-decay-iters 6")
    assert again.code == 0 and "the curriculum is not that of the checkpoint" in again.text
    counts = steps_of(tmp_path / "whole")[6]["source_samples"]
    assert sum(counts.values()) == 24 and counts[data[1]] > counts[data[0]] and SAMPLES == 23


def test_shorter_rows_of_made_up_data(tmp_path: Path) -> None:
    path = write(tmp_path, "stages:\n- {at: 0, seq_length: 2}\n- {at: 128, seq_length: 16}\n")
    plain, staged = (f"{MOCK} --train-iters 4 --log-dir {tmp_path}/{name}" for name in ("plain", "staged"))
    assert train_here(plain).code == 0 and train_here(f"{staged} --curriculum {path}").code == 0
    a, b = steps_of(tmp_path / "plain"), steps_of(tmp_path / "staged")
    assert a[1]["loss"] != b[1]["loss"] and a[4]["consumed_tokens"] == b[4]["consumed_tokens"]
