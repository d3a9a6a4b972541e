"""Checkpoints: saved in any rectangles and loaded in any others; whole or not at all, whenever a rank dies; nothing executes."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from checkpoint_toys import (
    KINDS,
    State,
    cut,
    deal,
    equal,
    in_child,
    killed_at_each_call,
    model,
    on_ranks,
    read_all,
    save,
    share,
    whole,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.checkpoint import load as load_module
from megatron_lite.checkpoint import manifest as manifest_module
from megatron_lite.checkpoint import owner as owner_module
from megatron_lite.checkpoint import save as save_module
from megatron_lite.checkpoint.load import CorruptCheckpoint, Reader, intersect, load_shares, name_problems
from megatron_lite.checkpoint.manifest import (
    MARKER,
    Fragment,
    StoredPiece,
    coverage_problem,
    find_checkpoint,
    incomplete_reason,
    list_steps,
    marker_text,
    read_manifest,
    read_marker,
    step_directory,
)
from megatron_lite.checkpoint.owner import Owner, take_together
from megatron_lite.checkpoint.retention import prune
from megatron_lite.checkpoint.save import plan_file, save_checkpoint
from megatron_lite.checkpoint.together import SaveError, everyone
from megatron_lite.mesh.collectives import Axis
from megatron_lite.optim.shares import Share
from megatron_lite.tensor.spec import Rectangle
from megatron_lite.testing.ranks import RankFailed, run_ranks

ONE = Axis.single("world")


def entries(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def found_step(root: Path) -> int | None:
    found = find_checkpoint(root)
    return None if found is None else found.step


# --- any rectangles -------------------------------------------------------------------------------------------------


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    block=st.sampled_from([1, 7, 64, 1 << 20]),
)
@settings(max_examples=100, deadline=None)
def test_saved_in_any_rectangles_and_loaded_in_any_others(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    ranks: int,
    seed: int,
    block: int,
) -> None:
    """Bitwise, scalars and empty tensors too, with checksum blocks that end anywhere."""
    generator = torch.Generator().manual_seed(seed)
    state: State = {("weight", f"t{i}"): torch.randn(s, generator=generator).to(dtype) for i, s in enumerate(shapes)}
    with mock.patch.object(save_module, "BLOCK", block), mock.patch.object(load_module, "BLOCK", block):
        directory = save(tmp_path_factory.mktemp("c"), 3, state, ranks, seed)
        assert equal(read_all(directory), state)
        reader, rng = Reader(directory), random.Random(seed + 1)
        for (kind, name), full in state.items():
            for box in cut(whole(full.shape), rng, 5):
                out = torch.full((box.numel,), torch.nan, dtype=torch.float64)
                reader.read(kind, name, box, out)  # another dtype
                assert torch.equal(out, share((kind, name), full, box).tensor.double())
        assert list(reader.problems()) == []


def test_intersect_against_brute_force() -> None:
    rng = random.Random(0)

    def cells(box: Rectangle) -> set[tuple[int, ...]]:
        grids = np.indices(box.size).reshape(len(box.size), -1).T
        return {tuple(int(x) + s for x, s in zip(cell, box.start, strict=True)) for cell in grids}

    for _ in range(500):
        a, b = (Rectangle((rng.randrange(4), rng.randrange(4)), (rng.randrange(4), rng.randrange(4))) for _ in range(2))
        common = intersect(a, b)
        assert (cells(common) if common is not None else set()) == cells(a) & cells(b)
        assert common is None or common.numel > 0
    assert intersect(Rectangle((), ()), Rectangle((), ())) == Rectangle((), ())


def test_more_than_ten_ranks_and_stale_files(tmp_path: Path) -> None:
    """Files are taken from the manifest, never from a listing or in order of their names."""
    state = model()
    directory = save(tmp_path, 1, state, ranks=12, seed=3)
    assert len(list(directory.glob("rank*.safetensors"))) == 12
    assert incomplete_reason(directory) is None
    other = save(tmp_path, 2, model(seed=1), ranks=14, seed=4)
    for rank in (12, 13):
        for suffix in ("json", "safetensors"):
            shutil.copy(other / f"rank{rank:05d}.{suffix}", directory)
    (directory / "rank00003.json.tmp").write_text("left over")
    assert equal(read_all(directory), state)


def test_step_zero_and_large_steps(tmp_path: Path) -> None:
    state = model()
    directory = save(tmp_path, 0, state)
    assert directory.name == "step_00000000" and found_step(tmp_path) == 0
    assert equal(read_all(directory), state) and Reader(directory).step == 0
    later = save(tmp_path, 123_456_789_012, model(1))
    assert later.name == "step_123456789012" and found_step(tmp_path) == 123_456_789_012


def test_state_comes_back(tmp_path: Path) -> None:
    config = {"model": {"hidden_size": 4}, "text": "é"}
    directory = save_checkpoint(
        tmp_path, 7, [], {"config": config, "progress": {"step": 7}, "big": 2**60, "x": 1e-300}, ONE
    )
    reader = Reader(directory)
    assert reader.state == {"config": config, "progress": {"step": 7}, "big": 2**60, "x": 1e-300}
    assert read_manifest(directory)["step"] == 7 and reader.names() == {}


def test_safetensors_opens_every_file(tmp_path: Path) -> None:
    from safetensors import safe_open

    state = {
        **model(dtype=torch.bfloat16),
        ("weight", "scalar"): torch.tensor(3.5),
        ("weight", "none"): torch.empty(0, 4),
    }
    dealt = deal(state, 3, seed=5)
    results = on_ranks(3, lambda world: save_checkpoint(tmp_path, 1, dealt[world.index], {}, world))
    for rank, shares in enumerate(dealt):
        with safe_open(results[0] / f"rank{rank:05d}.safetensors", "pt") as file:
            assert len(list(file.keys())) == len(shares)
            for number, s in enumerate(shares):
                tensor = file.get_tensor(f"{s.kind}/{s.name}/{number}")
                assert tuple(tensor.shape) == s.rectangle.size and torch.equal(tensor.reshape(-1), s.tensor)


def test_progress_is_told_during_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_module, "_WRITTEN_AT_ONCE", 100)
    calls: list[int] = []
    full = torch.arange(100.0)
    shares = [share(("weight", "a"), full, whole(full.shape)), share(("weight", "b"), full[:1], whole((1,)))]
    directory = save_checkpoint(tmp_path, 1, shares, {}, ONE, progress=lambda: calls.append(1))
    assert len(calls) == 4 + 1 and torch.equal(read_all(directory)["weight", "a"], full)


# --- offsets beyond 32 bits -----------------------------------------------------------------------------------------


def test_offsets_of_a_file_beyond_32_bits() -> None:
    """Tensors without storage: a file of 24 GiB is laid out, none is written."""
    rows = 3 << 20
    shares = [
        Share(
            "weight",
            f"t{i}",
            (3 * rows, 1024),
            Rectangle((i * rows, 0), (rows, 1024)),
            torch.empty(rows * 1024, device="meta"),
        )
        for i in range(2)
    ]
    plan = plan_file(shares)
    nbytes = rows * 1024 * 4
    assert nbytes == 12 << 30 and plan.size == len(plan.head) + 2 * nbytes
    assert [p.offset - len(plan.head) for p in plan.pieces] == [0, nbytes]
    assert [p.nbytes for p in plan.pieces] == [nbytes, nbytes]
    header = json.loads(plan.head[8:])
    assert header["weight/t1/1"]["data_offsets"] == [nbytes, 2 * nbytes]
    assert len(plan.head) == 8 + int.from_bytes(plan.head[:8], "little") and len(plan.head) % 8 == 0
    fragment = Fragment("rank00000.safetensors", plan.size, (), plan.pieces)
    assert Fragment.from_json(fragment.to_json()) == fragment


def test_reading_beyond_32_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with a hole: bytes past 2^32 and elements past 2^31 of a tensor of 2^33 elements."""
    monkeypatch.setattr(load_module, "BLOCK", 4096)
    directory = step_directory(tmp_path, 1)
    directory.mkdir()
    values = torch.arange(5000, dtype=torch.float32)
    offset, full = (1 << 32) + 8, (1 << 33) + 10
    size = offset + values.numel() * 4
    with open(directory / "rank00000.safetensors", "wb") as f:
        f.truncate(size)
        f.seek(offset)
        f.write(values.numpy().tobytes())
    if (directory / "rank00000.safetensors").stat().st_blocks * 512 > 1 << 30:
        pytest.skip("this file system stores holes")
    box = Rectangle((full - 5000,), (5000,))
    checksums = {}
    with open(directory / "rank00000.safetensors", "rb") as f:
        for block in range(offset // 4096, -(-size // 4096)):
            f.seek(block * 4096)
            checksums[block] = zlib.crc32(f.read(4096))
    sums = tuple(checksums.get(block, 0) for block in range(-(-size // 4096)))  # those of untouched blocks are not read
    piece = StoredPiece("weight", "t", (full,), "F32", box, offset, 20_000)
    data = Fragment("rank00000.safetensors", size, sums, (piece,)).to_json()
    (directory / "rank00000.json").write_bytes(data)
    files = {
        "rank00000.safetensors": {"size": size},
        "rank00000.json": {"size": len(data), "checksum": zlib.crc32(data)},
    }
    text = json.dumps({"format_version": 1, "step": 1, "state": {}, "files": files}).encode()
    (directory / "manifest.json").write_bytes(text)
    (directory / MARKER).write_bytes(marker_text(text, 0.0))
    out = torch.empty(100)
    Reader(directory).read("weight", "t", Rectangle((full - 2100,), (100,)), out)
    assert torch.equal(out, values[2900:3000])


# --- what is not whole is not taken ---------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path, State]:
    """Checkpoints of steps 5 and 10, the newer one's directory, the older one's tensors."""
    old = model(seed=5)
    save(tmp_path, 5, old, ranks=2)
    return tmp_path, save(tmp_path, 10, model(seed=10), ranks=3), old


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        path.write_bytes(data[:-1])
    elif kind == "longer":
        path.write_bytes(data + b"x")
    elif kind == "missing":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "garbage":
        path.write_bytes(b"abc\n")
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe\x00" * 50)
    else:
        assert kind == "flipped"
        data[-1] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        (MARKER, "missing", "no COMPLETE marker (the save did not finish)"),
        (MARKER, "empty", "COMPLETE is not a marker of this program"),
        (MARKER, "garbage", "COMPLETE is not a marker of this program"),
        (MARKER, "binary", "COMPLETE is not a marker of this program"),
        ("manifest.json", "missing", "manifest.json cannot be read (No such file or directory)"),
        ("manifest.json", "empty", "manifest.json does not match the checksum in COMPLETE"),
        ("manifest.json", "flipped", "manifest.json does not match the checksum in COMPLETE"),
        ("rank00001.safetensors", "missing", "rank00001.safetensors is missing"),
        ("rank00001.safetensors", "truncated", "rank00001.safetensors has "),
        ("rank00002.json", "missing", "rank00002.json is missing"),
        ("rank00002.json", "longer", "rank00002.json has "),
    ],
)
def test_broken_newest_is_passed_over_and_named(
    two: tuple[Path, Path, State], name: str, kind: str, reason: str
) -> None:
    root, newest, old = two
    damage(newest / name, kind)
    found = find_checkpoint(root)
    assert found is not None and found.step == 5 and equal(read_all(found.directory), old)
    assert f"passed over: step_00000010: {reason}" in found.notice
    with pytest.raises(CorruptCheckpoint, match=f"not a complete checkpoint: {re.escape(reason)}"):
        Reader(newest)
    with pytest.raises(ValueError, match=f"no complete checkpoint: step_00000010: {re.escape(reason)}"):
        find_checkpoint(root, step=10)
    shutil.rmtree(root / "step_00000005")
    with pytest.raises(
        ValueError, match=f"holds no complete checkpoint: step_00000010: {re.escape(reason)}.*remove these"
    ):
        find_checkpoint(root)


def test_flipped_byte_names_file_and_range(two: tuple[Path, Path, State], monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is right, so that only reading finds it; what does not touch the block is still read."""
    root, _, _ = two
    monkeypatch.setattr(load_module, "BLOCK", 64)
    monkeypatch.setattr(save_module, "BLOCK", 64)
    state = model()
    directory = save(root, 20, state)
    reader = Reader(directory)
    file, piece = reader.tensors["exp_avg", "blocks.1.mlp.up.weight"][0]
    data = bytearray((directory / file).read_bytes())
    at = piece.offset + piece.nbytes // 2
    data[at] ^= 0x10
    (directory / file).write_bytes(data)
    assert found_step(root) == 20
    begin = at // 64 * 64
    wanted = rf"{re.escape(str(directory / file))}: bytes {begin} to {min(begin + 64, len(data)) - 1} do not match their checksum"
    box = whole(piece.full_shape)
    with pytest.raises(CorruptCheckpoint, match=wanted):
        Reader(directory).read("exp_avg", "blocks.1.mlp.up.weight", box, torch.empty(box.size))
    good = torch.empty(7, 4)
    Reader(directory).read("weight", "embed.tokens.weight", whole((7, 4)), good)
    assert torch.equal(good, state["weight", "embed.tokens.weight"])
    (problem,) = Reader(directory).problems()
    assert re.search(wanted, problem)


def test_flipped_byte_in_a_fragment(two: tuple[Path, Path, State]) -> None:
    _, newest, _ = two
    damage(newest / "rank00000.json", "flipped")
    with pytest.raises(CorruptCheckpoint, match=r"rank00000\.json does not match its checksum in manifest\.json"):
        Reader(newest)


def test_other_format_version_is_refused(two: tuple[Path, Path, State]) -> None:
    _, newest, _ = two
    forge(newest, lambda m: {**m, "format_version": 2})
    assert incomplete_reason(newest) == "format version 2, this program reads 1"


def forge(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Another manifest, with a marker that matches it."""
    text = json.dumps(change(json.loads((directory / "manifest.json").read_bytes()))).encode()
    (directory / "manifest.json").write_bytes(text)
    (directory / MARKER).write_bytes(marker_text(text, 1e9))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: [],
        lambda m: {},
        lambda m: {**m, "files": 3},
        lambda m: {**m, "files": {"../../etc/passwd": {"size": 1}}},
    ],
)
def test_forged_manifest_is_refused(two: tuple[Path, Path, State], change: Any) -> None:
    root, newest, _ = two
    forge(newest, change)
    reason = incomplete_reason(newest)
    assert reason is not None and reason.startswith("manifest.json")
    assert found_step(root) == 5


def test_pieces_must_hold_every_element_once(tmp_path: Path) -> None:
    """A hole is found when saving; two pieces that overlap beside a hole (the count is right) when reading."""
    full = torch.arange(12.0).view(3, 4)

    def pieces(*boxes: Rectangle) -> list[Share]:
        return [share(("weight", "t"), full, box) for box in boxes]

    with pytest.raises(SaveError, match=r"not the whole model: weight of t: 8 of 12 elements"):
        save_checkpoint(tmp_path, 1, pieces(Rectangle((0, 0), (2, 4))), {}, ONE)
    assert entries(tmp_path) == []
    overlapping = pieces(Rectangle((0, 0), (2, 4)), Rectangle((1, 0), (1, 4)))
    directory = save_checkpoint(tmp_path, 1, overlapping, {}, ONE)
    reader, out = Reader(directory), torch.empty(12)
    with pytest.raises(CorruptCheckpoint, match="weight of t: of the box .* elements are stored twice"):
        reader.read("weight", "t", whole((3, 4)), out)
    with pytest.raises(CorruptCheckpoint, match="only 0 of 4 elements are stored"):
        reader.read("weight", "t", Rectangle((2, 0), (1, 4)), out[:4])
    assert list(reader.problems()) == ["weight of t: elements are stored twice"]
    reader.read("weight", "t", Rectangle((0, 0), (1, 4)), out[:4])
    assert out[:4].tolist() == [0, 1, 2, 3]
    with pytest.raises(CorruptCheckpoint, match=r"has no weight of u"):
        reader.read("weight", "u", whole((3, 4)), out)
    for box in (Rectangle((0, 0), (4, 4)), Rectangle((0,), (3,))):
        with pytest.raises(CorruptCheckpoint, match=r"has shape \[3, 4\], asked for is"):
            reader.read("weight", "t", box, torch.empty(box.numel))


def test_ranks_that_disagree_on_a_shape(tmp_path: Path) -> None:
    pieces = [StoredPiece("weight", "t", shape, "F32", whole(shape), 0, 0) for shape in ((2, 3), (3, 2))]
    assert coverage_problem(pieces) == "weight of t has shape [2, 3] on one rank, [3, 2] on another"
    assert coverage_problem(pieces[:1]) is None and coverage_problem([]) is None


def test_no_checkpoint_and_unknown_step(two: tuple[Path, Path, State], tmp_path: Path) -> None:
    root, _, _ = two
    assert find_checkpoint(tmp_path / "none") is None
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "step_00000003.tmp").mkdir()  # a first save that died
    (tmp_path / "empty" / "steps").mkdir()
    (tmp_path / "empty" / "step_00000004").write_text("a file")
    assert find_checkpoint(tmp_path / "empty") is None
    found = find_checkpoint(root, step=5)
    assert found is not None and found.step == 5 and found.notice.endswith("step_00000005 (as asked)")
    with pytest.raises(ValueError, match="has no checkpoint of step 7; it has: 5, 10"):
        find_checkpoint(root, step=7)


