"""Orders kept in files: found by what they follow from, made once by many processes, never believed when damaged."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.config.schema_io import DataConfig
from megatron_lite.data import megatron_order, order_cache
from megatron_lite.data.build import build_datasets
from megatron_lite.data.indexed import IndexedDataset, IndexedWriter
from megatron_lite.data.megatron_order import MegatronDataset
from megatron_lite.data.node_file import new_file, node_lock
from megatron_lite.data.order_cache import cached_arrays


def write(prefix: Path, lengths: list[int]) -> IndexedDataset:
    with IndexedWriter(prefix, dtype="int32", eod_id=0, overwrite=True) as writer:
        for length in lengths:
            writer.add_document(range(length))
    return IndexedDataset(prefix)


LENGTHS = [5, 9, 2, 14, 7, 3, 11]


def dataset(data: IndexedDataset, cache: Path | None, tell: list[str] | None = None, **changed: Any) -> MegatronDataset:
    options = {"part": range(len(data)), "seq_length": 4, "asked": 30, "seed": 1, **changed}
    part, seq_length, asked, seed = (options[k] for k in ("part", "seq_length", "asked", "seed"))
    return MegatronDataset(data, part, seq_length, asked, seed, cache=cache, tell=(tell if tell is not None else []).append)


def rows(data: MegatronDataset) -> list[list[int]]:
    return [data.row(j).tokens.tolist() for j in range(len(data))]


def files(cache: Path) -> list[Path]:
    return sorted((cache / "orders").glob("*.order"))


def test_a_second_start_computes_nothing(tmp_path, monkeypatch):
    data, cache = write(tmp_path / "a", LENGTHS), tmp_path / "cache"
    plain, first = dataset(data, None), dataset(data, cache)
    monkeypatch.setattr(MegatronDataset, "_build", lambda self, seed: pytest.fail("computed again"))
    second = dataset(IndexedDataset(tmp_path / "a"), cache)
    assert rows(plain) == rows(first) == rows(second) and len(files(cache)) == 1
    for name in ("order", "samples", "shuffle"):
        array, wanted = getattr(second, name), getattr(plain, name)
        assert array.dtype == wanted.dtype and array.shape == wanted.shape and not array.flags.writeable
        assert array.ctypes.data % 64 == 0


def test_whatever_changes_the_order_is_in_the_key(tmp_path):
    data, cache = write(tmp_path / "a", LENGTHS), tmp_path / "cache"
    for number, changed in enumerate(
        [{}, {"part": range(1, 7)}, {"part": range(6)}, {"seq_length": 5}, {"asked": 31}, {"asked": None}, {"seed": 2}], 1
    ):
        assert rows(dataset(data, cache, **changed)) == rows(dataset(data, None, **changed))
        assert len(files(cache)) == number
    swapped = write(tmp_path / "a", [9, 5, *LENGTHS[2:]])  # same name, counts and size; another index
    assert rows(dataset(swapped, cache)) == rows(dataset(swapped, None)) != rows(dataset(data, None))
    assert len(files(cache)) == number + 1
    write(tmp_path / "b", LENGTHS)  # the same index under another name may not even be looked at, but is right
    other = IndexedDataset(tmp_path / "b")
    assert other.index_digest == data.index_digest and rows(dataset(other, cache)) == rows(dataset(data, None))


def _damages(path: Path) -> list[tuple[str, bytes]]:
    whole = path.read_bytes()
    (header,) = struct.unpack("<I", whole[8:12])
    return [
        ("is not a file of sample orders", b""),
        ("is not a file of sample orders", b"MLORDE"),
        ("is not a file of sample orders", b"\x80\x04cos\nsystem\n" * 50),
        ("is damaged", whole[:40]),
        ("is damaged", whole[:30] + bytes([whole[30] ^ 1]) + whole[31:]),
        ("is damaged", whole[:8] + b"\xff\xff\xff\xff" + whole[12:]),
        ("is cut off: it has", whole[:-1]),
        ("is cut off: it has", whole[: 12 + header + 4]),
        ("is damaged (its array shuffle)", whole[:-1] + bytes([whole[-1] ^ 0x80])),
        ("is damaged (its array", whole[:-200] + bytes(200)),
    ]


def test_damaged_and_foreign_files_are_made_anew_and_said(tmp_path):
    data, cache = write(tmp_path / "a", LENGTHS), tmp_path / "cache"
    expected = rows(dataset(data, cache))
    (path,) = files(cache)
    whole = path.read_bytes()
    for reason, content in _damages(path):
        path.write_bytes(content)
        told: list[str] = []
        assert rows(dataset(data, cache, told)) == expected
        assert told == [f"{path} {reason}: built again"] or (reason in told[0] and told[0].endswith(": built again")), told
        assert path.read_bytes() == whole
    dataset(data, cache, seed=2)
    other = next(p for p in files(cache) if p != path)
    path.write_bytes(other.read_bytes())
    told = []
    assert rows(dataset(data, cache, told)) == expected and told == [f"{path} belongs to other data: built again"]
    told = []
    assert rows(dataset(data, cache, told)) == expected and told == []


def test_random_damage_is_never_believed(tmp_path):
    """One byte changed anywhere: the arrays are right, and said to be made anew unless the byte was padding."""
    arrays = {"order": np.arange(50, dtype=np.int32), "samples": np.arange(60).reshape(30, 2)}
    cached_arrays(tmp_path / "a", {"k": 1}, lambda: arrays)
    (path,) = tmp_path.glob("*.order")
    whole, unseen = path.read_bytes(), 0
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        told: list[str] = []
        found = cached_arrays(tmp_path / "a", {"k": 1}, lambda: arrays, told.append)
        assert all(np.array_equal(found[name], arrays[name]) for name in arrays)
        unseen += not told
    assert unseen < 2 * 64 / 3  # what lies between arrays


def _rank(prefix: str, cache: str, results: Any) -> None:
    built = []
    original = MegatronDataset._build

    def build(self: MegatronDataset, seed: int) -> Any:
        built.append(1)
        time.sleep(0.3)
        return original(self, seed)

    MegatronDataset._build = build  # type: ignore[method-assign]
    data = dataset(IndexedDataset(prefix), Path(cache))
    results.put((len(built), rows(data)))


def test_one_process_builds_and_the_others_wait(tmp_path):
    expected = rows(dataset(write(tmp_path / "a", LENGTHS), None))
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(str(tmp_path / "a"), str(tmp_path / "cache"), results)) for _ in range(4)]
    for process in ranks:
        process.start()
    found = [results.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(60)
    assert sorted(built for built, _ in found) == [0, 0, 0, 1]
    assert all(order == expected for _, order in found)


def _holder(path: str, ready: Any) -> None:
    with node_lock(Path(path)), new_file(Path(path)) as file:
        file.write(b"half")
        file.flush()
        ready.set()
        time.sleep(60)


def test_a_killed_builder_keeps_nobody_waiting(tmp_path):
    path = tmp_path / "sub" / "thing"
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    builder = context.Process(target=_holder, args=(str(path), ready))
    builder.start()
    assert ready.wait(30)
    waited: list[int] = []

    def waiting() -> None:
        waited.append(1)
        if len(waited) == 3:
            assert builder.pid is not None
            os.kill(builder.pid, signal.SIGKILL)
            builder.join()

    with node_lock(path, waiting):
        assert not path.exists() and len(list(path.parent.glob("*.tmp"))) == 1
        with new_file(path) as file:
            file.write(b"whole")
    assert path.read_bytes() == b"whole" and not list(path.parent.glob("*.tmp")) and len(waited) >= 3


def test_a_builder_that_fails_fails_on_every_rank_and_leaves_nothing(tmp_path):
    def fail() -> Any:
        raise MemoryError("no room")

    for _ in range(2):  # each tries for itself: nobody is left waiting
        with pytest.raises(MemoryError):
            cached_arrays(tmp_path / "a", {}, fail)
    assert not list(tmp_path.glob("*.order*"))
    with pytest.raises(ZeroDivisionError), new_file(tmp_path / "b") as file:
        file.write(b"x")
        1 / 0  # noqa: B018
    assert not list(tmp_path.glob("b*"))
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    with pytest.raises(OSError, match=r"[Nn]ot a directory|exists"):
        cached_arrays(blocked / "a", {}, lambda: {"x": np.zeros(1)})


def test_a_cache_that_cannot_be_written_is_read_and_long_work_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(order_cache, "_SAID_FROM", 0.0)
    told: list[str] = []
    arrays = {"x": np.arange(3)}
    cached_arrays(tmp_path / "a", {}, lambda: arrays, told.append)
    assert len(told) == 1 and "was computed in 0.0 s; later starts find it" in told[0]
    monkeypatch.setattr(order_cache, "node_lock", lambda path: pytest.fail("nothing is to be written"))
    assert cached_arrays(tmp_path / "a", {}, lambda: arrays, told.append)["x"].tolist() == [0, 1, 2] and len(told) == 1


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def no_locks(*args: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("megatron_lite.data.node_file.fcntl.flock", no_locks)
    assert cached_arrays(tmp_path / "a", {}, lambda: {"x": np.arange(3)})["x"].tolist() == [0, 1, 2]
    with new_file(tmp_path / "b") as first, new_file(tmp_path / "c") as other:  # two at work do not disturb each other
        first.write(b"1")
        assert other.write(b"2") == 1 and len(list(tmp_path.glob("*.tmp"))) == 2
        with new_file(tmp_path / "b.x"):
            pass
    dead = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    left = tmp_path / f"d.{socket.gethostname()}.{dead}-1.tmp"
    mine = tmp_path / f"d.{socket.gethostname()}.{os.getpid()}-1.tmp"
    for path in (left, mine):
        path.touch()
    with new_file(tmp_path / "d"):
        assert not left.exists() and mine.exists()


def test_a_run_of_five_hundred_sources_with_two_million_documents(tmp_path):
    """Megatron order: cold in seconds, warm from the cache in less than two, with the same rows."""
    rng = np.random.default_rng(0)
    entries = []
    for i in range(500):
        prefix = tmp_path / f"s{i}"
        lengths = rng.integers(100, 900, 4000).astype(np.int32)
        _index_only(prefix, lengths)
        entries += [str(1 + i % 3), str(prefix)]
    config = DataConfig(
        seq_length=2048, data_path=tuple(entries), split="1", sample_order="megatron", data_cache_path=str(tmp_path / "cache"),
        document_mask=False,
    )  # fmt: skip
    seconds, found = [], []
    for _ in range(2):
        began = time.perf_counter()
        built = build_datasets(config, asked=(100_000, 0, 0), seed=1)
        seconds.append(time.perf_counter() - began)
        assert built.train is not None and not built.problems
        found.append([built.train.row(j).starts.tolist() for j in range(3)])
    assert len(files(tmp_path / "cache")) == 500 and found[0] == found[1]
    assert min(seconds) < 2 and seconds[1] < 4, seconds


def _index_only(prefix: Path, lengths: np.ndarray) -> None:
    """A pair whose ``.bin`` is sparse."""
    n = len(lengths)
    pointers = np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64))) * 2
    with open(f"{prefix}.idx", "wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, n, n + 1))
        file.write(lengths.tobytes() + pointers.tobytes() + np.arange(n + 1, dtype=np.int64).tobytes())
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(lengths.sum(dtype=np.int64)) * 2)


def test_numpy_alone_gives_the_same_files(tmp_path, monkeypatch):
    data = write(tmp_path / "a", LENGTHS)
    dataset(data, tmp_path / "one")
    monkeypatch.setattr(megatron_order, "_index", None)
    dataset(data, tmp_path / "two")
    assert files(tmp_path / "one")[0].read_bytes() == files(tmp_path / "two")[0].read_bytes()
    assert order_cache.MAGIC == files(tmp_path / "one")[0].read_bytes()[:8]


def test_a_full_disk_is_told_with_the_file(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/a-.*\.order\..*\.tmp'"):
            cached_arrays(tmp_path / "a", {}, lambda: {"x": np.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.glob("a*"))
