"""Preprocessing in parts, and runs that were killed and go on: the bytes are those of one run over everything."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from megatron_lite.clean import shards as clean_shards
from megatron_lite.clean.shards import ShardWriter
from megatron_lite.cli import preprocess as cli
from megatron_lite.data.describe import verify
from megatron_lite.data.index_format import DatasetMeta
from megatron_lite.data.indexed import IndexedDataset, IndexedWriter
from megatron_lite.data.parts import merge
from megatron_lite.text import run as engine
from megatron_lite.text.blocks import InputOptions, Lines
from megatron_lite.text.encode import Counts
from megatron_lite.text.frames import index_path
from megatron_lite.text.inputs import open_input
from megatron_lite.text.journal import Journal
from megatron_lite.text.preprocess import Options, preprocess
from megatron_lite.text.progress import Progress
from megatron_lite.text.records import BadInput
from megatron_lite.text.shares import Place, after, numbers_before, parse_part, shares
from megatron_lite.text.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = ("bin", "idx", "meta.json")
NUMBERS = partial(build_tokenizer, "NullTokenizer", vocab_size=1000)


def options(**more: Any) -> Options:
    return Options(NUMBERS, append_eod=True, **more)


def lines(path: Path, count: int, seed: int = 0, longest: int = 40) -> Path:
    """Numbers from 0 to 998; some lines are blank or empty records."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        text = " ".join(str(rng.randrange(999)) for _ in range(rng.randint(1, longest)))
        rows.append({0: "", 1: '{"text": ""}'}.get(rng.randrange(20), json.dumps({"text": text})))
    data = "\n".join(rows).encode() + b"\n" * (seed % 2)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def stored(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}_text_document.{suffix}").read_bytes() for suffix in SUFFIXES]


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_merged_are_the_whole(tmp_path: Path, parts: int) -> None:
    """Several files, one of them packed; cuts fall inside lines and near the borders of files."""
    inputs = [lines(tmp_path / f"{name}", n, seed) for seed, (name, n) in enumerate(
        [("a.jsonl", 300), ("b.jsonl.gz", 200), ("c.jsonl", 1), ("d.jsonl", 500), ("empty.jsonl", 0)]
    )]  # fmt: skip
    counts = preprocess(inputs, str(tmp_path / "whole"), options(), reading=InputOptions(block_bytes=1 << 12))
    total = Counts()
    for i in range(parts):
        total.add(preprocess(inputs, str(tmp_path / f"p{i}"), options(), part=(i, parts), workers=1 + i % 2))
    merge([tmp_path / f"p{i}_text_document" for i in range(parts)], tmp_path / "merged_text_document")
    assert stored(tmp_path / "merged") == stored(tmp_path / "whole")
    assert (total.documents, total.tokens, total.dropped["empty"]) == (counts.documents, counts.tokens, counts.dropped["empty"])