# --- nothing executes -----------------------------------------------------------------------------------------------


class Exploit:
    """Its pickle writes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("name", [MARKER, "manifest.json", "rank00000.json", "rank00000.safetensors"])
@pytest.mark.parametrize("forged", [False, True])
@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_pickles_are_refused(two: tuple[Path, Path, State], tmp_path: Path, name: str, forged: bool, form: str) -> None:
    """Put in place of any file, also where sizes and checksums have been made to match."""
    _, newest, _ = two
    marker, path = tmp_path / "marker", newest / name
    size = path.stat().st_size
    if form == "torch":
        torch.save(Exploit(marker), path)
    else:
        path.write_bytes(pickle.dumps(Exploit(marker)))
    if forged and name == MARKER:
        return
    if forged and name == "manifest.json":
        (newest / MARKER).write_bytes(marker_text(path.read_bytes(), 1e9))
    elif forged:
        data = path.read_bytes()
        if name.endswith(".safetensors"):
            data = (data * (size // len(data) + 1))[:size]
            path.write_bytes(data)
        entry = {"size": len(data), "checksum": zlib.crc32(data)}
        forge(newest, lambda m: {**m, "files": {**m["files"], name: entry}})
    with pytest.raises(
        CorruptCheckpoint, match=r"manifest|marker|checksum|description of a rank|is not|bytes, \d+ were written"
    ):
        assert Reader(newest).names()
        for (kind, tensor), shape in ((k, Reader(newest).names(k[0])[k[1]]) for k in Reader(newest).tensors):
            Reader(newest).read(kind, tensor, whole(shape), torch.empty(shape))
    assert not marker.exists()


# --- publication ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True], ids=["new step", "same step again"])
def test_killed_at_any_moment(tmp_path: Path, again: bool) -> None:
    """Before, in and after each file, between rename and marker, in the removal of the older save of the same step: what is
    found is the old or the new checkpoint, whole; and saving again works and leaves no trace."""
    old, new = model(seed=1), model(seed=2)
    first, second = (5, 5) if again else (5, 10)
    outcomes = set()
    shares = deal(new, 1, seed=0)[0]
    template = tmp_path / "template"
    save(template, first, old)

    def attempt(tick: Callable[[], None]) -> None:
        root = tmp_path / "run"
        save_checkpoint(root, second, shares, {}, ONE, progress=tick)
        prune(root, 1, None)

    shutil.copytree(template, tmp_path / "run")
    for moment in killed_at_each_call(attempt):
        root = tmp_path / "run"
        found = find_checkpoint(root)
        assert found is not None, moment
        tensors = read_all(found.directory)
        is_new = equal(tensors, new)
        assert is_new or equal(tensors, old), moment
        outcomes.add((is_new, found.directory.name))
        attempt(lambda: None)
        assert entries(root) == [f"step_{second:08d}"] and equal(read_all(root / f"step_{second:08d}"), new), moment
        shutil.rmtree(root)
        shutil.copytree(template, root)
    assert {is_new for is_new, _ in outcomes} == {True, False} and moment > 20
    assert ((False, "step_00000005.replaced") in outcomes) == again
    root = tmp_path / "run"
    assert entries(root) == [f"step_{second:08d}"] and equal(read_all(root / f"step_{second:08d}"), new)


def test_first_save_killed_starts_fresh(tmp_path: Path) -> None:
    """Nothing that a reader would take, or an error that names it; a rerun works."""
    shares = deal(model(), 1, seed=0)[0]
    seen = set()
    for _ in killed_at_each_call(lambda tick: save_checkpoint(tmp_path / "run", 5, shares, {}, ONE, progress=tick)):
        try:
            found = find_checkpoint(tmp_path / "run")
            seen.add("none" if found is None else "complete")
        except ValueError as error:
            assert "step_00000005: no COMPLETE marker (the save did not finish)" in str(error)
            seen.add("error")
        save_checkpoint(tmp_path / "run", 5, shares, {}, ONE)
        assert entries(tmp_path / "run") == ["step_00000005"]
        shutil.rmtree(tmp_path / "run")
    assert seen == {"none", "error", "complete"}


def test_full_disk_ends_with_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    full = torch.zeros(100_000)
    big = [share(("weight", "t"), full, whole(full.shape))]
    save(tmp_path, 5, model(seed=1))

    def full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            save_checkpoint(tmp_path, 10, big, {}, ONE)
        except SaveError as error:
            assert "the checkpoint of step 10 could not be written; earlier ones are untouched. rank 0: OSError" in str(
                error
            )
            os._exit(42)

    assert in_child(full_disk) == 42
    assert entries(tmp_path) == ["step_00000005"] and found_step(tmp_path) == 5


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    first, second = model(seed=1), model(seed=2)
    save(tmp_path, 5, first, ranks=4)
    directory = save(tmp_path, 5, second, ranks=2)
    assert equal(read_all(directory), second) and entries(tmp_path) == ["step_00000005"]
    assert len(list(directory.glob("*.safetensors"))) == 2


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_ends_all_with_its_error(tmp_path: Path, failing: int) -> None:
    state = model()
    save(tmp_path, 5, state)
    dealt = deal(state, 3, seed=0)

    def attempt(world: Axis) -> Any:
        def fail() -> None:
            if world.index == failing:
                raise OSError(28, "No space left on device")

        shares = dealt[world.index] or [Share("weight", "x", (0,), whole((0,)), torch.empty(0))]
        return save_checkpoint(tmp_path, 10, shares, {}, world, progress=fail)

    for error in on_ranks(3, attempt):
        assert isinstance(error, SaveError)
        assert f"rank {failing}: OSError: [Errno 28] No space left on device" in str(error)
    assert entries(tmp_path) == ["step_00000005"]


@pytest.mark.parametrize("stale", [False, True])
def test_a_rank_that_does_not_see_the_directory(tmp_path: Path, stale: bool) -> None:
    """As with a disk of its own on one node, also where an earlier attempt left the directory there."""
    dealt = deal(model(), 3, seed=0)
    if stale:
        (tmp_path / "own" / "step_00000010.tmp").mkdir(parents=True)

    def attempt(world: Axis) -> Any:
        return save_checkpoint(tmp_path / ("own" if world.index == 1 else "shared"), 10, dealt[world.index], {}, world)

    seen_by = "which its rank has written, is not seen by rank 0" if stale else "made by rank 0, is not seen here"
    for error in on_ranks(3, attempt):
        assert isinstance(error, SaveError) and seen_by in str(error)
        assert "--save must be on a file system that every node shares" in str(error)
        assert f"rank {0 if stale else 1}: FileNotFoundError" in str(error)
    assert entries(tmp_path / "shared") == []


def test_everyone_groups_equal_errors() -> None:
    def work(world: Axis) -> Any:
        def fail() -> int:
            if world.index == 2:
                raise KeyError("two")
            if world.index != 0:
                raise ValueError("odd" if world.index % 2 else "even")
            return 1

        return everyone(world, fail, error=LookupError)

    for error in on_ranks(7, work):
        assert type(error) is LookupError
        assert str(error) == "ranks 1, 3, 5: ValueError: odd; rank 2: KeyError: 'two'; ranks 4, 6: ValueError: even"
    assert on_ranks(3, lambda world: everyone(world, lambda: world.index * 2)) == [[0, 2, 4]] * 3
    assert on_ranks(3, lambda world: everyone(world, lambda: world.index, only=1)) == [[None, 1, None]] * 3


def world_of(size: int, index: int) -> Axis:
    import torch.distributed as dist

    return Axis("world", tuple(range(size)), index, dist.group.WORLD)


def save_on_ranks(root: str, die: str) -> str:
    """Runs on real ranks; ``die`` says which one is killed, and when."""
    import torch.distributed as dist

    world = world_of(dist.get_world_size(), dist.get_rank())
    shares = deal(model(seed=2), world.size, seed=1)[world.index]

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if die == "rank 1 in its file" and world.index == 1:
        shares = shares or [Share("weight", "x", (0,), whole((0,)), torch.empty(0))]
        return str(save_checkpoint(Path(root), 10, shares, {}, world, progress=kill))
    if die == "rank 0 before the marker" and world.index == 0:
        with mock.patch.object(save_module, "marker_text", kill):
            return str(save_checkpoint(Path(root), 10, shares, {}, world))
    return str(save_checkpoint(Path(root), 10, shares, {}, world))


@pytest.mark.parametrize("die", ["rank 1 in its file", "rank 0 before the marker"])
def test_a_killed_rank_among_real_ones(tmp_path: Path, die: str) -> None:
    old = model(seed=1)
    save(tmp_path, 5, old)
    with pytest.raises(RankFailed, match="exit code -9|onnection"):
        run_ranks(2, save_on_ranks, str(tmp_path), die)
    assert found_step(tmp_path) == 5 and equal(read_all(tmp_path / "step_00000005"), old)
    assert run_ranks(3, save_on_ranks, str(tmp_path), "nobody") == [str(tmp_path / "step_00000010")] * 3
    assert found_step(tmp_path) == 10 and equal(read_all(tmp_path / "step_00000010"), model(seed=2))


# --- newest, and what is kept ---------------------------------------------------------------------------------------


def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves at times 1, 2, 3, ..."""
    ticks = iter(range(1, 1000))
    monkeypatch.setattr(save_module.time, "time", lambda: float(next(ticks)))


