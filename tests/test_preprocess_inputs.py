"""Every kind of input through preprocessing: the dirty files, and the flags that say how files are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from byte_tokenizer import Bytes
from dirty_inputs import ALL, EACH_DIRTY_FILE, FOLDER, Dirty, options_of

from megatron_lite.cli import preprocess as cli
from megatron_lite.cli.main import main
from megatron_lite.data.index_format import prefix_paths
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.text.blocks import InputOptions
from megatron_lite.text.chat_records import Keys, conversation_of
from megatron_lite.text.preprocess import Options, preprocess
from megatron_lite.text.records import BadInput, BadRecord

ROOT = Path(__file__).resolve().parent.parent


def documents(prefix: Path | str) -> list[str]:
    dataset = IndexedDataset(prefix)
    return [Bytes().decode(dataset.document(d).tolist()) for d in range(dataset.num_documents)]


def stored(texts: Sequence[str]) -> list[str]:
    return [text for text in texts if text.strip()]


# --- dirty files ----------------------------------------------------------------------------------------------------


@EACH_DIRTY_FILE
def test_dirty_file_with_bad_records_left_out(tmp_path: Path, dirty: Dirty) -> None:
    """The good texts in order, the bad ones by reason; a damaged file is refused all the same."""
    try:
        counts = preprocess(
            [dirty.path], str(tmp_path / "out"), Options(Bytes, skip_bad=True), reading=options_of(dirty)
        )
    except BadInput as error:
        message = str(error)
        if dirty.error is not None:
            assert dirty.error in message and dirty.path.name in message
        else:
            assert not stored(dirty.good) and "no documents were written" in message
            assert (f"; {len(dirty.good)} dropped: empty" in message) == bool(dirty.good)
            assert (" bad: " in message) == bool(dirty.bad)
        assert list(tmp_path.iterdir()) == []
        return
    assert dirty.error is None
    assert documents(tmp_path / "out_text_document") == stored(dirty.good)
    assert counts.bad == Counter(why for _, why in dirty.bad)
    assert counts.dropped["empty"] == len(dirty.good) - len(stored(dirty.good)) and counts.documents == len(stored(dirty.good))


@pytest.mark.parametrize("dirty", [d for d in ALL if d.bad and not d.error], ids=lambda d: d.path.name)
def test_the_first_bad_record_ends_the_run(tmp_path: Path, dirty: Dirty) -> None:
    """With file, number, reason and at most 80 characters of it."""
    with pytest.raises(BadInput) as error:
        preprocess([dirty.path], str(tmp_path / "out"), Options(Bytes), reading=options_of(dirty))
    text = str(error.value)
    number, reason = dirty.bad[0]
    assert text.startswith(str(dirty.path)) and f":{number}: {reason}" in text
    assert text.isprintable() and len(text.partition(reason)[2]) < 80 + 70 + 70
    place = "(character 6 of the document); --encoding names another one; --skip-bad leaves such records out: good \ufffd bad"
    assert dirty.path.name != "bytes.txt" or text.endswith(place)
    assert dirty.path.name != "gbk_as_utf8.jsonl" or "; --encoding gb18030 may be right; --skip-bad" in text
    assert list(tmp_path.iterdir()) == []


def test_dirty_files_together_are_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    files = [d.path for d in ALL if not d.error and not d.options]
    outputs = []
    for workers, block_bytes in ((1, 1 << 20), (3, 300)):
        folder = tmp_path / str(workers)
        folder.mkdir()
        reading = InputOptions(block_bytes=block_bytes)
        counts = preprocess(files, str(folder / "out"), Options(Bytes, skip_bad=True), reading=reading, workers=workers)
        outputs.append(([p.read_bytes() for p in prefix_paths(folder / "out_text_document")], replace(counts, bytes=0)))
    assert outputs[0] == outputs[1]
    good = [text for d in ALL if d.path in files for text in stored(d.good)]
    assert documents(tmp_path / "3" / "out_text_document") == good and len(good) > 50


# --- flags ----------------------------------------------------------------------------------------------------------


def tool(folder: Path, *flags: object, out: str = "out") -> int:
    from base64 import b64encode

    ranks = folder / "bytes.tiktoken"
    ranks.write_bytes(b"".join(b64encode(bytes([b])) + f" {b}\n".encode() for b in range(256)))
    tokenizer = ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", str(ranks), "--tiktoken-pattern", "v1"]
    return cli.main([*map(str, flags), "--output-prefix", str(folder / out), *tokenizer, "--eod-token", "<end>"])


def test_encoding_and_separator(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "天气"}\n'.encode("gb18030"))
    (tmp_path / "b.txt").write_bytes("一\n\n二\n三".encode("gb18030"))
    code = tool(
        tmp_path, "--input", tmp_path / "?.*", "--encoding", "GB18030", "--document-separator", r"\n\n", "--overwrite"
    )
    assert code == 0 and documents(tmp_path / "out_text_document") == ["天气", "一", "二\n三"]


def test_directories_and_several_kinds(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(pa.table({"title": ["T"], "body": ["B"]}), folder / "b.parquet")
    (folder / "a.jsonl").write_text('{"title": "t", "body": ["x", "y"], "n": 1}\n')
    assert tool(tmp_path, "--input", folder, "--json-keys", "title", "body") == 0
    assert documents(tmp_path / "out_title_document") == ["t", "T"]
    assert documents(tmp_path / "out_body_document") == ["x\n\ny", "B"]


@pytest.mark.parametrize(
    ("names", "flags", "why"),
    [
        (["a.csv"], [], r"a.csv: this kind of file is not read; supported are .jsonl, .json, .ndjson, .txt"),
        ([], [], "no file matches; supported are .jsonl"),
        (["a.jsonl"], ["--json-keys", "body"], "a.jsonl:1: no key 'body' (its keys: text, meta)"),
        (["a.jsonl"], ["--encoding", "utf-99"], "--encoding utf-99: not an encoding that is read here"),
        (["a.jsonl"], ["--document-separator", "x"], "none of the 1 inputs is plain text"),
        (["a.txt"], ["--json-keys", "title"], "plain text has no keys but 'text'"),
        (["a.parquet"], ["--json-keys", "title"], "a.parquet: no column 'title'; its columns are text"),
        (["a.jsonl"], ["--part", "3/3"], "--part 3/3: give i/n with 0 <= i < n"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_no_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], flags: list[str], why: str
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in names:
        (folder / name).write_text('{"text": "a", "meta": {}}\n')
        if name.endswith(".parquet"):
            pq.write_table(pa.table({"text": ["a"]}), folder / name)
    assert tool(tmp_path, "--input", folder / "*", *flags) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("megatron-lite: error: ") and why in error
    assert {p.name for p in tmp_path.iterdir()} == {"in", "bytes.tiktoken"}


def test_standard_input(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", "-", "--output-prefix", "out"]
    command += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
    done = subprocess.run(
        command, input=b'{"text": "1 2"}\n{"text": "3"}\n', cwd=tmp_path, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert [dataset.document(d).tolist() for d in range(2)] == [[1, 2], [3]]
    bad = subprocess.run([*command, "--overwrite"], input=b"{}\n", cwd=tmp_path, capture_output=True, timeout=60)
    assert bad.returncode == 2 and b"standard input:1: no key 'text'" in bad.stderr


def test_megatron_flags_keep_their_meaning(tmp_path: Path) -> None:
    """A command of Megatron-LM's tool, as it stands in its documentation, but for the paths."""
    texts = ["One. Two.", "Three"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    flags = ["--append-eod", "--workers", "2", "--partitions", "2", "--keep-sequential-samples", "--log-interval", "1"]
    assert tool(tmp_path, "--input", tmp_path / "a.jsonl", "--json-keys", "text", "--split-sentences", *flags) == 0
    dataset = IndexedDataset(tmp_path / "out_text_sentence")
    assert [dataset.sequence(i).tolist() for i in range(3)] == [
        list(b"One."),
        [*b"Two.", 256],
        [*b"Three", 256],
    ]
    assert dataset.documents.tolist() == [0, 2, 3]


def test_outputs_of_parts_join(tmp_path: Path) -> None:
    from megatron_lite.cli.main import main

    lines = [json.dumps({"text": "words " * (1 + i % 9) + str(i)}) for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:120]) + "\n")
    (tmp_path / "b.jsonl").write_text("\n".join(lines[120:]))
    common = ["--input", str(tmp_path / "?.jsonl")]
    assert tool(tmp_path, *common) == 0
    parts = tmp_path / "parts"
    for part in range(4):
        assert tool(tmp_path, *common, "--part", f"{part}/4", out=f"p{part}/out") == 0
    parts.mkdir()
    for part in range(4):
        for suffix in (".bin", ".idx", ".meta.json"):
            os.rename(tmp_path / f"p{part}" / f"out_text_document{suffix}", parts / f"{part}{suffix}")
    assert main(["data", "merge", str(parts), "--output-prefix", str(tmp_path / "merged")]) == 0
    whole, merged = ([p.read_bytes() for p in prefix_paths(tmp_path / n)] for n in ("out_text_document", "merged"))
    assert whole == merged


