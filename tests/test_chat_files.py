"""Files of conversations: both pairs, every record stored or counted, bad input, kills, workers."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_toys import CHATML, CHATML_MARKED, SYSTEM, TALK, encode, save_tokenizer, tokenizer_with
from train_toys import TINY, steps_of, train_here, trained

from megatron_lite.cli.data import run as data
from megatron_lite.config.exit_codes import LIMIT
from megatron_lite.data.index_format import prefix_paths
from megatron_lite.data.index_writer import IndexedWriter
from megatron_lite.data.indexed import IndexedDataset


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def files(prefix: Path) -> dict[str, bytes]:
    return {
        p.name.removeprefix(prefix.name): p.read_bytes()
        for q in ("", "_loss_mask")
        for p in prefix_paths(f"{prefix}{q}")
    }


def chat(
    capsys: pytest.CaptureFixture[str], source: Path, prefix: Path, folder: Path, *more: str
) -> tuple[int, str, str]:
    code = data(
        ["chat", "--input", str(source), "--output-prefix", str(prefix), "--tokenizer-model", str(folder), *more]
    )
    out, err = capsys.readouterr()
    return code, out, err


def test_files(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both pairs, the same for any number of workers; every record is stored or counted."""
    folder = tokenizer_with(model, tmp_path / "t", CHATML)
    long = [{"role": "user", "content": "word " * 400}, *TALK[1:]]
    late = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "word " * 300}]
    records = [
        {"messages": TALK},
        {"prompt": "q", "completion": "a"},
        {"messages": []},
        {"messages": TALK[:1]},
        {"messages": long},
    ]
    records += [{"messages": late, "tools": [{"name": "f"}]}] + [
        {"messages": SYSTEM, "n": i, "pad": "x" * 5000} for i in range(500)
    ]
    source = lines(tmp_path / "in.jsonl", records)
    code, out, err = chat(capsys, source, tmp_path / "one", folder, "--seq-length", "200")
    assert code == 0, err
    assert "502 conversations" in out and "2 dropped: longer than a row" in out
    assert "1 dropped: without messages" in out and "1 dropped: without an assistant's turn" in out
    code, out, _ = chat(capsys, source, tmp_path / "cut", folder, "--seq-length", "200", "--too-long", "truncate")
    assert code == 0 and "503 conversations" in out and "1 cut to 201 tokens" in out
    assert (
        "1 dropped: without a token that the loss counts" in out
        and "1 with tools, which the template does not read" in out
    )
    assert chat(capsys, source, tmp_path / "two", folder, "--seq-length", "200", "--workers", "2")[0] == 0
    assert files(tmp_path / "one") == files(tmp_path / "two")
    tokens, mask = IndexedDataset(tmp_path / "one"), IndexedDataset(tmp_path / "one_loss_mask")
    assert len(tokens) == 502 and tokens.lengths.tolist() == mask.lengths.tolist() and mask.dtype == np.uint8
    example = encode(folder, TALK)
    assert tokens.document(0).tolist() == example.ids.tolist() and mask.document(0).tolist() == example.mask.tolist()
    code, _, err = chat(capsys, source, tmp_path / "one", folder)
    assert code == 2 and "already there" in err
    assert chat(capsys, source, tmp_path / "one", folder, "--overwrite")[0] == 0