def test_more_parts_than_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts without a document are datasets all the same, so that the jobs of an array can be joined; not all may be empty."""
    some, none = lines(tmp_path / "a.jsonl.gz", 5), tmp_path / "b.jsonl"
    none.write_text("\n" + json.dumps({"text": " "}) + "\n")
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000", "--append-eod", "--input"]

    def made(i: int, *inputs: Path) -> tuple[int, str, str]:
        where = ["--output-prefix", str(tmp_path / f"new{len(inputs)}" / f"p{i}"), "--part", f"{i}/9"]
        return cli.main([*flags, *map(str, inputs), *where]), *capsys.readouterr()

    for inputs in ([none], [some, none]):
        results = [made(i, *inputs) for i in range(9)]
        assert {code for code, *_ in results} == {0} and "0 documents, 0 tokens" in results[8][1]
        parts = [tmp_path / f"new{len(inputs)}" / f"p{i}_text_document" for i in range(9)]
        assert all(verify(part) == ([], []) for part in parts)
        if inputs == [none]:
            with pytest.raises(ValueError, match="nothing to join into .*: no document is in any of the 9 datasets"):
                merge(parts, tmp_path / "merged_text_document")
    merge(parts, tmp_path / "merged_text_document")
    preprocess([some, none], str(tmp_path / "whole"), options())
    assert stored(tmp_path / "merged") == stored(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["", "no index", "of another file"])
def test_shards_are_cut_inside_by_their_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `data clean` writes them; every part has documents, errors name the line of the file, and a run goes on from a frame."""
    monkeypatch.setattr(clean_shards, "FRAME_BYTES", 3000)
    (tmp_path / "in").mkdir()
    with ShardWriter(tmp_path / "in", 1 << 16) as writer:
        writer.add(lines(tmp_path / "lines", 1200).read_bytes() + b"\n")
    files = sorted((tmp_path / "in").glob("*.zst"))
    assert len(files) == 2
    for path in files:
        if damage == "no index":
            index_path(path).unlink()
        elif damage:
            text = b"".join(b.data for b in open_input(path, InputOptions()) if isinstance(b, Lines))
            path.write_bytes(zstandard.compress(text))
    preprocess(files, str(tmp_path / "whole"), options())
    counts = [preprocess(files, str(tmp_path / f"p{i}"), options(), part=(i, 7), workers=1 + i % 2) for i in range(7)]
    empty = [i for i, c in enumerate(counts) if not c.documents]
    assert len(empty) == (5 if damage else 0)
    assert capsys.readouterr().out.count("holds no input: packed files") == len(empty)
    merge([tmp_path / f"p{i}_text_document" for i in range(7)], tmp_path / "merged_text_document")
    assert stored(tmp_path / "merged") == stored(tmp_path / "whole")
    if damage:
        return
    share = shares(files, InputOptions(), (3, 7))[0]
    read = [b for b in open_input(share.path, InputOptions(), share.start, share.stop) if isinstance(b, Lines)]
    everything = b"".join(b.data for b in open_input(share.path, InputOptions()) if isinstance(b, Lines))
    assert share.start > 3000 and read[0].first == everything[: read[0].offset].count(b"\n") + 1
    assert everything[read[0].offset :].startswith(read[0].data)
    assert numbers_before(share, InputOptions()) == 0


def test_documents_that_are_no_lines_are_parted_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of Parquet are cut anywhere; plain text is one share."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"{i} {i % 7}" for i in range(900)]
    pq.write_table(pa.table({"text": texts[:600]}), tmp_path / "a.parquet", row_group_size=50)
    (tmp_path / "b.txt").write_text("\n\n".join(texts[600:]))
    inputs = [tmp_path / "a.parquet", tmp_path / "b.txt"]
    reading = InputOptions(block_bytes=1 << 9, separator="\n\n")
    preprocess(inputs, str(tmp_path / "whole"), options(), reading=reading)
    assert IndexedDataset(tmp_path / "whole_text_document").num_documents == 900
    for i in range(3):
        preprocess(inputs, str(tmp_path / f"p{i}"), options(), reading=reading, part=(i, 3), workers=2)
    merge([tmp_path / f"p{i}_text_document" for i in range(3)], tmp_path / "merged_text_document")
    assert stored(tmp_path / "merged") == stored(tmp_path / "whole")
    monkeypatch.setattr(engine, "_FINISHED_BYTES", 1 << 9)
    for documents in (350, 800):
        with monkeypatch.context() as patch:
            stop_after(patch, documents)
            with pytest.raises(OSError, match="No space left"):
                preprocess(inputs, str(tmp_path / "out"), options(), reading=reading, resume=True)
        assert finished_parts(tmp_path / "out") >= 2
    preprocess(inputs, str(tmp_path / "out"), options(), reading=reading, resume=True)
    assert stored(tmp_path / "out") == stored(tmp_path / "whole")


