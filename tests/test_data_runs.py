"""Whole runs over every way to their data: the same numbers, nothing computed twice, nothing sent around, errors on all ranks."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_toys import save_tokenizer
from train_toys import TINY, make_data, opened_in, train_here, trained

from megatron_lite.cli import data_index
from megatron_lite.config import exit_codes
from megatron_lite.config.problem import ConfigError
from megatron_lite.data.index_writer import IndexedWriter
from megatron_lite.data.megatron_order import MegatronDataset
from megatron_lite.testing.ranks import run_ranks
from megatron_lite.train.metrics import read_lines

RUN = f"{TINY} --train-iters 3 --split 1 --micro-batch-size 1"
TWO_STAGES = "--pipeline-model-parallel-size 2"


@contextlib.contextmanager
def look(built: Any) -> Iterator[None]:
    """What this rank's own loader gives, and what ranks have sent each other in the steps."""
    seen = built.found = {"rows": [], "traffic": {}}
    loader, step = built.data.train, built.data.train.step
    built.mesh.traffic.reset()

    def note(*args: Any) -> Any:
        found = step(*args)
        for batch in found.microbatches:
            seen["rows"].append((batch.positions.tolist(), batch.cu_seqlens.tolist(), batch.tokens.tolist()))
        return found

    loader.step = note
    yield
    seen["traffic"] = built.mesh.traffic.as_dict()


def on_ranks(argv: str) -> dict[str, Any]:
    """One run on two pipeline stages and two data-parallel ranks, as each rank sees it."""
    answers = run_ranks(4, train_here, argv, look, timeout=120)
    assert [a.code for a in answers] == [0] * 4, answers
    return {"rank": [a.extra for a in answers], "text": answers[0].text}


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_lines(folder / "metrics.jsonl")]


def test_every_stage_finds_its_rows_by_itself(tmp_path):
    """Positions and document borders are the same on both stages, come from the index, and are sent by nobody."""
    prefix = make_data(tmp_path)
    found = on_ranks(f"{RUN} {TWO_STAGES} --data-path {prefix} --log-dir {tmp_path / 'log'}")["rank"]
    by_rows: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(found):
        assert len(of_rank["rows"]) == 6
        by_rows.setdefault(repr(of_rank["rows"]), []).append(rank)
        assert any(len(set(borders)) > 2 for _, borders, _ in of_rank["rows"])  # documents begin inside rows
        for positions, borders, _ in of_rank["rows"]:
            assert [p for p, position in enumerate(positions) if position == 0] == sorted({b for b in borders if b < 16})
    assert sorted(map(len, by_rows.values())) == [2, 2]  # each data-parallel rank's two stages alike
    kinds = {key.partition(".")[2] for of_rank in found for key in of_rank["traffic"]}
    assert "broadcast" not in kinds and kinds & {"send", "recv"}
    sent = [count["bytes"] for of_rank in found for key, count in of_rank["traffic"].items() if key.endswith(".send")]
    assert set(sent) == {3 * 2 * 16 * 32 * 4}  # steps, microbatches, positions, hidden, fp32: the hidden states alone


@pytest.mark.parametrize("order", ["windows", "megatron"])
def test_the_way_to_the_data_changes_no_number(tmp_path, order):
    prefix = make_data(tmp_path)
    base = f"{RUN} --sample-order {order}"
    cache, staged = f"--data-cache-path {tmp_path / 'cache'}", f"--stage-dir {tmp_path / 'stage'}"
    ways = {
        "plain": f"--data-path {prefix}",
        "pread": f"--data-path {prefix} --data-access pread",
        "cached": f"--data-path {prefix} {cache}",
        "cached again": f"--data-path {prefix} {cache}",
        "staged": f"--data-path {prefix} {staged}",
        "staged again": f"--data-path {prefix} {staged} {cache}",
        "store": f"--data-path file://{prefix} {cache} --remote-cache-gib 1",
        "staged from a store": f"--data-path file://{prefix} {staged}",
        "blend": f"--data-path 1 {prefix} 0 file://{prefix} {cache}",
    }
    found = {}
    runs = [f"{base} {way} --log-dir {tmp_path / 'log' / name.replace(' ', '-')}" for name, way in ways.items()]
    outcomes = trained(2, *runs)
    for name, outcome in zip(ways, outcomes, strict=True):
        assert outcome.code == 0, (name, outcome)
        found[name] = losses(tmp_path / "log" / name.replace(" ", "-"))
    alone = {name: values for name, values in found.items() if name != "blend"}
    assert len({tuple(values) for values in alone.values()}) == 1, alone
    assert len(found["plain"]) == 3
    text = dict(zip(ways, (o.text for o in outcomes), strict=True))
    assert [text[name].count("are read from copies in") for name in ("plain", "staged", "staged again")] == [0, 1, 1]
    assert [text[name].count("were copied there now") for name in ("staged", "staged again")] == [1, 0]  # whichever rank has
    assert len(list((tmp_path / "cache").glob("orders/*.order"))) == (0 if order == "windows" else 2)
    assert len(list((tmp_path / "stage").glob("*.staged.json"))) == 2


