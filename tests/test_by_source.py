"""The loss of each source: sorted samples are the same samples, and any layout tells what one sample after another would."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train_metrics import check_line, schema, tags
from train_toys import TINY, make_data, train_here, trained

from megatron_lite.data.batch import make_batch
from megatron_lite.data.blend import BlendedDataset, WindowsBlend
from megatron_lite.data.by_source import BySource
from megatron_lite.data.index_writer import IndexedWriter
from megatron_lite.data.row import Row
from megatron_lite.data.sampler import Sampler
from megatron_lite.train.metrics import read_lines

S = 5


class Member:
    """Endless rows that name their member and number."""

    endless = True

    def __init__(self, name: int) -> None:
        self.name = name

    def __len__(self) -> int:
        return 7

    def row(self, j: int) -> Row:
        return Row(np.array([self.name, j, 0, 0, 0, 0]), np.zeros(1, np.int64), j)


weights = st.lists(st.sampled_from([0.0, 0.001, 0.3, 1.0, 2.0]), min_size=2, max_size=5).filter(any)


@given(weights, st.integers(1, 60), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_the_same_samples_sorted(given_weights: list[float], samples: int, micro: int, dp: int) -> None:
    """Each sample counts once; a microbatch is of one source; what fills it up counts for nothing."""
    blend = BlendedDataset([Member(d) for d in range(len(given_weights))], WindowsBlend(given_weights, 16))
    data = BySource(blend, samples, micro * dp)
    assert len(data) % (micro * dp) == 0 and sum(data.counts) == samples
    wanted = Counter(tuple(blend.row(j).tokens.tolist()) for j in range(samples))
    found: Counter[tuple[int, ...]] = Counter()
    for d in range(dp):
        sampler = Sampler(micro, dp, d)
        for m in range(sampler.microbatches(len(data))):
            rows = [(j, data.row(j)) for j in sampler.rows(0, m)]
            assert {row.tokens[0] for _, row in rows} == {data.source(rows[0][0])} == {data.source(j) for j, _ in rows}
            for _, row in rows:
                batch = make_batch([row], document_mask=False)
                assert batch.valid_tokens in (0, S)
                found.update([tuple(row.tokens.tolist())] * (batch.valid_tokens // S))
    assert found == wanted
    assert len(data) - samples < micro * dp * sum(n > 0 for n in data.counts)


# ---- runs


def two_more(folder: Path) -> list[str]:
    """Three sources: made-up data, counting up, and a few documents of one token and its end."""
    found = [make_data(folder), str(folder / "up"), str(folder / "short")]
    with IndexedWriter(found[1], vocab_size=61, eod_id=60) as writer:
        for n in range(60):
            writer.add_document([*range(n % 30, n % 30 + 12), 60])
    with IndexedWriter(found[2], vocab_size=61, eod_id=60) as writer:
        for n in range(40):
            writer.add_document([n, n + 1, 60])
    return found


@contextlib.contextmanager
def one_by_one(built: Any) -> Iterator[None]:
    """Leaves the loss of each source by another way: a pass for each sample in the order of the blend."""
    built.found = None
    blend = built.data.valid.dataset.dataset
    yield
    sums = {name: [0.0, 0] for name in blend.names}
    for j in range(8):
        batch = make_batch([blend.row(j)])
        part = sums[blend.names[blend.blend.locate(j)[0]]]
        part[0] += float(built.assembly.runtime.evaluate([batch]).loss_sum)
        part[1] += batch.valid_tokens
    whole = [sum(column) for column in zip(*sums.values(), strict=True)]
    built.found = (whole[0] / whole[1], {name: loss / n for name, (loss, n) in sums.items() if n})


def last(folder: Path) -> dict[str, Any]:
    """The last evaluation on validation data."""
    return [r for r in read_lines(folder / "metrics.jsonl") if r.get("split") == "validation"][-1]


def test_the_loss_of_each_source_in_any_layout(tmp_path: Path) -> None:
    data = two_more(tmp_path)
    weighted = " ".join(f"{w} {p}" for w, p in zip((5, 2, 1), data, strict=True))
    flags = f"{TINY} --fp64 --train-iters 2 --lr-warmup-iters 0 --data-path {weighted} --split 1,1 --eval-iters 2 --eval-interval 2"
    alone = train_here(f"{flags} --log-dir {tmp_path}/alone --log-interval 1 --tensorboard-dir {tmp_path}/board", one_by_one)
    assert alone.code == 0 and set(alone.extra[1]) == set(data)
    found = last(tmp_path / "alone")
    assert found["eval_loss"] == pytest.approx(alone.extra[0], rel=1e-12)
    assert found["eval_loss_by_source"] == pytest.approx(alone.extra[1], rel=1e-12)
    assert len({round(v, 6) for v in found["eval_loss_by_source"].values()}) == 3
    _reports(tmp_path, alone.text, found)
    layouts = {"pp": "--pipeline-model-parallel-size 2", "tp": "--tensor-model-parallel-size 2", "dp": "--micro-batch-size 2"}
    runs = [f"{flags} --log-dir {tmp_path}/{name} {more}" for name, more in layouts.items()]
    assert [o.code for o in trained(2, *runs)] == [0, 0, 0]
    for name in layouts:
        other = last(tmp_path / name)
        assert other["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-12), name
        assert other["eval_loss_by_source"] == pytest.approx(found["eval_loss_by_source"], rel=1e-12), name


def _reports(folder: Path, text: str, found: dict[str, Any]) -> None:
    """The documented fields, TensorBoard, and the lines on the terminal."""
    lines = list(read_lines(folder / "alone" / "metrics.jsonl"))
    for record in lines:
        check_line(record, schema("Lines of evaluations" if "split" in record else "Lines of steps"))
    steps = [r for r in lines if "split" not in r]
    assert all(sum(r["source_samples"].values()) == r["consumed_samples"] for r in steps) and len(steps) == 2
    board = tags(folder / "board")
    for name, value in found["eval_loss_by_source"].items():
        assert f"\n  {value:.4f} {name}\n" in text and board[f"eval_loss/{name}"][2] == pytest.approx(value, rel=1e-6)
    counts = steps[-1]["source_samples"]
    assert "step 2: 8 samples consumed, of these\n" in text
    assert all(f"\n  {n:,} {name}\n" in text for name, n in counts.items())
    assert json.loads(json.dumps(counts)) == counts and list(counts.values()) == [5, 2, 1]


def test_one_source_is_as_before(tmp_path: Path) -> None:
    flags = f"{TINY} --train-iters 2 --lr-warmup-iters 0 --data-path {make_data(tmp_path)} --split 1,1 --eval-iters 1 --eval-interval 2"
    done = train_here(f"{flags} --log-dir {tmp_path}/log")
    assert done.code == 0 and "consumed, of these" not in done.text
    assert "eval_loss_by_source" not in last(tmp_path / "log")
    assert not any("source_samples" in r for r in read_lines(tmp_path / "log" / "metrics.jsonl"))
