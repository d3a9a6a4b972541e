"""Files of text in ``--data-path``: tokenized once, by one process; changed, damaged, killed; and trained on."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import shlex
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from train_toys import TINY, steps_of, train_here, trained

from megatron_lite.cli.main import main
from megatron_lite.config.schema_io import DataConfig
from megatron_lite.data.index_format import prefix_paths
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.text.corpus_cache import CorpusCache, names_text, renamed, with_tokens
from megatron_lite.text.preprocess import Options, preprocess
from megatron_lite.text.tokenizer import NullTokenizer

TEXTS = [" ".join(str((7 * i + 3 * j) % 60) for j in range(5 + i % 20)) for i in range(40)]


class Slow(NullTokenizer):
    """Takes its time, or dies, at a text that says so."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if any("die" in text for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5 if any("wait" in text for text in texts) else 0)
        return super().encode_batch([t.replace("wait", "").replace("die", "") for t in texts])


def slow() -> Slow:
    return Slow(61)


def cache(directory: Path | None = None, vocab_size: int = 61) -> CorpusCache:
    return CorpusCache(partial(NullTokenizer, vocab_size), NullTokenizer(vocab_size), directory)


def write(path: Path, texts: Sequence[str] = TEXTS, packed: Any = bytes) -> Path:
    path.write_bytes(packed("".join(json.dumps({"text": t}) + "\n" for t in texts).encode()))
    return path


def content(prefix: str | Path) -> list[bytes]:
    return [path.read_bytes() for path in prefix_paths(prefix)]


def test_made_once_and_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "corpus.jsonl")
    prefix, line = cache().dataset_of(path)
    assert Path(prefix).parent == tmp_path / ".tokenized" and Path(prefix).name.startswith("corpus.jsonl-")
    assert line.startswith(f"{path}: 40 documents, ") and "this once" in capsys.readouterr().out
    preprocess([path], str(tmp_path / "by_hand"), Options(partial(NullTokenizer, 61), append_eod=True))
    assert content(prefix) == content(tmp_path / "by_hand_text_document")
    states = {p: p.stat().st_mtime_ns for p in prefix_paths(prefix)}
    assert cache().dataset_of(path) == (prefix, f"{path}: tokenized before, in {prefix}")
    assert {p: p.stat().st_mtime_ns for p in prefix_paths(prefix)} == states and capsys.readouterr().out == ""
    assert {p.name for p in Path(prefix).parent.iterdir()} == {p.name for p in states}
    other, _ = cache(tmp_path / "elsewhere" / "deep").dataset_of(path)
    assert Path(other).parent == tmp_path / "elsewhere" / "deep" and content(other) == content(prefix)


@pytest.mark.parametrize(("suffix", "why"), [("bin", "truncated"), ("idx", "not an index"), ("meta.json", "not JSON"), ("", "")])
def test_a_damaged_dataset_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, why: str) -> None:
    path = write(tmp_path / "corpus.jsonl")
    prefix, _ = cache().dataset_of(path)
    good = content(prefix)
    damaged = Path(f"{prefix}.{suffix or 'idx'}")
    damaged.write_bytes(b"x" * 200)
    if not suffix:
        damaged.unlink()
    capsys.readouterr()
    assert "tokenized in" in cache().dataset_of(path)[1] and content(prefix) == good
    out = capsys.readouterr().out
    assert "; it is made again" in out and str(damaged) in out and why in out


