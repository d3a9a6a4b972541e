"""From JSON lines to an indexed dataset: empty and bad records, keys and formats, ends of documents, dead workers,
interrupted runs; the same bytes for every number of workers and every locale."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.cli import preprocess as cli
from megatron_lite.data.describe import verify
from megatron_lite.data.indexed import IndexedDataset, IndexedWriter
from megatron_lite.text.blocks import InputOptions, Lines
from megatron_lite.text.inputs import open_input
from megatron_lite.text.pool import OrderedPool, WorkerDied, WorkerFailed
from megatron_lite.text.preprocess import SENTENCE_END, Counts, Options, preprocess
from megatron_lite.text.records import NOT_DECODABLE, BadInput, BadRecord, parse_line
from megatron_lite.text.run import Stream
from megatron_lite.text.shares import Share
from megatron_lite.text.tokenizer import Tokenizer, build_tokenizer

ROOT = Path(__file__).resolve().parent.parent
TOOL = [sys.executable, str(ROOT / "tools" / "preprocess_data.py")]
WORKERS = pytest.mark.parametrize("workers", [1, 3])


class Characters(Tokenizer):
    """A tokenizer of characters (ids 0 to 255; 256 ends a document) that can be made to fail at a word."""

    vocab_size, eod_id, fingerprint = 257, 256, "characters"

    def __init__(self, hook: Callable[[], None] | None = None) -> None:
        self._hook = hook

    def encode(self, text: str) -> list[int]:
        if self._hook is not None and "trigger" in text:
            self._hook()
        return list(text.replace("\u200b", "").encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(7)


def dawdle() -> None:
    time.sleep(1.5)


def fail() -> None:
    raise RuntimeError("out of ink")


def refuse() -> None:
    raise ValueError("no such word")


class Panic(BaseException):
    """As compiled tokenizers raise it."""


def panic() -> None:
    raise Panic("stack overflow")


def no_tokenizer() -> Tokenizer:
    raise OSError("the file has gone")


def only_once(folder: str) -> Tokenizer:
    """A tokenizer that can be built once: by the parent, not by the workers."""
    with open(os.path.join(folder, "built"), "x"):
        return Characters()


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    """A file of JSON lines; bytes are taken as they are."""
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def run(path: Path | Sequence[Path], out: Path, workers: int = 1, hook: Any = None, **options: Any) -> Counts:
    files = [path] if isinstance(path, Path) else list(path)
    more = {k: options.pop(k) for k in ("overwrite", "log_interval", "say", "reading") if k in options}
    return preprocess(files, str(out), Options(partial(Characters, hook), **options), workers=workers, **more)


def documents(prefix: Path) -> list[str]:
    dataset = IndexedDataset(prefix)
    texts = [Characters().decode(dataset.document(d).tolist()) for d in range(dataset.num_documents)]
    dataset.close()
    return texts


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def expected_files(documents: list[list[list[int]]]) -> tuple[bytes, bytes]:
    """``.bin`` and ``.idx`` of uint16 documents, straight from the table of the format."""
    sequences = [s for d in documents for s in d]
    lengths = [len(s) for s in sequences]
    pointers = [2 * sum(lengths[:i]) for i in range(len(lengths))]
    borders = [sum(map(len, documents[:i])) for i in range(len(documents) + 1)]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(sequences), len(borders))
    index += struct.pack(f"<{len(lengths)}i{len(pointers)}q{len(borders)}q", *lengths, *pointers, *borders)
    return b"".join(struct.pack(f"<{len(s)}H", *s) for s in sequences), index


# --- bytes ----------------------------------------------------------------------------------------------------------


@WORKERS
@pytest.mark.parametrize("append_eod", [True, False])
def test_bytes_are_those_of_the_format(tmp_path: Path, workers: int, append_eod: bool) -> None:
    """Documents of 1, 2 and 3 tokens: what is counted is what is written."""
    path = write_lines(tmp_path / "a.jsonl", [{"text": "7"}, {"text": "8 9"}, {"text": "1 2 3"}])
    out = tmp_path / "out"
    options = Options(partial(build_tokenizer, "NullTokenizer", vocab_size=100), append_eod=append_eod)
    counts = preprocess([path], str(out), options, workers=workers)
    end = [99] if append_eod else []
    wanted = expected_files([[[7, *end]], [[8, 9, *end]], [[1, 2, 3, *end]]])
    assert (
        (tmp_path / "out_text_document.bin").read_bytes(),
        (tmp_path / "out_text_document.idx").read_bytes(),
    ) == wanted
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert dataset.lengths.tolist() == [1 + append_eod, 2 + append_eod, 3 + append_eod]
    assert (counts.documents, counts.tokens) == (3, 6 + 3 * append_eod) and dataset.num_tokens == counts.tokens
    meta = dataset.meta
    assert meta is not None and (meta.eod_id, meta.vocab_size) == (99 if append_eod else None, 100)
    assert meta.tokenizer == options.tokenizer().fingerprint
    assert verify(dataset.prefix)[0] == []


@WORKERS
def test_sentences_are_sequences(tmp_path: Path, workers: int) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b. C"}, {"text": "d"}])
    run(path, tmp_path / "out", workers, split_sentences=True, append_eod=True)
    ids = [[[97, 256]], [[98, 46], [67, 256]], [[100, 256]]]
    stored = tuple((tmp_path / f"out_text_sentence.{s}").read_bytes() for s in ("bin", "idx"))  # Megatron-LM's name
    assert stored == expected_files(ids)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! \"Three?\" Four (five.) Six", ["One.", "Two!", '"Three?"', "Four (five.)", "Six"]),
        ("At 3.5 a.m. it rains... and rains.", ["At 3.5 a.m. it rains... and rains."]),
        ("一。二！三？四", ["一。", "二！", "三？", "四"]),
        ("他说：“好。”然后走了。", ["他说：“好。”", "然后走了。"]),
        ("真的？！是。", ["真的？！", "是。"]),
        ("A title\n\nOne. Two\nlines", ["A title", "One.", "Two\nlines"]),
    ],
)  # fmt: skip
def test_where_sentences_end(text: str, sentences: list[str]) -> None:
    assert [s for s in SENTENCE_END.split(text) if s.strip()] == sentences


def test_workers_do_not_change_a_byte(tmp_path: Path) -> None:
    """Many small blocks, with bad, empty and long records among them."""
    reading = InputOptions(block_bytes=1 << 12)
    records: list[Any] = []
    for i in range(1000):
        records.append({"text": f"document {i}. " * (1 + i * 37 % 50), "title": f"T{i}"})
        if i % 97 == 0:
            records += [{"text": " ", "title": "x"}, b"broken", {"text": "without a title"}]
    records.append({"text": "long " * 6_000, "title": "a line longer than two blocks"})
    path = write_lines(tmp_path / "a.jsonl", records)
    assert len(list(open_input(path, reading))) > 50
    seen, counted = [], []
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        folder.mkdir()
        options = {"keys": ("text", "title"), "skip_bad": True, "append_eod": True, "reading": reading}
        counted.append(run([path, path], folder / "out", workers, **options))
        seen.append({p.name: p.read_bytes() for p in folder.iterdir()})
    assert seen[0] == seen[1] and len(seen[0]) == 6 and counted[0] == counted[1]
    assert counted[0].dropped["empty"] == 22 and sum(counted[0].bad.values()) == 44 and counted[0].documents == 2002


def test_does_not_import_torch() -> None:
    code = "import sys\nimport megatron_lite.text.preprocess, megatron_lite.cli.preprocess\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


# --- empty documents ------------------------------------------------------------------------------------------------


@WORKERS
@pytest.mark.parametrize("append_eod", [True, False])
def test_empty_documents_are_skipped_everywhere(tmp_path: Path, workers: int, append_eod: bool) -> None:
    texts = ["", "a b", "   ", "", "\u200b", "c"]  # the fifth has no token
    path = write_lines(tmp_path / "a.jsonl", [{"text": t} for t in texts])
    counts = run(path, tmp_path / "out", workers, append_eod=append_eod)
    assert documents(tmp_path / "out_text_document") == ["a b", "c"]
    assert (counts.documents, counts.dropped["empty"]) == (2, 4)


@pytest.mark.parametrize(
    ("content", "workers"),
    [(b"", 1), (b"", 3), (b"\n\n", 1), (b'{"text": ""}\n{"text": " \\n"}\n', 1), (b'{"text": ""}\n', 3)],
)
def test_nothing_to_write_is_an_error(tmp_path: Path, workers: int, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(BadInput, match="no documents were written"):
        run(tmp_path / "a.jsonl", tmp_path / "out", workers)
    assert names(tmp_path) == ["a.jsonl"]


# --- bad records ----------------------------------------------------------------------------------------------------

BAD: list[tuple[bytes, str]] = [
    (b'{"text": "unterminated', r"not one JSON value \(Unterminated string"),
    (b'"just a string with text in it"', "a string, not an object"),
    (b"[1,2]", r"an array, not an object \(JSON lines have one object per line\)"),
    (b"42", "a number, not an object"),
    (b"null", "null, not an object"),
    (b"true", "a boolean, not an object"),
    (b'{"text": null}', "the value of 'text' is null, not a string"),
    (b'{"text": 7}', "the value of 'text' is a number, not a string"),
    (b'{"text": ["x", 1]}', "the value of 'text' is an array, not a string"),
    (b'{"title": "x"}', "no key 'text'"),
    (b'{"text":"\xc3\xa9 \\ud800"}', "the value of 'text' holds a lone surrogate"),
    (b'{"text":"a"} {"text":"b"}', r"not one JSON value \(Extra data at character 14"),
    (b'{"text":"x\xff\xfe"}', r"bytes that are not text in the input's encoding \(character 11 of the line\)"),
    (b'{"text": ' + b"1" * 5000 + b"}", "the value of 'text' is a number, not a string"),
    (b"[" * 200_000, "nested too deeply"),
    (b'{"text": "x"}\x00', "not one JSON value"),
]


@pytest.mark.parametrize(("line", "reason"), BAD, ids=[r[:30] for _, r in BAD])
def test_bad_record_ends_the_run(tmp_path: Path, line: bytes, reason: str) -> None:
    """With file, line, reason and the first 80 characters, for any number of workers, and no output."""
    path = write_lines(tmp_path / "a.jsonl", [{"text": "ok"}, b"", line, {"text": "after"}])
    with pytest.raises(BadInput, match=rf"a\.jsonl:3: {reason}") as error:
        run(path, tmp_path / "out")
    text = str(error.value)
    assert "\n" not in text and text.isprintable() and len(text) < 300 + len(str(path))
    assert names(tmp_path) == ["a.jsonl"]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x"}])

    def change(text: str) -> None:
        if text == "change" and not path.read_bytes().endswith(b"\n\n"):
            path.write_bytes(path.read_bytes() + b"\n\n")

    write_lines(tmp_path / "b.jsonl", [{"text": "y"}])
    files = [path, tmp_path / "b.jsonl"]
    with pytest.raises(BadInput, match=r"a\.jsonl has changed while it was read"):
        run(files, tmp_path / "out", log_interval=1, say=lambda _: change("change"))
    assert names(tmp_path) == ["a.jsonl", "b.jsonl"]


def test_reasons_have_a_bound() -> None:
    total = Counts()
    for start in (0, 150):
        total.add(Counts(bad=Counter({f"reason {start + i}": 2 for i in range(150)})))
    assert len(total.bad) == 101 and total.bad["reason 99"] == 2 and total.bad["(others)"] == 400


def test_reasons_are_told_where_all_records_are_bad(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": 7}, {"text": 8}, b'{"text": "a\tb"}'])
    with pytest.raises(BadInput, match="of [0-9]* bytes; 2 bad: the value of 'text' is a number, not a string; 1 bad: not one"):
        run(path, tmp_path / "out", skip_bad=True)


@WORKERS
def test_bad_records_are_counted_on_request(tmp_path: Path, workers: int) -> None:
    good = ["first", "é 😀", "crlf", "with mark", "last"]
    records: list[bytes] = [b'\xef\xbb\xbf{"text": "first"}', *(line for line, _ in BAD[:8])]
    records += ['{"text": "é 😀"}'.encode(), b'{"text": "crlf"}\r', b"\r", b"\xef\xbb\xbf", b"  \t"]
    records += [b'\xef\xbb\xbf{"text": "with mark"}', *(line for line, _ in BAD[8:]), b'{"text": "last"}']
    path = write_lines(tmp_path / "a.jsonl", records)
    path.write_bytes(path.read_bytes()[:-1])  # no newline at the end
    counts = run(path, tmp_path / "out", workers, skip_bad=True)
    assert documents(tmp_path / "out_text_document") == good
    assert sum(counts.bad.values()) == len(BAD) and counts.bad["not one JSON value"] == 3
    assert counts.bad["a number, not an object"] == 1 and counts.bad[NOT_DECODABLE] == 1


@WORKERS
def test_locale_does_not_matter(tmp_path: Path, workers: int) -> None:
    """An ASCII locale, UTF-8 mode off: files, messages and counts are as elsewhere."""
    bad = '{"text": "é", "n": }'
    path = tmp_path / "é.jsonl"
    path.write_bytes('{"text": "é 😀"}\n{"text": "今天"}\n'.encode() + bad.encode() + b"\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))}
    env |= {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [*TOOL, "--input", str(path), "--output-prefix", str(tmp_path / "out"), "--workers", str(workers)]
    command += ["--tokenizer-type", "TikTokenizer", "--tiktoken-pattern", "v1", "--eod-token", "<end>"]
    command += ["--tokenizer-model", str(bytes_tokenizer(tmp_path))]
    stopped = subprocess.run(command, env=env, capture_output=True, timeout=60)
    assert stopped.returncode == 2 and b"Traceback" not in stopped.stderr
    assert b".jsonl:3: not one JSON value (Expecting value at character 20)" in stopped.stderr
    done = subprocess.run([*command, "--skip-bad"], env=env, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert b"1 bad: not one JSON value" in done.stdout
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert bytes(dataset.read(0, dataset.num_tokens).tolist()).decode() == "é 😀今天"


def bytes_tokenizer(folder: Path) -> Path:
    """A tiktoken file of the 256 bytes."""
    from base64 import b64encode

    path = folder / "bytes.tiktoken"
    path.write_bytes(b"".join(b64encode(bytes([b])) + f" {b}\n".encode() for b in range(256)))
    return path


def test_parse_line_takes_any_key_and_text() -> None:
    assert parse_line(b'{"a": "\\ud83d\\ude00", "b": "x\\u0000", "c": NaN}', ["b", "a"]) == ["x\x00", "😀"]
    assert parse_line(b'{"a": "x", "n": -%b, "m": [%b]}' % ((b"1" * 5000,) * 2), ["a"]) == ["x"]
    with pytest.raises(BadRecord) as error:
        parse_line(b'{"a": "x"', ["a"])
    assert error.value.reason == "not one JSON value"  # counted without the place


# --- keys, suffixes, patterns ---------------------------------------------------------------------------------------


@WORKERS
def test_every_key_has_an_output_and_they_stay_aligned(tmp_path: Path, workers: int) -> None:
    records = [{"title": "A", "body": "a"}, {"title": "B", "body": ""}, {"title": " ", "body": "c"}]
    path = write_lines(tmp_path / "a.jsonl", [*records, {"body": "d", "title": "D"}])
    counts = run(path, tmp_path / "out", workers, keys=("title", "body"))
    assert documents(tmp_path / "out_title_document") == ["A", "D"]
    assert documents(tmp_path / "out_body_document") == ["a", "d"]
    assert (counts.documents, counts.dropped["empty"]) == (2, 2)


def test_missing_key_is_an_error_or_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"title": "A", "body": "a"}, {"title": "B"}])
    with pytest.raises(BadInput, match=r"a\.jsonl:2: no key 'body'"):
        run(path, tmp_path / "out", keys=("title", "body"))
    counts = run(path, tmp_path / "out", keys=("title", "body"), skip_bad=True)
    assert counts.bad == Counter({"no key 'body'": 1}) and documents(tmp_path / "out_title_document") == ["A"]
    with pytest.raises(ValueError, match="each key once"):
        run(path, tmp_path / "out2", keys=("title", "title"))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz", ".json.bz2", ".jsonl.xz"])
def test_packed_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    opener: Any = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}.get(suffix.rsplit(".", 1)[-1], open)
    with opener(path, "wb") as f:
        f.write(b'{"text": "packed"}\n' * 3)
    run(path, tmp_path / "out")
    assert documents(tmp_path / "out_text_document") == ["packed"] * 3


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
@pytest.mark.parametrize(("damage", "workers"), [("cut", 1), ("flip", 1), ("other", 1), ("cut", 3)])
def test_damaged_packed_files(tmp_path: Path, suffix: str, damage: str, workers: int) -> None:
    path = tmp_path / f"a.jsonl.{suffix}"
    opener: Any = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}[suffix]
    with opener(path, "wb") as f:
        f.write(b"".join(b'{"text": "%d"}\n' % (i * 2654435761) for i in range(20_000)))
    data = bytearray(path.read_bytes())
    if damage == "flip":
        for i in range(len(data) // 2, len(data) // 2 + 50):
            data[i] ^= 255
    path.write_bytes({"cut": data[: len(data) // 2], "flip": data, "other": b'{"text": "plain"}\n'}[damage])
    with pytest.raises(BadInput, match=rf"a\.jsonl\.{suffix}(: damaged, cut off|:\d+: |: its content is not packed)"):
        run(path, tmp_path / "out", workers)
    assert names(tmp_path) == [path.name]


# --- ends of documents ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "end", "wanted"),
    [
        (None, "</s>", [4, 2]),
        ("<|endoftext|> $A", "<|endoftext|>", [4, 3]),
        ("<s> $A </s>", "</s>", [1, 4, 2]),
    ],
)
@WORKERS
def test_one_end_of_document_and_it_is_stored(
    tmp_path: Path, template: str | None, end: str, wanted: list[int], workers: int
) -> None:
    from test_tokenizer import hugging_face

    path = write_lines(tmp_path / "a.jsonl", [{"text": "hello"}] * 2)
    tokenizer = partial(build_tokenizer, "HuggingFaceTokenizer", model=str(hugging_face(tmp_path / "t", template, end)))
    counts = preprocess([path], str(tmp_path / "out"), Options(tokenizer, append_eod=True), workers=workers)
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert [dataset.document(d).tolist() for d in range(2)] == [wanted] * 2 and counts.holds_eod == 0
    assert dataset.meta is not None and dataset.meta.eod_id == wanted[-1]


def test_tokenizer_without_end_is_refused_before_any_work(tmp_path: Path) -> None:
    from test_tokenizer import hugging_face

    tokenizer = partial(build_tokenizer, "HuggingFaceTokenizer", model=str(hugging_face(tmp_path / "t")))
    with pytest.raises(ValueError, match="declares no end-of-document token"):
        preprocess([tmp_path / "never read.jsonl"], str(tmp_path / "out"), Options(tokenizer, append_eod=True))
    assert names(tmp_path) == ["t"]


@WORKERS
def test_texts_that_hold_the_end_are_counted(tmp_path: Path, workers: int) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": t} for t in ("1 2", "1 9 2", "9 9")])
    options = Options(partial(build_tokenizer, "NullTokenizer", vocab_size=10), append_eod=True)
    assert preprocess([path], str(tmp_path / "out"), options, workers=workers).holds_eod == 2


# --- workers that fail ----------------------------------------------------------------------------------------------


def failing(tmp_path: Path, before: int = 6) -> Path:
    """Document 7 (line 7) makes the tokenizer's hook run."""
    texts = [{"text": f"document {i} " + "filler " * 6_000} for i in range(1, before + 1)]
    return write_lines(tmp_path / "a.jsonl", [*texts, {"text": "trigger " * 4}, *texts])