def test_every_byte_is_in_one_share(tmp_path: Path) -> None:
    """Property: shares of random files are contiguous, in order, and together everything; those that cannot be cut are whole."""
    rng = random.Random(3)
    for trial in range(60):
        paths = []
        for i in range(rng.randint(1, 5)):
            paths.append(tmp_path / f"{trial}-{i}.jsonl{rng.choice(['', '', '.gz'])}")
            paths[-1].write_bytes(b"x" * rng.choice([0, 1, 7, 100, 1000]))
        parts = rng.randint(1, 9)
        found = [share for i in range(parts) for share in shares(paths, InputOptions(), (i, parts))]
        assert [s.file for s in found] == sorted(s.file for s in found)
        for i in range(parts):
            own = shares(paths, InputOptions(), (i, parts))
            assert [s.before for s in own] == [sum(s.size for s in own[:k]) for k in range(len(own))]
        for number, path in enumerate(paths):
            size, own = path.stat().st_size, [s for s in found if s.file == number]
            if not size:
                assert [(s.start, s.stop) for s in own] == [(0, None)]  # an empty .txt is a record, and of Parquet damaged
                continue
            assert own[0].start == 0 and own[-1].stop is None and sum(s.size for s in own) == size
            assert [s.stop for s in own[:-1]] == [s.start for s in own[1:]]
            assert len(own) == 1 or path.suffix == ".jsonl"
        if all(path.suffix == ".jsonl" for path in paths):
            sizes = [sum(s.size for s in shares(paths, InputOptions(), (i, parts))) for i in range(parts)]
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_in_a_part_name_the_line_of_the_file(tmp_path: Path, workers: int) -> None:
    path = lines(tmp_path / "a.jsonl", 400)
    rows = path.read_bytes().split(b"\n")
    rows[310] = b"broken"
    path.write_bytes(b"\n".join(rows))
    for i in range(3):
        run = partial(preprocess, [path], str(tmp_path / f"p{i}"), options(), part=(i, 3), workers=workers)
        if i == 2:
            with pytest.raises(BadInput, match=r"a\.jsonl:311: not one JSON value .*: broken"):
                run()
        else:
            run()


@pytest.mark.parametrize("text", ["8/8", "1", "a/b", "-1/2", "1/0", "1 / 2"])
def test_parts_are_named_from_0(text: str) -> None:
    assert parse_part("0/8") == (0, 8) and parse_part("7/8") == (7, 8)
    with pytest.raises(ValueError, match="give i/n with 0 <= i < n"):
        parse_part(text)


def test_what_cannot_be_parted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="standard input cannot be read in parts"):
        shares([Path("-")], InputOptions(), (0, 2))
    left = after(shares([tmp_path, tmp_path, tmp_path], InputOptions()), Place(1, 77))
    assert [(s.file, s.start) for s in left] == [(1, 77), (2, 0)]


# --- runs that go on ------------------------------------------------------------------------------------------------

RUN = """
import sys
from functools import partial
sys.path.insert(0, {root!r})
from megatron_lite.cli.preprocess import main
from megatron_lite.text import blocks, run
run._FINISHED_BYTES = 1 << 14  # the real command, in smaller pieces
blocks.InputOptions = partial(blocks.InputOptions, block_bytes=1 << 12)
if __name__ == "__main__":
    print("ready", flush=True)
    sys.exit(main(sys.argv[1:]))
"""


def start(tmp_path: Path, out: Path, workers: int, files: list[Path]) -> subprocess.Popen[str]:
    script = tmp_path / "run.py"
    script.write_text(RUN.format(root=str(ROOT)))
    command = [sys.executable, str(script), "--output-prefix", str(out), "--input", *map(str, files), "--resume"]
    command += ["--workers", str(workers), "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000", "--append-eod"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def finished_parts(out: Path) -> int:
    try:
        return Path(f"{out}.journal.tmp").read_bytes().count(b"\n") - 1
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize(("workers", "number"), [(1, signal.SIGKILL), (2, signal.SIGKILL), (1, signal.SIGINT)])
def test_killed_runs_go_on_to_the_same_bytes(tmp_path: Path, workers: int, number: signal.Signals) -> None:
    """Killed again and again at random, it comes to the end; what opens is complete; what was finished is not done again."""
    files = [
        lines(tmp_path / "a.jsonl", 6000),
        lines(tmp_path / "b.jsonl.gz", 6000, 1),
        lines(tmp_path / "c.jsonl", 6000, 2),
    ]
    preprocess(files, str(tmp_path / "whole"), options())
    out, rng, kills, reached = tmp_path / "out", random.Random(workers), 0, 0
    while not Path(f"{out}_text_document.idx").exists():
        process = start(tmp_path, out, workers, files)
        assert process.stdout is not None
        process.stdout.readline()
        before = finished_parts(out)
        while process.poll() is None and finished_parts(out) < before + rng.randint(1, 30):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.02)
        if process.poll() is None and kills < 4:
            os.killpg(process.pid, number)
            kills += 1
        process.communicate(timeout=60)
        assert Path(f"{out}_text_document.idx").exists() or finished_parts(out) >= reached
        reached = finished_parts(out)
    assert kills >= 2
    assert stored(out) == stored(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.glob("out*")) == sorted(f"out_text_document.{s}" for s in SUFFIXES)


