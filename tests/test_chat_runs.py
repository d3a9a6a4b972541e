"""Runs over files of conversations: parts, runs that go on, inputs that change, every kind of tokenizer."""

from __future__ import annotations

import base64
import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chat_toys import CHATML, SYSTEM, TALK, save_tokenizer, tokenizer_with

from megatron_lite.cli.data import run as data
from megatron_lite.data.index_format import prefix_paths
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.text import chat_files, run
from megatron_lite.text.blocks import InputOptions
from megatron_lite.text.special_places import named_tokens
from megatron_lite.text.tokenizer import HuggingFaceTokenizer, build_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokenizer")
    return tokenizer_with(save_tokenizer(place), place / "t", CHATML)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_files, "InputOptions", partial(InputOptions, block_bytes=1 << 12))
    monkeypatch.setattr(run, "_FINISHED_BYTES", 1 << 13)


def lines(path: Path, number: int = 400) -> Path:
    records: list[Any] = [{"messages": SYSTEM[i % 2 :], "n": i} for i in range(number)]
    records[number // 2] = {"messages": TALK[:1]}
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def chat(source: Path, out: Path, *more: object) -> int:
    return data(["chat", "--input", str(source), "--output-prefix", str(out), *map(str, more)])


def stored(prefix: Path) -> list[bytes]:
    both = (str(prefix), f"{prefix}_loss_mask")
    return [path.read_bytes() for one in both for path in prefix_paths(one)]


def test_outputs_of_parts_join(folder: Path, tmp_path: Path) -> None:
    """Their merge is the run over everything, byte for byte, with parts that hold nothing too."""
    source, common = lines(tmp_path / "in.jsonl"), ("--tokenizer-model", folder, "--no-fast-tokenizer")
    assert chat(source, tmp_path / "whole", *common) == 0
    parts = [tmp_path / f"p{i}" for i in range(3)]
    for i, part in enumerate(parts):
        assert chat(source, part, *common, "--part", f"{i}/3", "--workers", 1 + i % 2) == 0
        assert IndexedDataset(part).num_documents > 50
    assert data(["merge", *map(str, parts), "--output-prefix", str(tmp_path / "merged")]) == 0
    assert stored(tmp_path / "merged") == stored(tmp_path / "whole")
    few = lines(tmp_path / "few.jsonl", 2)
    parts = [tmp_path / f"q{i}" for i in range(4)]
    assert [chat(few, part, *common, "--part", f"{i}/4") for i, part in enumerate(parts)] == [0] * 4
    assert chat(few, tmp_path / "few", *common) == 0
    assert data(["merge", *map(str, parts), "--output-prefix", str(tmp_path / "merged"), "--overwrite"]) == 0
    assert stored(tmp_path / "merged") == stored(tmp_path / "few")


def dies(source: Path, out: Path, *more: object, name: str, place: Any, after: int) -> bool:
    """Run in a process that is killed at the call number ``after`` of a function; whether it was."""
    if (child := os.fork()) == 0:
        function, left = getattr(place, name), after

        def dying(*args: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return function(*args, **options)

        setattr(place, name, dying)
        os._exit(chat(source, out, *more))
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_killed_runs_go_on_to_the_same_bytes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, more = lines(tmp_path / "in.jsonl"), ("--tokenizer-model", folder, "--resume", "--no-fast-tokenizer")
    assert chat(source, tmp_path / "whole", *more) == 0
    assert named_tokens(HuggingFaceTokenizer(str(folder))) == {}  # as in transformers, its files say it or nobody
    whole = capsys.readouterr().out.split("\n", 1)[1].replace("/whole", "/out")
    for after in (9, 6):
        assert dies(source, tmp_path / "out", *more, name="add_documents", place=run.IndexedWriter, after=after * 2)
        assert not [p.name for p in tmp_path.glob("out*") if not p.name.endswith(".tmp")]
    assert chat(source, tmp_path / "out", "--skip-bad", *more) == 2  # other options
    assert "skip_bad" in capsys.readouterr().err
    assert chat(source, tmp_path / "out", *more, "--workers", 2) == 0
    told = capsys.readouterr().out
    assert "going on after" in told and told.endswith(whole.split("written:")[1]) and "1 dropped" in told
    assert stored(tmp_path / "out") == stored(tmp_path / "whole")
    assert len(list(tmp_path.glob("out*"))) == 6
    assert chat(source, tmp_path / "out", *more) == 0  # there is nothing to do
    assert f"{tmp_path}/out is complete: " in capsys.readouterr().out
    for path in prefix_paths(f"{tmp_path}/out_loss_mask"):
        path.unlink()
    assert chat(source, tmp_path / "out", *more) == 2 and "it has no loss mask" in capsys.readouterr().err


def test_a_run_that_is_killed_between_renames_goes_on(folder: Path, tmp_path: Path) -> None:
    """At every one of them, over old files too: tokens never stand without their mask or beside another one."""
    source, more = lines(tmp_path / "in.jsonl", 40), ("--tokenizer-model", folder, "--resume", "--no-fast-tokenizer")
    old = lines(tmp_path / "old.jsonl", 30)
    assert chat(source, tmp_path / "whole", *more) == 0
    for after in range(7):
        out = tmp_path / f"out{after}"
        if after % 2:
            assert chat(old, out, "--tokenizer-model", folder, "--no-fast-tokenizer") == 0
        args = (source, out, *more, "--overwrite")
        assert dies(*args, name="replace", place=os, after=after) == (after < 6)
        if prefix_paths(str(out))[1].exists():  # complete, or none
            assert prefix_paths(f"{out}_loss_mask")[1].exists()
        assert chat(*args) == 0
        assert stored(out) == stored(tmp_path / "whole") and len(list(tmp_path.glob(f"out{after}*"))) == 6


def test_standard_input_cannot_go_on(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What came through it is nowhere to compare: two inputs would be mixed."""
    for command in ("chat", "preprocess"):
        argv = [command, "--input", "-", "--output-prefix", str(tmp_path / "out"), "--tokenizer-model", str(folder)]
        kind = ["--tokenizer-type", "HuggingFaceTokenizer"] if command == "preprocess" else []
        assert data([*argv, *kind, "--resume"]) == 2
        assert "--resume cannot go on with standard input" in capsys.readouterr().err and not list(tmp_path.glob("out*"))


def test_an_input_that_changes_ends_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, encode = lines(tmp_path / "in.jsonl"), chat_files.encode_block

    def writing(*args: Any) -> Any:
        with open(source, "a") as file:
            file.write("\n")
        return encode(*args)

    monkeypatch.setattr(chat_files, "encode_block", writing)
    assert chat(source, tmp_path / "out", "--tokenizer-model", folder) == 2
    assert "in.jsonl has changed while it was read" in capsys.readouterr().err and not list(tmp_path.glob("out*"))


# ---- every kind of tokenizer

BYTES = [bytes([b]) for b in range(256)]


def gpt2_files(folder: Path) -> None:
    from tokenizers import pre_tokenizers

    texts = [*pre_tokenizers.ByteLevel.alphabet(), "he", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    (folder / "vocab.json").write_text(json.dumps({text: i for i, text in enumerate(texts)}))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\n")


def sentencepiece_model(folder: Path) -> None:
    import sentencepiece

    texts = [m["content"].replace("\n", " ") for m in SYSTEM] * 3 + ["user assistant system hi there"] * 9
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(folder / "sp"), vocab_size=360, model_type="bpe",
        byte_fallback=True, control_symbols=["<|im_start|>", "<|im_end|>"], minloglevel=2,
    )  # fmt: skip


KINDS = {
    "GPT2BPETokenizer": "--vocab-file {0}/vocab.json --merge-file {0}/merges.txt",
    "SentencePieceTokenizer": "--tokenizer-model {0}/sp.model",
    "Llama2Tokenizer": "--tokenizer-model {0}/sp.model",
    "TikTokenizer": "--tokenizer-model {0}/bytes.json --tiktoken-pattern v2",
}
SPELLED = {"TikTokenizer": CHATML.replace("<|im_start|>", "<s>").replace("<|im_end|>", "</s>")}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The template's special tokens are ids, what the loss counts is the answers with their ends, spellings are text."""
    gpt2_files(tmp_path)
    sentencepiece_model(tmp_path)
    entries = [{"rank": i, "token_bytes": base64.b64encode(b).decode(), "token_str": ""} for i, b in enumerate(BYTES)]
    (tmp_path / "bytes.json").write_text(json.dumps(entries))
    (tmp_path / "t.jinja").write_text(SPELLED.get(kind, CHATML))
    flags = ["--tokenizer-type", kind, *KINDS[kind].format(tmp_path).split()]
    end = "</s>" if kind in SPELLED else "<|im_end|>"
    talk = [*TALK[:3], {"role": "assistant", "content": f"Rome {end} it is."}]
    source = tmp_path / "in.jsonl"
    source.write_text((json.dumps({"messages": talk}) + "\n") * 20)
    assert chat(source, tmp_path / "out", *flags) == 2 and "--chat-template FILE" in capsys.readouterr().err
    template = ("--chat-template", tmp_path / "t.jinja")
    assert chat(source, tmp_path / "out", *flags, *template) == 0
    told = capsys.readouterr().out
    assert "20 with messages that spell special tokens" in told and "of 40 turns" in told and "do not end" not in told
    assert chat(source, tmp_path / "slow", *flags, *template, "--no-fast-tokenizer", "--workers", 2) == 0
    assert stored(tmp_path / "out") == stored(tmp_path / "slow")
    names = {"--tokenizer-model": "model"}
    options: Any = {names.get(f, f[2:].replace("-", "_")): v for f, v in zip(flags[2::2], flags[3::2], strict=True)}
    tokenizer = build_tokenizer(kind, **options)
    ids, mask = (IndexedDataset(f"{tmp_path / 'out'}{q}").document(0) for q in ("", "_loss_mask"))
    special = {i: text for text, i in tokenizer.special.items()}
    written = [special[i] for i in ids.tolist() if i in special]
    start = "<s>" if kind in SPELLED else "<|im_start|>"
    assert written == [start, end] * 4
    assert named_tokens(tokenizer)["eos_token"] == special[tokenizer.eod_id]
    assert named_tokens(tokenizer).get("bos_token") == (None if kind == "GPT2BPETokenizer" else "<s>")
    text = tokenizer.decode(ids[mask.astype(bool)].tolist())
    assert "Rome" in text and "it is." in text and "capital" not in text
    bad = source.with_name("bad.jsonl")
    bad.write_text(json.dumps({"prompt": "q", "completion": "a"}) + "\n{}\n")
    assert chat(bad, tmp_path / "bad", *flags, *template) == 2 and "bad.jsonl:2: neither" in capsys.readouterr().err


def test_the_null_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }} 98 {% endfor %}")
    source = tmp_path / "in.jsonl"
    pairs = [("1 2", "3"), ("1", "x"), ("4", "5 6")]
    source.write_text("".join(json.dumps({"prompt": q, "completion": a}) + "\n" for q, a in pairs))
    flags = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 99, "--chat-template", tmp_path / "t.jinja")
    assert chat(source, tmp_path / "out", *flags) == 2
    assert "in.jsonl:2: the tokenizer cannot encode the text (not numbers" in capsys.readouterr().err
    assert chat(source, tmp_path / "out", *flags, "--skip-bad") == 0
    ids, mask = (IndexedDataset(f"{tmp_path / 'out'}{q}") for q in ("", "_loss_mask"))
    assert [ids.document(i).tolist() for i in range(2)] == [[1, 2, 98, 3, 98], [4, 98, 5, 6, 98]]
    assert [mask.document(i).tolist() for i in range(2)] == [[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]