@pytest.mark.parametrize(("hook", "how"), [(die, "was ended by SIGKILL"), (leave, "ended with exit status 7")])
def test_dead_worker_is_noticed_and_named(tmp_path: Path, hook: Any, how: str) -> None:
    path = failing(tmp_path)
    start = time.monotonic()
    place = r"in lines \d to \d+ of .*a\.jsonl; nothing was written"
    with pytest.raises(BadInput, match=rf"worker \d \(process \d+\) {how} {place}") as e:
        run(path, tmp_path / "out", 3, hook=hook, reading=InputOptions(block_bytes=1 << 16))  # about two documents
    assert time.monotonic() - start < 30
    first, last = (int(w) for w in str(e.value).split(" in lines ")[1].split(" of ")[0].split(" to "))
    assert first <= 7 <= last
    assert ("Out of memory?" in str(e.value)) == (hook is die)
    assert names(tmp_path) == ["a.jsonl"]


@WORKERS
def test_lines_that_take_long_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr("megatron_lite.text.progress._PATIENCE", 0.3)
    said: list[str] = []
    reading = InputOptions(block_bytes=1 << 16)
    run(failing(tmp_path), tmp_path / "out", workers, hook=dawdle, reading=reading, say=said.append)
    found = re.findall(r"^still at lines (\d+) to (\d+) of .*a\.jsonl, for \d s$", "\n".join(said), re.M)
    assert any(int(first) <= 7 <= int(last) for first, last in found), said


