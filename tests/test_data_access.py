"""Where token files are read from: local ones by any method, a store through the cache of blocks; its bound, its repair."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import sys
import threading
from pathlib import Path
from unittest import mock

import fsspec
import numpy as np
import pytest

from megatron_lite.data import access as access_module
from megatron_lite.data import remote
from megatron_lite.data.access import Access
from megatron_lite.data.indexed import IndexedDataset, IndexedWriter
from megatron_lite.data.remote import BLOCK, BlockCache, RemoteFile
from megatron_lite.data.sources import open_all


def write(prefix: Path, tokens: int = 900_000, seed: int = 0) -> IndexedDataset:
    """Documents of about 3,000 int32 tokens: a little more than three blocks."""
    rng = np.random.default_rng(seed)
    with IndexedWriter(prefix, dtype="int32") as writer:
        while writer.tokens < tokens:
            writer.add_document(rng.integers(0, 2**31 - 1, int(rng.integers(0, 6000)), dtype=np.int32))
    return IndexedDataset(prefix)


def upload(prefix: Path, name: str) -> str:
    """The files of a dataset in fsspec's store in memory."""
    store = fsspec.filesystem("memory")
    for suffix in (".bin", ".idx", ".meta.json"):
        store.pipe_file(f"/{name}{suffix}", Path(f"{prefix}{suffix}").read_bytes())
    return f"memory://{name}"


