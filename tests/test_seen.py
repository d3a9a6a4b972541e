"""De-duplication by hash: nothing survives twice, little is dropped wrongly, and what was seen is kept for other corpora."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from clean_toys import contents, corpus, drive, kept, run_pipeline, write_lines

from megatron_lite.clean.bucket_file import BucketFile, write_bucket_file
from megatron_lite.clean.step import Document, bucket_path
from megatron_lite.clean.steps.bloom import (
    Bloom,
    BloomOptions,
    capacity,
    error_rate,
    functions,
    new_filter,
    wrong_drops,
)
from megatron_lite.clean.steps.exact import Exact
from megatron_lite.clean.steps.seen import SeenOptions

KINDS = [(Bloom, BloomOptions), (Exact, SeenOptions)]


def first_places(texts: list[str]) -> list[int]:
    """Where each text stands first."""
    return sorted({t: n for n, t in reversed(list(enumerate(texts)))}.values())


def lines_by_hand(texts: list[str], separator: str, least: int) -> list[str | None]:
    """What is left of texts when every line that was there before goes."""
    seen: set[str] = set()
    left: list[str | None] = []
    for document in texts:
        lines = []
        for line in document.split(separator):
            compared = line.strip()
            lines.append(line if len(compared) < least or compared not in seen else TAKEN)
            if len(compared) >= least:
                seen.add(compared)
        rest = tidied(separator.join(lines))
        left.append(rest if rest.strip() else None)
    return left


TAKEN = "\0"


def tidied(text: str) -> str:
    """A text without the lines that are TAKEN: a gap has a blank line at most, the ends have none."""
    kept: list[str] = []
    gap = blank = False
    for line in text.split("\n"):
        if line == TAKEN:
            gap = True
            while kept and not kept[-1].strip():
                kept.pop()
                blank = True
        elif gap and not line.strip():
            blank = True
        else:
            kept += [""] * (gap and blank and bool(kept)) + [line]
            gap = blank = False
    return "\n".join(kept)


@pytest.mark.parametrize(
    ("text", "unit", "left"),
    [
        ("MENU OF IT\n\nfirst\n\nMENU OF IT\n\nlast\n\nMENU OF IT", "line", "first\n\nlast"),
        ("  first\nMENU OF IT\nMENU OF IT\nlast\n", "line", "  first\nlast\n"),
        ("first\n\n\n\nMENU OF IT\nlast\n\n\nmore", "line", "first\n\nlast\n\n\nmore"),
        ("MENU OF IT\n\n\nfirst\n\n\n\nMENU OF IT\n\nlast\n\nMENU OF IT\n", "paragraph", "first\n\nlast"),
        ("\nfirst\nMENU OF IT", "paragraph", "\nfirst\nMENU OF IT"),
    ],
)
def test_what_stays_is_tidy_where_something_was_taken_out(text, unit, left, tmp_path):
    options = SeenOptions(unit=unit, min_length=8)
    _, found = drive(lambda: Exact(options), ["MENU OF IT", text], tmp_path)
    assert found.text == left


@pytest.mark.parametrize("kind,options", KINDS)
@pytest.mark.parametrize("block", [1, 7, 1000])
def test_the_first_of_equal_documents_stays(kind, options, block, tmp_path):
    for seed in range(4):
        texts = corpus(seed, 120, length=4)
        assert len(first_places(texts)) < 110
        assert kept(drive(lambda: kind(options()), texts, tmp_path, block=block)) == first_places(texts)


@pytest.mark.parametrize("kind,options", KINDS)
@pytest.mark.parametrize("unit,separator,least", [("line", "\n", 1), ("line", "\n", 6), ("paragraph", "\n\n", 3)])
def test_lines_and_paragraphs(kind, options, unit, separator, least, tmp_path):
    rng = random.Random(5)
    lines = [*corpus(1, 40, length=4), "", " ", "}", "  return x", "return x", "你好"]
    texts = [separator.join(rng.choice(lines) for _ in range(rng.randrange(1, 9))) for _ in range(80)]
    found = drive(lambda: kind(options(unit=unit, min_length=least)), texts, tmp_path)
    by_hand = lines_by_hand(texts, separator, least)
    assert [None if d.dropped else d.text for d in found] == by_hand
    assert {d.dropped for d in found} == {None, f"every {unit} was seen before"}


def test_what_counts_as_equal(tmp_path):
    texts = ["One two", "one  TWO", " One two\n", "One two"]
    for case, space, left in [
        (False, False, [0, 1, 2]),
        (True, False, [0, 1, 2]),
        (False, True, [0, 1]),
        (True, True, [0]),
    ]:
        options = SeenOptions(ignore_case=case, ignore_whitespace=space)
        assert kept(drive(lambda o=options: Exact(o), texts, tmp_path)) == left


def test_hashes_are_the_same_everywhere():
    """The reference value of XXH3 (128 bits) for the empty input, and one of ours: a saved filter is good elsewhere."""
    keys = Exact(SeenOptions()).keys([Document("", 1), Document("你好", 2)])
    assert keys["hash"][0].tobytes().hex() == "99aa06d3014798d86001c324468d497f"
    assert keys["number"].tolist() == [1, 2]


# ---- false drops


def test_share_of_wrong_drops():
    """At most the stated share of new units is dropped, as often as the report says; no old one stays."""
    count, rate = 40_000, 0.01
    step = Bloom(BloomOptions(expected=count, error_rate=rate))
    dropped = 0
    for at in range(0, count, 4000):
        keys = step.keys([Document(f"document {n}", n) for n in range(at, at + 4000)])
        for bucket in range(step.buckets):
            dropped += int(step.decide(bucket, keys[keys["bucket"] == bucket]).sum())
    facts = [step.bucket_facts(bucket) for bucket in range(step.buckets)]
    told = sum(f["expected wrong drops"] for f in facts)
    assert sum(f["documents held"] for f in facts) == count - dropped
    assert abs(dropped - told) < 4 * math.sqrt(told)  # drops are rare and independent: Poisson
    assert 0.05 * rate * count < told < 0.2 * rate * count
    # When it is full, new ones are dropped with the probability of the formula, which is no more than the stated one.
    fresh = step.keys([Document(f"another {n}", n) for n in range(20_000)])
    wrong = sum(in_filter(step, b, fresh) for b in range(step.buckets))
    size, k = 8 * facts[0]["bytes of filter"], functions(rate)
    expected = sum(error_rate(f["documents held"], size, k) * np.sum(fresh["bucket"] == b) for b, f in enumerate(facts))
    assert abs(wrong - expected) < 4 * math.sqrt(expected)
    assert wrong < rate * 20_000 + 4 * math.sqrt(rate * 20_000)


def test_wrong_drops_of_a_filter_that_is_too_small():
    """Four times as many units as there is room for: what is told is what is dropped."""
    step = Bloom(BloomOptions(expected=40_000, error_rate=0.1))
    keys = step.keys([Document(f"document {n}", n) for n in range(160_000)])
    dropped = sum(int(step.decide(bucket, keys[keys["bucket"] == bucket]).sum()) for bucket in range(step.buckets))
    told = sum(step.bucket_facts(bucket)["expected wrong drops"] for bucket in range(step.buckets))
    assert abs(dropped - told) < 4 * math.sqrt(told)


def in_filter(step: Bloom, bucket: int, keys: np.ndarray) -> int:
    """How many keys the filter of a bucket takes for old ones, without adding them."""
    bits = step._filters[bucket].bits
    rows = keys[keys["bucket"] == bucket]["hash"]
    return sum(int.from_bytes(row.tobytes(), "little", signed=True) in bits for row in rows)


def test_formulas():
    assert wrong_drops(0, 0, 1000, 5) == 0
    by_hand = sum(error_rate(n + 0.5, 100_000, 7) for n in range(10_000))
    assert math.isclose(wrong_drops(0, 10_000 - by_hand, 100_000, 7), by_hand, rel_tol=1e-3)
    for rate in (0.1, 0.01, 1e-3, 1e-6):
        bits = new_filter(10_000, rate).size_in_bits
        assert math.isclose(error_rate(10_000, bits, functions(rate)), rate, rel_tol=0.15)
    assert capacity(64, 64) == 5 and capacity(64_000_000, 64) == 1_004_000


def test_an_overfull_filter_is_told(tmp_path):
    options = BloomOptions(expected=100, error_rate=0.01)
    step = Bloom(options)
    keys = step.keys([Document(f"document {n}", n) for n in range(5000)])
    sums: dict[str, float] = {}
    for bucket in range(step.buckets):
        step.decide(bucket, keys[keys["bucket"] == bucket])
        for name, value in step.bucket_facts(bucket).items():
            sums[name] = sums.get(name, 0) + value
    (warning,) = Bloom.facts(options, sums).warnings
    held = int(sums["documents held"])
    assert (
        "expected: 100 different documents" in warning and f"holds {held:,}" in warning and "instead of 0.01" in warning
    )
    assert Bloom.facts(options, {**sums, "documents held": 100}).warnings == []


# ---- what is kept


@pytest.mark.parametrize("kind,options", KINDS)
def test_a_second_corpus_is_compared_with_the_first(kind, options, tmp_path):
    texts = corpus(3, 200, length=4)
    first, second = texts[:120], texts[120:]
    one = drive(lambda: kind(options()), first, tmp_path, save=str(tmp_path / "one"))
    two = drive(lambda: kind(options()), second, tmp_path, against=str(tmp_path / "one"), save=str(tmp_path / "two"))
    whole = drive(lambda: kind(options()), texts, tmp_path, block=11, save=str(tmp_path / "whole"))
    assert kept(one) + [120 + n for n in kept(two)] == kept(whole) == first_places(texts)
    assert contents(tmp_path / "two") == contents(tmp_path / "whole")  # as if it had been one corpus
    assert contents(tmp_path / "one") != contents(tmp_path / "whole")
    again = drive(lambda: kind(options()), texts, tmp_path, against=str(tmp_path / "two"))
    assert kept(again) == []


def test_other_settings_are_refused(tmp_path):
    drive(lambda: Bloom(BloomOptions(expected=1000)), ["a", "b"], tmp_path, save=str(tmp_path / "saved"))
    saved = str(tmp_path / "saved")
    assert Bloom.problems(BloomOptions(expected=1000, against=saved)) == []
    (problem,) = Bloom.problems(BloomOptions(expected=2000, error_rate=0.01, against=saved))
    assert "expected: 1000 there, 2000 here" in problem and "error_rate: 0.001 there, 0.01 here" in problem
    with pytest.raises(ValueError, match="unit: document there, line here"):
        Bloom(BloomOptions(expected=1000, unit="line")).load(0, bucket_path(saved, 0))
    (problem,) = Exact.problems(SeenOptions(against=saved))
    assert "was saved by the step bloom, not exact" in problem


def test_every_saved_file_is_looked_at_before_a_run(tmp_path):
    drive(lambda: Bloom(BloomOptions(expected=1000)), ["a", "b"], tmp_path, save=str(tmp_path / "saved"))
    options = BloomOptions(expected=1000, against=str(tmp_path / "saved"))
    path = Path(bucket_path(options.against, 63))
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    (problem,) = Bloom.problems(options)
    assert "bucket-63: not the saved bucket of a cleaning step, or cut off" in problem
    path.unlink()
    assert Bloom.problems(options) == [f"against {options.against}: {path} is missing"]


def test_buckets_of_two_saves_and_exchanged_ones_are_refused(tmp_path):
    for kind, options in KINDS:
        saved, later = tmp_path / kind.name, tmp_path / f"later {kind.name}"
        for seed, name in enumerate((saved, later)):
            drive(lambda kind=kind, options=options: kind(options()), corpus(seed, 200, length=4), tmp_path, save=str(name))
        one, two, three = (Path(bucket_path(str(saved), bucket)) for bucket in (3, 4, 5))
        for path, other in ((three, Path(bucket_path(str(later), 5))), (one, two)):
            assert kind.problems(options(against=str(saved))) == []
            kept = path.read_bytes()
            path.write_bytes(other.read_bytes())
            (problem,) = kind.problems(options(against=str(saved)))
            assert f"{path} was not saved with the others" in problem and "save anew" in problem
            path.write_bytes(kept)
        (saved / "saved-by").write_text("of a version without a list\n[]\n")
        (problem,) = kind.problems(options(against=str(saved)))
        assert "saved-by: has no list of the buckets" in problem


def test_options_that_cannot_work():
    for options, said in [
        (BloomOptions(expected=0), "expected: 0 must be at least 1"),
        (BloomOptions(error_rate=0.5), "error_rate: 0.5 must be above 0 and at most 0.1"),
        (BloomOptions(min_length=0), "min_length: 0 must be at least 1"),
    ]:
        assert Bloom.problems(options) == [said]


def test_damaged_files_are_refused(tmp_path):
    path = str(tmp_path / "bucket")
    write_bucket_file(path, {"settings": {"a": 1}}, {"x": [np.arange(5), np.arange(3)], "y": [np.empty(0, np.uint8)]})
    file = BucketFile(path)
    assert file.read("x").tolist() == [0, 1, 2, 3, 4, 0, 1, 2] and file.read("y").tolist() == []
    assert file.about == {"settings": {"a": 1}}
    data = Path(path).read_bytes()
    for at in (3, len(data) - 40, len(data) - 15):
        Path(path).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ValueError, match="bucket"):
            BucketFile(path).read("x")
    for size in (0, 10, 30, len(data) - 1):
        Path(path).write_bytes(data[:size])
        with pytest.raises(ValueError, match="cut off"):
            BucketFile(path)


def test_a_killed_save_leaves_the_old_file_or_the_new_one(tmp_path):
    path, rng = str(tmp_path / "bucket"), random.Random(0)
    seen = set()
    for _ in range(6):
        child = os.fork()
        if child == 0:
            for generation in range(1, 100_000):
                numbers = np.full(20_000, generation)
                write_bucket_file(path, {"generation": generation}, {"numbers": [numbers, numbers, numbers]})
            os._exit(0)
        time.sleep(0.03 + 0.02 * rng.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if Path(path).exists():
            file = BucketFile(path)
            assert set(file.read("numbers").tolist()) == {file.about["generation"]}
            seen.add(file.about["generation"])
    assert seen


# ---- through the pipeline


@pytest.mark.parametrize("step,options", [("bloom", {"expected": 500}), ("exact", {"unit": "line", "min_length": 3})])
def test_parts_and_workers_change_nothing(step, options, tmp_path):
    texts = corpus(9, 240, length=6)
    texts = [f"{a}\n{b}" for a, b in zip(texts, reversed(texts), strict=True)]
    files = [write_lines(tmp_path / f"{n}.jsonl", texts[80 * n : 80 * n + 80]) for n in range(3)]
    found = []
    for workers, parts in [(1, 1), (3, 1), (1, 2), (1, 5)]:
        name = f"{workers}-{parts}"
        saved = tmp_path / f"saved-{name}"
        output = run_pipeline(
            tmp_path, name, files, {step: {**options, "save": str(saved)}}, workers=workers, parts=parts
        )
        shards = {k: v for k, v in contents(output).items() if k.endswith(".zst")}
        found.append((shards, {k: v for k, v in contents(saved).items() if k.startswith("bucket")}))
    assert len(found[0][0]) == 1 and len(found[0][1]) == 64
    assert all(other == found[0] for other in found[1:])