def test_a_run_that_is_killed_between_renames_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every one of them: what opens is complete, with an old dataset there or not; the next run renames the rest."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": str(i), "title": f"{i} {i}"}) + "\n" for i in range(50)))
    run = partial(preprocess, [path], options=options(keys=("text", "title")), resume=True)
    whole = run(output_prefix=str(tmp_path / "whole"))
    names = [f"_{key}_document.{suffix}" for key in ("text", "title") for suffix in SUFFIXES]
    replace, left = os.replace, len(names)
    for at, overwrite in [(at, overwrite) for at in range(left) for overwrite in (False, True)]:
        out = tmp_path / f"{at}{overwrite}"
        if overwrite:
            preprocess([path], str(out), Options(NUMBERS, keys=("text", "title")))  # another dataset
        if (child := os.fork()) == 0:
            left = at

            def dying(old: str, new: str) -> None:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                replace(old, new)

            os.replace = dying
            run(output_prefix=str(out), overwrite=overwrite)
            os._exit(3)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        for key in ("text", "title"):
            if Path(f"{out}_{key}_document.idx").exists():
                assert verify(f"{out}_{key}_document") == ([], [])
        assert run(output_prefix=str(out), overwrite=overwrite) == whole
        for name in names:
            assert Path(f"{out}{name}").read_bytes() == Path(f"{tmp_path}/whole{name}").read_bytes()
        assert len(list(tmp_path.glob(f"{out.name}*"))) == len(names)


def stop_after(monkeypatch: pytest.MonkeyPatch, documents: int) -> None:
    """The writer fails as with a full disk."""
    add = IndexedWriter.add_documents

    def failing(self: IndexedWriter, *args: Any) -> None:
        if self.documents >= documents:
            raise OSError(28, "No space left on device")
        add(self, *args)

    monkeypatch.setattr(IndexedWriter, "add_documents", failing)


def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool = True, **more: Any) -> list[Path]:
    """Two files, and a run over them that stopped in the second."""
    monkeypatch.setattr(engine, "_FINISHED_BYTES", 1 << 13)
    files = [lines(tmp_path / "a.jsonl", 300), lines(tmp_path / "b.jsonl", 300, 1)]
    with monkeypatch.context() as patch:
        stop_after(patch, 400)
        with pytest.raises(OSError, match="No space left"):
            preprocess(files, str(tmp_path / "out"), options(), reading=small(), resume=resume, **more)
    return files


def small() -> InputOptions:
    return InputOptions(block_bytes=1 << 11)


def test_a_run_that_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = stopped(tmp_path, monkeypatch)
    preprocess(files, str(tmp_path / "whole"), options())
    said: list[str] = []
    counts = preprocess(
        files, str(tmp_path / "out"), options(), reading=small(), resume=True, workers=2, say=said.append
    )
    assert stored(tmp_path / "out") == stored(tmp_path / "whole") and len(said) == 1
    assert 300 < int(said[0].split()[3]) <= counts.documents
    assert counts == preprocess(files, str(tmp_path / "again"), options())


