"""Near de-duplication: signatures that estimate what they should, the rule by brute force, corpora that come one after another."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from clean_toys import HAN, changed, contents, corpus, drive, kept, run_pipeline, text, write_lines

from megatron_lite.clean.step import Document
from megatron_lite.clean.steps import shingles
from megatron_lite.clean.steps.minhash import MinHash, MinHashOptions, bands_and_rows
from megatron_lite.clean.steps.shingle_sets import SetReader, SetWriter, set_path
from megatron_lite.clean.steps.shingles import hasher, shared_by_numpy, similarity, token_hashes
from megatron_lite.ops.library import index_module

needs_helper = pytest.mark.skipif(index_module()[0] is None, reason="csrc is not built")


def tokens_by_hand(text: str) -> list[str]:
    """Runs of letters, digits and marks; a Chinese or Japanese character by itself."""
    found, word = [], ""
    for c in text.lower() + " ":
        alone = "\u4e00" <= c <= "\u9fff" or "\u3040" <= c <= "\u30ff" and c.isalpha()
        if word and (alone or not c.isalnum()):
            found.append(word)
            word = ""
        if alone:
            found.append(c)
        elif c.isalnum():
            word += c
    return found


def set_by_hand(text: str, ngram: int) -> frozenset[tuple[str, ...]]:
    tokens = tokens_by_hand(text)
    size = min(ngram, len(tokens))
    return frozenset(tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)) if tokens else frozenset()


def jaccard(left: frozenset, right: frozenset) -> float:
    return len(left & right) / len(left | right) if left and right else 0.0


def step_of(**options) -> Callable[[], MinHash]:
    return lambda: MinHash(MinHashOptions(**options))


# ---- shingles and signatures


@needs_helper
def test_both_forms_agree():
    """Characters of every kind, texts of no, one and many tokens; sizes around the vectors of the compiled one."""
    rng = random.Random(0)
    texts = ["", " ", "a", "a b", "。", "你", "a你b", "x" * 5000, "é" * 300, "a " * 3000, *corpus(0, 30)]
    for size in (1, 3, 40, 500):
        codes = [rng.randrange(1, rng.choice([0x80, 0x800, 0x10000, 0x110000])) for _ in range(size * 5)]
        texts.append("".join(chr(c) for c in codes if not 0xD800 <= c < 0xE000))
    for ngram, count in itertools.product((1, 2, 5), (1, 31, 33, 128)):
        compiled, plain = hasher(ngram, count), hasher(ngram, count, helper=False)
        for t in texts:
            for a, b in zip(compiled(t), plain(t), strict=True):
                assert a.dtype == b.dtype and a.tolist() == b.tolist()
    for _ in range(50):
        a, b = (np.unique(np.array(rng.sample(range(60), rng.randrange(0, 40)), np.uint32)) for _ in range(2))
        assert index_module()[0].shared(a, b) == shared_by_numpy(a, b) == len(set(a.tolist()) & set(b.tolist()))


def test_tokens_and_shingles_are_those_of_the_definition():
    texts = [*corpus(2, 60), "Ein Wort; zwei", "ein wort zwei", "東京へ行く", "a-b c_d", "１２３", "naïve ΣΑΣ"]
    hash_text = hasher(3, 8)
    for t in texts:
        assert len(token_hashes(t.lower())) == len(tokens_by_hand(t))
    sets = [hash_text(t)[1] for t in texts]
    for (t, a), (u, b) in itertools.combinations(zip(texts, sets, strict=True), 2):
        if len(a) and len(b):
            assert similarity(a, b, shared_by_numpy) == jaccard(set_by_hand(t, 3), set_by_hand(u, 3))
    assert hash_text("Ein Wort; zwei")[1].tolist() == hash_text("ein  wort zwei")[1].tolist()


def test_a_signature_estimates_the_similarity():
    """The share of equal places has the mean J and the variance J (1 - J) / k of k independent permutations."""
    rng, count = np.random.default_rng(0), 128
    a, b = shingles.permutations(count)
    for size, shared in [(200, 100), (200, 160), (200, 190), (12, 8)]:
        equal = []
        for _ in range(400):
            numbers = rng.choice(2**32, 2 * size - shared, replace=False).astype(np.uint32)
            left, right = numbers[:size], numbers[size - shared :]
            equal.append(np.mean(shingles.signature(left, a, b) == shingles.signature(right, a, b)))
        j = shared / (2 * size - shared)
        variance = j * (1 - j) / count
        assert abs(np.mean(equal) - j) < 4 * (variance / 400) ** 0.5
        assert 0.75 < np.var(equal) / variance < 1.3  # four standard deviations of a variance of 400 samples


def test_bands_and_rows():
    assert bands_and_rows(0.8, 128, 0.9) == (16, 8)
    for threshold, count, recall in itertools.product((0.5, 0.8, 0.95), (64, 128, 256), (0.5, 0.9, 0.99)):
        bands, rows = bands_and_rows(threshold, count, recall)
        assert bands * rows <= count and 1 - (1 - threshold**rows) ** bands >= recall
        more = count // (rows + 1)
        assert rows == count or 1 - (1 - threshold ** (rows + 1)) ** more < recall
    with pytest.raises(ValueError, match="4 permutations find no 0.99 of the pairs at 0.3"):
        bands_and_rows(0.3, 4, 0.99)
    said = "permutations: 0 must be between 1 and 10,000"
    assert MinHash.problems(MinHashOptions(permutations=0)) == [said]
    assert "take more permutations" in MinHash.problems(MinHashOptions(threshold=0.3, permutations=4, recall=0.99))[0]


# ---- which documents go


def expected(texts: list[str], step: MinHash, threshold: float, ngram: int) -> list[int]:
    """By brute force: who is near no earlier one with which it shares a band."""
    sets = [set_by_hand(t, ngram) for t in texts]
    hash_text = hasher(ngram, step.options.permutations)
    bands = step._band_hashes(np.stack([hash_text(t)[0] for t in texts]))
    return [
        later
        for later in range(len(texts))
        if not any(
            np.any(bands[earlier] == bands[later]) and jaccard(sets[earlier], sets[later]) >= threshold
            for earlier in range(later)
        )
    ]


@pytest.mark.parametrize("threshold,ngram,recall", [(0.8, 5, 0.9), (0.5, 2, 0.99), (0.7, 3, 0.5)])
def test_the_rule_by_brute_force(threshold, ngram, recall, tmp_path):
    make = step_of(threshold=threshold, ngram=ngram, recall=recall)
    for seed in range(3):
        texts = corpus(seed, 120)
        found = kept(drive(make, texts, tmp_path, block=1 + 50 * seed))
        assert found == expected(texts, make(), threshold, ngram)
        assert 30 < len(found) < 110


def test_recall_and_precision_against_the_similarity(tmp_path):
    """All that goes is near an earlier one; of what is near an earlier one, nearly all goes. English and Chinese alike."""
    rng = random.Random(4)
    for chinese in (False, True):
        texts = []
        for _ in range(150):
            old = (
                "".join(rng.choice(HAN) for _ in range(150))
                if chinese
                else " ".join(f"w{rng.randrange(999)}" for _ in range(150))
            )
            texts += [old, changed(rng, old, rng.choice([0.0, 0.005, 0.01, 0.02, 0.03, 0.05]))]
        sets = [set_by_hand(t, 5) for t in texts]
        near = {n for n in range(1, 300, 2) if jaccard(sets[n - 1], sets[n]) >= 0.8}
        gone = set(range(300)) - set(kept(drive(step_of(), texts, tmp_path)))
        assert gone <= near
        assert len(gone) > 0.93 * len(near) and 60 < len(near) < 140


def test_chains(tmp_path):
    """Of texts each near the one before, only the first stays, whatever becomes of those between."""
    words = [f"w{n}" for n in range(400)]
    chain = [" ".join(words[40 * n // 4 : 40 * n // 4 + 200]) for n in range(6)]
    sets = [set_by_hand(t, 1) for t in chain]
    assert jaccard(sets[0], sets[1]) > 0.9 and jaccard(sets[0], sets[5]) < 0.7
    make = step_of(ngram=1, threshold=0.85, recall=0.9999)
    assert kept(drive(make, chain, tmp_path)) == [0]
    two_ends = [chain[0], chain[4], chain[2]]  # the last is near both, and those are not near each other
    assert kept(drive(step_of(ngram=1, threshold=0.8, recall=0.9999), two_ends, tmp_path)) == [0, 1]


def test_documents_without_a_word_stay(tmp_path):
    step = MinHash(MinHashOptions())
    step.scratch = str(tmp_path)
    assert len(step.keys([Document("…", 1), Document("--", 2)])) == 0 and step.counts == {"documents without a word": 2}
    assert kept(drive(step_of(), ["!", "!", "a", "A.", "b"], tmp_path)) == [0, 1, 2, 4]


# ---- what is kept


def test_a_second_corpus_is_compared_with_the_first(tmp_path):
    """Three corpora one after another leave what one would, however they are cut, and the same files."""
    texts, make = corpus(7, 240), step_of(save="yes")
    whole = drive(make, texts, tmp_path, save=str(tmp_path / "whole"))
    left: list[int] = []
    against = ""
    for n, (first, last) in enumerate([(0, 100), (100, 130), (130, 240)]):
        save = str(tmp_path / f"saved-{n}")
        left += [first + place for place in kept(drive(make, texts[first:last], tmp_path, against=against, save=save))]
        against = save
    assert left == kept(whole)
    again = drive(make, texts, tmp_path, against=against)
    assert kept(again) == []
    drive(make, texts, tmp_path, block=100, save=str(tmp_path / "other-blocks"))
    assert contents(tmp_path / "other-blocks") == contents(tmp_path / "whole")


def test_saved_signatures_of_other_settings_are_refused(tmp_path):
    saved = str(tmp_path / "saved")
    drive(step_of(save="yes"), corpus(0, 20), tmp_path, save=saved)
    assert MinHash.problems(MinHashOptions(against=saved)) == []
    (problem,) = MinHash.problems(MinHashOptions(against=saved, ngram=7, permutations=256))
    assert "ngram: 5 there, 7 here" in problem and "permutations: 128 there, 256 here" in problem
    (problem,) = MinHash.problems(MinHashOptions(against=saved, threshold=0.9))
    assert "rows: 8 there" in problem


def test_damaged_sets_are_refused(tmp_path):
    writer = SetWriter(str(tmp_path))
    sets = [np.arange(n, dtype=np.uint32) for n in (3, 1, 50)]
    positions = writer.append([7, 8, 9], sets)
    assert [
        SetReader(str(tmp_path)).read(writer.name, p, n).tolist() for p, n in zip(positions, (7, 8, 9), strict=True)
    ] == [s.tolist() for s in sets]
    with pytest.raises(ValueError, match="the set of document 9 is not at byte 0"):
        SetReader(str(tmp_path)).read(writer.name, positions[0], 9)
    path = Path(set_path(str(tmp_path), writer.name))
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    with pytest.raises(ValueError, match="document 9"):
        SetReader(str(tmp_path)).read(writer.name, positions[2], 9)
    path.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    with pytest.raises(ValueError, match="damaged"):
        SetReader(str(tmp_path)).read(writer.name, positions[2], 9)


def test_a_damaged_index_is_refused(tmp_path):
    texts, saved = corpus(1, 60), tmp_path / "saved"
    drive(step_of(save="yes"), texts, tmp_path, save=str(saved))
    for path in saved.glob("bucket-*"):
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])  # in the first array: bands
    with pytest.raises(ValueError, match=r"bucket-\d\d: damaged"):
        drive(step_of(), texts, tmp_path, against=str(saved))


# ---- through the pipeline


def test_parts_workers_and_kills_change_nothing(tmp_path):
    """Documents and index are the same bytes for any workers and parts, and after any number of kills."""
    texts = corpus(5, 240)
    files = [write_lines(tmp_path / f"{n}.jsonl", texts[80 * n : 80 * n + 80]) for n in range(3)]

    def steps(name: str) -> dict[str, dict]:
        return {"exact": {}, "minhash": {"save": str(tmp_path / f"saved-{name}")}}

    def result(name: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
        output, saved = contents(tmp_path / name), contents(tmp_path / f"saved-{name}")
        return {n: b for n, b in output.items() if n.endswith(".zst")}, {
            n: b for n, b in saved.items() if n != "saved-by"
        }

    run_pipeline(tmp_path, "one", files, steps("one"))
    run_pipeline(tmp_path, "workers", files, steps("workers"), workers=3)
    run_pipeline(tmp_path, "parts", files, steps("parts"), parts=5)
    kills = 0
    while not (tmp_path / "killed").is_dir():
        child = os.fork()
        if child == 0:
            run_pipeline(tmp_path, "killed", files, steps("killed"))
            os._exit(0)
        time.sleep(0.1 + 0.1 * kills)
        os.kill(child, signal.SIGKILL)  # one that has ended is waited for, too
        kills += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert kills > 0
    assert result("one") == result("workers") == result("parts") == result("killed")
    assert len(result("one")[1]) == 64


def test_the_pairs_of_another_program(tmp_path):
    """datasketch, with the same shingles, permutations and threshold, finds the same where few are near the threshold."""
    datasketch = pytest.importorskip("datasketch")
    rng = random.Random(3)
    texts = [text(rng, rng.randrange(60, 200)) for _ in range(120)]
    texts += [changed(rng, rng.choice(texts), rng.choice([0.0, 0.002, 0.005, 0.01, 0.2])) for _ in range(120)]
    index, theirs = datasketch.MinHashLSH(threshold=0.8, num_perm=128), set()
    for n, t in enumerate(texts):
        signature = datasketch.MinHash(num_perm=128)
        signature.update_batch(["\0".join(s).encode() for s in set_by_hand(t, 5)])
        theirs |= {n for _ in index.query(signature)}
        index.insert(n, signature)
    ours = set(range(len(texts))) - set(kept(drive(step_of(), texts, tmp_path)))
    assert len(theirs) > 60 and 2 * len(ours & theirs) / (len(ours) + len(theirs)) >= 0.95