def saves(root: Path, *steps: int) -> None:
    for step in steps:
        save_checkpoint(root, step, [], {}, ONE)


def test_newest_is_the_one_saved_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run taken back to an earlier step goes on from there after a restart, not from the attempt that was abandoned."""
    clock(monkeypatch)
    saves(tmp_path, 10, 20, 30, 12)
    found = find_checkpoint(tmp_path)
    assert found is not None and found.step == 12
    assert "saved before it, by a run that was taken back: step 20, 30" in found.notice
    assert [d.step for d in list_steps(tmp_path)] == [12, 30, 20, 10]
    damage(tmp_path / "step_00000012" / "manifest.json", "flipped")
    found = find_checkpoint(tmp_path)
    assert found is not None and found.step == 30 and "passed over: step_00000012" in found.notice


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "protect", "kept"),
    [
        (None, None, [], [1, 2, 3, 4, 5, 6]),
        (None, 3, [2], [1, 2, 3, 4, 5, 6]),
        (2, None, [], [5, 6]),
        (1, None, [], [6]),
        (2, 3, [], [3, 5, 6]),
        (1, 2, [1], [1, 2, 4, 6]),
        (99, None, [], [1, 2, 3, 4, 5, 6]),
    ],
)
def test_retention(
    tmp_path: Path, keep_last: int | None, keep_every: int | None, protect: list[int], kept: list[int]
) -> None:
    saves(tmp_path, 1, 2, 3, 4, 5, 6)
    removed = prune(tmp_path, keep_last, keep_every, protect)
    assert sorted(d.step for d in list_steps(tmp_path)) == kept
    assert sorted(removed + kept) == [1, 2, 3, 4, 5, 6]


def test_retention_never_removes_the_last_complete_one(tmp_path: Path) -> None:
    saves(tmp_path, 1, 2, 3, 4)
    damage(tmp_path / "step_00000004" / "manifest.json", "flipped")
    damage(tmp_path / "step_00000003" / MARKER, "missing")
    assert prune(tmp_path, 1, None) == [1] and found_step(tmp_path) == 2  # what is younger than 2 stays
    damage(tmp_path / "step_00000002" / "rank00000.json", "truncated")
    assert prune(tmp_path, 1, None) == []  # none is complete: nothing goes
    assert entries(tmp_path) == ["step_00000002", "step_00000003", "step_00000004"]
    assert prune(tmp_path / "none", 1, None) == []


def test_retention_after_a_run_was_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was saved just now stays, though the abandoned attempt has higher steps."""
    clock(monkeypatch)
    saves(tmp_path, 10, 20, 30, 12)
    assert prune(tmp_path, 2, None) == [10, 20] and found_step(tmp_path) == 12
    saves(tmp_path, 14)
    assert prune(tmp_path, 2, None) == [30] and found_step(tmp_path) == 14