@pytest.mark.parametrize(("workers", "encoding"), [(1, "utf-8"), (2, "utf-8"), (1, "utf-16"), (1, "gb18030")])
def test_an_interrupt_keeps_every_block_that_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, encoding: str
) -> None:
    """With one worker no later block is known then, with two some are; also at the end of a file and in plain text."""
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", tmp_path / "c.txt"]
    records = [json.dumps({"text": f"{i} {i % 7}", "é": "漢字"}, ensure_ascii=False) + "\n" for i in range(600)]
    files[0].write_bytes("".join(records[:300]).encode(encoding))
    files[1].write_bytes(gzip.compress("".join(records[300:]).encode(encoding)))
    files[2].write_bytes("|".join(str(i) for i in range(300)).encode(encoding))
    reading = InputOptions(encoding=encoding, separator="|", block_bytes=1 << 9)
    preprocess(files, str(tmp_path / "whole"), options(), reading=reading)
    add, blocks, said, kept = IndexedWriter.add_documents, 0, list[str](), [0]

    def interrupted(self: IndexedWriter, *args: Any) -> None:
        nonlocal blocks
        blocks += 1
        if blocks % 5 == 0:
            signal.raise_signal(signal.SIGINT)
        add(self, *args)
        kept.append(self.documents)

    monkeypatch.setattr(IndexedWriter, "add_documents", interrupted)
    for _ in range(20):
        before = kept[-1]
        said.clear()
        with suppress(KeyboardInterrupt):
            preprocess(files, str(tmp_path / "out"), options(), reading=reading, resume=True, workers=workers, say=said.append)
            break
        start = f"going on after {before:,} documents" if before else "beginning at the start: no earlier run has kept anything"
        assert said == [start, f"kept: {kept[-1]:,} documents"]
    assert blocks > 12 and stored(tmp_path / "out")[:2] == stored(tmp_path / "whole")[:2]


def test_work_that_was_kept_is_not_thrown_away_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, said = stopped(tmp_path, monkeypatch), list[str]()
    preprocess(files, str(tmp_path / "out"), options(), say=said.append)
    assert len(said) == 1 and said[0].endswith("documents that an earlier run had kept are made again; --resume goes on after them")
    (tmp_path / "out.journal.tmp").write_bytes(b"{}\n[]\n")  # no journal
    preprocess(files, str(tmp_path / "out"), options(), say=said.append, overwrite=True)
    assert len(said) == 1


def test_without_resume_nothing_is_left_and_a_new_run_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = stopped(tmp_path, monkeypatch, resume=False)
    assert list(tmp_path.glob("out*")) == []
    stopped(tmp_path, monkeypatch)
    assert len(list(tmp_path.glob("out*.tmp"))) == 4
    preprocess(files[:1], str(tmp_path / "out"), options())  # takes the temporaries over
    assert len(list(tmp_path.glob("out*"))) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"skip_bad": True}}, "skip_bad: False then, True now"),
        ({"options": {"keys": ("title",)}}, r"json_keys: \['text'\] then, \['title'\] now"),
        ({"tokenizer": 999}, "tokenizer: "),
        ({"part": (0, 2)}, r"part: None then, \[0, 2\] now"),
        ({"files": [1, 0]}, "the order of the inputs"),
        ({"files": [0]}, r"b\.jsonl is no input now"),
        ({"grown": 1}, r"b\.jsonl has changed"),
        ({"touched": 1}, r"b\.jsonl has another time \(where its content is the same: `touch -d @\d+\.\d{9} .*b\.jsonl`\)"),
    ],
)  # fmt: skip
def test_a_run_with_other_inputs_or_options_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    files = stopped(tmp_path, monkeypatch)
    if "touched" in change:
        os.utime(files[1], (1, 1))
    if "grown" in change:
        files[1].write_bytes(files[1].read_bytes() + b"\n")
    files = [files[i] for i in change.get("files", [0, 1])]
    tokenizer = partial(build_tokenizer, "NullTokenizer", vocab_size=change.get("tokenizer", 1000))
    other = Options(tokenizer, append_eod=True, **change.get("options", {}))
    before = {p.name: p.read_bytes() for p in tmp_path.glob("out*")}
    with pytest.raises(ValueError, match=f"--resume: .*other inputs or options: .*{message}"):
        preprocess(files, str(tmp_path / "out"), other, part=change.get("part"), resume=True)
    assert {p.name: p.read_bytes() for p in tmp_path.glob("out*")} == before


