"""The loader: the same batches with any number of threads, errors with the sample's number, no leaks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lite.config.schema_io import DataConfig
from megatron_lite.data import blend
from megatron_lite.data.access import Access
from megatron_lite.data.build import build_datasets
from megatron_lite.data.indexed import IndexedWriter
from megatron_lite.data.loader import Loader, SampleError
from megatron_lite.data.mock import MockDataset
from megatron_lite.data.row import Row

S = 16


class Numbers:
    """Row j holds j everywhere; can fail at a row and be slow."""

    endless = True

    def __init__(self, fail_at=None, seconds=0.0):
        self.fail_at, self.seconds, self.asked = fail_at, seconds, []

    def __len__(self):
        return 100

    def row(self, j):
        self.asked.append(j)
        if self.seconds:
            time.sleep(self.seconds)
        if j == self.fail_at:
            raise OSError("disk on fire")
        return Row(np.full(S + 1, j), np.zeros(1, np.int64), j)


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("loader")]


def record(loader, consumed, batches):
    steps = []
    for batch in batches:
        step = loader.step(consumed, batch)
        fields = [
            (
                b.first_row,
                b.num_documents,
                b.max_seqlen,
                *(getattr(b, n).tolist() for n in ("tokens", "targets", "positions", "loss_mask")),
            )
            for b in step.microbatches
        ]
        steps.append((step.samples, step.digest, step.valid_tokens, fields))
        consumed = step.next_consumed
    return steps


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_change_nothing(workers):
    batches = [12, 12, 24, 36, 12]  # a ramp
    options = dict(micro_batch_size=2, seq_length=S, dp_index=1, dp_size=3)  # noqa: C408
    data = MockDataset(50, S, 1)
    with Loader(data, num_workers=0, **options) as inline:
        expected = record(inline, 6, batches)
    with Loader(data, num_workers=workers, **options) as loader:
        loader.start(6, 12)
        assert record(loader, 6, batches) == expected
        assert record(loader, 6, batches) == expected  # back to the beginning
        assert len(threads()) == workers
    assert threads() == []
    assert expected[0][0] == [[8, 9], [14, 15]] and [f[0] for f in expected[0][3]] == [2, 8]


def test_ramp_keeps_what_is_ahead():
    data = Numbers()
    with Loader(data, micro_batch_size=2, seq_length=S, num_workers=1) as loader:
        record(loader, 0, [4, 8, 8, 4])
    assert len(set(data.asked)) == len(data.asked)  # nothing was read twice


def test_layouts_read_the_same_samples():
    def batch(dp, micro):
        rows = {}
        for d in range(dp):
            with Loader(Numbers(), micro_batch_size=micro, seq_length=S, dp_index=d, dp_size=dp) as loader:
                for b in loader.step(24, 12).microbatches:
                    for r in range(b.rows):
                        rows[b.first_row + r] = int(b.tokens[r * S])
        return rows

    assert batch(1, 1) == batch(3, 2) == batch(2, 3) == {i: 24 + i for i in range(12)}


def test_digest_tells_what_was_read():
    def digest(data, consumed=0, **options):
        with Loader(data, micro_batch_size=2, seq_length=S, num_workers=0, **options) as loader:
            return loader.step(consumed, 4).digest

    plain = digest(MockDataset(50, S, 1))
    assert plain == digest(MockDataset(50, S, 1)) and 0 <= plain < 2**32
    assert len({plain, digest(MockDataset(50, S, 2)), digest(MockDataset(50, S, 1), 4)}) == 3
    assert plain != digest(MockDataset(50, S, 1), document_mask=False)

    class LastTarget(MockDataset):
        def row(self, j):
            row = super().row(j)
            row.tokens[-1] ^= 1
            return row

    assert plain != digest(LastTarget(50, S, 1))


@pytest.mark.parametrize("workers", [0, 2])
def test_error_names_the_sample(workers):
    with Loader(Numbers(fail_at=13), micro_batch_size=2, seq_length=S, num_workers=workers) as loader:
        loader.step(0, 4)
        loader.step(4, 4)  # 13 is ahead by now, and hurts nobody
        loader.step(8, 4)
        with pytest.raises(
            SampleError, match="sample 13 .data-parallel rank 0. could not be read: OSError: disk on fire"
        ) as info:
            loader.step(12, 4)
        assert isinstance(info.value.__cause__, OSError)
        assert loader.step(16, 4).samples == [[16, 17], [18, 19]]
    with (
        pytest.raises(SampleError, match="it has 17 tokens, not the 33 of a row"),
        Loader(Numbers(), micro_batch_size=1, seq_length=32) as loader,
    ):
        loader.step(0, 1)
    assert threads() == []


def test_options_are_not_dropped():
    with pytest.raises(ValueError, match="--eod-mask-loss needs the end-of-document id"):
        Loader(Numbers(), micro_batch_size=1, seq_length=S, eod_mask_loss=True)
    with Loader(Numbers(), micro_batch_size=1, seq_length=S, eod_id=3, eod_mask_loss=True) as loader:
        assert loader.step(3, 1).valid_tokens == 0 and loader.step(4, 1).valid_tokens == S
        with pytest.raises(ValueError, match="must divide it"):
            Loader(Numbers(), micro_batch_size=2, seq_length=S).step(0, 3)


def test_rollback_skips():
    with Loader(Numbers(), micro_batch_size=2, seq_length=S, skipped=[(2, 4)]) as loader:
        first = loader.step(0, 4)
        assert first.samples == [[0, 1], [4, 5]] and first.next_consumed == 6
        loader.skip(6, 20)
        second = loader.step(first.next_consumed, 4)
        assert second.samples == [[20, 21], [22, 23]] and second.next_consumed == 24


def test_waiting_is_hidden_and_measured():
    with Loader(Numbers(seconds=0.01), micro_batch_size=2, seq_length=S, num_workers=0) as inline:
        assert inline.step(0, 4).wait_seconds > 0.04
    with Loader(Numbers(seconds=0.01), micro_batch_size=2, seq_length=S, num_workers=2) as loader:
        assert loader.step(0, 4).wait_seconds > 0.02
        consumed, waited = 4, []
        for _ in range(5):
            time.sleep(0.1)
            waited.append(loader.step(consumed, 4).wait_seconds)
            consumed += 4
        assert min(waited) < 0.005, waited  # inline it would be 0.04 each time


@pytest.mark.parametrize(("order", "packing", "method"), [
    ("windows", "windows", "mmap"),
    pytest.param("windows", "best-fit", "pread", marks=pytest.mark.nightly),
    pytest.param("megatron", "windows", "mmap", marks=pytest.mark.nightly),
])  # fmt: skip
def test_memory_does_not_grow_over_fifty_thousand_samples(tmp_path, monkeypatch, order, packing, method):
    """Many epochs of five sources: the process does not grow from 10,000 to 50,000 samples, nor do Python's objects at the end."""
    rng = np.random.default_rng(0)
    entries = []
    for i in range(5):
        with IndexedWriter(tmp_path / f"s{i}", dtype="int32", eod_id=0) as writer:
            for _ in range(600):
                writer.add_document(np.append(rng.integers(1, 50, int(rng.integers(1, 60))), 0))
        entries += [str(i + 1), str(tmp_path / f"s{i}")]
    data = DataConfig(
        seq_length=32, data_path=tuple(entries), split="1", sample_order=order, packing=packing,
        data_cache_path=str(tmp_path / "cache"),
    )  # fmt: skip
    built = build_datasets(data, asked=(60_000, 0, 0), seed=1, access=Access(method))
    assert built.train is not None, built.problems
    monkeypatch.setattr(blend, "_CHUNKS_KEPT", 2)  # or it fills up to its bound for long
    page = os.sysconf("SC_PAGE_SIZE")

    def measure(loader):
        for _, _, future in loader._queue:  # what is ahead is part of the memory: have all of it, each time
            future.result()
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
        return tracemalloc.get_traced_memory()[0], resident

    with Loader(built.train, micro_batch_size=50, seq_length=32) as loader:
        consumed, marks = 0, {}
        for step in range(1, 501):
            consumed = loader.step(consumed, 100).next_consumed
            if step == 300:
                tracemalloc.start()
            if step in (100, 400, 500):
                marks[step] = measure(loader)
        tracemalloc.stop()
    assert consumed == 50_000
    assert marks[500][0] - marks[400][0] < 50_000 and marks[500][1] - marks[100][1] < 8 << 20, marks


