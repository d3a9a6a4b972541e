"""``megatron-lite data inspect|verify|head|merge|split``: what they print and write, and what they refuse."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from chat_toys import save_tokenizer, tokenizer_with

from megatron_lite.cli.main import main
from megatron_lite.data.index_format import DatasetMeta, prefix_paths
from megatron_lite.data.indexed import IndexedDataset, IndexedWriter
from megatron_lite.data.parts import divide, merge, part_ranges
from megatron_lite.text.preprocess import Options, preprocess
from megatron_lite.text.tokenizer import NullTokenizer, build_tokenizer


def write(prefix: Path, documents: list[list[list[int]]], dtype: str | None = None, **facts: object) -> Path:
    """A dataset of documents, each a list of sequences of ids."""
    facts = {"vocab_size": 100, "eod_id": 99, "tokenizer": "toy"} | facts
    with IndexedWriter(prefix, dtype=dtype, **facts) as writer:  # type: ignore[arg-type]
        for document in documents:
            writer.add_document(np.array([i for s in document for i in s], dtype=np.int64), [len(s) for s in document])
    return prefix


def documents(seed: int, count: int) -> list[list[list[int]]]:
    """Documents of zero to three sequences, some of them empty."""
    rng = random.Random(seed)
    return [
        [[rng.randrange(100) for _ in range(rng.choice([0, 1, 3, 40]))] for _ in range(rng.choice([0, 1, 1, 1, 3]))]
        for _ in range(count)
    ]


def mask(documents: list[list[list[int]]]) -> list[list[list[int]]]:
    return [[[i % 2 for i in s] for s in document] for document in documents]


def content(prefix: Path | str) -> list[bytes]:
    return [path.read_bytes() for path in prefix_paths(prefix)]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["data", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


# --- split and merge ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["documents", "tokens"])
def test_parts_are_the_nearest_cuts_and_join_to_the_whole(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against brute force, for many datasets; pieces in memory of a few documents."""
    monkeypatch.setattr("megatron_lite.data.index_writer._BLOCK", 50)
    rng = random.Random(5)
    for seed in range(12):
        given = documents(seed, rng.randrange(5, 40))
        write(tmp_path / f"{seed}", given)
        shares = [rng.choice([1.0, 2.0, 5.5]) for _ in range(rng.randrange(1, 5))]
        sizes = np.array([1 if by == "documents" else sum(map(len, d)) for d in given])
        starts = np.concatenate(([0], np.cumsum(sizes)))
        borders = [0]
        for done in np.cumsum(shares)[:-1] / sum(shares):
            target = done * starts[-1]
            distance = np.abs(starts - target)
            best = np.flatnonzero(distance == distance.min())
            borders.append(round(target) if by == "documents" else int(best[0]))
        borders.append(len(given))
        outs = [str(tmp_path / f"{seed}_{i}") for i in range(len(shares))]
        if any(a == b for a, b in zip(borders, borders[1:], strict=False)):
            with pytest.raises(ValueError, match="none may be empty"):
                divide(str(tmp_path / f"{seed}"), outs, shares, by)  # type: ignore[arg-type]
            assert not list(tmp_path.glob(f"{seed}_*"))
            continue
        ranges = divide(str(tmp_path / f"{seed}"), outs, shares, by)  # type: ignore[arg-type]
        sums = [(sum(sizes[r.start : r.stop]), len(r)) for r in ranges]
        wanted = [(sum(sizes[a:b]), b - a) for a, b in zip(borders, borders[1:], strict=False)]
        assert [s for s, _ in sums] == [s for s, _ in wanted]
        merge(outs, tmp_path / f"{seed}_whole")
        assert content(tmp_path / f"{seed}_whole") == content(tmp_path / f"{seed}")
        assert DatasetMeta.read(prefix_paths(outs[0])[2]).tokenizer == "toy"  # type: ignore[union-attr]