def test_a_finished_run_is_not_begun_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1 2"}\n')
    preprocess([path], str(tmp_path / "out"), options(), resume=True)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    tool = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000", "--input", str(path), "--resume"]
    tool += ["--output-prefix", str(tmp_path / "out")]
    assert cli.main([*tool, "--append-eod"]) == 0
    assert "out_text_document is complete: 1 documents, 3 tokens; nothing is left to do" in capsys.readouterr().out
    assert cli.main(tool) == 2 and "eod_id: 999 there, None now" in capsys.readouterr().err
    assert cli.main([*tool, "--append-eod", "--vocab-size", "999"]) == 2
    assert "tokenizer: " in (said := capsys.readouterr().err) and "vocab_size: 1000 there, 999 now" in said
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
    other = tmp_path / "other"
    other.write_text('{"text": "3 4"}\n')
    os.utime(other, (1e9, 1e9))
    other.replace(path)
    assert cli.main([*tool, "--append-eod"]) == 2 and "a.jsonl has changed since" in capsys.readouterr().err
    os.utime(path, (2e9, 2e9))
    assert cli.main([*tool, "--append-eod"]) == 2 and "a.jsonl has changed since" in capsys.readouterr().err
    os.utime(path, (1, 1))
    index, meta = (tmp_path / f"out_text_document.{suffix}" for suffix in SUFFIXES[1:])
    assert cli.main([*tool, "--append-eod"]) == 2 and f"`touch {index}` says so" in capsys.readouterr().err
    path.write_text('{"text": "1 2"}\n')
    index.touch()
    assert cli.main([*tool, "--append-eod"]) == 0
    index.write_bytes(index.read_bytes()[:-1])
    assert cli.main([*tool, "--append-eod"]) == 2 and "does not open" in capsys.readouterr().err
    index.write_bytes(before[index])
    meta.unlink()
    assert cli.main([*tool, "--append-eod"]) == 2 and "it has no .meta.json" in capsys.readouterr().err


def test_a_finished_run_of_other_input_or_options_is_not_this_one(tmp_path: Path) -> None:
    """Files of the same sizes, in another order or part, other options: what is there says so by itself, whatever the times are."""
    files = [lines(tmp_path / f"{name}.jsonl", 40, 3) for name in ("a", "b", "c")]
    run = partial(preprocess, output_prefix=str(tmp_path / "out"), resume=True)
    run(files[:2], options=options(), part=(0, 2))
    meta, record = tmp_path / "out_text_document.meta.json", json.loads((tmp_path / "out_text_document.meta.json").read_text())
    size = files[0].stat().st_size
    assert (record["made_of"]["files"], record["made_of"]["bytes"], record["made_of"]["part"]) == (2, 2 * size, [0, 2])
    for inputs, part, more, why in (
        (files[:2], (1, 2), {}, "part: 0/2 there, 1/2 now"),
        (files[:2], None, {}, "part: 0/2 there, none now"),
        (files, (0, 2), {}, f"the input: 2 files of {2 * size:,} bytes there, 3 files of {3 * size:,} bytes now"),
        (files[1:], (0, 2), {}, f"the input: other names, sizes or order of the 2 files of {2 * size:,} bytes"),
        (files[1::-1], (0, 2), {}, "the input: other names, sizes or order"),
        (files[:2], (0, 2), {"skip_bad": True}, "skip_bad: False there, True now"),
    ):
        with pytest.raises(FileExistsError, match=f"would have made another: {why}"):
            run(inputs, options=options(**more), part=part)
    meta.write_text(json.dumps({name: value for name, value in record.items() if name != "made_of"}))  # as of before
    assert IndexedDataset(tmp_path / "out_text_document").num_documents and verify(tmp_path / "out_text_document")[0] == []
    with pytest.raises(FileExistsError, match="does not say of what it was made"):
        run(files[:2], options=options(), part=(0, 2))