def test_no_lines_are_named_while_the_input_does_not_come() -> None:
    """As of a slow pipe: those that were given out may be done."""
    share, named = Share(0, Path("a.jsonl")), list[str]()

    def slow() -> Iterator[tuple[Share, Lines]]:
        for first in (1, 2):
            named.append(stream.oldest())
            yield share, Lines("a.jsonl", first, b"{}\n")

    stream = Stream(slow(), InputOptions())
    for _ in stream.work():
        named.append(stream.oldest())
    assert named == ["", "lines 1 to 1 of a.jsonl"] * 2 and stream.oldest() == named[1]


@WORKERS
@pytest.mark.parametrize(("hook", "what"), [(fail, "RuntimeError: out of ink"), (panic, "Panic: stack overflow")])
def test_tokenizer_that_raises_names_the_document(tmp_path: Path, hook: Any, what: str, workers: int) -> None:
    with pytest.raises(BadInput, match=rf"a\.jsonl:7: the tokenizer failed \({what}\): .*trigger"):
        run(failing(tmp_path), tmp_path / "out", workers, hook=hook, skip_bad=True)
    assert names(tmp_path) == ["a.jsonl"]


@WORKERS
def test_text_that_the_tokenizer_refuses_is_a_bad_record(tmp_path: Path, workers: int) -> None:
    path = failing(tmp_path)
    with pytest.raises(BadInput, match=r"a\.jsonl:7: the tokenizer cannot encode the text \(no such word\)"):
        run(path, tmp_path / "out", workers, hook=refuse)
    counts = run(path, tmp_path / "out", workers, hook=refuse, skip_bad=True)
    assert counts.documents == 12 and counts.bad == Counter({"the tokenizer cannot encode the text": 1})