def test_the_commands_of_splitting_and_joining(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [[[i % 99] * (1 + i % 7)] for i in range(60)]
    whole = write(tmp_path / "whole", given)
    write(tmp_path / "whole_loss_mask", mask(given), "uint8", vocab_size=None, eod_id=None, tokenizer=None)
    parts = tmp_path / "parts"
    parts.mkdir()
    code, out, _ = run(capsys, "split", f"{whole}.idx", "--output-prefix", parts / "p", "--parts", 12)
    assert code == 0 and out.splitlines()[0].startswith(f"{parts}/p_00-of-12: documents 0 to ")
    assert out.splitlines()[-1].startswith(f"{parts}/p_11-of-12: documents ") and out.rstrip().endswith(" to 59")
    code, out, _ = run(capsys, "merge", parts, "--output-prefix", tmp_path / "again")
    joined = ", ".join(f"{parts}/p_{i:02}-of-12" for i in range(12))
    tokens = sum(len(d[0]) for d in given)
    assert (code, out) == (0, f"{tmp_path}/again: 60 documents, {tokens} tokens of 12 datasets: {joined}\n")
    assert content(tmp_path / "again") == content(whole)
    assert content(tmp_path / "again_loss_mask") == content(tmp_path / "whole_loss_mask")
    code, out, _ = run(
        capsys, "split", whole, "--output-prefix", tmp_path / "s", "--fractions", "58,1,1", "--by", "documents"
    )
    assert code == 0 and ranges(out) == [range(58), range(58, 59), range(59, 60)]
    code, _, err = run(capsys, "split", whole, "--output-prefix", parts / "p", "--parts", 12)
    assert code == 2 and "already there: give another prefix, or --overwrite" in err
    assert run(capsys, "split", whole, "--output-prefix", parts / "p", "--parts", 12, "--overwrite")[0] == 0
    for arguments, why in [
        (["--parts", 61], "none may be empty"),
        (["--parts", 0], "--parts 0: at least 1"),
        (["--fractions", "1,x"], "--fractions 1,x: give numbers"),
        (["--fractions", "1,-1"], "each a number above 0"),
        (["--fractions", "nan,1"], "each a number above 0"),
    ]:
        code, _, err = run(capsys, "split", whole, "--output-prefix", tmp_path / "no", *arguments)
        assert code == 2 and why in err and not list(tmp_path.glob("no*"))


def ranges(printed: str) -> list[range]:
    numbers = [line.split(": documents ")[1].split(" to ") for line in printed.splitlines()]
    return [range(int(a), int(b) + 1) for a, b in numbers]


@pytest.mark.parametrize("command", ["merge", "split"])
def test_an_old_mask_is_never_beside_new_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Of the same lengths, so that nothing would notice."""
    plain, masked = documents(1, 9), documents(2, 9)
    write(tmp_path / "plain", plain)
    write(tmp_path / "masked", masked)
    write(tmp_path / "masked_loss_mask", mask(masked), "uint8", vocab_size=None, eod_id=None, tokenizer=None)
    out = tmp_path / ("out" if command == "merge" else "out_0-of-1")
    more = ["--output-prefix", tmp_path / "out", *(["--parts", 1] if command == "split" else [])]
    old = {"": content(tmp_path / "masked"), "_loss_mask": content(tmp_path / "masked_loss_mask")}

    def found() -> dict[str, list[bytes]]:
        return {q: content(f"{out}{q}") for q in ("", "_loss_mask") if Path(f"{out}{q}.idx").exists()}

    assert run(capsys, command, tmp_path / "masked", *more)[0] == 0 and found() == old
    with monkeypatch.context() as patched:  # the disk is full when the mask is there and the tokens come
        complete = IndexedWriter._complete_index

        def full(writer: IndexedWriter) -> str:
            if writer.prefix.endswith("_loss_mask"):
                return complete(writer)
            raise OSError(28, "No space left on device")

        patched.setattr(IndexedWriter, "_complete_index", full)
        for given in ("plain", "masked"):
            assert run(capsys, command, tmp_path / given, *more, "--overwrite")[0] == 1 and found() == old
    assert run(capsys, command, tmp_path / "plain", *more, "--overwrite")[0] == 0
    assert found() == {"": content(tmp_path / "plain")}
    write(Path(f"{out}_loss_mask"), mask(plain), "uint8", vocab_size=None, eod_id=None, tokenizer=None)
    out.with_name(out.name + ".idx").unlink()
    out.with_name(out.name + ".bin").unlink()
    code, _, err = run(capsys, command, tmp_path / "plain", *more)
    assert code == 2 and "_loss_mask.idx already there" in err


def test_the_output_of_split_is_not_its_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a_0-of-1", documents(1, 9))
    before = content(tmp_path / "a_0-of-1")
    code, _, err = run(capsys, "split", tmp_path / "a_0-of-1", "--output-prefix", tmp_path / "a", "--parts", 1, "--overwrite")
    assert code == 2 and "is one of the outputs itself" in err and content(tmp_path / "a_0-of-1") == before


def test_what_cannot_be_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a", documents(1, 9)), write(tmp_path / "b", documents(2, 9), eod_id=98)
    d = write(tmp_path / "d", documents(2, 9), eod_id=None)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "c", documents(1, 9))
    write(tmp_path / "c_loss_mask", mask(documents(1, 9)), "uint8", vocab_size=None, eod_id=None, tokenizer=None)
    for given, why in [
        ([a, b], "different eod_id cannot be joined: 99 in "),
        ([a, d], f"99 in {tmp_path}/a, no end of document in {tmp_path}/d; one was made with --append-eod and one without"),
        ([a, tmp_path / "none"], "none.bin"),
        ([tmp_path / "empty"], "a directory without a dataset"),
        ([a, tmp_path / "c"], "has a loss mask and"),
        ([a, tmp_path / "out"], "is one of the datasets to join"),
    ]:
        code, _, err = run(capsys, "merge", *given, "--output-prefix", tmp_path / "out")
        assert code == 2 and why in err and not list(tmp_path.glob("out*")), err


def test_a_damaged_index_is_not_written_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a dataset that looks whole. The damage is not where opening looks, and there is no .meta.json."""
    write(tmp_path / "a", [[[7]]] * 3000)
    idx = bytearray((tmp_path / "a.idx").read_bytes())
    for at in (34 + 4 * 1001, 34 + 4 * 3000 + 8 * 1001, len(idx) - 8 * 1001):  # a length, a pointer, a border
        idx[at] ^= 0x55
        (tmp_path / "a.idx").write_bytes(idx)
        (tmp_path / "a.meta.json").unlink(missing_ok=True)
        for command in (("merge", tmp_path / "a"), ("split", tmp_path / "a", "--parts", 2)):
            code, _, said = run(capsys, *command, "--output-prefix", tmp_path / "out")
            assert (code, "it is damaged" in said) == (2, True) and not list(tmp_path.glob("out*")), said
        idx[at] ^= 0x55


@pytest.mark.parametrize("pattern", ["p*", "p*_text.idx", "p*.bin", "p*_t[e]xt.meta.json", ""])
def test_patterns_are_joined_in_the_order_of_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pattern: str
) -> None:
    """part10 comes after part9, also without zeros in front."""
    (tmp_path / "in").mkdir()
    for i in range(12):
        write(tmp_path / "in" / f"p{i}_text", [[[i]]])
        write(tmp_path / "in" / f"p{i}_text_loss_mask", [[[1]]], "uint8", vocab_size=None, eod_id=None, tokenizer=None)
    write(tmp_path / "all", [[[i]] for i in range(12)])
    given = tmp_path / "in" / pattern
    code, out, _ = run(capsys, "merge", given, "--output-prefix", tmp_path / "out")
    assert code == 0 and " of 12 datasets: " in out and out.index("p2_text, ") < out.index("p10_text, ")
    assert content(tmp_path / "out") == content(tmp_path / "all")
    (tmp_path / "in" / "p3_text.idx").unlink()  # a part that is not whole is not left out
    code, _, err = run(capsys, "merge", given, "--output-prefix", tmp_path / "out", "--overwrite")
    assert code == 2 and "p3_text.idx" in err
    code, _, err = run(capsys, "merge", tmp_path / "in" / "q*", "--output-prefix", tmp_path / "no")
    assert code == 2 and "q*: no dataset matches" in err


