"""Reading inputs: every format, packing and encoding; dirty, damaged and huge files; parts; which files the arguments name."""

from __future__ import annotations

import builtins
import bz2
import gzip
import io
import json
import lzma
import os
import random
import re
import subprocess
import sys
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from dirty_inputs import ALL, EACH_DIRTY_FILE, FOLDER, Dirty, documents, options_of

from megatron_lite.config.text_files import SUPPORTED, is_text_file
from megatron_lite.text.blocks import InputOptions, Lines, Texts
from megatron_lite.text.inputs import check_options, expand_inputs, extent, lines_before, name_of, open_input, repeated
from megatron_lite.text.inputs_bytes import check_encoding, whole_lines
from megatron_lite.text.records import NOT_DECODABLE, NOT_UTF8, BadInput, BadRecord, refusal

PLAIN = InputOptions()
PACK: dict[str, Any] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


def read(path: Path, options: InputOptions = PLAIN, **part: Any) -> list[tuple[int, Any]]:
    return [document for block in open_input(path, options, **part) for document in documents(block, options.keys)]


def good(found: list[tuple[int, Any]]) -> list[str]:
    return [texts[0] for _, texts in found if not isinstance(texts, BadRecord)]


def write_jsonl(path: Path, count: int, seed: int = 0) -> Path:
    rng = random.Random(seed)
    rows = [{"text": "x" * rng.randrange(40) + str(i), "meta": {"n": i}} for i in range(count)]
    data = "".join(json.dumps(r) + "\n" * rng.choice([1, 1, 2]) for r in rows).encode()
    path.write_bytes(PACK[next((s for s in PACK if s and path.name.endswith(s)), "")](data))
    return path


# --- dirty files ----------------------------------------------------------------------------------------------------


@EACH_DIRTY_FILE
@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
def test_dirty_file(dirty: Dirty, block_bytes: int) -> None:
    """Good texts in order, bad ones by number and reason, damage as an error with the file's name; however blocks are cut."""
    options = options_of(dirty, block_bytes=block_bytes)
    found: list[tuple[int, Any]] = []
    if dirty.error is None:
        found = read(dirty.path, options)
        assert good(found) == dirty.good
    else:
        with pytest.raises(BadInput) as error:
            for block in open_input(dirty.path, options):
                found += documents(block)
        text = str(error.value)
        assert text.startswith(f"{FOLDER}/") and dirty.path.name in text and dirty.error in text and "\n" not in text
        whole = good(found)
        assert whole == dirty.good[: len(whole)]
    assert [(n, why.reason) for n, why in found if isinstance(why, BadRecord)] == dirty.bad
    assert [n for n, _ in found] == sorted(n for n, _ in found) or dirty.path.suffix == ".tar"


def test_dirty_files_are_all_there() -> None:
    """Each file has an expectation, and each kind, packing and reason occurs."""
    there = {p.name for p in FOLDER.iterdir()} - {"make.py", "expected.json", "__pycache__"}
    assert there == {d.path.name for d in ALL}
    assert {name_of(d.path).kind for d in ALL} >= {".jsonl", ".json", ".txt", ".parquet", ".dat.zst", ".jsonl.zst.tar"}  # type: ignore[union-attr]
    assert len({why for d in ALL for _, why in d.bad}) >= 13


@pytest.mark.parametrize("encoding", ["utf-8", "gb18030", "utf-16"])
def test_the_place_of_undecodable_bytes(tmp_path: Path, encoding: str) -> None:
    """In characters of the line, so that it is the same place in an editor."""
    path = tmp_path / "a.jsonl"
    line = '{"text": "今天好"}\n'.encode(encoding)
    if encoding == "utf-16":
        path.write_bytes(line + '{"text": "今天\ud800好"}\n'.encode("utf-16-le", "surrogatepass"))
    else:
        path.write_bytes(line + line.replace("好".encode(encoding), b"\xff"))
    (_, first), (number, why) = read(path, InputOptions(encoding=encoding))
    assert first == ["今天好"] and number == 2
    assert str(why) == "bytes that are not text in the input's encoding (character 13 of the line)"


