"""What an ended cleaning run leaves on the disk is never taken for another's, and never lost."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clean_pipelines import files_of, killed_at, lines_of, one_run, records, write_corpus

from megatron_lite.clean import pipeline
from megatron_lite.clean.config import Pipeline, StepConfig
from megatron_lite.clean.pipeline_output import Output
from megatron_lite.clean.pipeline_stage import StepFailed
from megatron_lite.clean.pipeline_work import PartsMissing, PlanDiffers
from megatron_lite.clean.shards import INDEX, LIST, ShardWriter, shard_name, write_list
from megatron_lite.clean.steps.bloom import Bloom, BloomOptions
from megatron_lite.clean.steps.exact import Exact, SeenOptions
from megatron_lite.clean.steps.minhash import MinHash, MinHashOptions
from megatron_lite.clean.steps.normalise import Normalise, NormaliseOptions
from megatron_lite.clean.steps.quality import Quality, QualityOptions
from megatron_lite.text.inputs import expand_inputs
from megatron_lite.text.records import BadInput

KEEP = Pipeline((StepConfig("normalise", NormaliseOptions(), Normalise),))


def clean(place: Path, paths: list[Path], **options: Any) -> Any:
    return one_run(place, paths, steps=KEEP, **{"shard_bytes": 2000, "keep_dropped": None, "json": None, **options})


def ended_before(what: str, place: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """A run that ends before it writes its shards to the draft, or where they are all there, before it publishes them."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Output, what, end)
        clean(place, paths, **options)


def test_the_draft_of_another_run_is_not_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_corpus(tmp_path, 100)
    ended_before("publish", tmp_path, paths, monkeypatch)
    shutil.rmtree(tmp_path / "out.work")
    clean(tmp_path, paths[:1])
    assert [r["id"] for r in lines_of(tmp_path / "out")] == [r["id"] for r in records(paths[:1]) if r["text"].strip()]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out", "out.html"]  # nor does it stay for ever


