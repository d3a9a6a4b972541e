"""Packing by best fit: against brute force, every target once, masks, orders; and a packed row is its documents alone."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from whole_model import assert_same, enlarge, make_whole

from megatron_lite.cli.inspect import dataset_text
from megatron_lite.config.schema_io import DataConfig
from megatron_lite.data.batch import Batch, Row, make_batch
from megatron_lite.data.build import build_datasets
from megatron_lite.data.describe import describe
from megatron_lite.data.index_format import mask_prefix
from megatron_lite.data.indexed import IndexedDataset, IndexedWriter, TokenStream, open_mask
from megatron_lite.data.loader import Loader
from megatron_lite.data.packing import PackedDataset, best_fit, plan_rows
from megatron_lite.data.windows import WindowDataset
from megatron_lite.mesh.layout import Layout
from megatron_lite.model.llama import Llama
from megatron_lite.testing.layouts import Batches, Case, tiny_llama
from megatron_lite.testing.ranks import run_ranks
from megatron_lite.train.report import first_sample_line

S = 8


def write(path: Path, lengths: list[int], masks: list[list[int]] | None = None, **options: Any) -> str:
    """Documents of these lengths, ids counting up; with masks also the second pair."""
    first = 0
    with IndexedWriter(path, dtype="int32", **options) as writer:
        for length in lengths:
            writer.add_document(range(first, first + length))
            first += length
    if masks is not None:
        with IndexedWriter(mask_prefix(str(path)), dtype="uint8") as writer:
            for mask in masks:
                writer.add_document(mask)
    return str(path)


def stream_of(prefix: str, part: range | None = None) -> TokenStream:
    dataset = IndexedDataset(prefix)
    dataset.loss_mask = open_mask(dataset)
    return TokenStream(dataset, part or range(len(dataset)))


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """What best fit decreasing leaves free in its bins, one item at a time."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [r for r in free if r >= length]
        if fitting:
            free.remove(min(fitting))
        free.append((min(fitting) if fitting else capacity) - length)
    return sorted(free)


@given(st.integers(1, 24).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=60))))
def test_bins_are_those_of_best_fit(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    bins, count = best_fit(np.array(lengths, dtype=np.int64), capacity)
    used = np.bincount(bins, weights=lengths, minlength=count).astype(int)
    assert sorted((capacity - used).tolist()) == one_by_one(lengths, capacity)
    assert set(bins.tolist()) == set(range(count))


@given(st.lists(st.integers(1, 30), max_size=25), st.integers(1, 9))
def test_a_plan_trains_every_target_once(lengths: list[int], size: int) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    plan = plan_rows(starts, sizes, size)
    wanted = Counter(int(a + i) for a, n in zip(starts, sizes, strict=True) for i in range(1, n))
    found: Counter[int] = Counter()
    padding = 0
    for row in range(plan.rows):
        pieces = range(int(plan.firsts[row]), int(plan.firsts[row + 1]))
        total = sum(int(plan.lengths[p]) for p in pieces)
        assert 0 < total <= size + 1
        padding += size + 1 - total
        for p in pieces:
            begin, length = int(plan.begins[p]), int(plan.lengths[p])
            document = int(np.searchsorted(starts, begin, side="right")) - 1
            assert begin + length <= starts[document] + sizes[document], "a piece lies in one document"
            found.update(range(begin + 1, begin + length))
            whole = length == sizes[document]
            assert whole or sizes[document] > size + 1, "only a document longer than a row is cut"
    assert found == wanted and padding == plan.padding
    assert plan.cut == sum(n > size + 1 for n in lengths) and plan.left_out == sum(n == 1 for n in lengths)


def test_a_row(tmp_path: Path) -> None:
    """Documents of 9, 4, 3, 2, 1 and 20 tokens in rows of 9, the last of which is a target only."""
    data = PackedDataset(stream_of(write(tmp_path / "a", [9, 4, 3, 2, 1, 20])), S, seed=1, padding_id=99)
    rows = {tuple(r.tokens.tolist()): r for r in map(data.row, range(len(data)))}
    assert len(rows) == len(data) == 5
    assert (
        data.describe()
        == "5 documents packed into 5 rows, 11% padding, 1 longer than a row cut, 1 of one token left out"
    )
    packed = rows[9, 10, 11, 12, 35, 36, 37, 38, 99]  # 4 tokens and the rest of the longest, a place is left
    assert packed.starts.tolist() == [0, 4, 8] and packed.loss_mask.tolist() == [1, 1, 1, 0, 1, 1, 1, 0]  # type: ignore[union-attr]
    assert {tuple(range(19, 28)), tuple(range(27, 36))} < set(rows)  # neighbours share the token between them
    short = rows[13, 14, 15, 16, 17, 99, 99, 99, 99]
    assert short.starts.tolist() == [0, 3, 5] and short.loss_mask.tolist() == [1, 1, 0, 1, 0, 0, 0, 0]  # type: ignore[union-attr]
    for mask in (True, False):
        batch = make_batch([packed, short], document_mask=mask)
        assert batch.loss_mask.tolist() == [1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 0, 0, 0, 0] and batch.valid_tokens == 9
    batch = make_batch([short])
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8, 8, 8, 8, 8, 8], "padding is a segment of its own"
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]