def blocks(cache: Path) -> list[Path]:
    return sorted(p for p in (cache / "blocks").glob("*/*") if p.is_file() and p.parent.name != ".locks")


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What was asked of stores: (suffix, start, stop)."""
    calls: list[tuple[str, int, int]] = []
    original = RemoteFile.fetch

    def count(self: RemoteFile, start: int, stop: int) -> bytes:
        calls.append((self.name.rpartition(".")[2], start, stop))
        return original(self, start, stop)

    monkeypatch.setattr(RemoteFile, "fetch", count)
    return calls


def test_every_way_to_read_gives_the_same(tmp_path, fetched):
    local = write(tmp_path / "a")
    name = upload(tmp_path / "a", "same/a")
    pread = IndexedDataset(tmp_path / "a", Access("pread"))
    stored = IndexedDataset(name, Access(cache=tmp_path / "cache"))
    assert local.num_tokens * 4 > 3 * BLOCK
    rng = np.random.default_rng(1)
    edges = [k * BLOCK // 4 + d for k in range(4) for d in (-1, 0, 1)]
    spans = [(s, s + n) for s in edges if s >= 0 for n in (0, 1, 2, 16384, 16385)]
    spans += [tuple(sorted(rng.integers(0, local.num_tokens, 2).tolist())) for _ in range(50)]
    for start, stop in [*spans, (0, local.num_tokens)]:
        expected = local.read(start, min(stop, local.num_tokens))
        for other in (pread, stored):
            assert np.array_equal(other.read(start, min(stop, local.num_tokens)), expected), (start, stop)
        assert np.array_equal(stored.document_starts(start, stop), local.document_starts(start, stop))
    assert (stored.num_documents, stored.meta) == (local.num_documents, local.meta)
    asked = [call for call in fetched if call[0] == "bin"]
    assert len(asked) == len(set(asked)) == 4 == len(blocks(tmp_path / "cache"))  # each block once
    again = IndexedDataset(name, Access(cache=tmp_path / "cache"))  # another process would find index and blocks
    assert np.array_equal(again.read(0, 10), local.read(0, 10))
    assert [c for c in fetched if c[0] == "bin"] == asked and len([c for c in fetched if c[0] == "idx"]) == 1
    for dataset in (local, pread, stored):
        dataset.close()


def test_damaged_blocks_are_fetched_again(tmp_path, fetched):
    local, name = write(tmp_path / "a"), upload(tmp_path / "a", "damage/a")
    stored = IndexedDataset(name, Access(cache=tmp_path / "cache"))
    expected = local.read(0, local.num_tokens)
    assert np.array_equal(stored.read(0, local.num_tokens), expected)
    for damage in (lambda b: b[:-1], lambda b: b"", lambda b: b[:70000] + bytes([b[70000] ^ 1]) + b[70001:], lambda b: bytes(len(b))):
        for path in blocks(tmp_path / "cache"):
            path.write_bytes(damage(path.read_bytes()))
        before = len(fetched)
        assert np.array_equal(stored.read(0, local.num_tokens), expected)
        assert len(fetched) > before
    blocks(tmp_path / "cache")[1].unlink()
    assert np.array_equal(stored.read(0, local.num_tokens), expected)


def test_a_replaced_file_has_new_blocks(tmp_path):
    write(tmp_path / "a")
    name = upload(tmp_path / "a", "replaced/a")
    IndexedDataset(name, Access(cache=tmp_path / "cache")).read(0, 100)
    for path in tmp_path.glob("a.*"):
        path.unlink()
    other = write(tmp_path / "a", seed=1)
    upload(tmp_path / "a", "replaced/a")
    assert np.array_equal(IndexedDataset(name, Access(cache=tmp_path / "cache")).read(0, 100), other.read(0, 100))


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_file_that_is_replaced_during_a_run_ends_it(tmp_path, kind):
    local = write(tmp_path / "a")
    write(tmp_path / "b", seed=1)
    name = f"file://{tmp_path}/a" if kind == "file" else upload(tmp_path / "a", "midway/a")
    old = (tmp_path / "a.bin").read_bytes()
    stored = IndexedDataset(name, Access(cache=tmp_path / "cache"))
    assert np.array_equal(stored.read(0, 9), local.read(0, 9))
    new = (tmp_path / "b.bin").read_bytes()[: len(old)].ljust(len(old))
    if kind == "file":
        (tmp_path / "new").write_bytes(new)
        os.replace(tmp_path / "new", tmp_path / "a.bin")
    else:
        fsspec.filesystem("memory").pipe_file("/midway/a.bin", new)
    assert stored.read(0, 9).astype("<i4").tobytes() == old[:36]  # in the cache
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{name}.bin has changed in the store since it was opened"):
            stored.read(BLOCK // 4, BLOCK // 4 + 9)
    assert len(blocks(tmp_path / "cache")) == 1


def test_the_cache_is_bounded_and_keeps_what_was_used_last(tmp_path):
    local, name = write(tmp_path / "a", 5_000_000), upload(tmp_path / "a", "bound/a")  # 20 blocks
    limit = 8 * BLOCK
    stored = IndexedDataset(name, Access(cache=tmp_path / "cache", cache_bytes=limit))
    (tmp_path / "cache/blocks/x").mkdir(parents=True)
    left = tmp_path / "cache/blocks/x/00000000.host.1-1.tmp"  # of a killed process, long ago
    left.write_bytes(bytes(BLOCK))
    os.utime(left, (1, 1))
    for start in range(0, local.num_tokens - 1000, BLOCK // 8):
        assert np.array_equal(stored.read(start, start + 1000), local.read(start, start + 1000))
        assert sum(p.stat().st_size for p in blocks(tmp_path / "cache")) <= limit * 1.01
    names = [p.name for p in blocks(tmp_path / "cache")]
    assert not left.exists() and names[-1] == "00000019" and len(names) >= 6
    oldest = blocks(tmp_path / "cache")[0]
    os.utime(oldest, (1, 1))
    number = int(oldest.name)
    stored.read(number * BLOCK // 4, number * BLOCK // 4 + 1)  # used: young again
    assert oldest.stat().st_mtime > 1e9
    BlockCache(tmp_path / "cache/blocks", 2 * BLOCK).trim()
    assert 0 < sum(p.stat().st_size for p in blocks(tmp_path / "cache")) <= 2 * BLOCK * 7 / 8


def test_the_bound_is_that_of_all_datasets_together(tmp_path):
    """Each of 150 small sources adds less than what a process adds before it looks at the cache."""
    size = write(tmp_path / "a", 10).num_tokens * 4 + 4  # one block, with its checksum
    access = Access(cache=tmp_path / "cache", cache_bytes=100 * size)
    for i in range(150):
        IndexedDataset(upload(tmp_path / "a", f"many/{i}"), access).read(0, 5)
    assert 75 < len(blocks(tmp_path / "cache")) <= 100


def test_threads_fetch_a_block_once(tmp_path, fetched):
    local, name = write(tmp_path / "a"), upload(tmp_path / "a", "threads/a")
    stored = IndexedDataset(name, Access(cache=tmp_path / "cache"))
    wrong = []

    def read() -> None:
        for start in range(0, local.num_tokens - 50, 20_000):
            if not np.array_equal(stored.read(start, start + 50), local.read(start, start + 50)):
                wrong.append(start)

    readers = [threading.Thread(target=read) for _ in range(6)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert not wrong and len([c for c in fetched if c[0] == "bin"]) == 4


def _process(prefix: str, cache: str, seed: int, bound: int) -> None:
    """Reads at random through a small cache that others use too, and compares."""
    local, stored = IndexedDataset(prefix), IndexedDataset(f"file://{prefix}", Access(cache=Path(cache), cache_bytes=bound))
    rng = np.random.default_rng(seed)
    for _ in range(150):
        start = int(rng.integers(0, local.num_tokens - 300))
        if not np.array_equal(stored.read(start, start + 300), local.read(start, start + 300)):
            sys.exit(3)


def test_ranks_share_a_cache_that_is_too_small(tmp_path):
    write(tmp_path / "a", 2_000_000)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_process, args=(str(tmp_path / "a"), str(tmp_path / "cache"), seed, 4 * BLOCK))
        for seed in range(3)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0, 0]
    assert sum(p.stat().st_size for p in blocks(tmp_path / "cache")) <= 4 * BLOCK * 1.01
    assert len(list((tmp_path / "cache/index").glob("*.idx"))) == 1 and not list((tmp_path / "cache").rglob("*.tmp"))


def test_stores_that_fail(tmp_path, monkeypatch):
    local, name = write(tmp_path / "a"), upload(tmp_path / "a", "fail/a")
    stored = IndexedDataset(name, Access(cache=tmp_path / "cache"))
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    store, answers = fsspec.filesystem("memory"), []
    original = store.cat_file

    def sometimes(path, start=None, end=None):
        answers.append(start)
        if len(answers) % 3:
            raise TimeoutError("slow down") if len(answers) % 3 == 1 else OSError("reset")
        return original(path, start=start, end=end)

    monkeypatch.setattr(type(store), "cat_file", staticmethod(sometimes))
    assert np.array_equal(stored.read(0, 9), local.read(0, 9)) and len(answers) == 3
    monkeypatch.setattr(type(store), "cat_file", staticmethod(lambda path, start=None, end=None: b"short"))
    with pytest.raises(ConnectionError, match=r"memory://fail/a.bin: bytes 1048576 to 2097152 .* 3 times; .* 5 bytes came"):
        stored.read(BLOCK // 4, BLOCK // 4 + 1)
    assert len(blocks(tmp_path / "cache")) == 1


def test_a_store_that_does_not_answer_is_no_store_without_the_file(tmp_path, monkeypatch):
    """Over HTTP fsspec raises FileNotFoundError for both; taken for one, a loss mask would be left out without a word."""
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)

    def info(path):
        reason = answers.pop(0)
        if reason is not None:
            raise FileNotFoundError(path) from reason
        return {"size": 4, "ETag": "x"}

    def status(number):
        error = OSError(f"answer {number}")
        error.status = number
        return error

    store = mock.Mock(info=info)
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda name: (store, "f"))
    for answers, found in (([None], 4), ([status(404)], None), ([status(503), ConnectionResetError("reset"), None], 4)):
        file = RemoteFile.find("http://host/f")
        assert (file and file.size) == found and not answers
    answers = [status(503), status(503), ConnectionRefusedError("nobody")]
    with pytest.raises(ValueError, match=r"http://host/f cannot be opened: ConnectionError: 3 times; the last: .*nobody"):
        RemoteFile.find("http://host/f")


def test_a_full_disk_makes_a_store_slow_and_ends_nothing(tmp_path, monkeypatch, fetched):
    local, name = write(tmp_path / "a"), upload(tmp_path / "a", "full/a")
    stored = IndexedDataset(name, Access(cache=tmp_path / "cache"))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(remote, "new_file", full)
    with pytest.warns(UserWarning, match=r"blocks of memory://full/a.bin cannot be kept in .*: .*No space left"):
        assert np.array_equal(stored.read(0, 9), local.read(0, 9))
    assert blocks(tmp_path / "cache") == []


@pytest.mark.parametrize("method", ["mmap", "pread"])
def test_more_files_than_a_shell_allows(tmp_path, method):
    """Files that are read stay open, and so do mapped ones."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    write(tmp_path / "s0", 10)
    prefixes = [str(tmp_path / f"s{i}") for i in range(300)]
    for prefix in prefixes[1:]:
        for suffix in (".bin", ".idx", ".meta.json"):
            os.link(f"{prefixes[0]}{suffix}", f"{prefix}{suffix}")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        opened, problems = open_all(prefixes, Access(method))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not problems and len(opened) == 300
    for dataset in opened.values():
        dataset.close()