@pytest.mark.parametrize("of", ["", "_loss_mask"])
def test_damaged_tokens_are_not_copied_under_a_new_checksum(tmp_path: Path, capsys: pytest.CaptureFixture[str], of: str) -> None:
    a = write(tmp_path / "a", documents(5, 30))
    lengths = [[[1] * len(sequence) for sequence in document] for document in documents(5, 30)]
    write(tmp_path / "a_loss_mask", lengths, "uint8", vocab_size=None, eod_id=None, tokenizer=None)
    name = Path(f"{a}{of}.bin")
    data = bytearray(name.read_bytes())
    data[0] ^= 1
    name.write_bytes(data)
    for command in (["merge", a, a], ["split", a, "--parts", 2]):
        code, _, err = run(capsys, *command, "--output-prefix", tmp_path / "out")
        assert code == 2 and f"{name}: its sha256 is not the one in" in err
        assert not list(tmp_path.glob("out*"))


# --- looking --------------------------------------------------------------------------------------------------------


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a", [[[1, 2, 3]], [[4] * 20]]), write(tmp_path / "b", [[[5]]])
    code, out, _ = run(capsys, "inspect", a, f"{b}.idx", "--documents", 1)
    assert code == 0 and "2 documents, 2 sequences, 23 tokens of uint16" in out and "document 0: 1 2 3" in out
    assert "            2-3 tokens: 1" in out and "document 1" not in out
    assert out.rstrip().endswith("together 3 documents, 24 tokens")
    code, out, _ = run(capsys, "inspect", tmp_path, "--json")
    assert code == 0 and [found["tokens"] for found in json.loads(out)] == [23, 1]
    assert "loss" not in run(capsys, "inspect", a)[1]
    write(tmp_path / "a_loss_mask", [[[0, 1, 1]], [[1] * 20]], "uint8", vocab_size=None, eod_id=None, tokenizer=None)
    assert f"which tokens the loss counts: {a}_loss_mask" in run(capsys, "inspect", a)[1]
    assert run(capsys, "inspect", tmp_path / "none")[0] == 2


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a", documents(3, 30)), write(tmp_path / "b", documents(4, 30))
    assert run(capsys, "verify", a, b)[:2] == (0, f"{a}: good\n{b}: good\n")
    data = bytearray((tmp_path / "a.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "a.bin").write_bytes(data)
    code, out, _ = run(capsys, "verify", tmp_path)
    assert (
        code == 2
        and f"{a}: DAMAGED\n  {a}.bin: its sha256 is not the one in {a}.meta.json" in out
        and f"{b}: good" in out
    )
    (tmp_path / "b.meta.json").unlink()
    code, out, _ = run(capsys, "verify", b)
    assert code == 0 and "nothing says what the checksums should be" in out
    (tmp_path / "b.bin").write_bytes((tmp_path / "b.bin").read_bytes()[:-2])
    code, out, _ = run(capsys, "verify", b)
    assert code == 2 and "one of the two files is truncated" in out
    code, out, _ = run(capsys, "verify", tmp_path / "aa")
    assert code == 2 and f"{tmp_path}/aa: NOT THERE\n" in out and f"no such file; there are: {a}, {b}\n" in out
    (tmp_path / "b.bin").unlink()
    assert run(capsys, "verify", b)[1].startswith(f"{b}: DAMAGED\n")


@pytest.mark.parametrize("what", ["idx", "largest", "vocabulary", "mask"])
def test_verify_finds_every_kind_of_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    given = documents(3, 30)
    prefix = write(tmp_path / "a", given)
    facts = {"vocab_size": None, "eod_id": None, "tokenizer": None}
    write(tmp_path / "a_loss_mask", mask(given), "uint8", **facts)
    meta = json.loads((tmp_path / "a.meta.json").read_text())
    if what == "idx":
        meta["sha256_idx"] = "0" * 64
    elif what == "largest":
        meta["largest_id"] += 1
    elif what == "vocabulary":
        meta["vocab_size"] = 10
    else:
        path = tmp_path / "a_loss_mask.bin"
        path.write_bytes(bytes(b ^ 1 for b in path.read_bytes()))
    (tmp_path / "a.meta.json").write_text(json.dumps(meta))
    code, out, _ = run(capsys, "verify", prefix)
    wanted = {"idx": "a.idx: its sha256", "largest": "its largest id is 99, and 100", "vocabulary": "its vocabulary has 10",
              "mask": "a_loss_mask.bin: its sha256"}  # fmt: skip
    assert code == 2 and wanted[what] in out, out


def test_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    null = NullTokenizer(100)
    flags = build_tokenizer("NullTokenizer", vocab_size=100).flags
    given = [[[i] * (i + 1)] for i in range(8)]
    prefix = write(tmp_path / "a", given, tokenizer=null.fingerprint, tokenizer_flags=flags)
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", 100]
    code, out, err = run(capsys, "head", prefix, "-n", 2, "--from", 3, "--tokens", 4, *tokenizer)
    assert (code, err) == (0, "")
    assert out == "--- document 3: 4 tokens\n3 3 3 3\n--- document 4: 5 tokens\n4 4 4 4\n... 1 more tokens\n"
    code, out, _ = run(capsys, "head", prefix, "--json", "--from", 7, "--tokens", 0, *tokenizer)
    assert json.loads(out) == {"document": 7, "tokens": 8, "ids": [7] * 8, "text": " ".join("7" * 8)}
    assert run(capsys, "head", prefix, "-n", 1) == (0, "--- document 0: 1 tokens\n0\n", "")
    assert run(capsys, "head", prefix, "-n", 1, "--vocab-size", 100) == (0, "--- document 0: 1 tokens\n0\n", "")
    _, _, err = run(capsys, "head", prefix, "--tokenizer-type", "NullTokenizer", "--vocab-size", 50)
    assert "was made with another tokenizer than this one" in err
    for wrong, why in [
        (["--from", 8], "there are 8 documents, from 0"),
        (["--vocab-size", 9, "--merge-file", "x"], "no kind of tokenizer is named by these flags together"),
        (["--tokenizer-model", tmp_path / "none"], "none: No such file or directory; only local files are read, nothing is"),
    ]:
        code, _, err = run(capsys, "head", prefix, *wrong)
        assert code == 2 and why in err
    assert run(capsys, "head", tmp_path / "none")[0] == 2
    with pytest.raises(SystemExit):
        run(capsys, "head", prefix, "--token", 4)  # neither --tokens nor --tokenizer-model
    assert "unknown argument --token: did you mean --tokens?" in capsys.readouterr().err


def test_head_finds_the_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From ``.meta.json``; when its files were moved, from their new place; of several kinds by the fingerprint."""
    (tmp_path / "bare").mkdir()
    folder = tokenizer_with(save_tokenizer(tmp_path / "bare"), tmp_path / "tokenizer", None)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "hello world"}) + "\n")
    make = partial(build_tokenizer, "HuggingFaceTokenizer", model=str(folder))
    preprocess([tmp_path / "a.jsonl"], str(tmp_path / "a"), Options(make, append_eod=True))
    prefix = tmp_path / "a_text_document"
    code, out, err = run(capsys, "head", prefix)
    assert (code, err) == (0, "") and "\nhello world<" in out
    folder.rename(tmp_path / "moved")
    code, ids, err = run(capsys, "head", prefix)
    assert code == 0 and "hello" not in ids and f"note: ids are shown, since --tokenizer-model {folder}" in err
    assert err.endswith("; give --tokenizer-model\n")
    assert run(capsys, "head", prefix, "--tokenizer-model", tmp_path / "moved") == (0, out, "")
    meta = Path(f"{prefix}.meta.json")
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"tokenizer_flags": "--tokenizer-type 'x"}))
    code, out, err = run(capsys, "head", prefix)
    assert (code, out) == (0, ids) and "note: ids are shown, since No closing quotation" in err


def test_head_marks_what_has_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, loss = [[[1, 2, 3, 4]], [[5, 6]], [[7]]], [[[0, 1, 1, 0]], [[1, 1]], [[0]]]
    facts = {"tokenizer": NullTokenizer(100).fingerprint, "tokenizer_flags": "--tokenizer-type NullTokenizer --vocab-size 100"}
    prefix = write(tmp_path / "a", given, **facts)
    write(tmp_path / "a_loss_mask", loss, "uint8", vocab_size=None, eod_id=None, tokenizer=None)
    wanted = ["\u27e6...\u27e7: tokens that count as targets", "--- document 0: 4 tokens, 2 with loss", "1\u27e6 2 3\u27e7 4",
              "--- document 1: 2 tokens, 2 with loss", "\u27e65 6\u27e7", "--- document 2: 1 tokens, 0 with loss", "7"]  # fmt: skip
    assert run(capsys, "head", prefix)[1].splitlines() == wanted
    lines = [json.loads(line) for line in run(capsys, "head", prefix, "--json")[1].splitlines()]
    assert [line["loss"] for line in lines] == [document[0] for document in loss] and lines[0]["text"] == "1 2 3 4"


def test_texts_come_back_from_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["1 2 3", "4", "5 6"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    preprocess([tmp_path / "a.jsonl"], str(tmp_path / "a"), Options(partial(NullTokenizer, 100)))
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", 100]
    capsys.readouterr()
    _, out, _ = run(capsys, "head", tmp_path / "a_text_document", "--json", *tokenizer)
    assert [json.loads(line)["text"] for line in out.splitlines()] == texts


def test_part_ranges_of_one_long_document(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "a", [[[1] * 1000], [[2]], [[3]]]))
    assert part_ranges(dataset, [1, 1], "tokens") == [range(1), range(1, 3)]
    assert part_ranges(dataset, [2, 1], "documents") == [range(2), range(2, 3)]