def test_parts_of_a_run_are_joined_all_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} 1", "title": f"{i}"}) + "\n" for i in range(60)))
    for name, parts in (("a", 3), ("b", 2)):
        for i in range(parts):
            preprocess([path], str(tmp_path / f"{name}{i}"), options(keys=("text", "title")), part=(i, parts))
    preprocess([path], str(tmp_path / "whole"), options(keys=("text", "title")))

    def join(*names: str) -> DatasetMeta:
        return merge([tmp_path / f"{name}_document" for name in names], tmp_path / "out_text_document", overwrite=True)

    for wrong, why in (
        (["a0_text", "a2_text"], r"a0_text_document is one of 3 parts .*; missing is part 1/3$"),
        (["a2_text"], "missing are part 0/3, part 1/3$"),
        (["a0_text", "a1_text", "a1_text", "a2_text"], "part 1/3 is .*a1_text_document and .*a1_text_document"),
        (["a0_text", "a2_text", "a1_text"], r"out of order: .*a0_text_document \(part 0/3\), .*a2_text_document \(part 2/3\), "),
        (["a0_text", "a1_title", "a2_text"], "missing is part 1/3"),
        (["a0_text", "a1_text", "a2_text", "b1_text"], "b1_text_document is one of 2 parts"),
    ):
        with pytest.raises(ValueError, match=why):
            join(*wrong)
    assert join("a0_text", "a0_title", "a1_text", "a1_title", "a2_text", "a2_title", "whole_text").made_of is None
    assert join("b0_title", "b1_title").to_json() == (tmp_path / "whole_title_document.meta.json").read_text()
    record = tmp_path / "a1_text_document.meta.json"
    record.write_text(json.dumps({name: value for name, value in json.loads(record.read_text()).items() if name != "made_of"}))
    with pytest.raises(ValueError, match="missing is part 1/3"):
        join("a0_text", "a1_text", "a2_text")
    for i in (0, 2):
        (tmp_path / f"a{i}_text_document.meta.json").unlink()
    assert join("a0_text", "a2_text").made_of is None


def test_temporaries_that_are_not_those_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = stopped(tmp_path, monkeypatch)
    path = tmp_path / "out_text_document.bin.tmp"
    good = path.read_bytes()
    path.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    with pytest.raises(ValueError, match="does not hold what was written to it"):
        preprocess(files, str(tmp_path / "out"), options(), reading=small(), resume=True)
    path.write_bytes(good[:100])
    with pytest.raises(ValueError, match="has fewer than the"):
        preprocess(files, str(tmp_path / "out"), options(), reading=small(), resume=True)
    path.write_bytes(good)
    preprocess(files, str(tmp_path / "out"), options(), reading=small(), resume=True)


def test_a_line_of_the_journal_that_is_cut_off_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = stopped(tmp_path, monkeypatch)
    preprocess(files, str(tmp_path / "whole"), options())
    path = tmp_path / "out.journal.tmp"
    rows = path.read_bytes().splitlines(keepends=True)
    assert len(rows) > 4
    path.write_bytes(b"".join(rows[:-2]) + rows[-2][:50])
    preprocess(files, str(tmp_path / "out"), options(), reading=small(), resume=True)
    assert stored(tmp_path / "out") == stored(tmp_path / "whole")


def test_errors_after_going_on_name_the_line_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_FINISHED_BYTES", 1 << 13)
    path = lines(tmp_path / "a.jsonl", 600)
    path.write_bytes(path.read_bytes() + b"\nbroken\n")
    for _ in range(2):  # the second goes on from what the first has finished
        with pytest.raises(BadInput, match=r"a\.jsonl:601: not one JSON value"):
            preprocess([path], str(tmp_path / "out"), options(), reading=small(), resume=True)
    assert finished_parts(tmp_path / "out") > 2


def test_counts_of_bad_records_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_FINISHED_BYTES", 1 << 13)
    path = lines(tmp_path / "a.jsonl", 900)
    path.write_bytes(b"{}\n{}\n7\n" + path.read_bytes())
    whole = preprocess([path], str(tmp_path / "whole"), options(skip_bad=True))
    with monkeypatch.context() as patch:
        stop_after(patch, 500)
        with pytest.raises(OSError, match="No space left"):
            preprocess([path], str(tmp_path / "out"), options(skip_bad=True), reading=small(), resume=True)
    assert preprocess([path], str(tmp_path / "out"), options(skip_bad=True), reading=small(), resume=True) == whole
    assert sorted(whole.bad.values()) == [1, 2] and stored(tmp_path / "out") == stored(tmp_path / "whole")