def test_data_index_leaves_nothing_to_compute(tmp_path, monkeypatch, capsys):
    prefix = make_data(tmp_path)
    flags = f"{RUN} --sample-order megatron --data-path {prefix} --data-cache-path {tmp_path / 'cache'}"
    assert data_index.run(shlex.split(f"{flags} --stage-dir {tmp_path / 'stage'}")) == 0
    said = capsys.readouterr().out
    assert "training: " in said and "ready after" in said
    monkeypatch.setattr(MegatronDataset, "_build", lambda self, seed: pytest.fail("computed again"))
    assert train_here(f"{flags} --stage-dir {tmp_path / 'stage'} --log-dir {tmp_path / 'log'}").code == 0
    with pytest.raises(ConfigError, match="data index without --data-cache-path and --stage-dir"):
        data_index.run(shlex.split(f"{RUN} --data-path {prefix}"))
    with pytest.raises(ConfigError, match=r"(?s)needs --global-batch-size.*|nothing.bin"):
        data_index.run(shlex.split(flags.replace("--global-batch-size 4", "")))
    assert data_index.run(["--help"]) == 0


def test_what_fails_fails_on_every_rank(tmp_path):
    """A copy that is not what it should be, a directory that is not writable, a store that is not there."""
    prefix = make_data(tmp_path)
    with open(f"{prefix}.bin", "r+b") as file:
        file.write(np.array([1, 2, 3], "<u2").tobytes())
    for suffix in (".bin", ".idx"):
        Path(f"{prefix}2{suffix}").write_bytes(Path(f"{prefix}{suffix}").read_bytes())
    log = f"--document-mask off --log-dir {tmp_path / 'log'}"
    (tmp_path / "file").write_bytes(b"")
    outcomes = trained(
        2,
        f"{RUN} {log} --data-path {prefix} --stage-dir {tmp_path / 'stage'}",
        f"{RUN} {log} --data-path {prefix} --stage-dir {tmp_path / 'file' / 'x'}",
        f"{RUN} {log} --data-path file://{tmp_path / 'none'} --data-cache-path {tmp_path / 'cache'}",
        f"{RUN} {log} --data-path {prefix}2 --sample-order megatron --data-cache-path {tmp_path / 'file' / 'x'}",
        f"{RUN} {log} --data-path file://{prefix}",
        f"{RUN} {log} --data-path nowhere://{prefix} --data-cache-path {tmp_path / 'cache'}",
        f"{RUN} {log} --data-path file://{tmp_path / 'none'} --stage-dir {tmp_path / 'stage'}",
        f"{RUN} {log} --data-path {prefix} --prefetch-mib 0 --remote-cache-gib 0",
    )
    reasons = (
        "the sha256 of its copy is not the one in .meta.json",
        "--stage-dir",
        "none.bin and file://",
        "their orders not be kept: ",
        "a remote prefix needs --data-cache-path DIR",
        "Protocol not known",
        "no such file",
        "--prefetch-mib 0",
    )
    for outcome, reason in zip(outcomes, reasons, strict=True):
        assert outcome.code == exit_codes.CONFIGURATION and reason in outcome.error, (reason, outcome)
    assert not list((tmp_path / "stage").glob("*.staged.json"))


def test_nodes_with_files_of_their_own(tmp_path):
    """The same name: files of one content are good; other tokens or a tokenizer that one node lacks are told by every rank."""
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
        make_data(folder)
    with IndexedWriter(folders[2] / "toy_text_document", vocab_size=61, eod_id=60, overwrite=True) as writer:
        writer.add_document([7] * 369)
    a, b, c = map(str, folders)
    flags = f"{RUN} --data-path toy_text_document"
    assert all("16 samples" in said for said in run_ranks(2, opened_in, [a, b], flags, timeout=120))
    for said in run_ranks(2, opened_in, [a, c], flags, timeout=120):
        assert said.startswith("error: ") and "datasets.toy_text_document: " in said and "on rank 0" in said and "on rank 1" in said
    save_tokenizer(folders[1])
    flags = flags.replace("--tokenizer-type NullTokenizer", "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json")
    for said in run_ranks(2, opened_in, [a, b], flags, timeout=120):
        assert "tokenizer.json" in said and "No such file" in said


def test_what_another_rank_made_anew_is_said(tmp_path):
    """The start-up text is that of rank 0, and whoever gets a lock first makes a file."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        make_data(folder)
    where = [str(folder) for folder in folders]
    flags = f"{RUN} --data-path toy_text_document --sample-order megatron --data-cache-path cache"
    assert not any("built again" in said for said in run_ranks(2, opened_in, where, flags, timeout=120))
    (order,) = (folders[1] / "cache" / "orders").glob("*.order")
    order.write_bytes(b"")
    for said in run_ranks(2, opened_in, where, flags, timeout=120):
        assert said.count("built again") == 1 and order.name in said