@pytest.mark.parametrize("keep_last", [None, 2])
def test_retention_removes_leftovers(tmp_path: Path, keep_last: int | None) -> None:
    """Of saves that died, once they are older than the newest complete one; other files are not ours."""
    saves(tmp_path, 1, 5)
    for name in (
        "step_00000003.tmp",
        "step_00000004.replaced",
        "step_00000005.tmp",
        "step_00000002",
        "step_00000009.tmp",
        "notes",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank00000.safetensors").write_text("part")
    shutil.copytree(
        tmp_path / "step_00000005", tmp_path / "step_00000005.replaced"
    )  # complete, and so is its replacement
    assert prune(tmp_path, keep_last, None) == [2, 3, 4, 5]
    assert entries(tmp_path) == ["notes", "step_00000001", "step_00000005", "step_00000009.tmp"]


def test_an_older_save_that_was_not_replaced_is_kept(tmp_path: Path) -> None:
    """Its step was being saved again when the run died: it is the only whole one of that step."""
    saves(tmp_path, 1, 5)
    os.rename(tmp_path / "step_00000005", tmp_path / "step_00000005.replaced")
    (tmp_path / "step_00000005").mkdir()
    found = find_checkpoint(tmp_path)
    assert found is not None and found.directory.name == "step_00000005.replaced"
    assert "passed over: step_00000005: no COMPLETE marker" in found.notice
    assert prune(tmp_path, 1, None) == [1, 5] and entries(tmp_path) == ["step_00000005.replaced"]
    (tmp_path / "step_00000005").mkdir()
    saves(tmp_path, 5)
    assert entries(tmp_path) == ["step_00000005"]


def test_retention_killed_at_any_moment(tmp_path: Path) -> None:
    saves(tmp_path / "all", 1, 2, 3)
    shutil.copytree(tmp_path / "all", tmp_path / "run")
    for _ in killed_at_each_call(lambda tick: prune(tmp_path / "run", 1, None)):
        for d in list_steps(tmp_path / "run"):
            if incomplete_reason(d.path) is None:
                Reader(d.path)  # what looks complete is
        assert found_step(tmp_path / "run") == 3
        prune(tmp_path / "run", 1, None)
        assert entries(tmp_path / "run") == ["step_00000003"]
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "all", tmp_path / "run")