def test_too_many_files_are_said_with_a_name(tmp_path, monkeypatch):
    write(tmp_path / "a", 10)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(access_module.mmap, "mmap", full)
    problems = open_all([str(tmp_path / "a")])[1]
    assert str(tmp_path / "a") in problems[0].what and "Too many open files" in problems[0].what


def test_what_is_refused(tmp_path):
    write(tmp_path / "a")
    name = upload(tmp_path / "a", "refused/a")
    with pytest.raises(ValueError, match=r"memory://refused/a: a remote prefix needs --data-cache-path DIR.*--stage-dir DIR"):
        IndexedDataset(name)
    cached = Access(cache=tmp_path / "cache")
    with pytest.raises(FileNotFoundError, match=r"memory://refused/b.bin and memory://refused/b.idx: no such file"):
        IndexedDataset("memory://refused/b", cached)
    with pytest.raises(ValueError, match=r"nowhere://x.bin cannot be opened: ValueError: Protocol not known"):
        IndexedDataset("nowhere://x", cached)
    with (
        mock.patch("fsspec.core.url_to_fs", side_effect=ImportError("Install s3fs to access S3")),
        pytest.raises(ValueError, match=r"s3://b/x.bin: s3:// needs a package .*: pip install s3fs"),
    ):
        IndexedDataset("s3://b/x", cached)
    store = fsspec.filesystem("memory")
    index = bytearray(store.cat_file("/refused/a.idx"))
    index[40] ^= 1
    store.pipe_file("/refused/a.idx", bytes(index))
    with pytest.raises(ValueError, match=r"a.idx: its sha256 is not the one in .meta.json"):
        IndexedDataset(name, cached)
    assert not list((tmp_path / "cache/index").glob("*.idx*"))
    store.pipe_file("/refused/a.bin", b"12")
    with pytest.raises(ValueError, match=r"sha256|has 2 bytes, but its index describes"):
        IndexedDataset(name, cached)


def test_wide_offsets_of_a_store(tmp_path):
    """2^31 tokens of 8 bytes in a sparse file: bytes past 2^32, block numbers past 2^13."""
    from test_indexed import sparse_dataset

    local = sparse_dataset(tmp_path / "a", 4096, 2**20)
    end = local.num_tokens
    with open(tmp_path / "a.bin", "r+b") as f:
        f.seek(local.dtype.itemsize * (end - 2))
        f.write(np.array([7, 8], local.dtype).tobytes())
    stored = IndexedDataset(f"file://{tmp_path / 'a'}", Access(cache=tmp_path / "cache"))
    assert stored.read(end - 3, end).tolist() == [0, 7, 8] and end * local.dtype.itemsize > 2**32
    with pytest.raises(ValueError, match="ends at byte"):
        stored.read(end - 1, end + 1)