def test_worker_without_tokenizer(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    with pytest.raises(BadInput, match="worker 0: FileExistsError"):
        preprocess([path], str(tmp_path / "out"), Options(partial(only_once, str(tmp_path))), workers=2)
    with pytest.raises(OSError, match="the file has gone"):
        preprocess([path], str(tmp_path / "out"), Options(no_tokenizer), workers=2)
    assert names(tmp_path) == ["a.jsonl", "built"]


# --- the pool -------------------------------------------------------------------------------------------------------


def make_square() -> Callable[[int], int]:
    return square


def square(n: int) -> int:
    time.sleep(0.02 * (n % 3))
    if n == 50:
        os._exit(3)
    if n == 60:
        raise KeyError("sixty")
    return n * n


def numbers(stop: int) -> Any:
    yield from range(stop)
    raise ZeroDivisionError


def test_pool_keeps_order_and_tells_failures_after_earlier_results() -> None:
    with OrderedPool(3, make_square) as pool:
        assert list(pool.map(iter([]))) == []
        assert list(pool.map(iter(range(25)))) == [n * n for n in range(25)]
        results = pool.map(numbers(10))
        assert [next(results) for _ in range(10)] == [n * n for n in range(10)]
        with pytest.raises(ZeroDivisionError):
            next(results)
        with pytest.raises(WorkerFailed, match="KeyError: 'sixty'"):
            list(pool.map(iter([1, 60])))
    with OrderedPool(2, make_square) as pool:
        with pytest.raises(WorkerDied, match="ended with exit status 3") as error:
            list(pool.map(iter([50])))
        assert error.value.item == 50


def test_memory_that_cannot_be_had_is_not_a_worker_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, value: object) -> int:
        raise OSError(28, "No space left on device")

    with OrderedPool(1, make_square) as pool:
        monkeypatch.setattr("megatron_lite.text.pool._Shared.put", full)
        with pytest.raises(OSError, match="No space left"):
            list(pool.map(iter([1])))