# --- formats --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", list(PACK))
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".ndjson", ".txt"])
def test_every_kind_with_every_packing(tmp_path: Path, kind: str, packing: str) -> None:
    path = tmp_path / f"A{kind}{packing}".upper()
    path.write_bytes(PACK[packing](b'{"text": "packed"}\n' if kind != ".txt" else b"packed"))
    assert good(read(path)) == ["packed"]


def test_other_fields_are_there_for_who_wants_them(tmp_path: Path) -> None:
    table = {"text": ["a", "b", None], "url": ["u", None, "w"], "n": [1, 2, 3]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    (block,) = open_input(tmp_path / "a.parquet", InputOptions(whole=True))
    assert isinstance(block, Texts) and block.columns == [["a", "b", ""]] and [r.index for r in block.refused] == [2]
    assert block.records == [{"url": "u", "n": 1}, {"url": None, "n": 2}, {"url": "w", "n": 3}]
    assert next(iter(open_input(tmp_path / "a.parquet", InputOptions()))).records is None  # type: ignore[union-attr]
    (block,) = open_input(tmp_path / "a.parquet", InputOptions(keys=("url", "text")))
    assert (
        isinstance(block, Texts) and block.keys == ("url", "text") and block.columns == [["u", "", "w"], ["a", "b", ""]]
    )
    assert [(r.index, r.reason) for r in block.refused] == [
        (1, "the value of 'url' is null, not a string"),
        (2, "the value of 'text' is null, not a string"),
    ]


GZ = gzip.compress(b"{}\n", mtime=0)


@pytest.mark.parametrize(("name", "data", "why"), [
    ("a.jsonl", GZ, "its content is gz, and its name does not say so: give it a name that ends in .gz"),
    ("a.txt", zstandard.compress(b"text"), "its content is zst, and its name does not say so"),
    ("a.jsonl", bz2.compress(b"{}\n"), "its content is bz2, and"),
    ("a.txt.gz", lzma.compress(b"text"), "its content is xz, and its name says gz: give it a name that ends in .xz"),
    ("a.dat.zst", GZ, "its content is gz, and its name says zst"),
    ("a.jsonl", b"PAR1\x15\x04\x15", "its content is parquet, and"),
    ("a.jsonl.zst", b'\xef\xbb\xbf {"text": "x"}\n', "its content is not packed, and its name says zst: give it a name without .zst"),
])  # fmt: skip
def test_a_name_that_is_not_that_of_the_content(tmp_path: Path, name: str, data: bytes, why: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(BadInput, match=re.escape(f"{path}: {why}")):
        list(open_input(path, InputOptions()))


def test_what_a_line_of_another_encoding_may_be() -> None:
    bad = BadRecord(NOT_DECODABLE)
    assert "--encoding" not in refusal(BadRecord(NOT_UTF8), b"\xc4\xe3\xba\xc3")
    for text, encoding, guess in [
        ('{"text": "今天天气很好，我们去公园。"}', "gb18030", "gb18030"), ('{"text": "x"}', "utf-16", "utf-16"),
        ('{"text": "Überraschung, très bien, señor"}', "latin-1", None), ('{"text": "сегодня хорошо"}', "cp1251", None),
        ('{"text": "今日はとても良い天気です"}', "shift_jis", None),
    ]:  # fmt: skip
        hint = f"--encoding {guess} may be right" if guess else "--encoding names another one"
        assert refusal(bad, text.encode(encoding)).startswith(f"{NOT_DECODABLE}; {hint}; --skip-bad leaves such records out: ")


def test_standard_input(tmp_path: Path) -> None:
    code = "import sys; from megatron_lite.text.inputs import *; "
    code += "print([(b.file, b.first, b.data) for b in open_input('-', InputOptions())])"
    done = subprocess.run([sys.executable, "-c", code], input=b'{"text": "a"}\n', capture_output=True, timeout=60)
    assert eval(done.stdout) == [("standard input", 1, b'{"text": "a"}\n')], done.stderr
    with pytest.raises(ValueError, match="can be read once"):
        expand_inputs(["-", "-"])


@pytest.mark.parametrize(("name", "package"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    real = builtins.__import__

    def without(wanted: str, *args: Any) -> Any:
        if wanted.split(".")[0] == package:
            raise ImportError(wanted)
        return real(wanted, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=f"not installed: pip install {package}"):
        list(open_input(tmp_path / name, InputOptions()))


# --- encodings ------------------------------------------------------------------------------------------------------


def test_encodings() -> None:
    assert check_encoding("UTF8") == check_encoding("utf-8-sig") == "utf-8" and check_encoding("GBK") == "gbk"
    for name in ("utf-99", "utf-7", "hz", "iso2022_jp", "cp037", "raw_unicode_escape", "rot13", "base64", "idna", "\0"):
        with pytest.raises(ValueError, match="known are utf-8, gb18030"):
            check_encoding(name)


@pytest.mark.parametrize(
    "encoding", ["gb18030", "gbk", "big5", "shift_jis", "euc-jp", "euc-kr", "big5hkscs", "johab", "cp932"]
)
def test_a_newline_is_a_newline_in_every_encoding(encoding: str) -> None:
    """No character but the newline has its byte, so lines may be cut at it."""
    for code in [*range(0xD800), *range(0xE000, 0x20000)]:
        if code != 10:
            assert b"\n" not in chr(code).encode(encoding, "ignore"), hex(code)


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_parts_have_each_line_once(tmp_path: Path, name: str) -> None:
    """Every cut of a file into three: each line in one part, in order, under its number."""
    path = write_jsonl(tmp_path / name, 8)
    options = InputOptions(block_bytes=64)
    whole = read(path, options)
    assert len(whole) == 8
    size = sum(len(b.data) for b in open_input(path, options) if isinstance(b, Lines))
    assert extent(path, options) == (size if name == "a.jsonl" else None)
    for first in range(0, size + 3, 5):
        for second in range(first, size + 3, 7):
            parts = [(0, first), (first, second), (second, None)]
            found = []
            for start, stop in parts:
                shift = lines_before(path, options, start) if name == "a.jsonl" else 0
                found += [(n + shift, t) for n, t in read(path, options, start=start, stop=stop)]
            assert found == whole, (first, second)


def test_blocks_can_be_taken_up_again(tmp_path: Path) -> None:
    """Where a block ends, the next begins: reading from there gives the rest."""
    path = write_jsonl(tmp_path / "a.jsonl", 100)
    blocks = [b for b in open_input(path, InputOptions(block_bytes=200)) if isinstance(b, Lines)]
    assert len(blocks) > 10 and blocks[-1].taken == path.stat().st_size
    for block in blocks:
        assert block.data == path.read_bytes()[block.offset : block.offset + len(block.data)]
        assert block.first == path.read_bytes()[: block.offset].count(b"\n") + 1
        rest = open_input(path, InputOptions(block_bytes=200), start=block.offset)
        assert b"".join(b.data for b in rest if isinstance(b, Lines)) == path.read_bytes()[block.offset :]


@pytest.mark.parametrize("name", ["a.parquet", "a.txt", "a.dat.zst", "a.jsonl.zst.tar"])
def test_parts_of_other_kinds(tmp_path: Path, name: str) -> None:
    texts = [f"text {i}" for i in range(11)]
    path, options = tmp_path / name, InputOptions(block_bytes=20, separator="\n" if name == "a.txt" else None)
    if name == "a.parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=4)
        assert extent(path, options) == 11
    elif name == "a.txt":
        path.write_text("\n".join(texts))
    elif name == "a.dat.zst":
        path.write_bytes(zstandard.compress(b"".join(b"%016d" % len(t) + t.encode() for t in texts)))
    else:
        path = FOLDER / "archive.jsonl.zst.tar"
    whole = read(path, options)
    units = 11 if name != "a.jsonl.zst.tar" else 300
    for cut in range(units + 2):
        parts = read(path, options, stop=cut) + read(path, options, start=cut)
        assert [(n, str(t)) for n, t in parts] == [(n, str(t)) for n, t in whole]


# --- size -----------------------------------------------------------------------------------------------------------


def test_whole_lines_for_any_pieces() -> None:
    rng = random.Random(7)
    for _ in range(300):
        data = bytes(rng.choice(b"ab\n") for _ in range(rng.randrange(60)))
        pieces, at = [], 0
        while at < len(data):
            pieces.append(data[at : at + rng.randrange(1, 9)])
            at += len(pieces[-1])
        size = rng.randrange(1, 30)
        found = list(whole_lines(iter(pieces), size))
        assert b"".join(found) == data and all(found)
        assert all(f.endswith(b"\n") for f in found[:-1])
        longest = max(map(len, data.split(b"\n"))) + 1
        assert all(len(f) <= size + 9 + 2 * longest for f in found)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.zst", "a.parquet", "a.dat.zst"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    """60 MB of text that packs a thousandfold; 8 MB at a time would be too much."""
    path = tmp_path / name
    line = json.dumps({"text": "same words " * 180}).encode() + b"\n"
    if name == "a.parquet":
        pq.write_table(
            pa.table({"text": [f"{i} " + "same words " * 180 for i in range(30_000)]}), path, row_group_size=10_000
        )
    elif name == "a.dat.zst":
        path.write_bytes(zstandard.compress((b"%016d" % len(line) + line) * 30_000))
    else:
        path.write_bytes(PACK[path.suffix](line * 30_000))
    assert path.stat().st_size < 4_000_000
    list(open_input(path, InputOptions(separator="\n")))[:0]  # what is imported is not counted
    tracemalloc.start()
    total = 0
    for block in open_input(path, InputOptions(separator="\n")):
        total += len(block.data) if isinstance(block, Lines) else sum(map(len, block.columns[0]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total > 55_000_000 and peak < 20_000_000, peak


def test_one_plain_document_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_lite.text.inputs_texts.LONGEST", 100_000)
    (tmp_path / "a.txt").write_text("word " * 100_000)
    with pytest.raises(
        BadInput, match=r"a\.txt: a document of more than 100,000 characters; --document-separator parts"
    ):
        list(open_input(tmp_path / "a.txt", InputOptions(block_bytes=1 << 16)))
    assert len(read(tmp_path / "a.txt", InputOptions(separator=" "))) == 100_001 - 1
    (tmp_path / "a.dat.zst").write_bytes(zstandard.compress(b"%016d" % 400_001 + bytes(400_001)))
    with pytest.raises(BadInput, match=r"a\.dat\.zst: document 1 is said to have 400,001 bytes, more than the 400,000 that are read"):
        list(open_input(tmp_path / "a.dat.zst", InputOptions()))


def test_every_file_of_an_archive_counts(tmp_path: Path) -> None:
    """``tarfile`` ends without a word at a header that it cannot read, or at the end of the first of two archives."""
    packed = zstandard.compress(b'{"text": "a"}\n')
    with tarfile.open(tmp_path / "whole.tar", "w") as archive:
        for name in ("a.jsonl.zst", "b.jsonl.zst"):
            member = tarfile.TarInfo(name)
            member.size = len(packed)
            archive.addfile(member, io.BytesIO(packed))
    whole, path = (tmp_path / "whole.tar").read_bytes(), tmp_path / "a.jsonl.zst.tar"
    path.write_bytes(whole)
    assert len(list(open_input(path, PLAIN))) == 2
    for damaged in (whole[:1024], whole[:1100], whole[:1174] + b"?" + whole[1175:], whole[:1024] + bytes(512) + whole[1536:], whole * 2):
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match=r"a\.jsonl\.zst\.tar: damaged, cut off or unreadable"):
            list(open_input(path, PLAIN))


def test_names_in_an_archive_that_are_not_utf8_can_be_written_anywhere(tmp_path: Path) -> None:
    """They are sources, and places of bad records, in reports that are UTF-8."""
    packed, path = zstandard.compress(b'{"text": "a"}\n'), tmp_path / "a.jsonl.zst.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as archive:
        member = tarfile.TarInfo("caf\xe9.jsonl.zst")
        member.size = len(packed)
        archive.addfile(member, io.BytesIO(packed))
    (block,) = open_input(path, PLAIN)
    assert block.file == f"{path}(caf\ufffd.jsonl.zst)"


def test_one_line_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_lite.text.inputs_bytes._LONGEST_LINE", 100_000)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "' + b"b" * 300_000 + b'"}\n'))
    with pytest.raises(BadInput, match=r"a\.jsonl\.gz: .* in line 2 or later \(a line of more than 100,000 bytes\)"):
        list(open_input(tmp_path / "a.jsonl.gz", InputOptions(block_bytes=10)))


def test_separators_wherever_pieces_end(tmp_path: Path) -> None:
    rng = random.Random(3)
    for _ in range(200):
        text = "".join(rng.choice(["a", "aab", "今", "\n"]) for _ in range(rng.randrange(40)))
        (tmp_path / "a.txt").write_bytes(text.encode())
        for separator in ("\n", "aa", "ab", "\n\n", "今a"):
            expected = text.split(separator)
            if expected[-1] == "":
                expected.pop()  # nothing stands behind the last separator
            assert good(read(tmp_path / "a.txt", InputOptions(separator=separator, block_bytes=3))) == expected


# --- which files ----------------------------------------------------------------------------------------------------


def test_directories(tmp_path: Path) -> None:
    """Recursively, in the order of names; nothing is left out without a word."""
    for name in ("b/z.txt", "b/a.jsonl.zst", "a.parquet", "c.jsonl", ".hidden.md", ".git/x", "b/_SUCCESS"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = [str(p.relative_to(tmp_path)) for p in expand_inputs([str(tmp_path)])]
    assert found == ["a.parquet", "b/a.jsonl.zst", "b/z.txt", "c.jsonl"]
    (tmp_path / "b" / "README.md").write_text("")
    with pytest.raises(
        ValueError, match=r"holds .*README\.md, which is not read; give a pattern as in '.*\*\*/\*\.jsonl'"
    ):
        expand_inputs([str(tmp_path)])
    (tmp_path / "b" / "README.md").unlink()
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="reached a second time, through a link"):
        expand_inputs([str(tmp_path)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="a directory without files"):
        expand_inputs([str(tmp_path / "empty")])


def test_directories_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``os.walk`` and ``glob`` pass over them without a word."""
    closed = tmp_path / "in" / "closed"
    closed.mkdir(parents=True)
    for folder in (closed.parent, closed):
        (folder / "a.jsonl").write_bytes(b"")
    access, scandir = os.access, os.scandir

    def refuse(path: str) -> Iterator[os.DirEntry[str]]:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed and access(path, mode))
    monkeypatch.setattr(os, "scandir", refuse)
    for wrong in ("in", "in/**/*.jsonl", "in/*/*.jsonl", "in/closed/*.jsonl", "*/closed/a.jsonl", "in/**"):
        with pytest.raises(PermissionError, match=r"in/closed"):
            expand_inputs([str(tmp_path / wrong)])
    assert expand_inputs([str(tmp_path / "in" / "*.jsonl")]) == [tmp_path / "in" / "a.jsonl"]


def test_files_that_are_named_twice_are_said(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.jsonl"
    path.write_bytes(b"")
    (tmp_path / "in" / "b.jsonl").write_bytes(b"")
    assert repeated(expand_inputs([str(tmp_path / "in")])) is None
    note = repeated(expand_inputs([str(tmp_path / "in"), str(tmp_path / "*" / "a*")]))
    assert note == f"note: {path} is named 2 times, and read as often"
    (tmp_path / "latest.jsonl").symlink_to(path)
    note = repeated(expand_inputs([str(tmp_path / "in"), str(tmp_path / "latest.jsonl")]))
    assert note is not None and str(path) in note


def test_inputs_are_all_read_or_refused(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.csv", "[x].jsonl"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "d.json").write_bytes(b"")
    for wrong in ("c.csv", "*.*"):
        with pytest.raises(
            ValueError, match=r"c\.csv: this kind of file is not read; supported are \.jsonl, \.json"
        ) as error:
            expand_inputs([str(tmp_path / wrong)])
        assert SUPPORTED in str(error.value)
    with pytest.raises(ValueError, match=r"no file matches; supported are"):
        expand_inputs([str(tmp_path / "*.txt")])
    with pytest.raises(ValueError, match="no such file"):
        expand_inputs([str(tmp_path / "none.jsonl")])
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match="not an ordinary file"):
        expand_inputs([str(tmp_path / "pipe.jsonl")])
    assert [p.name for p in expand_inputs([str(tmp_path / "deep"), str(tmp_path / "?.jsonl")])] == [
        "d.json",
        "a.jsonl",
        "b.jsonl",
    ]
    assert [p.name for p in expand_inputs([str(tmp_path / "[x].jsonl")])] == ["[x].jsonl"]  # a name, not a pattern
    assert [p.name for p in expand_inputs([str(tmp_path / "**" / "*.json")])] == ["d.json"]
    assert [p.name for p in expand_inputs([str(tmp_path / "d*")])] == ["d.json"]  # a directory, as where the shell takes the pattern
    (tmp_path / "none").mkdir()
    for wrong in ("n*", "**/none"):
        with pytest.raises(ValueError, match="a directory without files|no file matches"):
            expand_inputs([str(tmp_path / wrong)])


def test_options_that_fit_no_file_are_refused() -> None:
    for options, files, why in [
        (InputOptions(encoding="klingon"), ["a.jsonl"], "--encoding klingon"),
        (InputOptions(separator=""), ["a.txt"], "empty text"),
        (InputOptions(separator="x"), ["a.jsonl", "a.parquet"], "none of the 2 inputs is plain text"),
        (InputOptions(keys=("body",)), ["a.txt.gz"], "plain text has no keys but 'text'; --json-keys asks for body"),
        (InputOptions(keys=("text", "b")), ["a.dat.zst"], "has no keys but 'text'"),
    ]:
        with pytest.raises(ValueError, match=why):
            check_options(options, [Path(f) for f in files])
    check_options(InputOptions(separator="x", encoding="gbk"), [Path("a.txt"), Path("b.jsonl")])
    assert is_text_file("a.jsonl.zst") and is_text_file("x/a.parquet") and not is_text_file("a_text_document")


def test_nothing_here_needs_torch_and_optional_packages_come_late() -> None:
    code = "import sys, megatron_lite.text.inputs_texts; print([m for m in ('torch', 'pyarrow', 'zstandard') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(("packing", "pack", "padding"), [(".bz2", bz2.compress, b""), (".xz", lzma.compress, bytes(8))])
def test_every_stream_of_a_file_counts(tmp_path: Path, packing: str, pack: Callable[[bytes], bytes], padding: bytes) -> None:
    """The standard library's readers stop without a word at a stream whose beginning is damaged."""
    streams = [pack(b'{"text": "%d"}\n' % n * 1000) for n in range(3)]
    path = tmp_path / f"a.jsonl{packing}"
    path.write_bytes(padding.join([*streams, b""]))
    lines = b"".join(block.data for block in open_input(path, InputOptions(block_bytes=99)) if isinstance(block, Lines))
    assert lines == b"".join(b'{"text": "%d"}\n' % n * 1000 for n in range(3))
    for damaged in ([streams[0], b"x", *streams[1:]], [*streams, b"more"], [*streams, streams[0][:-9]]):
        path.write_bytes(b"".join(damaged))
        with pytest.raises(BadInput, match="damaged, cut off or unreadable"):
            list(open_input(path, InputOptions()))
