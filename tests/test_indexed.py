"""The indexed dataset: bytes of the format, refusals of the reader, an atomic writer, offsets beyond 32 bits."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import subprocess
import sys
import textwrap
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_lite.data.access import Access
from megatron_lite.data.describe import describe, verify
from megatron_lite.data.index_format import DTYPES, DatasetMeta, IndexHeader
from megatron_lite.data.indexed import IndexedDataset, IndexedWriter, choose_dtype
from megatron_lite.data.parts import merge
from megatron_lite.data.sources import open_all
from megatron_lite.ops.library import index_module

CODES = {code: dtype.str.lstrip("<|") for code, dtype in DTYPES.items()}


def plain_write(prefix, code: int, documents: list[list[list[int]]]) -> None:
    """The format, straight from its table."""
    kind = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}[code]
    size = struct.calcsize("<" + kind)
    sequences = [s for d in documents for s in d]
    with open(f"{prefix}.bin", "wb") as f:
        f.writelines(struct.pack(f"<{len(s)}{kind}", *s) for s in sequences)
    with open(f"{prefix}.idx", "wb") as f:
        f.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(documents) + 1))
        f.write(struct.pack(f"<{len(sequences)}i", *map(len, sequences)))
        f.write(
            struct.pack(f"<{len(sequences)}q", *(size * sum(map(len, sequences[:i])) for i in range(len(sequences))))
        )
        f.write(
            struct.pack(f"<{len(documents) + 1}q", *(sum(map(len, documents[:i])) for i in range(len(documents) + 1)))
        )


def write(prefix, documents, **options) -> DatasetMeta:
    with IndexedWriter(prefix, **options) as writer:
        for d in documents:
            writer.add_document([t for s in d for t in s], [len(s) for s in d])
        return writer.finish()


DOCUMENTS = [[[1, 2]], [[3], [], [4, 5, 6]], [[]], [], [[7]]]
nested = st.lists(st.lists(st.lists(st.integers(0, 127), max_size=6), max_size=4), min_size=1, max_size=8)


@pytest.mark.parametrize("code", sorted(DTYPES))
@pytest.mark.parametrize("method", ["mmap", "pread"])
def test_reads_every_dtype(tmp_path, code, method):
    plain_write(tmp_path / "a", code, DOCUMENTS)
    dataset = IndexedDataset(tmp_path / "a", Access(method))
    assert dataset.dtype == DTYPES[code] and (dataset.num_sequences, dataset.num_documents, dataset.num_tokens) == (
        6,
        5,
        7,
    )
    assert [dataset.sequence(i).tolist() for i in range(6)] == [s for d in DOCUMENTS for s in d]
    assert [dataset.document(i).tolist() for i in range(5)] == [[t for s in d for t in s] for d in DOCUMENTS]
    assert dataset.read(1, 5).dtype == np.int64 and dataset.read(1, 5).tolist() == [2, 3, 4, 5]
    assert dataset.problems() == []
    dataset.close()


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_only_whole_numbers_are_token_ids(tmp_path, code):
    """1.5 would be trained on as token 1."""
    plain_write(tmp_path / "a", code, DOCUMENTS)
    opened, problems = open_all([str(tmp_path / "a")])
    if code in (6, 7):
        (problem,) = problems
        assert str(problem) == f"{tmp_path}/a.bin holds {DTYPES[code].name} numbers, not token ids" and not opened
    else:
        assert not problems and opened[str(tmp_path / "a")].num_tokens == 7


@given(nested, st.sampled_from(sorted(DTYPES)))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_writer_is_the_format(tmp_path_factory, documents, code):
    path = tmp_path_factory.mktemp("d")
    plain_write(path / "plain", code, documents)
    meta = write(path / "ours", documents, dtype=DTYPES[code], eod_id=7, tokenizer="abc")
    for suffix in (".bin", ".idx"):
        assert (path / f"ours{suffix}").read_bytes() == (path / f"plain{suffix}").read_bytes()
    assert sorted(p.name for p in path.iterdir()) == [
        "ours.bin",
        "ours.idx",
        "ours.meta.json",
        "plain.bin",
        "plain.idx",
    ]
    dataset = IndexedDataset(path / "ours")
    flat = [t for d in documents for s in d for t in s]
    assert dataset.meta == meta and meta.eod_id == 7 and meta.tokenizer == "abc"
    assert dataset.largest_id() == max(flat, default=-1) == IndexedDataset(path / "plain").largest_id()
    assert dataset.problems() == [] and verify(dataset.prefix)[0] == []


@given(nested)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_document_starts(tmp_path_factory, documents):
    path = tmp_path_factory.mktemp("d")
    plain_write(path / "a", 8, documents)
    dataset = IndexedDataset(path / "a")
    starts, position = [], 0
    for document in documents:
        length = sum(map(len, document))
        if length:
            starts.append(position)
        position += length
    for compiled in {dataset._borders, None}:  # the compiled search, and NumPy's
        dataset._borders = compiled
        for a in range(position + 1):
            for b in range(a, position + 1):
                found = dataset.document_starts(a, b)
                assert found.tolist() == [p for p in starts if a <= p < b] and found.dtype == np.int64


def test_the_compiled_search_refuses_what_lies_outside(tmp_path):
    helper = index_module()[0] or pytest.skip("the data helper has not been built")
    data = bytes(100)
    helper.Borders(data, 34, 8, 0, 4, 2)
    for wrong in ((34, 9, 0, 4, 2), (-1, 1, 0, 4, 2), (34, 8, 90, 2, 2), (34, -1, 0, 4, 2), (34, 8, 0, 4, 0), (0, 2**61, 0, 1, 1)):
        with pytest.raises(ValueError, match="do not lie inside"):
            helper.Borders(data, *wrong)
    plain_write(tmp_path / "a", 8, [[[1, 2]], [[3]], [[4]], [[5]], [[6]]])
    with open(tmp_path / "a.idx", "r+b") as f:  # a border that points nowhere, which opening does not see
        f.seek(-32, os.SEEK_END)
        f.write(struct.pack("<q", -5))
    with pytest.raises(ValueError, match="a document border is no sequence"):
        IndexedDataset(tmp_path / "a").document_starts(0, 6)


def test_eod_is_counted(tmp_path):
    meta = write(tmp_path / "a", [[[5, 9]], [[1, 2], [3, 9]], [[4, 4, 4, 9]]], eod_id=9, vocab_size=10)
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.lengths.tolist() == [2, 2, 2, 4] and dataset.pointers.tolist() == [0, 4, 8, 12]
    assert all(dataset.document(i)[-1] == meta.eod_id for i in range(3))
    assert (tmp_path / "a.bin").stat().st_size == dataset.lengths.sum() * dataset.dtype.itemsize


def test_writer_refuses(tmp_path):
    writer = IndexedWriter(tmp_path / "a", vocab_size=100)
    with pytest.raises(ValueError, match=r"document 0: .* sum to 3, but it has 4 tokens"):
        writer.add_document([1, 2, 3, 4], [1, 2])
    with pytest.raises(ValueError, match="sum to 4, but it has 4|sum to"):
        writer.add_document([1, 2, 3, 4], [5, -1])
    with pytest.raises(ValueError, match="token id 100 does not fit: the vocabulary has ids 0 to 99"):
        writer.add_document([1, 100])
    with pytest.raises(ValueError, match="token id -1 does not fit"):
        writer.add_document([-1, 5])
    with pytest.raises(ValueError, match="must be integers, not float64"):
        writer.add_document([1.5])
    with pytest.raises(ValueError, match="no documents were written"):
        writer.finish()
    assert list(tmp_path.iterdir()) == []
    with IndexedWriter(tmp_path / "b", dtype="uint16") as writer:
        with pytest.raises(ValueError, match=r"65536 does not fit: uint16 has ids 0 to 65535; use a wider dtype"):
            writer.add_document(np.array([65536]))
        writer.add_document(np.array([65535], dtype=np.uint64))
    assert IndexedDataset(tmp_path / "b").document(0).tolist() == [65535]
    with pytest.raises(ValueError, match="cannot hold float16"):
        IndexedWriter(tmp_path / "c", dtype="float16")
    with IndexedWriter(tmp_path / "none" / "yet" / "c") as writer:  # directories are made
        writer.add_document([1])
    assert len(IndexedDataset(tmp_path / "none" / "yet" / "c")) == 1


def test_a_dataset_without_documents_is_made_on_request_only(tmp_path):
    with IndexedWriter(tmp_path / "a", vocab_size=100, empty=True):
        pass
    dataset = IndexedDataset(tmp_path / "a")
    assert (dataset.num_documents, dataset.num_tokens, len(dataset), dataset.problems()) == (0, 0, 0, [])
    assert dataset.read(0, 0).tolist() == [] and dataset.document_starts(0, 1).tolist() == []


def test_choice_of_dtype():
    assert [choose_dtype(v).name for v in (None, 1, 65499, 65500)] == ["int32", "uint16", "uint16", "int32"]


def test_overwriting_is_asked_for(tmp_path):
    write(tmp_path / "a", [[[1]]])
    with pytest.raises(FileExistsError, match=r"a\.bin and .*a\.idx already there"):
        IndexedWriter(tmp_path / "a")
    write(tmp_path / "a", [[[2, 3]]], overwrite=True)
    assert IndexedDataset(tmp_path / "a").document(0).tolist() == [2, 3]


def test_exception_leaves_nothing_and_old_files_stay(tmp_path):
    write(tmp_path / "a", [[[1]]])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(KeyboardInterrupt), IndexedWriter(tmp_path / "a", overwrite=True) as writer:
        writer.add_document(range(500_000))
        assert len(list(tmp_path.iterdir())) == 6
        raise KeyboardInterrupt
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_two_writers_of_one_prefix(tmp_path):
    with IndexedWriter(tmp_path / "a") as first:
        first.add_document([1])
        with pytest.raises(FileExistsError, match="is being written by another process"):
            IndexedWriter(tmp_path / "a")
    assert IndexedDataset(tmp_path / "a").document(0).tolist() == [1]


WRITER = """
import sys, time, numpy as np
from megatron_lite.data.indexed import IndexedWriter
with IndexedWriter(sys.argv[1], vocab_size=1000) as writer:
    print("started", flush=True)
    for i in range(int(sys.argv[2])):
        writer.add_document(np.full(1000, i % 1000), [400, 600])