def test_forms_of_instruction_files(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Turns before, empty answers, roles that nobody knows, keys that are not read: kept, or counted by name."""
    folder = tokenizer_with(model, tmp_path / "t", CHATML)
    pair = {"instruction": "q", "input": "", "output": "a"}
    talk = [{"role": r, "content": c} for r, c in zip(["user", "assistant"] * 2, "xyqa", strict=True)]
    strange = {"messages": [{"role": "human", "content": "q"}, {"role": "bot", "content": "a"}]}
    spoken = [{"from": "human", "value": "q", "id": 3}, {"from": "gpt", "value": "a"}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    records = [
        {**pair, "history": [["x", "y"]], "source": "s"},
        {"messages": talk, "id": 1},
        {**pair, "history": [], "id": 2},
        {"conversations": spoken},
        *({**pair, "output": text} for text in ("", " \n")),
        {**pair, "history": [["x", ""]]},
        {"messages": [*talk[:1], call]},
        strange,
        strange,
    ]
    code, out, err = chat(capsys, lines(tmp_path / "in.jsonl", records), tmp_path / "out", folder)
    assert code == 0, err
    tokens = IndexedDataset(tmp_path / "out")
    assert tokens.document(0).tolist() == tokens.document(1).tolist() != tokens.document(2).tolist()
    assert tokens.document(2).tolist() == tokens.document(3).tolist() and len(tokens) == 5
    assert "3 dropped: with an empty answer" in out
    assert "2 dropped: without an assistant's turn (roles bot, human; known are user, assistant, system, tool)" in out
    assert "keys of records that are not read: id (2), source (1), conversations.id (1)\n" in out
    assert " bytes in " in out and "MB/s" not in out


def test_what_is_cut_off_is_not_counted(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tokenizer_with(model, tmp_path / "t", CHATML)
    long = {"role": "assistant", "content": "word " * 300}
    source = lines(tmp_path / "in.jsonl", [{"messages": [*TALK[:2], TALK[2], long, *TALK]}])
    code, out, err = chat(capsys, source, tmp_path / "out", folder, "--seq-length", "100", "--too-long", "truncate")
    assert code == 0 and " of 2 turns" in out and "do not end" not in out, err
    capital = {"messages": [TALK[0], {**TALK[1], "role": "Assistant"}]}
    _, _, err = chat(capsys, lines(source, [capital]), tmp_path / "none", folder)
    assert "(roles Assistant; known are user, assistant, system, tool, in small letters)" in err


def test_bad_records(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tokenizer_with(model, tmp_path / "t", CHATML)
    good = {"prompt": "q", "completion": "a"}
    bad = [
        '{"messages": 1}',
        "[1]",
        '{"prompt": "q", "completion": "\\ud800"}',
        '{"prompt": "\\uFDD0", "completion": "a"}',
    ]
    bad.append(json.dumps({"prompt": "q", "completion": "\n\nx"}))
    for number, line in enumerate(bad):
        source = lines(tmp_path / "in.jsonl", [good, line, good])
        code, _, err = chat(capsys, source, tmp_path / f"out{number}", folder)
        assert code == 2 and "in.jsonl:2: " in err and line[:20] in err and not list(tmp_path.glob(f"out{number}*"))
    code, out, _ = chat(
        capsys,
        lines(tmp_path / "in.jsonl", [good, *bad, good]),
        tmp_path / "out",
        folder,
        "--skip-bad",
        "--workers",
        "2",
    )
    assert code == 0 and "2 conversations" in out and out.count(" bad: ") == len(bad)
    code, _, err = chat(capsys, lines(tmp_path / "in.jsonl", ['{"messages": []}']), tmp_path / "none", folder)
    assert code == 2 and "no conversations were written" in err and "1 dropped: without messages" in err
    code, _, err = chat(
        capsys, lines(tmp_path / "in.jsonl", [good]), tmp_path / "x", tokenizer_with(model, tmp_path / "u", None)
    )
    assert code == 2 and "--chat-template FILE" in err and not list(tmp_path.glob("x*"))


def test_turns_without_an_end_token_are_told(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outside = (
        CHATML_MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
        + "{{ strftime_now('%Y') }}"
    )
    folder = tokenizer_with(model, tmp_path / "t", outside)
    source = lines(tmp_path / "in.jsonl", [{"messages": TALK}])
    code, out, err = chat(capsys, source, tmp_path / "out", folder, "--date", "2023-01-02")
    assert code == 0, err
    assert "2 turns do not end with a special token" in out and "2023-01-02 in all conversations" in out


def test_a_killed_run_leaves_nothing_that_opens(model: Path, tmp_path: Path) -> None:
    folder = tokenizer_with(model, tmp_path / "t", CHATML)
    source = lines(tmp_path / "in.jsonl", [{"messages": SYSTEM * 20}] * 3000)
    command = [
        sys.executable,
        "-m",
        "megatron_lite",
        "data",
        "chat",
        "--input",
        str(source),
        "--tokenizer-model",
        str(folder),
    ]
    with subprocess.Popen([*command, "--output-prefix", str(tmp_path / "out")], stdout=subprocess.DEVNULL) as process:
        while not (tmp_path / "out_loss_mask.bin.tmp").exists():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
    left = sorted(os.listdir(tmp_path))
    assert not [name for name in left if name.startswith("out") and not name.endswith(".tmp")], left
    lines(source, [{"messages": TALK}])
    done = subprocess.run(
        [*command, "--output-prefix", str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("*.tmp")) and len(IndexedDataset(tmp_path / "out")) == 1


def test_a_worker_that_dies_ends_the_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tokenizer_with(model, tmp_path / "t", CHATML)
    source = lines(tmp_path / "in.jsonl", [{"messages": SYSTEM, "pad": "x" * 5000}] * 2000)

    before = children()  # ranks of other tests

    def kill() -> None:
        while not (workers := children() - before):
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(min(workers), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    code, _, err = chat(capsys, source, tmp_path / "out", folder, "--workers", "2")
    killer.join()
    assert code == 2 and "was ended by SIGKILL" in err and not list(tmp_path.glob("out*"))


def children() -> set[int]:
    """Processes that this one has started by multiprocessing."""
    return {p.pid for p in multiprocessing.active_children() if p.pid is not None}


def test_no_tokens_without_their_mask(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the tokens cannot be published, neither is the mask; a mask left alone by a kill is replaced."""
    folder = tokenizer_with(model, tmp_path / "t", CHATML)
    source = lines(tmp_path / "in.jsonl", [{"messages": TALK}])
    publish = IndexedWriter._publish

    def fail(writer: IndexedWriter) -> Any:
        if not writer.prefix.endswith("_loss_mask"):
            raise OSError(28, "No space left on device")
        return publish(writer)

    monkeypatch.setattr(IndexedWriter, "_publish", fail)
    assert chat(capsys, source, tmp_path / "out", folder)[0] == 1
    assert not list(tmp_path.glob("out*"))
    monkeypatch.undo()
    with IndexedWriter(tmp_path / "out_loss_mask", dtype="uint8") as writer:
        writer.add_document([1, 1])
    assert chat(capsys, source, tmp_path / "out", folder)[0] == 0
    assert IndexedDataset(tmp_path / "out_loss_mask").num_tokens == IndexedDataset(tmp_path / "out").num_tokens


# ---- training


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_a_file_of_conversations(model: Path, tmp_path: Path, ranks: int) -> None:
    """It is the run on what ``data chat`` makes of it; the mask decides the loss; a resumed run goes on with the same rows."""
    folder = tokenizer_with(model, tmp_path / "t", CHATML)
    source = lines(tmp_path / "in.jsonl", [{"messages": SYSTEM[i % 2 :]} for i in range(9)] + [{"messages": TALK[:1]}])
    argv = ["chat", "--input", str(source), "--output-prefix", str(tmp_path / "made"), "--tokenizer-model", str(folder)]
    assert data(argv) == 0
    for suffix in (".bin", ".idx", ".meta.json"):
        (tmp_path / f"bare{suffix}").write_bytes((tmp_path / f"made{suffix}").read_bytes())
    flags = (
        f"{TINY} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder} --vocab-size 500 --seq-length 64 "
        f"--max-position-embeddings 64 --train-iters 4 --split 1,0,0 --packing best-fit --lr-decay-iters 4"
    )
    more = {
        "a": f"--data-path {tmp_path / 'made'}",
        "b": f"--data-path {source}",
        "bare": f"--data-path {tmp_path / 'bare'}",
        "c": f"--data-path {source} --save {tmp_path / 'save'} --exit-interval 2",
        "d": f"--data-path {source} --save {tmp_path / 'save'} --load {tmp_path / 'save'}",
    }
    runs = [(f"{flags} {what} --log-dir {tmp_path / name}",) for name, what in more.items()]
    outcomes = [train_here(*run) for run in runs] if ranks == 1 else trained(ranks, *runs)
    assert [o.code for o in outcomes] == [0, 0, 0, LIMIT, 0], [o.error for o in outcomes]
    losses = {name: [s["loss"] for s in steps_of(tmp_path / name).values()] for name in more}
    assert len(losses["a"]) == 4 and losses["a"] == losses["b"] == losses["c"] + losses["d"] != losses["bare"]
    (prefix,) = {p.name.removesuffix(".idx") for p in (tmp_path / ".tokenized").glob("*_chat.idx")}
    assert {f"{prefix}{q}.bin" for q in ("", "_loss_mask")} == {p.name for p in (tmp_path / ".tokenized").glob("*.bin")}
    assert "packed into" in outcomes[1].text and "\u27e6" in outcomes[1].text.split("first sample: ")[1]
    said = [outcomes[1].text.index(part) for part in ("samples of 64 tokens are", "warnings:\n  - nothing is saved", "first step: ")]
    assert said == sorted(said), "warnings stand last before the first step"
    if ranks == 1:  # whoever gets the lock says it
        _other_template(tmp_path, flags, source, folder, losses["a"])
        assert "9 conversations" in outcomes[1].text and "1 dropped: without an assistant's turn" in outcomes[1].text


def test_conversations_need_a_template_to_train_on(tmp_path: Path) -> None:
    source = lines(tmp_path / "in.jsonl", [{"messages": TALK}])
    done = train_here(f"{TINY} --train-iters 3 --data-path {source}")
    assert done.code == 2 and "in.jsonl holds conversations: this tokenizer has no files" in done.error
    assert "give --chat-template FILE" in done.error and not (tmp_path / ".tokenized").exists()


def _other_template(tmp_path: Path, flags: str, source: Path, folder: Path, losses: list[float]) -> None:
    """``train --chat-template`` is ``data chat --chat-template``, and makes token files of its own."""
    template = tmp_path / "other.jinja"
    template.write_text(CHATML.replace("m.content", "m.content | upper"))
    argv = ["chat", "--input", str(source), "--output-prefix", str(tmp_path / "other"), "--tokenizer-model", str(folder)]
    assert data([*argv, "--chat-template", str(template)]) == 0
    for name, what in {"e": f"{tmp_path / 'other'}", "f": f"{source} --chat-template {template}"}.items():
        assert train_here(f"{flags} --data-path {what} --log-dir {tmp_path / name}").code == 0
    e, f = ([s["loss"] for s in steps_of(tmp_path / name).values()] for name in "ef")
    assert e == f != losses and len(list((tmp_path / ".tokenized").glob("*_chat.idx"))) == 2