@pytest.mark.nightly
def test_ranks_hardly_wait():
    """Steps of 20 ms, windows of 4,096 out of a blend of a hundred sources: 8 ranks on 2 idle cores wait under 1% of the time."""
    bench = Path(__file__).resolve().parents[1] / "tools" / "bench" / "loader.py"
    command = [sys.executable, bench, "--ranks", "8", "--steps", "150", "--tokens", "50000", "--limit", "0.01"]
    for _ in range(3):  # another program may have had the cores
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        if done.returncode == 0:
            return
    pytest.fail(done.stdout + done.stderr)


def test_how_far_ahead():
    with Loader(Numbers(), micro_batch_size=2, seq_length=S, bytes_ahead=3 * 4 * S * 32) as loader:
        loader.step(0, 4)
        assert len(loader._queue) == 3 * 2
        loader.step(4, 8)
        assert len(loader._queue) == 2 * 4


def test_closing_twice_and_using_after():
    loader = Loader(Numbers(), micro_batch_size=2, seq_length=S)
    loader.step(0, 4)
    loader.close()
    loader.close()
    assert threads() == [] and loader.step(4, 4).samples == [[4, 5], [6, 7]]


def test_mock_rows():
    data = MockDataset(100, 64, 3)
    rows = [data.row(j) for j in range(200)]
    for row in rows:
        tokens, starts = row.tokens, row.starts.tolist()
        assert len(tokens) == 65 and tokens.min() >= 0 and tokens.max() < 100 and starts[0] == 0
        assert np.flatnonzero(tokens[:-1] == 99).tolist() == [s - 1 for s in starts[1:]]
        for a, b in zip(starts, [*starts[1:], 66], strict=True):
            document = tokens[a : b - 1]
            steps = set(np.diff(document[document != 99]) % 99)
            assert len(steps) <= 1 and all(1 <= s <= 8 for s in steps)
    assert 3 < np.mean([len(r.starts) for r in rows]) < 12
    assert len({r.tokens.tobytes() for r in rows}) == 200
    assert np.array_equal(MockDataset(100, 64, 3).row(7).tokens, rows[7].tokens)
    assert not np.array_equal(MockDataset(100, 64, 3, split="valid").row(7).tokens, rows[7].tokens)
    assert {int(t) for j in range(50) for t in MockDataset(10, 32, 1, eod_id=4).row(j).tokens} == set(range(10))
    assert MockDataset(2, 1, 0).row(0).tokens.shape == (2,)
    with pytest.raises(ValueError, match="at least 2 ids"):
        MockDataset(1, 8, 0)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        MockDataset(8, 8, 0, eod_id=8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_copies():
    with (
        Loader(MockDataset(50, S, 1), micro_batch_size=2, seq_length=S, device="cuda") as loader,
        Loader(MockDataset(50, S, 1), micro_batch_size=2, seq_length=S) as host,
    ):
        consumed = 0
        for _ in range(50):
            a, b = loader.step(consumed, 8), host.step(consumed, 8)
            assert a.digest == b.digest
            for x, y in zip(a.microbatches, b.microbatches, strict=True):
                assert (
                    x.tokens.is_cuda
                    and torch.equal(x.tokens.cpu(), y.tokens)
                    and torch.equal(x.cu_seqlens.cpu(), y.cu_seqlens)
                )
            consumed = a.next_consumed