"""


def run_writer(prefix, documents, **options) -> subprocess.Popen:
    root = str(Path(__file__).resolve().parent.parent)
    env = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(prefix), str(documents)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options)


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.3])
def test_killed_writer_leaves_nothing_that_opens(tmp_path, delay):
    process = run_writer(tmp_path / "a", 10**7)
    assert process.stdout.readline() == "started\n"
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert all(p.name.endswith(".tmp") for p in tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match="no such file"):
        IndexedDataset(tmp_path / "a")
    assert run_writer(tmp_path / "a", 3).communicate(timeout=30)[1] == ""  # works without cleaning by hand
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx", "a.meta.json"]
    assert IndexedDataset(tmp_path / "a").num_tokens == 3000


def test_interrupt_and_full_disk_remove_temporaries(tmp_path):
    process = run_writer(tmp_path / "a", 10**7)
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode != 0 and list(tmp_path.iterdir()) == []

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 512, 64 * 512))

    process = run_writer(tmp_path / "a", 10**4, preexec_fn=limit)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0 and "File too large: " in errors and "a.bin.tmp" in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("crash_at", range(9))
def test_crash_while_publishing(tmp_path, monkeypatch, crash_at):
    """Power fails at each rename or removal: the old pair, nothing, or the new pair; never a mixture."""
    write(tmp_path / "a", [[[1, 2]]])
    write(tmp_path / "a_loss_mask", [[[1, 0]]])
    calls = []

    class Crash(BaseException):
        pass

    real_replace, real_unlink = os.replace, Path.unlink

    def guarded(real):
        def call(*args, **kwargs):
            if len(calls) >= crash_at:
                raise Crash
            calls.append(args)
            return real(*args, **kwargs)

        return call

    writer = IndexedWriter(tmp_path / "a", overwrite=True)
    writer.add_document([8, 9])
    monkeypatch.setattr(os, "replace", guarded(real_replace))
    monkeypatch.setattr(Path, "unlink", guarded(real_unlink))
    try:
        writer.finish()
    except Crash:
        pass
    monkeypatch.undo()
    try:
        tokens = IndexedDataset(tmp_path / "a").document(0).tolist()
    except FileNotFoundError:
        tokens = None
    assert tokens == ([1, 2] if crash_at == 0 else [8, 9] if crash_at == 8 else None)
    assert tokens != [8, 9] or not list(tmp_path.glob("a_loss_mask*"))


def test_reader_refuses(tmp_path):
    write(tmp_path / "a", [[[1, 2, 3]], [[4]]])
    write(tmp_path / "b", [[[1, 2, 3, 4]], [[4]]])
    (tmp_path / "a.meta.json").unlink()
    a_bin, a_idx = (tmp_path / "a.bin").read_bytes(), (tmp_path / "a.idx").read_bytes()

    def refused(pattern, bin_bytes=a_bin, idx_bytes=a_idx):
        (tmp_path / "x.bin").write_bytes(bin_bytes)
        (tmp_path / "x.idx").write_bytes(idx_bytes)
        with pytest.raises(ValueError, match=pattern):
            IndexedDataset(tmp_path / "x")

    refused(r"x\.bin has 15 bytes, but its index describes 16", bin_bytes=a_bin[:-1])
    refused(r"x\.bin has 17 bytes, but its index describes 16", bin_bytes=a_bin + b"\0")
    refused(r"x\.bin has 20 bytes, but its index describes 16", bin_bytes=(tmp_path / "b.bin").read_bytes())
    refused(r"x\.idx has 81 bytes, but 2 sequences and 2 documents take 82", idx_bytes=a_idx[:-1])
    refused(r"x\.idx has 83 bytes", idx_bytes=a_idx + b"\0")
    refused("20 bytes are too few", idx_bytes=a_idx[:20])
    refused("too few", idx_bytes=b"")
    refused("not an index", idx_bytes=b"X" + a_idx[1:])
    refused("version 2", idx_bytes=a_idx[:9] + b"\2" + a_idx[10:])
    refused("unknown dtype code 9; known: 1 uint8", idx_bytes=a_idx[:17] + b"\x09" + a_idx[18:])
    refused("back to back", idx_bytes=a_idx[:34] + struct.pack("<ii", 2, 1) + a_idx[42:])
    refused("document borders run from 1 to 2", idx_bytes=a_idx[:58] + struct.pack("<q", 1) + a_idx[66:])
    refused("document borders", idx_bytes=a_idx[:26] + struct.pack("<Q", 0) + a_idx[34:58])
    with pytest.raises(FileNotFoundError, match=r"none\.bin and .*none\.idx: no such file; there are: .*/a, "):
        IndexedDataset(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"give the prefix without \.bin"):
        IndexedDataset(tmp_path / "a.bin")


def test_full_check(tmp_path):
    with IndexedWriter(tmp_path / "a", dtype="uint8") as writer:
        for i in range(1000):
            writer.add_document([i % 7] * 10)
    meta = json.loads((tmp_path / "a.meta.json").read_text())
    idx = bytearray((tmp_path / "a.idx").read_bytes())
    struct.pack_into("<ii", idx, 34 + 4 * 501, 9, 11)  # two lengths that sum to what they should
    (tmp_path / "a.idx").write_bytes(idx)
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:-1] + b"\6")
    found = verify(tmp_path / "a")[0]
    assert len(found) == 3 and "sequence 502 of length 11" in found[0] and "sha256" in found[1] and "sha256" in found[2]
    for name, value in (("vocab_size", "64"), ("eod_id", True), ("largest_id", 6.0), ("sha256_bin", 5), ("tokens", None)):
        (tmp_path / "a.meta.json").write_text(json.dumps(meta | {name: value}))
        with pytest.raises(ValueError, match=rf"a\.meta\.json: {name} is {value!r}; remove the file"):
            IndexedDataset(tmp_path / "a")
    meta["tokens"] += 1
    (tmp_path / "a.meta.json").write_text(json.dumps(meta))
    with pytest.raises(
        ValueError, match="describes another dataset: it says 1000 sequences, 1000 documents, 10001 tokens"
    ):
        IndexedDataset(tmp_path / "a")
    (tmp_path / "a.meta.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        IndexedDataset(tmp_path / "a")


def test_merge(tmp_path):
    parts = [[[[1, 2], [3]], [[]]], [[[4]]], [[[5], [6, 7]], [[8]]]]
    for i, documents in enumerate(parts):
        write(tmp_path / f"p{i}", documents, vocab_size=9, eod_id=8, tokenizer="t")
    meta = merge([tmp_path / f"p{i}" for i in range(3)], tmp_path / "all")
    write(tmp_path / "whole", [d for p in parts for d in p], vocab_size=9, eod_id=8, tokenizer="t")
    for suffix in (".bin", ".idx", ".meta.json"):
        assert (tmp_path / f"all{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    assert (meta.eod_id, meta.tokenizer, meta.vocab_size, meta.largest_id) == (8, "t", 9, 8)
    write(tmp_path / "wide", [[[1]]], dtype="int32")
    with pytest.raises(ValueError, match="different dtype cannot be joined: uint16 in .*p0, int32 in .*wide"):
        merge([tmp_path / "p0", tmp_path / "wide"], tmp_path / "bad")
    write(tmp_path / "other", [[[1]]], vocab_size=9, eod_id=0, tokenizer="t")
    with pytest.raises(ValueError, match="different eod_id"):
        merge([tmp_path / "p0", tmp_path / "other"], tmp_path / "bad")
    with pytest.raises(ValueError, match="nothing to join"):
        merge([], tmp_path / "bad")
    assert not list(tmp_path.glob("bad*"))
    (tmp_path / "p0.meta.json").unlink()
    assert merge([tmp_path / "p0", tmp_path / "p1"], tmp_path / "unknown").eod_id is None


def test_memory_does_not_grow_with_documents(tmp_path):
    tokens, lengths, count = np.zeros(10_000, dtype=np.uint16), np.ones(10_000, dtype=np.int64), 2_000_000
    tracemalloc.start()
    with IndexedWriter(tmp_path / "a", dtype="uint16") as writer:
        for _ in range(count // len(lengths)):
            writer.add_documents(tokens, lengths)
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    merge([tmp_path / "a"] * 3, tmp_path / "b")
    merged = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert IndexedDataset(tmp_path / "b").num_documents == 3 * count
    assert written < 8e6 and merged < 10e6, (written, merged)  # whatever the count


def sparse_dataset(path, sequences: int, length: int) -> IndexedDataset:
    """A dataset of equal int32 sequences whose files take no room on the disk, but for the pointers."""
    header = IndexHeader(DTYPES[4], sequences, sequences + 1)
    with open(f"{path}.bin", "wb") as f:
        f.truncate(4 * sequences * length)
    with open(f"{path}.idx", "wb") as f:
        f.write(header.pack())
        f.write(np.full(sequences, length, "<i4").tobytes())
        f.write((np.arange(sequences, dtype="<i8") * (4 * length)).tobytes())
        f.write(np.arange(sequences + 1, dtype="<i8").tobytes())
    return IndexedDataset(path)


def test_wide_offsets(tmp_path):
    """4,000 sequences of 2^21 tokens: 2^33 tokens, 2^35 bytes, in sparse files."""
    dataset = sparse_dataset(tmp_path / "a", 4096, 2**21)
    assert dataset.num_tokens == 2**33
    with open(tmp_path / "a.bin", "r+b") as f:
        f.seek(4 * (2**33 - 3))
        f.write(struct.pack("<3i", 7, 8, 2**31 - 1))
    assert dataset.sequence(4095)[-3:].tolist() == [7, 8, 2**31 - 1]
    assert dataset.read(2**33 - 2, 2**33).tolist() == [8, 2**31 - 1]
    assert dataset.document_starts(2**32 - 5, 2**32 + 2**21 + 1).tolist() == [2**32, 2**32 + 2**21]
    unmapped = IndexedDataset(tmp_path / "a", Access("pread"))
    assert unmapped.read(2**33 - 2, 2**33).tolist() == [8, 2**31 - 1]


def test_wide_counts():
    """Header arithmetic for 3 * 2^32 sequences, without a file."""
    header = IndexHeader(DTYPES[8], 3 * 2**32, 2**32 + 1)
    assert IndexHeader.unpack(header.pack(), Path("x")) == header
    assert header.pointers_at == 34 + 12 * 2**32 and header.borders_at == header.pointers_at + 24 * 2**32
    assert header.size == header.borders_at + 8 * (2**32 + 1)


def test_describe(tmp_path):
    write(tmp_path / "a", [[[1, 2, 3], [4]], [[]], [[5]], [[6] * 9]], vocab_size=10, eod_id=9)
    found = describe(tmp_path / "a", first=2, ids=3)
    assert found["documents"] == 4 and found["sequences"] == 5 and found["tokens"] == 14 and found["dtype"] == "uint16"
    assert found["lengths"] == {"0": 1, "1": 1, "4-7": 1, "8-15": 1} and found["empty_documents"] == 1
    assert (found["shortest"], found["longest"], found["mean"]) == (0, 9, 3.5)
    assert found["first_documents"] == [{"tokens": 4, "ids": [1, 2, 3]}, {"tokens": 0, "ids": []}]
    assert found["problems"] == [] and found["meta"]["eod_id"] == 9
    json.dumps(found)


def test_empty_dataset_opens(tmp_path):
    plain_write(tmp_path / "a", 8, [])
    dataset = IndexedDataset(tmp_path / "a")
    assert (dataset.num_sequences, dataset.num_documents, dataset.num_tokens, dataset.largest_id()) == (0, 0, 0, -1)
    assert describe(tmp_path / "a")["lengths"] == {}