def test_bad_lines_of_a_part_are_named_by_their_place_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"text": f"line {i}"}) for i in range(100)]
    lines[80] = "broken"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert tool(tmp_path, "--input", tmp_path / "a.jsonl", "--part", "3/4") == 2
    assert f"{tmp_path}/a.jsonl:81: not one JSON value" in capsys.readouterr().err


def test_every_folder_of_dirty_files_is_refused_as_a_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It holds a script: a directory is not read in part without a word."""
    assert tool(tmp_path, "--input", FOLDER) == 2
    assert "make.py, which is not read" in capsys.readouterr().err


def test_a_record_of_another_command_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is missing has a remedy that does not throw the corpus away; arrays are shown without newlines."""
    path = tmp_path / "a.jsonl"
    for record, why in (
        ('{"body": "1"}', "no key 'text' (its keys: body); --json-keys names another one; --skip-bad leaves such records out: {"),
        ('{"messages": []}', "; of conversations `megatron-lite data chat` makes data; --json-keys names another one; "),
        ('[\n  {"text":\t"1"}\n]', 'FILE > FILE.jsonl: [   {"text": "1"} ]'),
    ):
        path.write_text(record + "\n")
        arguments = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--input", str(path), "--output-prefix", str(tmp_path / "o")]
        assert main(["data", "preprocess", *arguments]) == 2 and why in capsys.readouterr().err
        assert "\ufffd" not in capsys.readouterr().err
    with pytest.raises(BadRecord, match="; of texts `megatron-lite data preprocess` makes data"):
        conversation_of({"text": "a"}, Keys())
    for sub in ("preprocess --inputs x", "clean --inputs x", "merge a --output-prefx x", "split a --output-prefx x"):
        with pytest.raises(SystemExit):
            main(["data", *sub.split()])
        assert "did you mean --" in capsys.readouterr().err
