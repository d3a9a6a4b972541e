"""Writes the dirty inputs of this folder and ``expected.json``: for each file what a reader must make of it.

``good``: the texts in order; ``bad``: [number of the line or document, reason]; ``error``: why the file as a whole is refused
(after the good ones that come before). The files are under version control; run this only to change them.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

HERE = Path(__file__).resolve().parent
NOT_TEXT = "bytes that are not text in the input's encoding"
NOT_UTF8 = "bytes that are not UTF-8, which is the encoding of this kind of file"
JSON = "not one JSON value"
EXPECTED: dict[str, dict[str, Any]] = {}


def line(text: str) -> bytes:
    return json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(3).compress(data)


def add(name: str, data: bytes, good: list[str], bad: list[Any] = (), error: str | None = None, **options: Any) -> None:  # type: ignore[assignment]
    (HERE / name).write_bytes(data)
    EXPECTED[name] = {"good": good, "bad": list(bad), "error": error, "options": options}


def field_lines() -> tuple[bytes, list[str], list[Any]]:
    """Everything that was ever seen in a file of JSON lines: (bytes, good texts, bad lines)."""
    rows: list[tuple[bytes, str | None, str | None]] = [  # line, text if good, reason if bad
        (b'\xef\xbb\xbf{"text":"marked"}', "marked", None),
        (b'{"text": "unterminated', None, JSON),
        (b"", None, None),
        (b'"just a string with text in it"', None, "a string, not an object"),
        (b"[1,2]", None, "an array, not an object (JSON lines have one object per line)"),
        (b'["text"]', None, "an array, not an object (JSON lines have one object per line)"),
        (b"42", None, "a number, not an object"),
        (b"true", None, "a boolean, not an object"),
        (b"null", None, "null, not an object"),
        (b'{"text": null}', None, "the value of 'text' is null, not a string"),
        (b'{"text": 7}', None, "the value of 'text' is a number, not a string"),
        (b'{"text": []}', None, "the value of 'text' is an array, not a string"),
        (b'{"text": ["a", 1]}', None, "the value of 'text' is an array, not a string"),
        (b'{"text": ["a", "b"]}', "a\n\nb", None),
        (b'{"text": {"text": "deep"}}', None, "the value of 'text' is an object, not a string"),
        (b'{"TEXT": "capitals"}', None, "no key 'text'"),
        (b"{}", None, "no key 'text'"),
        ('{"text":"é 😀 \\ud800"}'.encode(), None, "the value of 'text' holds a lone surrogate, which is no text"),
        (b'{"text":"\\ud83d\\ude00"}', "😀", None),
        (b'{"text":"one"} {"text":"two"}', None, JSON),
        (b'{"text":"one"},', None, JSON),
        (b'{"text":"windows"}\r', "windows", None),
        (b" \t\r", None, None),
        (b'{"text":"bytes \xff\xfe inside"}', None, NOT_TEXT),
        (b'{"text":"half of \xe4\xbb"}', None, NOT_TEXT),
        (b'{"text":"surrogate as bytes \xed\xa0\x80"}', None, NOT_TEXT),
        (b'{"text":"overlong \xc0\xaf"}', None, NOT_TEXT),
        (b'{"text":"tab \t raw"}', None, JSON),
        (b'{"text":"zero \\u0000 inside"}', "zero \x00 inside", None),
        (b'{"text":"zero after"}\x00', None, JSON),
        ('{"text":"separators \u2028 \u2029 \u0085 \u000b of lines"}'.replace("\u000b", "\\u000b").encode(),
         "separators \u2028 \u2029 \u0085 \u000b of lines", None),
        (b'{"text":"first","text":"the last of two"}', "the last of two", None),
        (b'{"text":"other values","n":NaN,"m":1e999,"k":123456789012345678901234567890}', "other values", None),
        (b"{'text':'python'}", None, JSON),
        (b'{"text":"comment"} // no', None, JSON),
        (b"[" * 3000, None, "nested too deeply"),
        ('{"text":"今天天气好。"}'.encode(), "今天天气好。", None),
        (b'{"text":"last, without a newline"}', "last, without a newline", None),
    ]  # fmt: skip
    good = [text for _, text, _ in rows if text is not None]
    bad = [[number, reason] for number, (_, _, reason) in enumerate(rows, 1) if reason is not None]
    return b"\n".join(data for data, _, _ in rows), good, bad


def packed() -> None:
    data, good, bad = field_lines()
    add("field.jsonl", data, good, bad)
    half = data.index(b"\n", len(data) // 2) + 7  # inside a line
    add("two_members.jsonl.gz", gzip.compress(data[:half], mtime=0) + gzip.compress(data[half:], mtime=0), good, bad)
    add("two_frames.jsonl.zst", zst(data[:half]) + zst(b"") + zst(data[half:]), good, bad)
    add("two_streams.json.bz2", bz2.compress(data[:half]) + bz2.compress(data[half:]), good, bad)
    add("two_streams.ndjson.xz", lzma.compress(data[:half]) + lzma.compress(data[half:]), good, bad)
    texts = [f"document {i * 2654435761 % 2**32:08x}" for i in range(40)]
    whole = b"".join(map(line, texts))
    for suffix, pack in {
        "gz": lambda d: gzip.compress(d, mtime=0),
        "bz2": bz2.compress,
        "xz": lzma.compress,
        "zst": zst,
    }.items():
        data = pack(whole)
        add(f"cut.jsonl.{suffix}", data[: len(data) * 2 // 3], texts, error="damaged, cut off")
        add(f"not_packed.jsonl.{suffix}", whole, [], error="its content is not packed")
    add("cut_second_frame.jsonl.zst", zst(whole) + zst(whole)[:-9], texts, error="damaged, cut off")
    add("garbage_behind.jsonl.zst", zst(whole) + b"garbage", texts, error="damaged, cut off")
    add("plain_gz_behind.jsonl", whole + gzip.compress(b"x", mtime=0), texts, [[41, NOT_TEXT]])


def arrays() -> None:
    add("array.json", b'[\n  {"text": "a"},\n  {"text": "b"}\n]\n', [], error="a JSON array")
    add("array_on_a_line.json", b'\xef\xbb\xbf [{"text": "a"}, {"text": "b"}]', [], error="a JSON array")
    add("empty.jsonl", b"", [])
    add("blank.jsonl", b"\n\r\n \n\t\n", [])


def encodings() -> None:
    texts = ["今天天气好。", "😀 and ascii", "\ue5e5 private, €"]
    lines = [json.dumps({"text": t}, ensure_ascii=False) for t in texts]
    for name in ("gb18030", "utf-16", "utf-16-be", "utf-32"):
        add(
            f"{name}.jsonl",
            "\n".join(["\ufeff" * (name == "utf-16-be") + lines[0], *lines[1:]]).encode(name),
            texts,
            encoding=name,
        )
    good = lines[0].encode("gb18030")
    add("gb18030_bad.jsonl.gz", gzip.compress(good + b"\n" + good[:-3] + b'\xff\xff"}\n' + good[:13] + b"\n" + good, mtime=0),
        texts[:1] * 2, [[2, NOT_TEXT], [3, NOT_TEXT]], encoding="gb18030")  # fmt: skip
    add("gbk_as_utf8.jsonl", lines[0].encode("gbk") + b"\n" + lines[1].encode(), texts[1:2], [[1, NOT_TEXT]])
    add("utf16_lone.jsonl", (lines[0] + '\n{"text":"x\ud800"}\n').encode("utf-16-le", "surrogatepass"),
        texts[:1], [[2, NOT_TEXT]], encoding="utf-16-le")  # fmt: skip
    add("utf16_cut.jsonl", lines[0].encode("utf-16")[:-1], [], error="damaged, cut off", encoding="utf-16")
    add("big5.txt", "繁體字".encode("big5"), ["繁體字"], encoding="big5")
    add("latin1.txt.bz2", bz2.compress("café".encode("latin-1")), ["café"], encoding="latin-1")


def plain() -> None:
    add("one.txt", "\ufeffTwo lines,\r\none document.\n\n".encode(), ["Two lines,\r\none document.\n\n"])
    add("bytes.txt", b"good \xff bad", [], [[1, NOT_TEXT]])
    add("empty.txt", b"", [""])
    add("parts.txt", "a<|end|>b <|en|> b<|end|><|end|>\xff<|end|>今<|end|>".encode("latin-1", "ignore") + "今".encode(),
        ["a", "b <|en|> b", "", "", "今"], [[4, NOT_TEXT]], separator="<|end|>")  # fmt: skip
    add("blank_lines.txt.zst", zst(b"a\n\n") + zst(b"b\n") + zst(b"\nc\n"), ["a", "b", "c\n"], separator="\n\n")
    add("gb18030_parts.txt", "一二\n\n三".encode("gb18030") + b"\xff\n\n" + "四".encode("gb18030"),
        ["一二", "四"], [[2, NOT_TEXT]], separator="\n\n", encoding="gb18030")  # fmt: skip


def archives() -> None:
    rows = [{"text": "first", "meta": {"url": "a"}}, {"text": ["two", "paragraphs"]}, {"text": "third", "meta": {}}]
    data = b"".join(json.dumps(r).encode() + b"\n" for r in rows)
    good = ["first", "two\n\nparagraphs", "third"]
    add("archive.jsonl.zst", zst(data), good)
    add("string_lines.jsonl.zst", zst(b'"as it was long ago"\n' + data), good, [[1, "a string, not an object"]])

    def tar(members: dict[str, bytes]) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            folder = tarfile.TarInfo("data")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return out.getvalue()

    whole = tar({"data/b.jsonl.zst": zst(data[:70]) + zst(data[70:]), "data/a.jsonl.zst": zst(b"\n[]\n" + data[:-1])})
    array = "an array, not an object (JSON lines have one object per line)"
    add("archive.jsonl.zst.tar", whole, good * 2, [[2, array]])
    add("cut.jsonl.zst.tar", whole[:2100], good, error="damaged, cut off")
    add(
        "stray.jsonl.zst.tar",
        tar({"a.jsonl.zst": zst(data), "README": b"x"}),
        good,
        error="only .jsonl.zst files are read",
    )

    def dat(*texts: bytes) -> bytes:
        return b"".join(b"%016d" % len(t) + t for t in texts)

    add("archive.dat.zst", zst(dat("一".encode(), b"", b"\xff", b"b" * 3000)), ["一", "", "b" * 3000], [[3, NOT_UTF8]])
    add("cut.dat.zst", zst(dat(b"whole", b"cut")[:-1]), ["whole"], error="damaged, cut off")
    add("not.dat.zst", zst(data), [], error="no length of 16 digits")


def parquet() -> None:
    why = "the value of 'text' is null, not a string"
    table = pa.table({"text": ["one", None, "", "今天"], "n": [1, 2, 3, 4]})

    def data(table: pa.Table, **options: Any) -> bytes:
        out = io.BytesIO()
        pq.write_table(table, out, **options)
        return out.getvalue()

    add("table.parquet", data(table, row_group_size=3), ["one", "", "今天"], [[2, why]])
    raw = pa.array([b"fine", b"\xff", b"too"])
    add("binary.parquet", data(pa.table({"text": raw})), ["fine", "too"], [[2, NOT_UTF8]])
    wrong = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    add("not_utf8.parquet", data(pa.table({"text": wrong})), ["fine", "too"], [[2, NOT_UTF8]])
    add("dictionary.parquet", data(pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()})), ["a", "b", "a"])
    add("numbers.parquet", data(pa.table({"text": [1, 2]})), [], error="column 'text' holds int64, not strings")
    add("no_column.parquet", data(pa.table({"body": ["a"]})), [], error="no column 'text'; its columns are body")
    add("cut.parquet", data(table)[:-30], [], error="not a Parquet file, or damaged")


if __name__ == "__main__":
    for part in (packed, arrays, encodings, plain, archives, parquet):
        part()
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(what, ensure_ascii=False)}" for name, what in EXPECTED.items())
    (HERE / "expected.json").write_text("{\n" + text + "\n}\n")
