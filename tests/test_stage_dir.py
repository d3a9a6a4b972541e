"""Copies on a node's disk: what runs read is the copy; killed, damaged, changed, full, and many processes at once."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import namedtuple
from pathlib import Path

import fsspec
import numpy as np
import pytest

from megatron_lite.config.schema_io import DataConfig
from megatron_lite.data import stage_dir
from megatron_lite.data.access import Access
from megatron_lite.data.index_format import mask_prefix
from megatron_lite.data.indexed import IndexedDataset, IndexedWriter
from megatron_lite.data.stage_dir import open_access, stage


def write(prefix: Path, tokens: int = 10_000, seed: int = 0) -> str:
    prefix.parent.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    with IndexedWriter(prefix, dtype="int32", overwrite=True) as writer:
        while writer.tokens < tokens:
            writer.add_document(rng.integers(0, 1000, int(rng.integers(1, 600)), dtype=np.int32))
    return str(prefix)


def same(copy: str, original: str) -> bool:
    return all(Path(copy + s).read_bytes() == Path(original + s).read_bytes() for s in (".bin", ".idx", ".meta.json"))


def names(directory: Path) -> set[str]:
    """Suffixes of what lies there."""
    return {p.name.partition(".")[2] for p in directory.iterdir() if p.is_file()}


def test_copies_are_made_once_and_used(tmp_path):
    source, directory = write(tmp_path / "x/corpus.v1"), tmp_path / "stage"
    first = stage([source, source], directory)
    copy = first.prefixes[source]
    assert same(copy, source) and Path(copy).name.startswith("corpus.v1-") and not first.notices
    assert first.copied == sum(os.path.getsize(source + s) for s in (".bin", ".idx", ".meta.json"))
    inodes = {p: p.stat().st_ino for p in directory.iterdir()}
    second = stage([source], directory)
    assert second.copied == 0 and second.prefixes == first.prefixes
    assert {p: p.stat().st_ino for p in directory.iterdir()} == inodes
    for path in (tmp_path / "x").glob("corpus*"):
        path.rename(path.with_name("gone" + path.name))
    dataset = IndexedDataset(source, Access(staged=second.prefixes))  # the original is not touched
    assert dataset.prefix == source and dataset.num_documents > 10
    with pytest.raises(FileNotFoundError, match=r"corpus.v1.bin and .*corpus.v1.idx: no such file"):
        stage([source], directory)


def test_a_changed_source_is_copied_again(tmp_path):
    source, directory = write(tmp_path / "a"), tmp_path / "stage"
    stage([source], directory)
    write(tmp_path / "a", seed=1)
    again = stage([source], directory)
    assert again.copied and same(again.prefixes[source], source)
    copy = Path(again.prefixes[source] + ".bin")
    for damaged in (copy.read_bytes()[:100], bytes(copy.stat().st_size)):  # and so is a copy that somebody has written to
        copy.write_bytes(damaged)
        assert same(stage([source], directory).prefixes[source], source)
    assert names(directory) == {"bin", "idx", "meta.json", "staged.json"}


def test_the_same_name_elsewhere_is_another_dataset(tmp_path):
    a, b = write(tmp_path / "a/c"), write(tmp_path / "b/c", seed=1)
    copies = stage([a, b], tmp_path / "stage").prefixes
    assert len(set(copies.values())) == 2 and same(copies[a], a) and same(copies[b], b)


def test_checksums_are_compared(tmp_path):
    source, directory = write(tmp_path / "a"), tmp_path / "stage"
    data = bytearray(Path(source + ".bin").read_bytes())
    data[7] ^= 1
    Path(source + ".bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"a.bin: the sha256 of its copy is not the one in .meta.json"):
        stage([source], directory)
    assert names(directory) == set()
    Path(source + ".meta.json").unlink()
    without = stage([source], directory)
    assert "a has no .meta.json: its copy could not be compared" in without.notices[0]
    assert names(directory) == {"bin", "idx", "staged.json"}


def test_what_was_copied_is_kept_unless_it_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(stage_dir, "_CHUNK", 1000)
    source, directory = write(tmp_path / "a"), tmp_path / "stage"
    size = os.path.getsize(source + ".bin")
    whole = Path(source + ".bin").read_bytes()
    read: list[int] = []
    original = stage_dir.ReadFile.read

    def count(self, start, stop):
        if self.path.suffix == ".bin":
            read.append(stop - start)
        return original(self, start, stop)

    monkeypatch.setattr(stage_dir.ReadFile, "read", count)
    state = stage_dir._open_sources(source)[".bin"]
    target = Path(stage([source], directory).prefixes[source])
    part = stage_dir._part(target, ".bin", state)
    for left, expected in ((whole[:2500], size - 2500), (b"\0" * 2500, size - 2500 + size), (whole + b"more", 0)):
        for path in directory.glob("a-*"):
            path.unlink()
        part.write_bytes(left)
        Path(f"{target}.bin.{'0' * 16}.part").write_bytes(b"of an older source")
        read.clear()
        assert same(stage([source], directory).prefixes[source], source)
        assert sum(read) == expected and names(directory) == {"bin", "idx", "meta.json", "staged.json"}


def test_no_room(tmp_path, monkeypatch):
    source = write(tmp_path / "a")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(stage_dir.shutil, "disk_usage", lambda path: usage(0, 0, 1 << 20))
    with pytest.raises(ValueError, match=r"--stage-dir .*stage has 0.00 GiB free, and the copy of .*a takes 0.00 more"):
        stage([source], tmp_path / "stage")
    assert names(tmp_path / "stage") == set()


def test_from_a_store(tmp_path):
    source = write(tmp_path / "a")
    store = fsspec.filesystem("memory")
    for suffix in (".bin", ".idx", ".meta.json"):
        store.pipe_file(f"/stage/a{suffix}", Path(source + suffix).read_bytes())
    copy = stage(["memory://stage/a"], tmp_path / "stage").prefixes["memory://stage/a"]
    assert same(copy, source) and stage(["memory://stage/a"], tmp_path / "stage").copied == 0


def test_what_a_run_stages(tmp_path):
    """Every source that is drawn from, loss masks too; nothing without --stage-dir."""
    a, b, c = (write(tmp_path / name) for name in "abc")
    with IndexedWriter(mask_prefix(a), dtype="uint8") as writer:
        writer.add_document([1])
    data = DataConfig(data_path=("0.5", a, "0", b, "0.5", c), stage_dir=str(tmp_path / "stage"))
    access, lines = open_access(data)
    assert set(access.staged) == {a, mask_prefix(a), c} and lines[1] == "0.00 GiB were copied there now"
    assert set(open_access(dataclasses.replace(data, curriculum="later.yaml"))[0].staged) == {a, mask_prefix(a), b, c}
    assert open_access(DataConfig(data_path=(a,)))[0].staged == {}
    assert access.exists(mask_prefix(a)) and not access.exists(mask_prefix(c))


def _rank(source: str, directory: str, results) -> None:
    began = time.monotonic()
    told: list[str] = []
    done = stage([source], Path(directory), told.append)
    results.put((done.copied, done.prefixes[source], time.monotonic() - began, told))


def test_one_process_of_a_node_copies(tmp_path, monkeypatch):
    """The others wait, hear that it goes on, and find the copy."""
    monkeypatch.setattr(stage_dir, "_CHUNK", 4096)
    original = stage_dir.ReadFile.read
    monkeypatch.setattr(stage_dir.ReadFile, "read", lambda *a: (time.sleep(0.02), original(*a))[1])
    source = write(tmp_path / "a", 50_000)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(source, str(tmp_path / "stage"), results)) for _ in range(3)]
    for process in ranks:
        process.start()
    found = [results.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(60)
    assert sorted(copied > 0 for copied, *_ in found) == [False, False, True]
    assert len({prefix for _, prefix, *_ in found}) == 1 and same(found[0][1], source)
    waited = [told for copied, _, _, told in found if not copied]
    assert all(len(told) >= 2 and "waiting for another process of this node" in told[0] for told in waited)


def test_a_killed_copy_is_taken_up_by_the_next(tmp_path):
    """Killed at random points, again and again: nothing opens before all is there, and in the end it is."""
    source, directory = write(tmp_path / "a", 60_000), tmp_path / "stage"
    program = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from megatron_lite.data import stage_dir
        stage_dir._CHUNK = 2048
        original = stage_dir.ReadFile.read
        stage_dir.ReadFile.read = lambda *a: (time.sleep(0.02), original(*a))[1]
        print("begin", flush=True)
        stage_dir.stage([{source!r}], Path({str(directory)!r}))
    """)
    rng = np.random.default_rng(5)
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"begin\n"
            time.sleep(rng.uniform(0.01, 0.12))
            process.send_signal(signal.SIGKILL)
        assert "staged.json" not in names(directory) if directory.exists() else True
    left = sum(p.stat().st_size for p in directory.glob("*.part"))
    done = stage([source], directory)
    total = sum(os.path.getsize(source + s) for s in (".bin", ".idx", ".meta.json"))
    assert same(done.prefixes[source], source) and 0 < left and done.copied <= total - left
    assert names(directory) == {"bin", "idx", "meta.json", "staged.json"}
    assert json.loads(Path(done.prefixes[source] + ".staged.json").read_bytes())["source"] == source
