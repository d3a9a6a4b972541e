"""What stands beside the text: fields of JSON lines keep their bytes, columns of Parquet are told as JSON."""

from __future__ import annotations

import itertools
import json
import uuid
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from clean_pipelines import lines_of, one_run

from megatron_lite.clean.config import Keys, Pipeline, StepConfig
from megatron_lite.clean.documents import read_block
from megatron_lite.clean.json_line import with_fields
from megatron_lite.clean.shards import ShardReader
from megatron_lite.clean.steps.normalise import Normalise, NormaliseOptions
from megatron_lite.text.blocks import Lines
from megatron_lite.text.records import BadInput

NORMALISE = Pipeline((StepConfig("normalise", NormaliseOptions(), Normalise),))


def test_fields_are_changed_where_they_stand() -> None:
    """Objects put together of pieces: what lies around the value of ``text`` stays, whatever it is."""
    before = ("", '"a": 1e400,', r'"a\"b" :{"text": "}\\\"{", "l": [[], {}, "]"]} , ', '"n":NaN,\n "text":[1,\t"x"],')
    values = ('"one\\u00a0\\n\\"two\\""', "[1, {}]", "null", "-1.50E+3", '{"text": {}}', "[" * 1020 + "]" * 1020, f"[{9:9<5000}]")
    after = ("", ', "big":12345678901234567890123', ' ,"s":"\\ud800中" ')
    for space, first, value, last in itertools.product(("", " \t"), before, values, after):
        line = f'{{{space}{first}"text"{space}:{space}{value}{last}{space}}}'
        changed = with_fields(line.encode(), {"text": "new “x”\n"}).decode()
        first = first.replace('[1,\t"x"]', '"new “x”\\n"')
        assert changed == f'{{{space}{first}"text"{space}:{space}"new “x”\\n"{last}{space}}}'
        added = with_fields(line.encode(), {"dropped": "why", "step": None}).decode()
        assert added == line[:-1] + ',"dropped":"why","step":null}'


def test_other_fields_of_a_changed_document_keep_their_bytes(tmp_path: Path) -> None:
    """Whether it passes between stages, is dropped, or not."""
    rest = rb'"n":12345678901234567890123, "g": 1e400,"nan":NaN, "f":[1.50] ,"s":"\ud800\u4e2d"'
    texts = (rb"three\u0007 words here", rb"gone\u0007")
    (tmp_path / "in.jsonl").write_bytes(b"".join(b'{"text":"%b",%b}\n' % (text, rest) for text in texts))
    one_run(tmp_path, [tmp_path / "in.jsonl"])
    assert ShardReader(tmp_path / "out").line(0) == b'{"text":"three words here",%b}' % rest
    why = b'"dropped":"fewer than 2 words","step":"2 short","dropped_detail":"","dropped_at":"%b"' % f"{tmp_path}/in.jsonl:2".encode()
    dropped = b'{"text":"gone",%b,%b}' % (rest, why)
    assert ShardReader(tmp_path / "dropped").line(0) == dropped


def test_sources_are_texts_or_numbers() -> None:
    values = ['"a"', "7", "1.5", "true", "null", "[1]", '"\\ud800"']
    lines = "".join(f'{{"text": "x", "site": {value}}}\n' for value in values)
    found = read_block(0, Lines("f", 1, lines.encode()), 0, Keys(source_key="site"), skip_bad=False)
    assert list(found.read) == ["a", "7", "1.5", "f", "?"] and found.read["f"] == 3  # else the file


def test_columns_of_any_type_are_carried(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    moment, told = 1600000000123456789, "2020-09-13 12:26:40.123456789"
    nested = pa.struct([("at", pa.timestamp("ns")), ("l", pa.list_(pa.decimal128(5, 2)))])
    columns: dict[str, tuple[Any, Any]] = {
        "bytes": (pa.array([b"\xff", None]), "/w=="),
        "fixed bytes": (pa.array([b"\xff\x01", None], pa.binary(2)), "/wE="),
        "decimal": (pa.array([Decimal("1.50"), None]), "1.50"),
        "date": (pa.array([date(2020, 1, 2), None]), "2020-01-02"),
        "a far date": (pa.array([10**7, None], pa.date32()), "29349-01-26"),
        "timestamp": (pa.array([moment, None], pa.timestamp("ns")), told),
        "zoned": (pa.array([moment, None], pa.timestamp("ns", "Asia/Shanghai")), "2020-09-13 20:26:40.123456789+0800"),
        "time": (pa.array([123456789, None], pa.time64("ns")), "00:00:00.123456789"),
        "duration": (pa.array([timedelta(seconds=1), None]), "1000000"),
        "nested": (pa.array([{"at": moment, "l": [Decimal("2.5")]}, None], nested), {"at": told, "l": ["2.50"]}),
        "list": (pa.array([[b"\xff"], None], pa.list_(pa.binary(), 1)), ["/w=="]),
        "map": (pa.array([[("k", moment)], None], pa.map_(pa.string(), pa.timestamp("ns"))), [["k", told]]),
        "uuid": (pa.array([uuid.UUID(int=5).bytes, None], pa.binary(16)), "AAAAAAAAAAAAAAAAAAAABQ=="),
        "nan": (pa.array([float("nan"), None]), None),
        "whole": (pa.array([2**64 - 1, None], pa.uint64()), 2**64 - 1),
        "dictionary": (pa.array(["x", None]).dictionary_encode(), "x"),
    }
    table = pa.table({"text": ["some \u00a0words", "as it is"], **{name: array for name, (array, _) in columns.items()}})
    parquet.write_table(table, tmp_path / "in.parquet")
    one_run(tmp_path, [tmp_path / "in.parquet"], steps=NORMALISE)
    first, second = lines_of(tmp_path / "out")
    assert first == {"text": "some  words", **{name: value for name, (_, value) in columns.items()}}
    assert second == {"text": "as it is", **dict.fromkeys(columns)}


def test_a_column_that_is_not_utf8_is_a_bad_record(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    offsets = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 1, 2)))
    column = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"\xffa")])
    parquet.write_table(pa.table({"text": ["one", "two"], "other": column}), tmp_path / "in.parquet")
    with pytest.raises(BadInput, match=r"in\.parquet:1: bytes that are not UTF-8"):
        one_run(tmp_path, [tmp_path / "in.parquet"], steps=NORMALISE)
    assert [p.name for p in tmp_path.iterdir()] == ["in.parquet"]
    one_run(tmp_path, [tmp_path / "in.parquet"], steps=NORMALISE, skip_bad=True)
    assert lines_of(tmp_path / "out") == [{"text": "two", "other": "a"}]


def test_texts_that_are_lists_keep_the_other_fields(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"g": 1e400, "text": ["of two", "parts"] }\n')
    one_run(tmp_path, [tmp_path / "in.jsonl"], steps=NORMALISE)
    assert ShardReader(tmp_path / "out").line(0) == rb'{"g": 1e400, "text": "of two\n\nparts" }'
    assert json.loads(ShardReader(tmp_path / "out").line(0))["g"] == float("inf")


def test_a_table_of_texts_alone(tmp_path: Path) -> None:
    """A file of Parquet without another column, and a bad record among its rows."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": ["one", None, "two"]}), tmp_path / "in.parquet")
    one_run(tmp_path, [tmp_path / "in.parquet"], steps=NORMALISE, skip_bad=True)
    assert lines_of(tmp_path / "out") == [{"text": "one"}, {"text": "two"}]