@pytest.mark.parametrize("far", [False, True])
def test_a_kill_while_shards_are_moved_loses_none(tmp_path: Path, far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the work directory is on another file system."""
    paths, replace = write_corpus(tmp_path, 25), os.replace

    def on_two_file_systems(source: Any, target: Any) -> None:
        if "stage-" in str(source) and ".work" not in str(target):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        replace(source, target)

    if far:
        monkeypatch.setattr(os, "replace", on_two_file_systems)
    clean(tmp_path, paths)
    ended, kills = tmp_path / "ended", 0
    ended.mkdir()
    ended_before("write", ended, paths, monkeypatch)
    for moment in range(10**6):
        place = tmp_path / f"killed-{moment}"
        shutil.copytree(ended, place)
        if killed_at(moment, lambda place=place: clean(place, paths)) == 0:  # type: ignore[misc]
            break
        kills += 1
        clean(place, paths)
        assert files_of(place / "out") == files_of(tmp_path / "out")
    assert kills > 9


def test_a_work_directory_serves_one_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, other = write_corpus(tmp_path, 40), tmp_path / "other"
    other.mkdir()
    ended_before("publish", tmp_path, paths, monkeypatch, work=tmp_path / "work")
    with pytest.raises(PlanDiffers, match="outputs 1: '../out' then, '../other/out' now"):
        clean(other, paths, work=tmp_path / "work")
    clean(tmp_path, paths, work=tmp_path / "work")


@pytest.mark.parametrize("parts", [1, 2])
def test_nothing_is_published_that_has_not_all_documents(tmp_path: Path, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_a_shard_gone(draft: Path, *more: Any) -> int:
        (draft / shard_name(1)).unlink(missing_ok=True)
        return write_list(draft, *more)

    monkeypatch.setattr("megatron_lite.clean.pipeline_output.write_list", with_a_shard_gone)
    paths, code = write_corpus(tmp_path, 60), 0
    for part in range(parts):
        try:
            one_run(tmp_path, paths, part, parts, KEEP, shard_bytes=2000, keep_dropped=None)
        except OSError as error:
            assert "were counted" in str(error)
            code = 1
        except RuntimeError:
            pass  # the other part has not come as far
    assert code and not (tmp_path / "out").exists() and not (tmp_path / "out.html").exists()


def test_an_input_that_changes_while_it_is_read_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, read = write_corpus(tmp_path, 40), pipeline.input_blocks

    def and_it_grows(*arguments: Any) -> Any:
        yield from read(*arguments)
        with open(paths[1], "a") as file:
            file.write(json.dumps({"text": "one more came"}) + "\n")

    monkeypatch.setattr(pipeline, "input_blocks", and_it_grows)
    with pytest.raises(BadInput, match=r"1\.jsonl has changed while it was read"):
        clean(tmp_path, paths)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("gone", [False, True])
def test_a_word_list_that_changes_while_documents_pass_ends_the_run(
    tmp_path: Path, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, read, words = write_corpus(tmp_path, 40), pipeline.input_blocks, tmp_path / "words"
    words.write_text("neverthere\n")

    def and_it_changes(*arguments: Any) -> Any:
        yield from read(*arguments)
        words.unlink() if gone else words.write_text("neverthere\nandanother\n")

    monkeypatch.setattr(pipeline, "input_blocks", and_it_changes)
    listed = Pipeline((StepConfig("quality", QualityOptions(word_list=str(words)), Quality),))
    with pytest.raises(BadInput, match="words has changed while it was read"):
        one_run(tmp_path, paths, steps=listed)
    assert not (tmp_path / "out.work").exists()


@pytest.mark.parametrize("kind,options", [(Bloom, BloomOptions(expected=1000)), (Exact, SeenOptions()), (MinHash, MinHashOptions())])
def test_a_saved_bucket_that_is_damaged_inside_ends_the_run_and_leaves_nothing(tmp_path: Path, kind: Any, options: Any) -> None:
    paths, saved = write_corpus(tmp_path, 200), tmp_path / "saved"
    one_run(tmp_path, paths, steps=Pipeline((StepConfig(kind.name, replace(options, save=str(saved)), kind),)))
    (tmp_path / "second").mkdir()
    for bucket in saved.glob("bucket-*"):
        if not (data := bucket.read_bytes()).startswith(b"{"):  # the table of a bucket without a document
            bucket.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    against = StepConfig(kind.name, replace(options, against=str(saved)), kind)
    assert kind.problems(against.options) == []
    with pytest.raises(BadInput, match=r"bucket-\d\d: damaged .* bring it back from a copy, or save anew"):
        one_run(tmp_path / "second", paths, steps=Pipeline((against,)))
    assert not list((tmp_path / "second").iterdir())


def test_standard_input_is_never_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_standard_input(text: str) -> None:
        data = io.TextIOWrapper(io.BytesIO(json.dumps({"text": text}).encode() + b"\n"))
        monkeypatch.setattr(sys, "stdin", data)

    from_standard_input("the first")
    ended_before("publish", tmp_path, [Path("-")], monkeypatch)
    from_standard_input("the second")
    with pytest.raises(PlanDiffers, match="to start over, remove it"):
        clean(tmp_path, [Path("-")])
    shutil.rmtree(tmp_path / "out.work")
    clean(tmp_path, [Path("-")])
    assert lines_of(tmp_path / "out") == [{"text": "the second"}]
    from_standard_input("the third")
    with pytest.raises(FileExistsError, match="not from this run"):
        clean(tmp_path, [Path("-")])


def test_shards_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = [shard_name(number) for number in (9, 99_999, 100_000, 1_000_000)]
    for name in names:
        with ShardWriter(tmp_path) as writer:
            writer.add(b'{"text": "a"}\n')
        (tmp_path / shard_name(0)).rename(tmp_path / name)
        (tmp_path / INDEX / f"{shard_name(0)}.json").rename(tmp_path / INDEX / f"{name}.json")
    assert write_list(tmp_path, "plan") == 4
    assert [shard["name"] for shard in json.loads((tmp_path / INDEX / LIST).read_text())["shards"]] == names
    for argument in (str(tmp_path), f"{tmp_path}/*.zst"):
        assert [path.name for path in expand_inputs([argument])] == names


def test_a_directory_of_shards_is_given_whole_or_refused(tmp_path: Path) -> None:
    clean(tmp_path, write_corpus(tmp_path, 60))
    shards, out = sorted((tmp_path / "out").glob("*.zst")), tmp_path / "out"
    first, last = shards[0], shards[-1]
    assert expand_inputs([str(tmp_path / "out")]) == shards and len(shards) > 2
    kept = first.read_bytes(), last.read_bytes()
    first.unlink()
    last.write_bytes(kept[1][:-1])
    (out / "other.jsonl.zst").write_bytes(kept[0])
    for directory in (tmp_path, out):
        with pytest.raises(ValueError, match=rf"{out} is not as .index/shards.json in it lists its shards: {first.name} missing; other.*"):
            expand_inputs([str(directory)])
    assert len(expand_inputs([f"{out}/*.jsonl.zst"])) == len(shards)  # who gives a pattern means what is there
    first.write_bytes(kept[0])
    (out / "other.jsonl.zst").unlink()
    with pytest.raises(ValueError, match=rf"{last.name} of another size; bring it back from a copy, or give the pattern"):
        expand_inputs([str(out)])
    last.write_bytes(kept[1])
    assert expand_inputs([str(out)]) == shards
    (out / INDEX / LIST).write_text("[]")
    with pytest.raises(ValueError, match="not the list of a directory of shards"):
        expand_inputs([str(out)])


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that is full for files of more bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_full_disk_is_told_with_what_was_written(tmp_path: Path, parts: int) -> None:
    paths, told = write_corpus(tmp_path, 200), set()
    step, options = (Exact, SeenOptions(unit="line", min_length=1)) if parts > 1 else (MinHash, MinHashOptions())
    steps = Pipeline((*KEEP.steps, StepConfig(step.name, options, step)))

    def some_parts(place: Path) -> None:
        for part in (*range(parts), *range(parts)):
            with suppress(PartsMissing):
                one_run(place, paths, part, parts, steps)

    (tmp_path / "whole").mkdir()
    (tmp_path / "full").mkdir()
    some_parts(tmp_path / "whole")
    for size in (10, *range(100, 20_000, 300)):
        with files_of_at_most(size):
            try:
                some_parts(tmp_path / "full")
            except (OSError, StepFailed) as error:
                assert str(error).endswith("'") and f": '{tmp_path / 'full'}/" in str(error) and "File too large" in str(error)
                told.add(re.sub("-.*", "", Path(str(error)).name))
                assert not (tmp_path / "full" / "out").exists()
    assert told >= {"plan.0.tmp'", "out.html.0.tmp'", *(("sets",) if parts == 1 else ("shard", "counts.json.tmp'"))}
    some_parts(tmp_path / "full")
    assert files_of(tmp_path / "full") == files_of(tmp_path / "whole")