def test_pool_does_not_run_ahead_without_end() -> None:
    taken = []

    def items() -> Any:
        for i in range(1000):
            taken.append(i)
            yield i * 3

    with OrderedPool(2, make_square) as pool:
        results = pool.map(items())
        for _ in range(5):
            next(results)
        assert len(taken) <= 5 + 8


# --- interrupted runs -----------------------------------------------------------------------------------------------


def start_tool(tmp_path: Path, workers: int, lines: int = 400_000, **options: Any) -> subprocess.Popen[str]:
    path = tmp_path / "a.jsonl"
    if not path.exists():
        path.write_text('{"text": "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"}\n' * lines)
    command = [*TOOL, "--input", str(path), "--output-prefix", str(tmp_path / "out"), "--workers", str(workers)]
    command += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99", "--append-eod", "--log-interval", "5000"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
    )


def group_is_gone(leader: int, seconds: float = 15) -> bool:
    """Whether no process of a group is left."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@WORKERS
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_interrupted_run(tmp_path: Path, number: signal.Signals, workers: int) -> None:
    """As by Ctrl-C (all processes) or kill (the parent): clean message, no temporaries, no process; a rerun works."""
    process = start_tool(tmp_path, workers)
    assert "documents/s" in process.stdout.readline()  # type: ignore[union-attr]
    assert any(n.endswith(".tmp") for n in names(tmp_path))
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert group_is_gone(process.pid)
    if number == signal.SIGKILL:
        assert process.returncode == -9
        assert all(n.endswith(".tmp") or n == "a.jsonl" for n in names(tmp_path))
        with pytest.raises(FileNotFoundError):
            IndexedDataset(tmp_path / "out_text_document")
    else:
        assert (process.returncode, errors) == (130, "interrupted; nothing was written\n")
        assert names(tmp_path) == ["a.jsonl"]
    (tmp_path / "a.jsonl").write_text('{"text": "1 2"}\n')
    again = start_tool(tmp_path, 1)
    assert again.communicate(timeout=60)[1] == "" and again.returncode == 0
    assert names(tmp_path) == ["a.jsonl", *(f"out_text_document.{s}" for s in ("bin", "idx", "meta.json"))]
    assert IndexedDataset(tmp_path / "out_text_document").read(0, 3).tolist() == [1, 2, 98]


def test_a_worker_that_is_killed_alone_ends_the_run(tmp_path: Path) -> None:
    """As the kernel does it when memory is out: within seconds, with the lines that it had in hand."""
    process = start_tool(tmp_path, 3)
    assert "documents/s" in process.stdout.readline()  # type: ignore[union-attr]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]
    assert len(workers) == 3
    os.kill(workers[1], signal.SIGKILL)
    start = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - start < 10 and process.returncode == 2
    place = rf"lines \d+ to \d+ of {tmp_path}/a\.jsonl; nothing was written\."
    assert re.search(rf"^megatron-lite: error: worker 1 \(process {workers[1]}\) was ended by SIGKILL in {place} Out of memory\?", errors)
    assert group_is_gone(process.pid) and names(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3, 0.6])
def test_interrupt_while_workers_start(tmp_path: Path, delay: float) -> None:
    process = start_tool(tmp_path, 3, lines=50_000)
    while not any(n.endswith(".tmp") for n in names(tmp_path)):
        assert process.poll() is None
        time.sleep(0.002)
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted; nothing was written\n") or process.returncode == 0
    assert group_is_gone(process.pid) and not any(n.endswith(".tmp") for n in names(tmp_path))


@WORKERS
def test_full_disk(tmp_path: Path, workers: int) -> None:
    def limit() -> None:  # of files, and of what is said to workers
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))

    process = start_tool(tmp_path, workers, lines=150_000, preexec_fn=limit)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors.startswith("megatron-lite: error: ") and errors.count("\n") == 1
    assert ".tmp: File too large; nothing was written" in errors
    assert names(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize("step", ["complete", "publish"])
def test_outputs_of_all_keys_or_of_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"a": "x", "b": "y"}])
    done = getattr(IndexedWriter, step)

    def no_space(self: IndexedWriter) -> Any:
        if "_b_" in self.prefix:
            raise OSError(28, "No space left on device")
        return done(self)

    monkeypatch.setattr(IndexedWriter, step, no_space)
    with pytest.raises(OSError, match="No space left"):
        run(path, tmp_path / "out", keys=("a", "b"))
    assert names(tmp_path) == ["a.jsonl"]


def test_outputs_that_are_there_are_kept(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "new"}])
    run(path, tmp_path / "out")
    before = {n: (tmp_path / n).read_bytes() for n in names(tmp_path)}
    with pytest.raises(FileExistsError, match="already there"):
        run(path, tmp_path / "out")
    write_lines(path, [{"text": "newer"}, b"bad"])
    with pytest.raises(BadInput):
        run(path, tmp_path / "out", overwrite=True)
    assert {n: (tmp_path / n).read_bytes() for n in names(tmp_path)} == {**before, "a.jsonl": path.read_bytes()}
    run(path, tmp_path / "out", overwrite=True, skip_bad=True)
    assert documents(tmp_path / "out_text_document") == ["newer"]


# --- the tool -------------------------------------------------------------------------------------------------------

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "50"]


def tool(tmp_path: Path, *more: str) -> int:
    return cli.main(["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "out"), *NULL, *more])


def test_tool_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "1 2"}, {"text": ""}, {"text": "49"}, {"text": "x"}])
    assert tool(tmp_path, "--append-eod", "--skip-bad", "--log-interval", "1") == 0
    text = capsys.readouterr().out
    for part in (
        "2 documents, 5 tokens from",
        "1 dropped: empty",
        "1 bad: the tokenizer",
    ):
        assert part in text
    assert "1 texts hold the end-of-document token themselves" in text and "MB/s" in text
    assert f"written: {tmp_path}/out_text_document (.bin, .idx, .meta.json)" in text
    before = signal.getsignal(signal.SIGTERM)
    assert tool(tmp_path) == 2 and "already there" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_tool_says_which_flags_do_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "1 2"}])
    assert (
        tool(tmp_path, "--vocab-file", "x", "--eod-token", "y", "--partitions", "2", "--keep-sequential-samples") == 0
    )
    errors = capsys.readouterr().err
    for flag in ("--vocab-file", "--eod-token"):
        assert f"{flag} has no effect with --tokenizer-type NullTokenizer" in errors
    assert "--partitions has no effect" in errors and "--keep-sequential-samples has no effect" in errors


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--apend-eod"], "unknown argument --apend-eod: did you mean --append-eod?"),
        (["--append"], "unknown argument --append"),  # no abbreviations
        (["--workers", "0"], "argument --workers: 0: give at least 1"),
        (["--tokenizer-type", "Bert"], "invalid choice: 'Bert'"),
    ],
)
def test_tool_names_wrong_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        tool(tmp_path, *more)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_prefix_has_a_name_and_documents_an_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "1 2"}])
    asked = ["--input", str(tmp_path / "a.jsonl"), *NULL, "--output-prefix"]
    with pytest.raises(SystemExit):  # it would write hidden files, or _text_document
        cli.main([*asked, f"{tmp_path}/"])
    assert f"is a directory: add the beginning of a name, as in {tmp_path}/corpus" in capsys.readouterr().err
    assert cli.main([*asked, str(tmp_path / "b")]) == 0 and "without --append-eod" in capsys.readouterr().out
    assert cli.main([*asked, str(tmp_path / "c"), "--append-eod"]) == 0 and "append" not in capsys.readouterr().out
    assert cli.main([*asked, str(tmp_path / "c")]) == 2 and "append" not in "".join(capsys.readouterr())  # nothing has begun


def test_tool_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "1 2"}, [1]])
    assert tool(tmp_path) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"megatron-lite: error: {tmp_path}/a.jsonl:2: an array, not an object")
    assert cli.main(["--input", str(tmp_path / "b.jsonl"), "--output-prefix", str(tmp_path / "out"), *NULL]) == 2
    assert "no such file" in capsys.readouterr().err
    assert cli.main(["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "out")]) == 2
    assert "no tokenizer is named: give --tokenizer-model" in capsys.readouterr().err