def test_what_is_finished_is_written_down_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow tokenizer loses seconds of work, however few bytes it has read."""
    monkeypatch.setattr(engine, "_FINISHED_SECONDS", 0.0)
    path = lines(tmp_path / "a.jsonl", 2000)
    stop_after(monkeypatch, 500)
    with pytest.raises(OSError, match="No space left"):
        preprocess([path], str(tmp_path / "out"), options(), reading=small(), resume=True)
    assert finished_parts(tmp_path / "out") > 2


def test_a_part_goes_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_FINISHED_BYTES", 1 << 13)
    path = lines(tmp_path / "a.jsonl", 2000)
    preprocess([path], str(tmp_path / "whole"), options(), part=(1, 2))
    with monkeypatch.context() as patch:
        stop_after(patch, 500)
        with pytest.raises(OSError, match="No space left"):
            preprocess([path], str(tmp_path / "out"), options(), part=(1, 2), reading=small(), resume=True)
    assert finished_parts(tmp_path / "out") > 2
    preprocess([path], str(tmp_path / "out"), options(), part=(1, 2), reading=small(), resume=True)
    assert stored(tmp_path / "out") == stored(tmp_path / "whole")


def test_a_journal_is_of_one_run_at_a_time(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "out"), {"inputs": []}, keep=True)
    journal.open()
    other = Journal(str(tmp_path / "out"), {"inputs": []}, keep=True)
    assert other.find() is None
    with pytest.raises(FileExistsError, match="being written by another process"):
        other.open()
    journal.end()
    other.open()


# --- whole blocks, progress, reading ahead --------------------------------------------------------------------------


def test_whole_blocks_of_documents_are_as_one_by_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [[rng.integers(0, 99, rng.integers(0, 6)) for _ in range(rng.integers(0, 4))] for _ in range(300)]
    with IndexedWriter(tmp_path / "one", vocab_size=99) as writer:
        for document in documents:
            writer.add_document(np.concatenate([*document, np.array([], dtype=int)]), [len(s) for s in document])
    with IndexedWriter(tmp_path / "block", vocab_size=99) as writer:
        for start in range(0, 300, 77):
            block = documents[start : start + 77]
            tokens = np.concatenate([s for d in block for s in d])
            lengths = np.array([len(s) for d in block for s in d])
            writer.add_documents(tokens, lengths, np.array([len(d) for d in block]))
        with pytest.raises(ValueError, match="3 sequences, but 2 lengths"):
            writer.add_documents(np.array([1, 2]), np.array([1, 1]), np.array([3]))
        with pytest.raises(ValueError, match="token id 99 does not fit"):
            writer.add_documents(np.array([1, 99]), np.array([1, 1]))
    for suffix in SUFFIXES:
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"block.{suffix}").read_bytes()
    assert verify(tmp_path / "block")[0] == []


def test_progress_in_a_log_and_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with closing(Progress(4000, Counts(), 0, said.append, log_interval=10, bar=False)) as progress:
        progress.show(Counts(documents=9, bytes=900), 900)
        time.sleep(0.05)
        progress.show(Counts(documents=10, tokens=12345, bytes=2_000_000), 1000)
    assert len(said) == 1
    assert said[0].startswith("10 documents, ") and "documents/s, 12,345 tokens, " in said[0]
    assert "MB/s" in said[0] and said[0].endswith("0:00 left")
    with closing(Progress(4000, Counts(), 0, said.append, log_interval=10, bar=True)) as progress:
        progress.show(Counts(documents=10, tokens=12345, bytes=2_000_000), 4000)
    shown = capsys.readouterr().err
    assert len(said) == 1 and "100%" in shown and "10 documents, 12,345 tokens" in shown and "MB/s" in shown


def test_items_are_taken_ahead_but_not_without_end() -> None:
    taken = []

    def items() -> Any:
        for i in range(100):
            taken.append(i)
            yield i
        raise ZeroDivisionError

    with ExitStack() as stack:
        found = engine.ahead(items(), 4, stack)
        assert [next(found) for _ in range(3)] == [0, 1, 2]
        time.sleep(0.1)
        assert 4 < len(taken) <= 3 + 4 + 2
        assert next(found) == 3
        with pytest.raises(ZeroDivisionError):
            list(found)
        assert next(engine.ahead(iter(range(100)), 2, stack)) == 0
        assert list(engine.ahead(iter([]), 1, stack)) == []