def test_retention_removes_a_link_and_not_what_it_points_to(tmp_path: Path) -> None:
    """A checkpoint that was put on another disk; and a save that meets a link in its way."""
    elsewhere = tmp_path / "elsewhere"
    saves(tmp_path / "run", 1, 2, 3)
    for step in (1, 3):
        shutil.move(step_directory(tmp_path / "run", step), step_directory(elsewhere, step))
        step_directory(tmp_path / "run", step).symlink_to(step_directory(elsewhere, step))
    step_directory(tmp_path / "run", 4).symlink_to(tmp_path / "nothing")
    assert prune(tmp_path / "run", 1, None) == [1, 2] and found_step(tmp_path / "run") == 3
    saves(tmp_path / "run", 3, 4)
    assert entries(tmp_path / "run") == ["step_00000003", "step_00000004"] and found_step(tmp_path / "run") == 4
    assert not step_directory(tmp_path / "run", 3).is_symlink()
    assert all(incomplete_reason(step_directory(elsewhere, step)) is None for step in (1, 3))


def test_what_cannot_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go, and so does the run on: what was saved is complete."""
    saves(tmp_path, 1, 2, 3)
    real, said = shutil.rmtree, []

    def rmtree(path: Path) -> None:
        if path.name.startswith("step_00000001"):
            raise OSError(39, "Directory not empty")
        real(path)

    monkeypatch.setattr(manifest_module.shutil, "rmtree", rmtree)
    assert prune(tmp_path, 1, None, say=said.append) == [2] and entries(tmp_path) == ["step_00000001", "step_00000003"]
    assert said == [f"{tmp_path}/step_00000001 is not needed any more and cannot be removed: [Errno 39] Directory not empty"]
    monkeypatch.undo()
    saves(tmp_path, 1)
    monkeypatch.setattr(manifest_module.shutil, "rmtree", rmtree)
    saves(tmp_path, 1)
    assert found_step(tmp_path) == 1, "its older save could not be removed"
    assert prune(tmp_path / "step_00000001" / MARKER / "below", 1, None) == []
    monkeypatch.setattr(manifest_module.Path, "iterdir", mock.Mock(side_effect=OSError(5, "Input/output error")))
    said.clear()
    assert prune(tmp_path, 1, None, say=said.append) == [] and "[Errno 5] Input/output error" in said[0]


def test_files_copied_into_the_directory_of_another_step(tmp_path: Path) -> None:
    saves(tmp_path, 1, 2)
    (tmp_path / "step_00000003").mkdir()
    for file in (tmp_path / "step_00000002").iterdir():
        shutil.copy(file, tmp_path / "step_00000003")
    assert incomplete_reason(tmp_path / "step_00000003") == "holds the checkpoint of step 2"
    found = find_checkpoint(tmp_path)
    assert found is not None and found.step == 2
    assert "passed over: step_00000003: holds the checkpoint of step 2" in found.notice
    with pytest.raises(ValueError, match="step_00000003: holds the checkpoint of step 2"):
        find_checkpoint(tmp_path, 3)
    (tmp_path / "step_00000003").rename(tmp_path / "best")
    assert incomplete_reason(tmp_path / "best") is None, "another name says nothing"


# --- one run at a time ----------------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from megatron_lite.checkpoint.owner import Owner
owner = Owner(Path(sys.argv[1]))
owner.take()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_directory_belongs_to_one_process_while_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "PATIENCE", 0.2)
    root = tmp_path / "new" / "run"
    command = [sys.executable, "-c", HOLD, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        wanted = rf"--save {root} is being written by another run \(process {other.pid} on \S+ since 2\d{{3}}-.*\): end it"
        for error in on_ranks(2, lambda world: take_together(root, world)):
            assert isinstance(error, ValueError) and re.match(wanted, str(error)), error
        other.kill()
    let_go = take_together(root, ONE)
    assert f"process {os.getpid()} on " in (root / ".lock").read_text()
    with pytest.raises(ValueError, match=rf"\(process {os.getpid()} on "):
        Owner(root).take()
    saves(root, 1, 2)
    assert prune(root, 1, None) == [1] and entries(root) == [".lock", "step_00000002"]
    let_go()
    Owner(root).take()


def test_a_run_that_is_just_ending_is_waited_for(tmp_path: Path) -> None:
    before, after = Owner(tmp_path), Owner(tmp_path)
    before.take()
    timer = threading.Timer(0.5, before.release)
    timer.start()
    after.take()
    timer.join()
    after.release()


@pytest.mark.parametrize("broken", ["flock", "open"])
def test_no_locks_no_protection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """A file system without them, or one that cannot be written: the run starts."""
    if broken == "flock":
        monkeypatch.setattr(owner_module.fcntl, "flock", mock.Mock(side_effect=OSError(37, "No locks available")))
    else:
        (tmp_path / ".lock").mkdir()
    for owner in (Owner(tmp_path), Owner(tmp_path)):
        owner.take()
        owner.release()


def test_marker_says_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_module.time, "time", lambda: 1234.5)
    saves(tmp_path, 1)
    marker = read_marker(tmp_path / "step_00000001")
    assert marker is not None and marker[1] == 1234.5
    assert marker[0] == f"{zlib.crc32((tmp_path / 'step_00000001' / 'manifest.json').read_bytes()):08x}"


def test_durable_writes_are_flushed_before_they_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(manifest_module.os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(manifest_module.os, "replace", lambda a, b: (calls.append("rename"), replace(a, b))[1])
    save(tmp_path, 1, model())
    one_file = ["fsync", "rename", "fsync"]  # file, rename, directory
    assert calls == ["fsync", *one_file, *one_file, "rename", "fsync", *one_file]


# --- loading into shares --------------------------------------------------------------------------------------------


def blank(shares: list[Share]) -> list[Share]:
    return [Share(s.kind, s.name, s.full_shape, s.rectangle, torch.full_like(s.tensor, torch.nan)) for s in shares]


def test_load_shares_fills_every_tensor(tmp_path: Path) -> None:
    state = model()
    reader = Reader(save(tmp_path, 1, state, ranks=3, seed=1))
    for shares in deal(state, 2, seed=9):
        wanted = blank(shares)
        load_shares(reader, wanted)
        assert all(torch.equal(w.tensor, s.tensor) for w, s in zip(wanted, shares, strict=True))
        some = blank(shares)
        load_shares(reader, some, weights_only=True)
        assert all(bool(s.tensor.isnan().all()) == (s.kind != "weight") for s in some if s.tensor.numel())


def test_load_shares_in_other_dtypes(tmp_path: Path) -> None:
    """Masters stored in fp64 for a model in fp32 and the other way round."""
    state = model(dtype=torch.float64)
    reader = Reader(save(tmp_path, 1, state))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        (shares,) = deal(state, 1, seed=0)
        wanted = [
            Share(s.kind, s.name, s.full_shape, s.rectangle, torch.empty(s.tensor.numel(), dtype=dtype)) for s in shares
        ]
        load_shares(reader, wanted)
        for w, s in zip(wanted, shares, strict=True):
            assert torch.equal(w.tensor, s.tensor.to(dtype))


def test_load_shares_without_moments(tmp_path: Path) -> None:
    state = model()
    reader = Reader(save(tmp_path, 1, {k: v for k, v in state.items() if k[0] == "weight"}))
    (shares,) = deal(state, 1, seed=0)
    with pytest.raises(CorruptCheckpoint, match="holds weights only: give --no-load-optim or --finetune"):
        load_shares(reader, blank(shares))
    wanted = blank(shares)
    load_shares(reader, wanted, weights_only=True)
    assert all(torch.equal(w.tensor, s.tensor) for w, s in zip(wanted, shares, strict=True) if s.kind == "weight")


def test_load_shares_tells_everything_that_is_wrong(tmp_path: Path) -> None:
    state = model()
    reader = Reader(save(tmp_path, 1, state))
    wanted = [Share("weight", f"new.{i}", (2,), whole((2,)), torch.empty(2)) for i in range(7)]
    wanted.insert(1, Share("weight", "head.norm.weight", (5,), Rectangle((0,), (3,)), torch.empty(3)))
    with pytest.raises(CorruptCheckpoint) as error:
        load_shares(reader, wanted)
    text = str(error.value)
    assert "has no weight of new.0;" in text and text.endswith("; and 3 problems more")
    assert "weight of head.norm.weight: [4] in the checkpoint, [5] in the model" in text


def load_on_ranks(directory: str) -> bool:
    """Rank 1 sees a damaged file (of its own copy); all ranks end with its error."""
    import torch.distributed as dist

    world = world_of(dist.get_world_size(), dist.get_rank())
    shares = blank(deal(model(), world.size, seed=2)[world.index])
    copy = Path(directory) if world.index != 1 else Path(directory + "_damaged")
    with pytest.raises(ValueError, match=r"^rank 1: CorruptCheckpoint: .*bytes 0 to .* do not match their checksum"):
        everyone(world, lambda: load_shares(Reader(copy), shares), error=ValueError)
    everyone(world, lambda: load_shares(Reader(Path(directory)), shares))
    expected = deal(model(), world.size, seed=2)[world.index]
    return all(torch.equal(a.tensor, b.tensor) for a, b in zip(shares, expected, strict=True))


def test_damage_seen_by_one_rank_ends_all(tmp_path: Path) -> None:
    directory = save(tmp_path, 1, model(), ranks=1)
    shutil.copytree(directory, str(directory) + "_damaged")
    damage(Path(str(directory) + "_damaged") / "rank00000.safetensors", "flipped")
    assert run_ranks(3, load_on_ranks, str(directory)) == [True] * 3


def test_name_problems() -> None:
    stored = {"a": (2, 3), "b": (4,), "c.padding": (1, 3)}
    assert name_problems(stored, stored.items()) == []
    assert name_problems(stored, [("a", (3, 2)), ("d", (1,)), ("e.padding", (1,))]) == [
        "d: not in the checkpoint",
        "e.padding: not in the checkpoint (trained rows of padding: --mask-padded-vocab has changed)",
        "b: in the checkpoint, not in the model",
        "c.padding: in the checkpoint, not in the model (trained rows of padding: --mask-padded-vocab has changed)",
        "a: [2, 3] in the checkpoint, [3, 2] in the model",
    ]


# --- the optimizer's own shares -------------------------------------------------------------------------------------


def optimizer_of(dp: int, zero_stage: int, dtype: torch.dtype) -> Any:
    from optim_toys import single, toy

    from megatron_lite.mesh.layout import Layout
    from megatron_lite.mesh.mesh import ProcessMesh
    from megatron_lite.optim.buckets import Gradients
    from megatron_lite.optim.sharded import Optimizer

    mesh = ProcessMesh.open(Layout(dp=dp))
    gradients = Gradients(
        toy(dtype), mesh, zero_stage=zero_stage, bucket_size=40, overlap=False, grad_dtype=torch.float32
    )
    return Optimizer(gradients, single(dtype=dtype))


def train_and_save(dp: int, zero_stage: int, dtype: torch.dtype, root: str) -> None:
    from optim_toys import train_step

    optimizer = optimizer_of(dp, zero_stage, dtype)
    for step in range(2):
        train_step(optimizer.gradients, optimizer, step, microbatches=1, rows=6, clip=1.0)
    save_checkpoint(Path(root), 2, optimizer.shares(), {}, optimizer.gradients.mesh.axis("world"))


def load_and_save(dp: int, zero_stage: int, dtype: torch.dtype, root: str, out: str) -> bool:
    """Load, save again; whether the weights are the masters rounded."""
    optimizer = optimizer_of(dp, zero_stage, dtype)
    world = optimizer.gradients.mesh.axis("world")
    reader = Reader(step_directory(Path(root), 2))
    everyone(world, lambda: load_shares(reader, optimizer.targets()))
    optimizer.refresh_weights()
    save_checkpoint(Path(out), 2, optimizer.shares(), {}, world)
    for name, parameter in optimizer.gradients.parameters.items():
        master = torch.empty(parameter.shape)
        reader.read("weight", name, whole(parameter.shape), master)
        if not torch.equal(parameter.detach(), master.to(dtype)):
            return False
    return True


@pytest.mark.parametrize(("dp", "zero_stage"), [(1, 0), (3, 0), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharded_optimizer_at_other_sizes(tmp_path: Path, dp: int, zero_stage: int, dtype: torch.dtype) -> None:
    """Saved at one data-parallel size and ZeRO stage, loaded at others, saved again: the same bits."""
    run_ranks(dp, train_and_save, dp, zero_stage, dtype, str(tmp_path / "a"))
    state = read_all(tmp_path / "a" / "step_00000002")
    assert {kind for kind, _ in state} == set(KINDS) and all(t.dtype == torch.float32 for t in state.values())
    for other, stage in ((1, 0), (2, 1), (4, 0)):
        out = tmp_path / f"{other}{stage}"
        assert run_ranks(other, load_and_save, other, stage, dtype, str(tmp_path / "a"), str(out)) == [True] * other
        assert equal(read_all(out / "step_00000002"), state)