def test_what_the_tokens_depend_on_makes_another_dataset(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl")
    first = cache().prefix_of(path)
    assert cache(vocab_size=62).prefix_of(path) != first
    os.utime(path, ns=(1, 1))
    changed = cache().prefix_of(path)
    assert changed != first
    write(path, [*TEXTS, "1"])
    os.utime(path, ns=(1, 1))
    assert cache().prefix_of(path) not in (first, changed)


def test_every_kind_and_weights(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl.gz", packed=gzip.compress)
    write(tmp_path / "b.jsonl.zst", packed=zstandard.compress)
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "c.parquet")
    (tmp_path / "d.txt").write_text("1 2 3\n4 5 6\n")
    files = [str(tmp_path / n) for n in ("a.jsonl.gz", "b.jsonl.zst", "c.parquet", "d.txt")]
    data = DataConfig(train_data_path=("0.5", files[0], "2", "ready/made", "1", files[0]), valid_data_path=tuple(files))
    assert names_text(data) and not names_text(DataConfig(data_path=("1", "a_text_document", "1", "s3://x/a.jsonl")))
    found, lines = with_tokens(data, cache())
    assert len(lines) == 4 and list(found) == files
    a, b, c, d = found.values()
    assert content(a)[:2] == content(b)[:2] == content(c)[:2]
    assert IndexedDataset(d).read(0, 7).tolist() == [1, 2, 3, 4, 5, 6, 60]
    new = renamed(data, found)
    assert new.train_data_path == ("0.5", a, "2", "ready/made", "1", a) and new.valid_data_path == (a, b, c, d)


def ask(path: Path, start: Any, answers: Any) -> None:
    start.wait()
    asked: list[str] = []
    try:
        found = CorpusCache(slow, slow(), None, asked.append).dataset_of(path)
    except ValueError as error:
        found = ("error", str(error))
    answers.put((found, [a for a in asked if a.startswith("waiting")]))


def at_once(path: Path, processes: int) -> list[Any]:
    context = multiprocessing.get_context("fork")
    start, answers = context.Event(), context.Queue()
    started = [context.Process(target=ask, args=(path, start, answers)) for _ in range(processes)]
    for process in started:
        process.start()
    start.set()
    found = [answers.get(timeout=60) for _ in started]
    for process in started:
        process.join()
    return found


def test_directories_and_patterns_are_one_dataset(tmp_path: Path) -> None:
    (tmp_path / "in" / "b").mkdir(parents=True)
    files = [write(tmp_path / "in" / f"{name}.jsonl", [f"{i} {i}", "9"]) for i, name in enumerate(("a", "b/x", "c"))]
    for entry, name, second, count in (
        ("in", ".tokenized/in-", 1, 6),
        ("in/*.jsonl", "in/.tokenized/_.jsonl-", 2, 4),
        ("i*/**/*.jsonl", ".tokenized/i_____", 1, 6),
    ):
        prefix, line = cache().dataset_of(tmp_path / entry)
        assert prefix.startswith(f"{tmp_path}/{name}")
        assert f"{tmp_path / entry}: {count} documents, " in line
        assert IndexedDataset(prefix).document(2).tolist()[:2] == [second, second]
        assert "tokenized before" in cache().dataset_of(tmp_path / entry)[1]
    os.utime(files[1], (1, 1))
    assert "6 documents" in cache().dataset_of(tmp_path / "in")[1]
    write(tmp_path / "in" / "d.jsonl", TEXTS)
    flags = f"{TINY} --train-iters 3 --log-dir {tmp_path}/log --data-path"
    for entry in (f"{tmp_path}/in/", f"{tmp_path}/in/*.jsonl"):
        said = train_here(f"{flags} {entry}")
        assert said.code == 0 and "documents, " in said.text, said
    nothing = train_here(f"{flags} {tmp_path}/no*.jsonl")
    assert nothing.code == 2 and "no*.jsonl: no such file" in nothing.error


def test_the_command_that_helps_is_told(tmp_path: Path) -> None:
    for data, words in (
        ('{"text": "今天天气很好"}\n'.encode("gb18030"), "--data-path {0}_text_document first: .* --encoding gb18030 --append-eod"),
        (b'{"body": "1"}\n', "--json-keys names another one; .* --data-path {0}_KEY_document first: .* --json-keys KEY --append-eod"),
    ):
        (tmp_path / "corpus.jsonl").write_bytes(data)
        with pytest.raises(ValueError, match=words.format(tmp_path / "corpus")):
            CorpusCache(slow, slow()).dataset_of(tmp_path / "corpus.jsonl")


def test_one_process_tokenizes_and_the_others_wait(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl", [*TEXTS, "wait 3", ""])
    found = at_once(path, 3)
    assert len({prefix for (prefix, _), _ in found}) == 1
    assert sum("; 1 dropped: empty, tokenized in" in line for (_, line), _ in found) == 1
    assert sum("by another process" in line for (_, line), _ in found) == 2
    assert sum(bool(waited) for _, waited in found) == 2
    assert IndexedDataset(found[0][0][0]).num_documents == 41


def test_the_failure_of_one_is_the_failure_of_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody tries again what has just failed; a later start does."""
    path = write(tmp_path / "corpus.jsonl", ["wait 1", "no number"])
    found = at_once(path, 3)
    assert capfd.readouterr().out.count("this once") == 1
    assert {answer for answer, _ in found} == {
        ("error", f"{path}:2: the tokenizer cannot encode the text (not numbers apart by spaces, which the null tokenizer "
         'reads); --skip-bad leaves such records out: {"text": "no number"}. Training reads \'text\' in UTF-8 and '
         f"skips no record; make a dataset for --data-path {tmp_path}/corpus_text_document first: megatron-lite data preprocess "
         f"--input {path} --output-prefix {tmp_path}/corpus --skip-bad --append-eod")
    }  # fmt: skip
    assert not (tmp_path / ".tokenized").exists()
    state = path.stat()
    write(path, ["wait 1", "123456789"][:1] + ["10 11 12x"[:8]])
    os.truncate(path, path.stat().st_size)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert CorpusCache(slow, slow()).dataset_of(path)[1].startswith(f"{path}: 2 documents")


def test_a_killed_process_keeps_nobody_waiting_and_leaves_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl", [*TEXTS, "die 1"])
    context = multiprocessing.get_context("fork")
    process = context.Process(target=slow_dataset, args=(path,))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert [p.name for p in (tmp_path / ".tokenized").iterdir() if p.name != ".locks"] != []
    state = path.stat()
    path.write_bytes(path.read_bytes().replace(b"die", b"   "))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    prefix, _ = CorpusCache(slow, slow()).dataset_of(path)
    assert {p.name for p in (tmp_path / ".tokenized").iterdir()} == {p.name for p in prefix_paths(prefix)}


def slow_dataset(path: Path) -> None:
    CorpusCache(slow, slow()).dataset_of(path)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl")
    (tmp_path / ".tokenized").write_text("a file")
    with pytest.raises(
        ValueError, match=r"cannot be kept in .*\.tokenized \(File exists\); give --data-cache-path DIRECTORY"
    ):
        cache().dataset_of(path)


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_text_is_the_run_on_its_tokens(tmp_path: Path, ranks: int) -> None:
    text = write(tmp_path / "corpus.jsonl")
    preprocess([text], str(tmp_path / "made"), Options(partial(NullTokenizer, 61), append_eod=True))
    flags = f"{TINY} --train-iters 3 --split 1,0,0"
    runs = [
        (f"{flags} --data-path {source} --log-dir {tmp_path / name}",)
        for name, source in (("a", tmp_path / "made_text_document"), ("b", text), ("c", f"1 {text}"))
    ]
    outcomes = [train_here(*run) for run in runs] if ranks == 1 else trained(ranks, *runs)
    assert [o.code for o in outcomes] == [0] * 3
    losses = [[s["loss"] for s in steps_of(tmp_path / name).values()] for name in "abc"]
    assert len(losses[0]) == 3 and losses[0] == losses[1] == losses[2]


def test_files_of_text_keep_their_names_and_are_staged(tmp_path: Path) -> None:
    """In what is printed, in the losses of sources, in a curriculum; with --stage-dir the copy of the tokens is read."""
    one, two = write(tmp_path / "one.jsonl"), write(tmp_path / "two.txt", packed=lambda _: " ".join(TEXTS).encode())
    (tmp_path / "curriculum.yaml").write_text(f"stages:\n  - at: 0\n    weights:\n      {one}: 3\n      {two}: 1\n")
    flags = f"{TINY} --train-iters 3 --train-data-path {one} {two} --log-dir {tmp_path / 'log'} --stage-dir {tmp_path / 'stage'}"
    done = train_here(f"{flags} --curriculum {tmp_path / 'curriculum.yaml'}")
    assert done.code == 0, done.error
    assert f"{one}: 40 documents" in done.text and f"% {one}: " in done.text and f"% {two}: " in done.text
    staged = [p.name for p in (tmp_path / "stage").glob("*.idx")]
    assert len(staged) == 2 and all("_text_document-" in name for name in staged)


def test_errors_reach_every_rank_and_say_where(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl", [*TEXTS, "x"])
    flags = f"{TINY} --train-iters 3 --log-dir {tmp_path / 'log'} --data-path {path}"
    (bad,) = trained(2, (flags,))
    assert bad.code == 2 and f"{path}:41: the tokenizer cannot encode the text" in bad.error
    command = shlex.split(bad.error.split(" first: ")[1].splitlines()[0])
    assert command[0] == "megatron-lite" and main(command[1:]) == 0
    assert train_here(flags.replace(str(path), f"{tmp_path}/corpus_text_document") + " --split 1,0,0").code == 0
    none = train_here(flags.replace("--tokenizer-type NullTokenizer", "") + " --tokenizer-type HuggingFaceTokenizer")
    assert none.code == 2 and "names a file of text, and no tokenizer is given" in none.error
    gone = train_here(f"{TINY} --train-iters 3 --data-path {tmp_path}/none.jsonl")
    assert gone.code == 2 and f"--data-path {tmp_path}/none.jsonl: no such file" in gone.error
