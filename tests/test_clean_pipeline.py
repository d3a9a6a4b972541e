"""Cleaning pipelines: the same bytes whatever the workers, the parts and the moments at which a run was killed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clean_pipelines import SMALL_BLOCKS, Once, Short, ShortOptions, files_of, killed_at, lines_of, one_run, pipeline  # isort: skip
from clean_pipelines import plain_loop, records, silent, write_corpus  # isort: skip
from selectolax.lexbor import LexborHTMLParser

from megatron_lite.clean import pipeline_input, pipeline_keys, pipeline_output
from megatron_lite.clean.config import Keys, Pipeline, StepConfig, step_class
from megatron_lite.clean.counts import OTHERS
from megatron_lite.clean.pipeline import Run, RunOptions
from megatron_lite.clean.pipeline_input import Progress
from megatron_lite.clean.pipeline_keys import by_bucket, gather_drops
from megatron_lite.clean.pipeline_stage import DROPS, Block, StepFailed, between
from megatron_lite.clean.pipeline_work import PartsMissing, PlanDiffers
from megatron_lite.clean.report import summary
from megatron_lite.clean.shards import ShardReader, ShardWriter, write_list
from megatron_lite.clean.step import CorpusOptions, CorpusStep, Document, LocalStep
from megatron_lite.text.blocks import InputOptions, Lines
from megatron_lite.text.records import BadInput, numbered_lines
from megatron_lite.text.shares import shares


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: list[Path]) -> Path:
    """The output of one run with one part and one worker."""
    directory = tmp_path_factory.mktemp("whole")
    one_run(directory, corpus)
    return directory


def test_the_output_is_that_of_a_plain_loop(corpus: list[Path], whole: Path) -> None:
    everything = records(corpus)
    wanted = plain_loop(everything)
    assert 50 < len(wanted) < len(everything) - 50
    assert list(map(str, lines_of(whole / "out"))) == list(map(str, wanted))
    report = json.loads((whole / "report.json").read_text())
    assert report["total"]["documents_out"] == len(wanted)
    assert report["records"]["read"] == len(everything)
    empty = sum(not r["text"].strip() for r in everything)
    assert report["records"]["empty"] == empty > 0
    assert len(lines_of(whole / "dropped")) == len(everything) - empty - len(wanted)
    assert not list(whole.glob("*.work")) and not list(whole.rglob("*tmp*"))


def test_dropped_documents_have_reason_and_step_in_the_order_of_the_corpus(corpus: list[Path], whole: Path) -> None:
    dropped, report = lines_of(whole / "dropped"), json.loads((whole / "report.json").read_text())
    for step in report["steps"]:
        reasons: dict[str, int] = {}
        for record in dropped:
            if record["step"] == step["step"]:
                reasons[record["dropped"]] = reasons.get(record["dropped"], 0) + 1
        assert reasons == step["reasons"]
        for crossed in (step["reasons_by_source"], step["reasons_by_language"]):
            assert sum(map(Counter, crossed.values()), Counter()) == reasons
        assert set(step["reasons_by_source"]) <= set(step["sources"])
    assert sum(sum(step["reasons"].values()) for step in report["steps"]) == len(dropped)
    places = {json.dumps([r["id"], r["meta"]]): n for n, r in enumerate(records(corpus))}
    assert len(places) < len(records(corpus))  # ids begin anew in each file
    order = [r["id"] for r in dropped]
    assert sum(a > b for a, b in zip(order, order[1:], strict=False)) == 3  # once for each file after the first


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_change_nothing(tmp_path: Path, corpus: list[Path], whole: Path, workers: int) -> None:
    one_run(tmp_path, corpus, workers=workers)
    assert files_of(tmp_path) == files_of(whole)


@pytest.mark.parametrize(("parts", "workers"), [(2, 1), (5, 1), (13, 1), (2, 3)])
def test_parts_change_nothing(tmp_path: Path, corpus: list[Path], whole: Path, parts: int, workers: int) -> None:
    """Parts are started in any order, again and again until the output is there."""
    order, ended = [*range(parts - 1, -1, -2), *range(parts - 2, -1, -2)], 0
    while not (tmp_path / "out").exists():
        for part in order:
            try:
                one_run(tmp_path, corpus, part, parts, workers=workers)
            except PartsMissing as missing:
                assert missing.parts and part not in missing.parts
            ended += 1
        assert ended < 5 * parts
    assert one_run(tmp_path, corpus, order[0], parts) is None  # complete already
    assert files_of(tmp_path) == files_of(whole)


def test_blocks_of_any_size_change_nothing(tmp_path: Path, corpus: list[Path], whole: Path) -> None:
    one_run(tmp_path, corpus, reading=InputOptions(block_bytes=90, whole=True))
    sizes = b'"block_bytes": 700', b'"block_bytes": 90'
    assert files_of(tmp_path) == {name: data.replace(*plans(whole, tmp_path)).replace(*sizes) for name, data in files_of(whole).items()}


def plans(*directories: Path) -> list[bytes]:
    return [json.loads((d / "out/.index/shards.json").read_text())["plan"].encode() for d in directories]


def test_lines_keep_their_numbers_in_parts(tmp_path: Path) -> None:
    """Of shards too, which are cut by their index."""
    (tmp_path / "shards").mkdir()
    with ShardWriter(tmp_path / "shards") as writer:
        for n in range(1, 30_001):
            writer.add(b'{"text": "%d"}\n' % n + b" " * 99 + b"\n")
    (shard,) = (tmp_path / "shards").glob("*.zst")
    (tmp_path / "plain.jsonl").write_bytes(b"".join(b'{"text": "%d"}\n\n' % n for n in range(1, 101)))
    paths, reading = [shard, tmp_path / "plain.jsonl"], InputOptions(block_bytes=1 << 16)
    for parts in (1, 3, 50):
        seen = 0
        for part in range(parts):
            for block in pipeline_input.input_blocks(shares(paths, reading, (part, parts)), reading):
                assert isinstance(block.block, Lines)
                for number, line in numbered_lines(block.block.first, block.block.data):
                    assert number == 2 * int(line[10:-2]) - 1
                    seen += 1
        assert seen == 30_100


@pytest.mark.parametrize("parts", [1, 2])
def test_a_killed_run_goes_on(tmp_path: Path, parts: int) -> None:
    """Killed again and again, ever later, until it gets to the end."""
    small = write_corpus(tmp_path, 60)
    reference = tmp_path / "reference"
    reference.mkdir()
    one_run(reference, small)
    for stride in (1, 7):
        place = tmp_path / f"killed-{stride}"
        place.mkdir()
        moment, kills = 0, 0
        while not (place / "out").exists():
            for part in range(parts):
                code = killed_at(moment, lambda part=part, place=place: _patient(place, small, part, parts))  # type: ignore[misc]
                kills += code is None
                assert code in (0, None)
            moment += stride
            assert not (place / "out").exists() or _is_complete(place)
        assert kills > 9
        for part in range(parts):
            one_run(place, small, part, parts)
        assert files_of(place) == files_of(reference) and (parts > 1 or not (place / "out.work").exists())


def test_a_killed_run_with_workers_goes_on(tmp_path: Path) -> None:
    paths = write_corpus(tmp_path, 60)
    one_run(tmp_path, paths)
    for moment in (12, 30):
        place = tmp_path / str(moment)
        place.mkdir()
        assert killed_at(moment, lambda place=place: one_run(place, paths, workers=2)) is None  # type: ignore[misc]
        one_run(place, paths, workers=1)
        assert (place / "report.json").read_bytes() == (tmp_path / "report.json").read_bytes()
        assert files_of(place / "out") == files_of(tmp_path / "out")


def _patient(place: Path, paths: list[Path], part: int, parts: int) -> None:
    try:
        one_run(place, paths, part, parts)
    except PartsMissing:
        pass


def _is_complete(place: Path) -> bool:
    return (place / "dropped").is_dir() and (place / "out.html").is_file() and (place / "report.json").is_file()


def test_finished_stages_are_not_done_again(tmp_path: Path, corpus: list[Path]) -> None:
    moment = 0
    while killed_at(moment, lambda: one_run(tmp_path, corpus)) is None and not (tmp_path / "out.work/stage-1/part-0").is_dir():
        moment += 5
    assert (tmp_path / "out.work/stage-1/part-0").is_dir()
    before = (tmp_path / "out.work/stage-0/part-0/counts.json").stat().st_mtime_ns
    killed_at(3, lambda: one_run(tmp_path, corpus))
    assert (tmp_path / "out.work/stage-0/part-0/counts.json").stat().st_mtime_ns == before


# ---- what is refused


def test_a_restart_with_other_options_or_inputs_is_refused(tmp_path: Path) -> None:
    paths = write_corpus(tmp_path, 40)
    with pytest.raises(PartsMissing):
        one_run(tmp_path, paths, 0, 2)
    with pytest.raises(PlanDiffers, match="shard_bytes: 6000 then, 7000 now"):
        one_run(tmp_path, paths, 1, 2, shard_bytes=7000)
    with pytest.raises(PlanDiffers, match="parts: 2 then, 3 now"):
        one_run(tmp_path, paths, 1, 3)
    with pytest.raises(PlanDiffers, match=r"pipeline\.steps 2 short\.words|pipeline\.steps 2\.short\.words: 2 then, 5 now"):
        steps = pipeline()
        changed = replace(steps.steps[1], options=replace(steps.steps[1].options, words=5))
        one_run(tmp_path, paths, 1, 2, Pipeline((steps.steps[0], changed, *steps.steps[2:])))
    with open(paths[1], "ab") as file:
        file.write(b"\n")
    with pytest.raises(PlanDiffers, match=r"inputs 2\.bytes: \d+ then, \d+ now"):
        one_run(tmp_path, paths, 1, 2)


def test_outputs_that_are_there_are_kept(tmp_path: Path) -> None:
    paths = write_corpus(tmp_path, 20)
    for name in ("out", "dropped"):
        (tmp_path / name).mkdir()
        with pytest.raises(FileExistsError, match=f"{name} is there, and not from this run"):
            one_run(tmp_path, paths)
        (tmp_path / name).rmdir()
    assert one_run(tmp_path, paths) is not None
    with pytest.raises(FileExistsError) as refused:
        one_run(tmp_path, paths[:2], shard_bytes=7000)
    told = f"inputs: 5 then, 2 now; gone: {', '.join(map(str, paths[2:]))}\n  shard_bytes: 6000 then, 7000 now\nremove it"
    assert f"{tmp_path}/out is there, and not from this run:\n  {told}" in str(refused.value)
    assert one_run(tmp_path, paths) is None
    with pytest.raises(FileExistsError):
        one_run(tmp_path, paths[:2])


def test_two_processes_do_not_work_at_one_part(tmp_path: Path) -> None:
    paths = write_corpus(tmp_path, 20)
    run = Run(pipeline(), paths, tmp_path / "out", RunOptions(), silent)
    with run.work.joined(run.plan()), pytest.raises(FileExistsError, match="another process works at part 0 of 1"):
        Run(pipeline(), paths, tmp_path / "out", RunOptions(), silent).run()


BAD = """{"text": "a fine one here"}
{"text": 5}
[1]
{"txt": "x"}
{"text": "b\\ud800"}
{"text": "tail "
{"text": "the last one here"}
"""


def test_bad_records_end_the_run_and_leave_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(BAD)
    for workers in (1, 2):
        with pytest.raises(BadInput, match=r"bad\.jsonl:2: .*not a string.*\{\"text\": 5\}"):
            one_run(tmp_path, [path], workers=workers)
        assert [p.name for p in tmp_path.iterdir()] == ["bad.jsonl"]


@pytest.mark.parametrize(("workers", "parts"), [(1, 1), (2, 1), (1, 3)])
def test_bad_records_are_found_again(workers: int, parts: int, tmp_path: Path) -> None:
    """The first five of a reason in the report, all of them among the dropped documents, whatever reads them."""
    paths = [tmp_path / f"{n}.jsonl" for n in range(3)]
    for path in paths:
        path.write_bytes(BAD.encode() * 3 + b'{"text": "caf\xe9"}\n')
    for part in [*range(parts)] * parts:
        with suppress(PartsMissing):
            one_run(tmp_path, paths, part, parts, workers=workers, skip_bad=True)
    report = json.loads((tmp_path / "report.json").read_text())
    numbers = [(path, line) for path in paths for line in range(1, 23)]
    wanted = {f"{path}:{line}" for path, line in [(path, n) for path, n in numbers if n % 7 == 2][:5]}
    samples = report["records"]["bad_samples"]
    assert {s["place"] for s in samples if "is a number, not a string" in s["reason"]} == wanted
    assert {s["text"] for s in samples if s["place"].endswith(":22")} == {'{"text": "caf\ufffd"}'}
    found = [line for line in lines_of(tmp_path / "dropped") if line["step"] == "reading"]
    assert [line["dropped_at"] for line in found] == [f"{path}:{n}" for path, n in numbers if n % 7 not in (0, 1) or n == 22]
    assert found[0]["line"] == '{"text": 5}' and found[15]["line"] == '{"text": "caf\\xe9"}'
    assert "(character 14 of the line)" in found[15]["dropped_detail"]
    assert f"bad: an array, not an object (JSON lines have one object per line) (the first is {paths[0]}:3)" in summary(report)


def test_bad_records_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(BAD)
    report = one_run(tmp_path, [path], skip_bad=True)
    assert [r["text"] for r in lines_of(tmp_path / "out")] == ["a fine one here", "the last one here"]
    found = report["records"]
    assert sum(found["bad"].values()) == 5 and (found["read"], found["documents"], found["empty"]) == (7, 2, 0)
    told, page = page_of(tmp_path)
    assert told["records"] == found and summary(report).startswith("7 records read: 2 documents, 0 empty, 5 bad\n  ")
    rows = [tuple(cell.text() for cell in row.css("td")) for row in page.css("tr")]
    assert {("read", "7"), ("documents", "2"), *((f"bad: {why}", str(n)) for why, n in found["bad"].items())} <= set(rows)


LINES = [
    rb'{"id": 1,  "text":"caf\u00e9 au lait", "n": NaN}',
    rb'{"text": "two lines\nof text", "n": 1e400, "big": 1180591620717411303424}',
    b'{"text": "a tab and a carriage return",\t"x":\r 1}',
    rb'{"text": "one thing", "text": "the last one counts"}',
]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_document_that_does_not_change_keeps_its_line(tmp_path: Path, parts: int) -> None:
    """As it stands in the input, whether it passes between stages or not; in the others the text is replaced."""
    changed = [b'\xef\xbb\xbf {"n": [1.50], "text": "this has a\x07 bell"}'.replace(b"\x07", rb"\u0007"), b'{"text": ["of two", "parts"]}']
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\r\n".join([*LINES[:2], *changed, *LINES[2:]]))
    for part in (*range(parts), *range(parts)):
        try:
            one_run(tmp_path, [path], part, parts)
        except PartsMissing:
            pass
    reader = ShardReader(tmp_path / "out")
    written = [b'{"n": [1.50], "text": "this has a bell"}', rb'{"text": "of two\n\nparts"}']
    assert [reader.line(n) for n in range(len(reader))] == [*LINES[:2], *written, *LINES[2:]]


class Fails(LocalStep):
    """Raises at a text."""

    name = "fails"

    def apply(self, documents: Any) -> None:
        if any("dawdle" in d.text for d in documents):
            time.sleep(1.5)
        if any("explode" in d.text for d in documents):
            raise ValueError("too much")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_that_raises_is_named_with_its_documents(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": "explode" if n == 30 else "fine " * 40}) + "\n" for n in range(60)))
    steps = Pipeline((StepConfig("fails", None, Fails),))
    with pytest.raises(StepFailed, match=r"1 fails failed at lines \d+ to \d+ of .*in\.jsonl: ValueError: too much"):
        one_run(tmp_path, [path], steps=steps, workers=workers)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_documents_that_take_long_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr("megatron_lite.text.progress._PATIENCE", 0.3)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": "dawdle" if n == 30 else "fine " * 40}) + "\n" for n in range(60)))
    said: list[str] = []
    steps = Pipeline((StepConfig("fails", None, Fails),))
    Run(steps, [path], tmp_path / "out", RunOptions(workers=workers, reading=SMALL_BLOCKS), said.append).run()
    found = re.findall(r"^still at lines (\d+) to (\d+) of .*in\.jsonl, for \d s$", "\n".join(said), re.M)
    assert any(int(first) <= 31 <= int(last) for first, last in found), said


def test_no_lines_are_named_while_the_input_does_not_come() -> None:
    """As of a slow pipe: those that were given out may be done."""
    named = list[str]()

    def slow() -> Iterator[Block]:
        for first in (1, 2):
            named.append(progress.oldest())
            yield Block(0, block=Lines("a.jsonl", first, b"{}\n"))

    progress = Progress("stage", 0, print)
    for _ in progress.counted(slow()):
        named.append(progress.oldest())
    assert named == ["", "lines 1 to 1 of a.jsonl"] * 2


# ---- corpora that grow


@pytest.mark.parametrize("parts", [1, 2])
def test_a_second_corpus_is_compared_with_the_first(tmp_path: Path, parts: int) -> None:
    """Two corpora one after the other keep what they keep as one."""
    paths = write_corpus(tmp_path, 200)

    def once(name: str, inputs: list[Path], options: CorpusOptions) -> list[dict[str, Any]]:
        (tmp_path / name).mkdir()
        for part in [*range(parts), *range(parts)]:
            try:
                one_run(tmp_path / name, inputs, part, parts, Pipeline((StepConfig("once", options, Once),)))
            except PartsMissing:
                pass
        return lines_of(tmp_path / name / "out")

    index, second = str(tmp_path / "index"), str(tmp_path / "index2")
    together = once("both", paths, CorpusOptions())
    assert once("first", paths[:2], CorpusOptions(save=index)) + once("rest", paths[2:], CorpusOptions(index, second)) == together
    assert once("again", paths, CorpusOptions(second)) == []
    with pytest.raises(FileExistsError, match="index is there"):
        one_run(tmp_path / "new", paths[2:], steps=Pipeline((StepConfig("once", CorpusOptions(save=index), Once),)))


def test_a_saved_set_of_another_run_tells_what_differs(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a b c"}\n')
    for words in (1, 2):
        steps = (StepConfig("short", ShortOptions(words), Short), StepConfig("once", CorpusOptions(save=str(tmp_path / "seen")), Once))
        with pytest.raises(FileExistsError) if words == 2 else nullcontext() as refused:
            one_run(tmp_path / str(words), [tmp_path / "in.jsonl"], steps=Pipeline(steps))
    assert "seen is there, and not from this run:\n  pipeline.steps 1.short.words: 1 then, 2 now\nremove it" in str(refused.value)


def test_saved_buckets_get_a_place_of_their_own(tmp_path: Path) -> None:
    """Else one of two would stand under the name, and the other be gone."""
    (path,) = write_corpus(tmp_path, 20)[:1]
    (tmp_path / "file").touch()
    taken = ["out", "out/x", "out.work", "out.html", "report.json", "dropped/x", ".", "save", "save/x", "file/x"]
    for name in taken:
        options = [CorpusOptions(save=str(tmp_path / save)) for save in ("save", name)]
        with pytest.raises(ValueError, match=r"save: .*: (give a directory apart from|.*is not a directory)"):
            one_run(tmp_path, [path], steps=Pipeline(tuple(StepConfig("once", o, Once) for o in options)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "in"]


# ---- long documents


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_long_document_costs_what_it_weighs(tmp_path: Path, language: str) -> None:
    """Books in one line: twice the text takes about twice the time, through all that looks into it."""
    chance = random.Random(5)
    letters, between = ("abcdefghijklmno", " ") if language == "en" else ("的一是在不了有和人这中大为上个国我以要他", "")
    words = ["".join(chance.choices(letters, k=chance.randrange(2, 9))) for _ in range(5000)]
    lines = [between.join(chance.choices(words, k=20)) + (". " if between else "。") for _ in range(4000)]
    names = ("normalise", "mask", "language", "quality", "exact", "bloom", "minhash")
    options: dict[str, dict[str, Any]] = {"language": {"keep_unknown": True}, "exact": {"unit": "line"}, "bloom": {"expected": 100_000}}
    seconds: dict[tuple[str, int], float] = {}
    for size, name in product((2000, 4000), names):
        kind = step_class(name)
        taken = []
        for attempt in range(2):
            step = kind(kind.Options(**options.get(name, {})))
            document = Document("\n".join(lines[:size]), 1, language=language)
            if isinstance(step, CorpusStep):
                step.scratch = str(tmp_path / f"{name}-{size}-{attempt}")
                Path(step.scratch).mkdir()
            begin = time.process_time()
            if isinstance(step, CorpusStep):
                keys = step.keys([document])
                for bucket, places in by_bucket(keys):
                    step.decide(bucket, keys[places])
            else:
                step.apply([document])
            taken.append(time.process_time() - begin)
        seconds[name, size] = min(taken)
    assert all(seconds[name, 4000] < 3 * seconds[name, 2000] + 0.01 for name in names), seconds


# ---- the report


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(the innermost name above it, value) of all numbers and texts."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield key, key
            yield from leaves(below, key)
    elif isinstance(value, list):
        for below in value:
            yield from leaves(below, name)
    else:
        yield name, value


def page_of(directory: Path) -> tuple[dict[str, Any], LexborHTMLParser]:
    """A run's report as numbers and as a page, which has every number and text of them."""
    report = json.loads((directory / "report.json").read_text())
    page = LexborHTMLParser((directory / "out.html").read_text())
    cells, text = {node.text() for node in page.css("td")}, page.body.text() if page.body else ""
    assert [json.loads(node.text()) for node in page.css("details > pre")[-2:]] == [report["inputs"], report["pipeline"]]
    names = {*report, *report["records"], *report["total"], *report["steps"][0], "place", "source", "reason", "detail", "text"}
    for name, value in leaves({**report, "inputs": [], "pipeline": []}):
        if isinstance(value, str):
            assert value in text or value in names, (name, value)
        elif value is not None:
            wanted = f"{value:.4%}" if name.endswith("_kept") else f"{value:,}" if isinstance(value, int) else str(value)
            assert wanted in cells or name == "version", (name, value)
    return report, page


def test_the_page_has_every_source(tmp_path: Path) -> None:
    corpus = "".join(json.dumps({"text": "word " * (n + 2), "site": f"site {n}"}) + "\n" for n in range(150))
    (tmp_path / "in.jsonl").write_text(corpus)
    one_run(tmp_path, [tmp_path / "in.jsonl"], steps=replace(pipeline(), keys=Keys(source_key="site")))
    report, page = page_of(tmp_path)
    rows = {row.css_first("td").text() for row in page.css("tr") if row.css_first("td")}
    assert len(report["sources"]) == 150 and rows >= set(report["sources"])


def test_the_page_has_the_numbers_of_the_json(whole: Path) -> None:
    report, page = page_of(whole)
    text = page.body.text() if page.body else ""
    rows = [[cell.text() for cell in row.css("td")] for row in page.css("tr")]
    for label, step in ((step["step"], step) for step in report["steps"]):
        (row,) = (row for row in rows if row and row[0] == label)
        assert row[1:3] == [f"{step['total']['documents_in']:,}", f"{step['total']['documents_out']:,}"]
    assert not re.search(r"(src|href)=|url\(|@import|<script", (whole / "out.html").read_text())
    assert report["warnings"] and all(w in text for w in report["warnings"])


def test_counts_fit_together(whole: Path) -> None:
    report = json.loads((whole / "report.json").read_text())
    steps = report["steps"]
    for before, after in zip(steps, steps[1:], strict=False):
        assert before["total"]["documents_out"] == after["total"]["documents_in"]
        assert before["total"]["characters_out"] == after["total"]["characters_in"]
    for step in steps:
        dropped = sum(step["reasons"].values())
        assert step["total"]["documents_in"] - step["total"]["documents_out"] == dropped == sum(step["lengths_dropped"].values())
        assert sum(step["lengths_in"].values()) == step["total"]["documents_in"]
        assert len(step["samples"]) == min(8, dropped)
        for name in ("documents_in", "documents_out", "characters_in", "characters_out"):
            assert sum(flow[name] for flow in step["sources"].values()) == step["total"][name]
    assert sum(report["lengths_out"].values()) == report["total"]["documents_out"]
    facts = steps[2]["facts"]
    assert facts["kept"] == steps[2]["total"]["documents_out"] and facts["expected"] == pytest.approx(facts["kept"] / 7)
    assert steps[2]["done"]["keys decided"] == steps[2]["total"]["documents_in"]


def test_parts_in_any_order_give_one_report(tmp_path: Path) -> None:
    paths, found = write_corpus(tmp_path, 50), set()
    for order in permutations((0, 1, 2)):
        place = tmp_path / "".join(map(str, order))
        place.mkdir()
        for part in order * 3:
            _patient(place, paths, part, 3)
        found.add((place / "report.json").read_bytes())
    assert len(found) == 1


def test_progress_is_told(tmp_path: Path, corpus: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_input, "_SAY_EVERY", 0.0)
    said: list[str] = []
    for part in (0, 1, 0, 1):
        try:
            Run(pipeline(), corpus, tmp_path / "out", RunOptions(part, 2, reading=SMALL_BLOCKS), said.append).run()
        except PartsMissing:
            pass
    said = [line for line in said if "waiting" not in line]
    rows = [re.fullmatch(r"stage (\d) of 3: (\d+) of (\d+) MB, [\d.]+ MB/s(, about \d+ s left)?", line) for line in said]
    assert len(rows) > 20 and all(rows) and {row[1] for row in rows if row} == set("123")


def test_an_output_that_another_part_has_named_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this part is told when the draft vanishes under its hands."""
    paths = write_corpus(tmp_path, 20)
    run = Run(pipeline(), paths, tmp_path / "out", RunOptions(), silent)

    def finished_by_another(draft: Path, plan: str, temporary: Path) -> None:
        write_list(draft, plan, temporary)
        draft.rename(tmp_path / "out")
        raise error(17, "File exists")

    monkeypatch.setattr(pipeline_output, "write_list", finished_by_another)
    for error in (FileNotFoundError, FileExistsError):  # noqa: B007
        assert run.run() is not None
        assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out", "out.html"]
        for path in (tmp_path / "out", tmp_path / "out.html"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_what_parts_drop_is_found_without_reading_all_of_it() -> None:
    """A block's drops by its documents' numbers, wherever they lie; and each once, sorted, out of many buckets."""
    drops = np.array([(n, u) for n in (2, 3, 5, 5, 9) for u in range(n % 3 + 1)], DROPS)
    for first in range(11):
        for last in range(first, 11):
            wanted = [d for d in drops.tolist() if first <= d[0] <= last]
            assert between(drops, first, last).tolist() == wanted


@pytest.mark.parametrize("together", [0, 5, 1 << 20])
def test_what_many_buckets_drop_is_gathered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr(pipeline_keys, "_TOGETHER", together)
    chance, buckets, everything = random.Random(1), [], set()
    for bucket in range(9):
        some = sorted({(chance.randrange(30), chance.randrange(3)) for _ in range(chance.randrange(20))})
        everything |= set(some)
        buckets.append(tmp_path / str(bucket))
        buckets[-1].mkdir()
        np.array(some, DROPS).tofile(buckets[-1] / "drops")
    gather_drops(buckets, 4, 25, tmp_path / "gathered")
    assert np.fromfile(tmp_path / "gathered", DROPS).tolist() == sorted(d for d in everything if 4 <= d[0] <= 25)


def test_parts_that_run_at_once_finish_together(tmp_path: Path, corpus: list[Path], whole: Path) -> None:
    """Four processes wait for each other, share the buckets and the shards, and all end well."""
    children = []
    for part in range(4):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                one_run(tmp_path, corpus, part, 4, wait=60.0)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert files_of(tmp_path) == files_of(whole)


def test_very_many_sources_are_counted_together(tmp_path: Path, corpus: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ones whatever the parts; nothing is lost of the sums."""
    monkeypatch.setattr("megatron_lite.clean.counts.SOURCES", 5)
    steps = replace(pipeline(), keys=Keys(source_key="id"))
    for name in ("alone", "parts"):
        (tmp_path / name).mkdir()
    report = one_run(tmp_path / "alone", corpus, steps=steps)
    for found in (report, *report["steps"]):
        assert 1 < len(found["sources"]) <= 6 and OTHERS in found["sources"]
        for name in ("documents_in", "documents_out", "characters_in", "characters_out"):
            assert sum(flow[name] for flow in found["sources"].values()) == found["total"][name]
    for part in [0, 1, 2] * 3:
        with suppress(PartsMissing):
            one_run(tmp_path / "parts", corpus, part, 3, steps=steps)
    assert (tmp_path / "parts" / "out.html").read_bytes() == (tmp_path / "alone" / "out.html").read_bytes()
    monkeypatch.setattr("megatron_lite.clean.counts.SOURCES", 1)  # fewer than half of the files
    (tmp_path / "typo").mkdir()
    found = one_run(tmp_path / "typo", corpus, steps=replace(steps, keys=Keys(source_key="idd")))
    assert any("no record has a text or number in the field 'idd'" in warning for warning in found["warnings"])
