"""Shards: any line by its number from one frame, cut by the text alone, readable as ordinary .jsonl.zst."""

from __future__ import annotations

import copy
import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zstandard

from megatron_lite.clean import shards
from megatron_lite.clean.shards import FrameFile, FrameReader, ShardReader, ShardWriter, index_path, write_list
from megatron_lite.text.blocks import InputOptions, Lines
from megatron_lite.text.frames import fitting_index
from megatron_lite.text.inputs import expand_inputs, open_input


@pytest.fixture
def lines() -> list[bytes]:
    chance = random.Random(3)
    return [b'{"n": %d, "text": "%s"}\n' % (n, b"x" * chance.choice((0, 30, 900, 3000, 25_000))) for n in range(600)]


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "FRAME_BYTES", 10_000)


def write(directory: Path, lines: list[bytes], shard_bytes: int = 200_000, **options: Any) -> Path:
    directory.mkdir()
    with ShardWriter(directory, shard_bytes, **options) as writer:
        for line in lines:
            writer.add(line)
    write_list(directory, "plan")
    return directory


def test_every_line_is_found_by_its_number(tmp_path: Path, lines: list[bytes]) -> None:
    reader = ShardReader(write(tmp_path / "s", lines))
    assert len(reader) == len(lines)
    order = list(range(len(lines)))
    random.Random(1).shuffle(order)
    for number in order:
        assert reader.line(number) == lines[number][:-1]
    for number in (-1, len(lines)):
        with pytest.raises(IndexError):
            reader.line(number)


def test_one_line_costs_one_frame(tmp_path: Path, lines: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ShardReader(write(tmp_path / "s", lines))
    read: list[int] = []
    original = FrameReader._read

    def counted(self: FrameReader, file: Any, number: int) -> bytes:
        data = original(self, file, number)
        read.append(len(data))
        return data

    monkeypatch.setattr(FrameReader, "_read", counted)
    reader.line(301)
    assert len(read) == 1 and read[0] < 10_000 + 25_100


def test_shards_and_frames_begin_where_the_text_says(tmp_path: Path, lines: list[bytes]) -> None:
    directory = write(tmp_path / "s", lines)
    starts, at = {}, 0
    for number, line in enumerate(lines):
        starts.setdefault(at // 200_000, []).append(number)
        at += len(line)
    paths = sorted(directory.glob("*.zst"))
    assert len(paths) == len(starts) > 5
    for shard, path in zip(sorted(starts), paths, strict=True):
        numbers = starts[shard]
        assert path.name == f"shard-{shard:05d}.jsonl.zst"
        reader = FrameReader(path)
        assert (reader.lines, reader.bytes) == (len(numbers), sum(len(lines[n]) for n in numbers))
        assert b"".join(reader.read_frames()) == b"".join(lines[n] for n in numbers)
        assert len(reader.frames) > 3 or shard == max(starts)


def test_a_piece_is_written_as_it_is_in_the_whole(tmp_path: Path, lines: list[bytes]) -> None:
    whole = write(tmp_path / "whole", lines)
    first = FrameReader(whole / "shard-00000.jsonl.zst").lines
    start = sum(map(len, lines[:first]))
    piece = write(tmp_path / "piece", lines[first:], start=start)
    for path in piece.glob("*.zst"):
        assert path.read_bytes() == (whole / path.name).read_bytes()
        assert index_path(path).read_bytes() == index_path(whole / path.name).read_bytes()


def test_a_line_longer_than_a_shard_stays_whole(tmp_path: Path) -> None:
    lines = [b"a\n", b"b" * 7000 + b"\n", b"c\n", b"d\n"]
    directory = write(tmp_path / "s", lines, 1000)
    assert [p.name for p in sorted(directory.glob("*.zst"))] == ["shard-00000.jsonl.zst", "shard-00007.jsonl.zst"]
    assert [ShardReader(directory).line(n) + b"\n" for n in range(4)] == lines


def test_shards_are_ordinary_inputs(tmp_path: Path, lines: list[bytes]) -> None:
    """All readers take them: the tool, the package as one stream, and the inputs of this project by directory."""
    directory = write(tmp_path / "s", lines)
    found = b""
    for path in expand_inputs([str(directory)]):
        found += b"".join(block.data for block in open_input(path, InputOptions()) if isinstance(block, Lines))
    assert found == b"".join(lines)
    with open(directory / "shard-00000.jsonl.zst", "rb") as file:
        stream = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        assert found.startswith(data := stream.read()) and len(data) > 150_000


def test_damage_is_told(tmp_path: Path, lines: list[bytes]) -> None:
    directory = write(tmp_path / "s", lines)
    path = directory / "shard-00001.jsonl.zst"
    reader = FrameReader(path)
    data = bytearray(whole := path.read_bytes())
    data[reader.frames[2].offset + 30] ^= 255
    path.write_bytes(data)
    reader.line(reader.frames[2].line - 1)
    with pytest.raises(ValueError, match=r"shard-00001.*frame 2"):
        reader.line(reader.frames[2].line)
    path.write_bytes(data[:-20])
    with pytest.raises(ValueError, match="damaged or cut off"):
        reader.line(reader.lines - 1)
    path.write_bytes(whole)
    index = json.loads(index_path(path).read_bytes())
    second = index["frames"][2][1]
    for frame, column, change in [(0, 0, 1), (0, 1, 1), (0, 2, 5), (2, 1, -second), (2, 0, 1 << 40), (-1, 1, 1 << 40), (1, 2, -(9**9))]:
        wrong = copy.deepcopy(index)
        wrong["frames"][frame][column] += change
        index_path(path).write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"shard-00001.*json: damaged"):
            FrameReader(path)
        assert fitting_index(path) is None
    index["frames"][2][1] += 1  # rises still
    index_path(path).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"shard-00001.*frame 2 has \d+ lines, its index says \d+"):
        FrameReader(path).line(index["frames"][2][1] + 1)
    index_path(path).unlink()
    with pytest.raises(FileNotFoundError, match="index .* is missing"):
        FrameReader(path)
    index_path(path).write_text("{}")
    with pytest.raises(ValueError, match="not the index of a shard"):
        FrameReader(path)
    shutil.rmtree(directory / ".index")
    with pytest.raises(ValueError, match="no directory of shards"):
        ShardReader(directory)


def test_nothing_has_its_name_before_it_is_whole(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        file = FrameFile(tmp_path / "x.jsonl.zst", pool)
        file.add(memoryview(b"line\n"), 1, True)
        assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["x.jsonl.zst.tmp"]
        file.finish()
    assert FrameReader(tmp_path / "x.jsonl.zst").line(0) == b"line"
    with pytest.raises(RuntimeError), ShardWriter(tmp_path) as writer:
        writer.add(b"a\n")
        raise RuntimeError
    assert not (tmp_path / "shard-00000.jsonl.zst").exists()


def test_no_lines_are_no_shards(tmp_path: Path) -> None:
    assert len(ShardReader(write(tmp_path / "s", []))) == 0