def test_order_is_a_function_of_the_sample(tmp_path: Path) -> None:
    """Every epoch visits every row once, in an order of its own; any sample can be asked for first."""
    prefix = write(tmp_path / "a", [2 + i % 7 for i in range(60)])
    one, other = (PackedDataset(stream_of(prefix), S, seed=1) for _ in range(2))
    epochs = [[one.locate(e * len(one) + i) for i in range(len(one))] for e in range(3)]
    assert all(sorted(e) == list(range(len(one))) for e in epochs) and len(set(map(tuple, epochs))) == 3
    flat = [r for e in epochs for r in e]
    for j in (len(flat) - 1, 3, len(one), 0, 2 * len(one) + 5):
        assert other.locate(j) == flat[j]
        assert other.row(j).tokens.tolist() == one.row(j).tokens.tolist() and other.row(j).index == j
    assert [PackedDataset(stream_of(prefix), S, seed=2).locate(j) for j in range(len(one))] != epochs[0]
    assert [PackedDataset(stream_of(prefix), S, seed=1, salt=1).locate(j) for j in range(len(one))] != epochs[0]


def test_a_plan_is_kept(tmp_path: Path) -> None:
    """Kept plans give the same rows; other lengths, borders, rows or splits have others; a damaged one is made anew."""
    prefix = write(tmp_path / "a", [2 + i % 7 for i in range(60)])
    said: list[str] = []
    cache = tmp_path / "cache"
    for folder in ("b", "c"):
        (tmp_path / folder).mkdir()

    def rows(stream: TokenStream, size: int = S, **options: Any) -> list[list[int]]:
        data = PackedDataset(stream, size, seed=1, **options)
        return [data.row(j).tokens.tolist() for j in range(len(data))]

    for _ in range(2):
        assert rows(stream_of(prefix), cache=cache) == rows(stream_of(prefix))
    (file,) = (cache / "orders").glob("*.order")
    file.write_bytes(file.read_bytes()[:-1])
    assert rows(stream_of(prefix), cache=cache, tell=said.append) == rows(stream_of(prefix)) and len(said) == 1
    for stream, size in ((stream_of(prefix), 9), (stream_of(prefix, range(30)), S)):
        assert rows(stream, size, cache=cache) == rows(stream, size)
    with IndexedWriter(tmp_path / "b" / "a", dtype="int32") as writer:  # the same sequences in other documents
        for i in range(0, 60, 2):
            writer.add_document(range(20), [2 + i % 7, 18 - i % 7])
    with IndexedWriter(tmp_path / "c" / "a", dtype="int32") as writer:
        for i in range(0, 60, 2):
            writer.add_document(range(2 + i % 7))
            writer.add_document(range(18 - i % 7))
    for folder in ("b", "c"):
        stream = stream_of(str(tmp_path / folder / "a"))
        assert rows(stream, 30, cache=cache) == rows(stream, 30)
    assert len(list((cache / "orders").glob("*.order"))) == 5


def test_the_mask_beside_the_data_is_used(tmp_path: Path) -> None:
    """In both packings a target counts where its mask says so; the digest tells masks apart."""
    rng = np.random.default_rng(0)
    lengths = [int(n) for n in rng.integers(1, 14, 40)]
    masks = [[int(x) for x in rng.integers(0, 2, n)] for n in lengths]
    prefix = write(tmp_path / "a", lengths, masks)
    counts = [x for mask in masks for x in mask]
    stream = stream_of(prefix)
    windows, packed = WindowDataset(stream, S, 1), PackedDataset(stream, S, 1, padding_id=-1)
    seen: Counter[int] = Counter()
    for j in range(len(windows)):
        row = windows.row(j)
        assert row.loss_mask is not None and row.loss_mask.tolist() == [counts[t] for t in row.tokens[1:]]
    for j in range(len(packed)):
        batch = make_batch([packed.row(j)])
        seen.update(batch.targets[batch.loss_mask == 1].tolist())
    first = set(np.cumsum([0, *lengths]).tolist())
    assert seen == Counter(t for t, count in enumerate(counts) if count and t not in first)
    plain = PackedDataset(stream_of(write(tmp_path / "b", lengths)), S, 1)
    packed.padding_id = 0
    digests = [Loader(d, micro_batch_size=1, seq_length=S, num_workers=0).step(0, 4).digest for d in (plain, packed)]
    assert digests[0] != digests[1]
    step = Loader(packed, micro_batch_size=1, seq_length=S, num_workers=0).step(0, len(packed))
    assert step.valid_tokens == seen.total()


