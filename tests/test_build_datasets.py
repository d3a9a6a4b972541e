"""From a configuration to datasets: splits, blends, orders, and everything that must be refused or said."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.config.schema_io import DataConfig
from megatron_lite.data.build import build_datasets
from megatron_lite.data.index_format import DTYPES, IndexHeader
from megatron_lite.data.indexed import IndexedDataset, IndexedWriter
from megatron_lite.data.megatron_order import MegatronDataset
from megatron_lite.data.sources import Source, parse_sources

S = 4


def write(path, documents, first=0, **options):
    """Ids are first, first + 1, ...: the source of a token can be told from it."""
    with IndexedWriter(path, dtype="int32", **{"eod_id": 9999, **options}) as writer:
        for length in documents:
            writer.add_document(range(first, first + length))
            first += length
    return str(path)


def build(*data_path, asked=(10, 0, 0), **options):
    config = {k: options.pop(k) for k in list(options) if k in DataConfig.__dataclass_fields__}
    return build_datasets(
        DataConfig(**{"seq_length": S, "data_path": tuple(map(str, data_path)), **config}),
        asked=asked,
        seed=1,
        **options,
    )


def problems(result):
    assert result.train is None
    return "\n".join(map(str, result.problems))


def tokens_of(dataset, rows):
    return {int(t) for j in range(rows) for t in dataset.row(j).tokens}


@pytest.mark.parametrize("order", ["windows", "megatron"])
def test_split_of_one_source(tmp_path, order):
    path = write(tmp_path / "a", [30, 40, 50, 60], eod_id=9999)
    result = build(path, split="2,1,1", asked=(40, 5, 5), sample_order=order)
    assert not result.problems and not result.notices and result.eod_id == 9999
    train, valid, test = (tokens_of(d, n) for d, n in ((result.train, 40), (result.valid, 5), (result.test, 5)))
    assert train <= set(range(70)) and valid <= set(range(70, 120)) and test <= set(range(120, 180))
    assert max(train) > 60 and len(valid) > 10
    assert result.summary[0].startswith("training: 2 documents, 70 tokens; 40 samples of 4 tokens are 2.29 epochs")


@pytest.mark.parametrize(
    ("split", "sizes"),
    [
        ("100,0,0", (3, 0, 0)),
        ("98,1,1", (3, 0, 0)),
        ("1,1,1", (1, 1, 1)),
        ("0.9,0.1", (3, 0, 0)),
        ("969,30,1", (3, 0, 0)),
    ],
)
@pytest.mark.parametrize("order", ["windows", "megatron"])
def test_three_documents(tmp_path, split, sizes, order):
    result = build(write(tmp_path / "a", [10] * 3, eod_id=999), split=split, asked=(10, 2, 2), sample_order=order)
    assert not result.problems
    assert [d is not None for d in (result.train, result.valid, result.test)] == [bool(n) for n in sizes]
    empty = sum(n == 0 for n in sizes)
    assert len(result.notices) == empty and all("split is empty" in n for n in result.notices)


def test_nothing_to_train_on(tmp_path):
    text = problems(build(write(tmp_path / "a", [10] * 3), split="0,1,0", asked=(10, 2, 2)))
    assert "the training split is empty (--split 0,1,0)" in text and "3 sequences in 1 sources" in text
    result = build(write(tmp_path / "b", [10] * 3), split="0,1,0", asked=(0, 2, 0))  # only evaluating
    assert not result.problems and result.valid is not None


def test_no_evaluation_asked_for(tmp_path):
    result = build(write(tmp_path / "a", [10] * 3), asked=(10, 0, 0))
    assert result.valid is None and result.test is None and not result.notices and not result.problems


def test_too_short(tmp_path):
    path = write(tmp_path / "a", [S])
    for order in ("windows", "megatron"):
        text = problems(build(path, split="1", sample_order=order, document_mask=False))
        assert (
            "is too short for one sample" in text
            and "4 tokens" in text
            and "= 5 tokens" in text
            and "--seq-length 3" in text
        )
    assert build(path, split="1", seq_length=3).train is not None
    result = build(write(tmp_path / "b", [100, 3]), split="1,1", asked=(10, 2, 0))
    assert (
        not result.problems
        and result.valid is None
        and "too short for one validation sample, no validation loss" in result.notices[0]
    )


@pytest.mark.parametrize("order", ["windows", "megatron"])
def test_blend(tmp_path, order):
    paths = [write(tmp_path / f"s{i}", [50] * 4, first=1000 * i, eod_id=9999) for i in range(3)]
    result = build("3", paths[0], "0", paths[1], "1", paths[2], split="1", asked=(80, 0, 0), sample_order=order)
    counts = Counter(int(result.train.row(j).tokens[0]) // 1000 for j in range(80))
    assert not result.problems and set(counts) == {0, 2} and abs(counts[0] - 60) < 2.7
    assert any(line.startswith("  75% ") for line in result.summary)
    same = build(paths[0], paths[0], split="1", asked=(60, 0, 0), sample_order=order)  # the same path twice
    assert not same.problems
    if order == "windows":
        assert same.train.row(0).tokens.tolist() != same.train.row(1).tokens.tolist()
        assert same.train.endless


@pytest.mark.parametrize("order", ["windows", "megatron"])
def test_blend_temperature(tmp_path, order):
    """By weight^(1/T), or by tokens^(1/T) of each split; 1 is without it."""
    sizes = {"a": 9, "b": 1}
    paths = [write(tmp_path / name, [100] * n * 2, first=10000 * n, eod_id=9) for name, n in sizes.items()]
    for data in (("9", paths[0], "1", paths[1]), paths):
        for temperature, share in ((1, 90), (2, 75), (1000, 50)):
            result = build(*data, split="1,1", asked=(100, 100, 0), sample_order=order, blend_temperature=temperature)
            assert not result.problems and not result.notices
            for dataset in (result.train, result.valid):
                counts = Counter(int(dataset.row(j).tokens[0]) // 10000 for j in range(100))
                assert abs(sum(n for k, n in counts.items() if k >= 9) - share) <= 1, (temperature, counts)
            assert list(result.train.consumed(100).values()) == [share, 100 - share]
            assert any(line.startswith(f"  {share}% {paths[0]}: {share} samples; ") for line in result.summary)


def test_blend_without_weights_goes_by_length(tmp_path):
    paths = [write(tmp_path / "a", [100] * 6, eod_id=9999), write(tmp_path / "b", [100] * 2, first=1000, eod_id=9999)]
    for order in ("windows", "megatron"):
        result = build(*paths, split="1", asked=(160, 0, 0), sample_order=order)
        counts = Counter(int(result.train.row(j).tokens[0]) // 1000 for j in range(160))
        assert abs(counts[0] - 120) < 2.7 and not result.notices
    assert len(result.train) == 160 and all(m.plan.epochs == 1 for m in result.train.members)
    more = build(*paths, split="1", asked=(500, 0, 0), sample_order="megatron")
    assert "repeated in proportion" in more.notices[0] and len(more.train) >= 500
    assert more.train.row(499).index == 499


@pytest.mark.parametrize("options", [{"sample_order": "megatron"}, {"packing": "best-fit"}])
def test_an_order_that_took_long_is_no_warning(tmp_path, monkeypatch, options):
    monkeypatch.setattr("megatron_lite.data.order_cache._SAID_FROM", -1.0)
    paths = [write(tmp_path / name, [100] * 6, eod_id=9999) for name in "ab"]
    result = build(*paths, split="1", data_cache_path=str(tmp_path / "cache"), **options)
    assert not result.problems and not result.notices
    assert len([line for line in result.summary if line.endswith("later starts find it")]) >= 2


def test_megatron_blend_sizes(tmp_path):
    paths = [write(tmp_path / "a", [100] * 6, eod_id=9999), write(tmp_path / "b", [100] * 2, first=1000, eod_id=9999)]
    train = build("0.3", paths[0], "0.7", paths[1], split="1", asked=(101, 0, 0), sample_order="megatron").train
    assert len(train) == 31 + 71 and [m.asked for m in train.members] == [32, 72]  # ceil(31 * 1.005), ceil(71 * 1.005)
    alone = build(paths[0], split="1", asked=(101, 0, 0), sample_order="megatron").train
    assert isinstance(alone, MegatronDataset) and alone.asked == 101  # one path: no surplus
    reference = MegatronDataset(IndexedDataset(paths[0]), range(6), S, 101, 1)
    assert all(np.array_equal(alone.row(j).tokens, reference.row(j).tokens) for j in range(101))


def test_own_paths(tmp_path):
    a, b = write(tmp_path / "a", [50]), write(tmp_path / "b", [50], first=1000)
    result = build(data_path=(), train_data_path=(a,), valid_data_path=("2", b, "1", a), asked=(10, 10, 10))
    assert not result.problems and tokens_of(result.train, 10) <= set(range(50))
    assert {t // 1000 for t in tokens_of(result.valid, 10)} == {0, 1}
    assert result.test is None and result.notices == ["no test data were given: no test loss"]
    assert "--data-path beside --train-data-path" in problems(build(a, train_data_path=(a,)))
    assert "there is no data" in problems(build(data_path=()))


def test_files_are_checked(tmp_path):
    a, b = write(tmp_path / "a", [50]), write(tmp_path / "b", [60])
    (tmp_path / "b.bin").write_bytes(b"123")
    text = problems(build(a, b, str(tmp_path / "c")))
    assert (
        "b.bin has 3 bytes, but its index describes 240" in text
        and "c.bin" in text
        and "no such file; there are:" in text
    )


def test_loss_masks_and_other_files_are_no_tokens(tmp_path):
    a = write(tmp_path / "a", [50])
    with IndexedWriter(a + "_loss_mask", dtype="uint8") as mask:
        mask.add_document([1] * 50)
    assert f"{a}_loss_mask is a loss mask: give the tokens, {a}" in problems(build(a + "_loss_mask"))
    (tmp_path / "a.text").write_text("x")
    assert "a.text is a file, not the prefix of a dataset" in problems(build(str(tmp_path / "a.text")))
    z = write(tmp_path / "z_text_document", [50])
    assert f"there are: {z}, {a}" in problems(build(str(tmp_path / "z")))  # the likely one first
    folder = tmp_path / "cleaned"
    folder.mkdir()
    assert f"{folder} is a directory, not the prefix" in problems(build(str(folder)))
    (folder / "b.idx").write_bytes(b"")
    assert f"in it are: {folder}/b" in problems(build(str(folder)))


def test_vocabulary_is_checked(tmp_path):
    path = write(tmp_path / "a", [50])
    assert build(path, vocab_size=50).train is not None
    text = problems(build(path, vocab_size=49))
    assert "largest id 49, vocabulary 49" in text and "--vocab-size 50" in text
    (tmp_path / "a.meta.json").unlink()
    assert problems(build(path, vocab_size=49)) == text  # found in the file itself
    assert build(path, vocab_size=50).train.vocab_size == 50  # and every row is checked


def test_end_of_document_id(tmp_path):
    a, b = write(tmp_path / "a", [50], eod_id=7), write(tmp_path / "b", [50], eod_id=8)
    c = write(tmp_path / "c", [50], eod_id=None)
    assert "tokenizer 7; " in problems(build(a, b, eod_id=7)) and "/b 8" in problems(build(a, b, eod_id=7))
    assert "different ids" in problems(build(a, b))
    assert build(a, c, split="1", eod_id=7).eod_id == build(a, c, split="1").eod_id == 7
    assert build(c, split="1").eod_id is None
    assert [n for n in build(a, c, split="1").notices if "without --append-eod" in n and c in n and a not in n]
    assert "--eod-mask-loss needs" in problems(build(c, split="1", eod_mask_loss=True))
    assert "finds documents by the end-of-document id" in problems(build(c, split="1", sample_order="megatron"))
    assert build(c, split="1", sample_order="megatron", document_mask=False).train is not None
    assert build(c, split="1", sample_order="megatron", eod_id=3).train.eod_id == 3


def test_data_of_another_tokenizer_are_refused(tmp_path):
    a = write(tmp_path / "a", [50], tokenizer="one", tokenizer_flags="--tokenizer-model one.json", vocab_size=70)
    b, c = write(tmp_path / "b", [50], tokenizer="two"), write(tmp_path / "c", [50])
    assert build(a, c, split="1", fingerprint="one").notices == [] == build(a, c, split="1").notices
    [problem] = build(a, c, split="1", fingerprint="two", tokenizer_flags="--tokenizer-model two.json", eod_id=1, vocab_size=9).problems
    assert "another tokenizer than this run's" in problem.what and c not in problem.numbers
    assert problem.numbers == f"this run: --tokenizer-model two.json; {a}: --tokenizer-model one.json"
    assert "--vocab-size 70: ids are taken as they are" in problem.nearest
    ids = build(a, split="1", vocab_size=70)  # the remedy
    assert ids.eod_id == 9999 and ids.train is not None and not ids.problems
    [problem] = build(a, b, c, split="1").problems
    assert "made by different tokenizers" in problem.what and f"{b}: a tokenizer of fingerprint two" in problem.numbers


def test_mock():
    result = build(data_path=(), mock_data=True, vocab_size=64, asked=(10, 10, 0))
    assert not result.problems and result.test is None and result.eod_id == 63
    assert not np.array_equal(result.train.row(0).tokens, result.valid.row(0).tokens)
    assert "give --vocab-size" in problems(build(data_path=(), mock_data=True))


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (["a"], [Source("a")]),
        (["a", "b", "c"], [Source("a"), Source("b"), Source("c")]),
        (["a", "b"], [Source("a"), Source("b")]),
        (["0.3", "a", "7", "b"], [Source("a", 0.3), Source("b", 7.0)]),
        (["1", "a"], [Source("a", 1.0)]),
        (["1"], [Source("1")]),
    ],
)
def test_sources(entries, expected):
    assert parse_sources(entries) == expected


@pytest.mark.parametrize(
    "entries", [["1", "a", "b"], ["1", "a", "b", "2"], ["a", "1", "b"], ["-1", "a", "2", "b"], ["0", "a"], ["nan", "a"]]
)
def test_sources_refused(entries):
    with pytest.raises(ValueError, match=r"--data-path"):
        parse_sources(entries)


def test_no_torch():
    """All but batches and the loader work without torch (the command line starts quickly)."""
    code = "import sys; import megatron_lite.data.build, megatron_lite.data.describe; sys.exit('torch' in sys.modules)"
    root = str(Path(__file__).resolve().parent.parent)
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_five_hundred_sources_start_quickly(tmp_path):
    """500 sources, 2 million documents: no pass over them at the start, and no arrays of their size."""
    per = 4000
    header = IndexHeader(DTYPES[8], per, per + 1)
    index = header.pack() + np.full(per, 100, "<i4").tobytes() + (np.arange(per, dtype="<i8") * 200).tobytes()
    index += np.arange(per + 1, dtype="<i8").tobytes()
    entries = []
    for i in range(500):
        (tmp_path / f"s{i}.idx").write_bytes(index)
        with open(tmp_path / f"s{i}.bin", "wb") as file:
            file.truncate(200 * per)
        entries += [str(1 + i % 7), str(tmp_path / f"s{i}")]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    result = build(*entries, seq_length=2048, asked=(10**7, 1000, 0), split="9,1")
    assert not result.problems
    for j in range(20):
        result.train.row(j)
    assert time.process_time() - began < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # KiB
    assert len(result.summary) == 23 and "and 480 more" in result.summary[21]