def test_a_mask_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    def problem(prefix: str) -> str:
        return "\n".join(map(str, build(prefix).problems))

    good = write(tmp_path / "good", [3, 3], [[0, 1, 1], [0, 0, 1]])
    assert build(good).train is not None
    assert "all lengths must be equal" in problem(write(tmp_path / "a", [3, 3], [[0, 1], [0, 0, 1, 1]]))
    assert "all lengths must be equal" in problem(write(tmp_path / "b", [3, 3], [[0, 1, 0, 0, 1, 1]]))
    assert "uint8 numbers, 0 or 1" in problem(write(tmp_path / "c", [3, 3], [[0, 2, 1], [0, 0, 1]]))
    (tmp_path / "good_loss_mask.bin").unlink()
    assert "good_loss_mask.bin: no such file" in problem(good)


def build(*data_path: str, asked: tuple[int, int, int] = (10, 0, 0), **options: Any) -> Any:
    config = {"packing": "best-fit", "split": "1", **options}
    return build_datasets(DataConfig(**{"seq_length": S, "data_path": data_path, **config}), asked=asked, seed=1, vocab_size=9999)


def test_building(tmp_path: Path) -> None:
    """Splits, blends, what is said, what is refused."""
    a = write(tmp_path / "a", [5] * 40, eod_id=3)
    b = write(tmp_path / "b", [3] * 30 + [1] * 4, eod_id=3)
    result = build(a, split="3,1,0", asked=(40, 4, 0))
    assert not result.problems and len(result.train) == 30 and len(result.valid) == 10
    assert result.summary[0].endswith("30 documents packed into 30 rows, 44% padding, 0 longer than a row cut")
    assert "40 samples of 8 tokens are 1.33 epochs" in result.summary[1]
    trained, held = (
        {int(t) for j in range(n) for t in d.row(j).tokens if t != 3}
        for d, n in ((result.train, 30), (result.valid, 10))
    )
    assert max(trained) < 150 <= min(held)
    assert result.train.row(0).tokens[-1] == 3, "padding is the end-of-document token"
    blend = build("1", a, "3", b, asked=(400, 0, 0)).train
    sources = Counter(int(blend.row(j).starts[1]) for j in range(400))  # 5 or 3: the first document's length
    assert blend.row(7).index == 7 and blend.row(7).loss_mask is not None
    assert abs(sources[5] - 100) <= 1 and sources[5] + sources[3] == 400
    assert "with --sample-order megatron" in str(build(a, sample_order="megatron").problems)
    masked = write(tmp_path / "m", [3, 3], [[0, 1, 1], [0, 0, 1]])
    text = str(build(masked, sample_order="megatron", packing="windows", document_mask=False).problems)
    assert "reads no loss masks" in text
    assert "one token trains nothing" in str(build(write(tmp_path / "ones", [1] * 20)).problems)
    assert not build(masked).notices, "conversations end without an end-of-document token"
    cut = build(write(tmp_path / "long", [5, 3, 40], [[0] * 5, [0] * 3, [0] * 30 + [1] * 10]))
    assert cut.masked and "1 of 3 conversations are longer than a row" in cut.notices[0] and "data chat --seq-length 8" in cut.notices[0]
    assert "--packing best-fit" in build(masked, seq_length=3, packing="windows").notices[0]
    assert not build(write(tmp_path / "text", [5, 3, 40], eod_id=3)).notices, "text loses no question"


def test_what_the_loss_counts_is_shown(tmp_path: Path) -> None:
    """The share in ``inspect``, and marks in the first sample, whose mask is of the tokens one further on."""
    prefix = write(tmp_path / "m", [5, 4], [[0, 0, 1, 1, 0], [0, 1, 1, 1]])
    assert "(5, 55.6%)" in dataset_text(found := describe(prefix)) and found["loss_tokens"] == 5
    assert describe(write(tmp_path / "n", [5]))["loss_tokens"] is None
    row = Row(np.arange(6), np.zeros(1, np.int64), 0, np.array([0, 1, 1, 0, 1], np.uint8))
    batch = make_batch([row])
    assert first_sample_line(None, make_batch([row, row]), masked=True) == first_sample_line(None, batch, masked=True), "one row of two"
    assert first_sample_line(None, batch, masked=True) == "first sample: '0 1 \u27e62 3\u27e7 4'"
    letters = first_sample_line(lambda ids: "".join("abcdef"[i] for i in ids), batch, masked=True)
    assert letters == "first sample: 'ab\u27e6cd\u27e7e'" and first_sample_line(None, batch) == "first sample: ids [0, 1, 2, 3, 4] ..."


def test_half_a_million_documents_in_a_second() -> None:
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(6, 1.2, 500_000)).astype(np.int64) + 2
    began = time.perf_counter()
    plan = plan_rows(np.cumsum(lengths) - lengths, lengths, 4096)
    assert time.perf_counter() - began < 2.0
    assert plan.padding < 1e-3 * plan.rows * 4097


# ---- a packed row is its documents alone


def conversations(folder: Path) -> str:
    """Thirty documents with masks, some longer than a row of 16."""
    rng = np.random.default_rng(5)
    with (
        IndexedWriter(folder / "chat_loss_mask", dtype="uint8") as masks,
        IndexedWriter(folder / "chat", dtype="int32", mask=masks) as tokens,
    ):
        for length in rng.integers(2, 24, 30):
            tokens.add_document(rng.integers(0, 61, length))
            masks.add_document(np.append(rng.integers(0, 2, length - 1), 1))
    return str(folder / "chat")


def alone(dataset: PackedDataset, number: int) -> list[Batch]:
    """The pieces of a row of the plan, each as a row of its own: only its tokens, its mask."""
    plan, stream, found = dataset.plan, dataset.stream, []
    for p in range(int(plan.firsts[number]), int(plan.firsts[number + 1])):
        begin, end = int(plan.begins[p]), int(plan.begins[p] + plan.lengths[p])
        found.append(
            make_batch([Row(stream.read(begin, end), np.zeros(1, np.int64), 0, stream.loss_mask(begin + 1, end))])
        )
    return found


def test_a_packed_row_is_its_documents_alone(tmp_path: Path) -> None:
    """Loss and every gradient of packed rows equal those of one document at a time, in fp64; padding changes nothing."""
    torch.set_num_threads(1)
    data = PackedDataset(stream_of(conversations(tmp_path)), 16, seed=1)
    model = enlarge(make_whole(Llama, tiny_llama(num_layers=2)), 4.0)
    options = {"seed": 1, "step": 0, "training": True}
    for j in range(0, len(data), 3):
        batch, single = make_batch([data.row(j)]), alone(data, data.locate(j))
        assert batch.valid_tokens == sum(b.valid_tokens for b in single)
        got, parts = model.gradients(batch, **options), [model.gradients(b, **options) for b in single]
        assert_same(got, {n: torch.stack([p[n] for p in parts]).sum(0) for n in got})
        data.padding_id = 60 - data.padding_id
        assert torch.equal(model.loss(batch, **options), model.loss(make_batch([data.row(j)]), **options))


def one_step(prefix: str, layout: Layout) -> tuple[float, float, int]:
    """Loss, gradient norm and counted tokens of a step over all rows of a packed set, on the ranks of a layout."""
    from megatron_lite.mesh.mesh import ProcessMesh
    from megatron_lite.train.assemble import assemble, kv_heads
    from megatron_lite.train.step import HostNumbers

    case = Case(layout=layout, model=tiny_llama(num_layers=2), global_batch=8)
    mesh = ProcessMesh.open(layout, backend="gloo", device="cpu", kv_heads=kv_heads(case.model), numbered=True)
    assembly = assemble(case.config(), mesh)
    data = PackedDataset(stream_of(prefix), 16, seed=1)
    with Loader(
        data, micro_batch_size=1, seq_length=16, dp_index=mesh.coords.dp, dp_size=layout.dp, num_workers=0
    ) as loader:
        step = loader.step(0, 8)
    report = assembly.step.run(
        Batches(step.microbatches, step.digest, step.valid_tokens), seed=1, step=0, loss_scale=1.0, update=1,
        learning_rates={"": 1e-3}, weight_decay=0.1, host=HostNumbers(0, False, 0.0, 0.0),
    )  # fmt: skip
    assembly.gradients.close()
    mesh.close()
    return report.loss, report.grad_norm, report.tokens


def test_layouts_compute_the_masked_loss_of_the_documents(tmp_path: Path) -> None:
    """tp 2 x dp 2 and one process give the mean over counted tokens of documents computed one at a time."""
    prefix = conversations(tmp_path)
    data = PackedDataset(stream_of(prefix), 16, seed=1)
    single = [b for j in range(8) for b in alone(data, data.locate(j))]
    model = make_whole(Llama, tiny_llama(num_layers=2))
    tokens = sum(b.valid_tokens for b in single)
    with torch.no_grad():
        expected = sum(float(model.loss(b, seed=1, step=0, training=True)) for b in single) / tokens
    found = [one_step_alone(prefix), *run_ranks(4, one_step, prefix, Layout(tp=2, dp=2))]
    for loss, norm, counted in found:
        assert abs(loss - expected) <= 1e-12 * expected and counted == tokens
        assert abs(norm - found[0][1]) <= 1e-12 * norm


def one_step_alone(prefix: str) -> tuple[float, float, int]:
    return one_step(prefix, Layout())
