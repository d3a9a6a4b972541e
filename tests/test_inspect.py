"""``megatron-lite inspect``: what is in a checkpoint or a dataset, for people and as JSON; damage is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_toys import KINDS, model, save

from megatron_lite.checkpoint.describe import describe, describe_root, text, text_root
from megatron_lite.cli.main import main
from megatron_lite.data.indexed import IndexedWriter

CONFIG = {
    "architecture": "llama",
    "model": {"num_layers": 2, "hidden_size": 4, "kv_channels": None, "swiglu": True, "qk_layernorm": False},
    "training": {"seed": 0, "bf16": True, "exit_signals": ["TERM"]},
    "data": {"seq_length": 16, "data_path": []},
}
STATE: dict[str, Any] = {
    "config": CONFIG,
    "layout": {"tp": 2, "dp": 1},
    "progress": {"step": 10, "consumed_samples": 80},
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path, 5, model(seed=1), ranks=1, **STATE)
    save(tmp_path, 10, model(seed=2), ranks=2, **STATE)
    return tmp_path


def test_describe_a_step(root: Path) -> None:
    directory = root / "step_00000010"
    found = describe(directory)
    assert json.loads(json.dumps(found)) == found
    assert (found["complete"], found["reason"], found["step"], found["ranks"]) == (True, None, 10, 2)
    assert found["parameters"] == 7 * 4 + 2 * 6 * 4 + 4 and found["kinds"] == sorted(KINDS)
    assert found["files"] == 6 and found["bytes"] == sum(p.stat().st_size for p in directory.iterdir())
    assert (found["config"], found["layout"], found["progress"]) == (CONFIG, STATE["layout"], STATE["progress"])
    assert list(found["tensors"]) == [
        "blocks.0.mlp.up.weight",
        "blocks.1.mlp.up.weight",
        "embed.tokens.weight",
        "head.norm.weight",
    ]
    tensor = found["tensors"]["embed.tokens.weight"]
    assert (tensor["shape"], tensor["dtype"]) == ([7, 4], "F32") and tensor["pieces"] >= 1
    assert found["saved_at"] > 1e9 and found["problems"] == []


def test_text_of_a_step(root: Path) -> None:
    shown = text(describe(root / "step_00000010")).splitlines()
    for line in (
        "  step 10, complete",
        "  layout: tp 2, dp 1",
        "  progress: step 10, consumed_samples 80",
        "  model: llama, num_layers 2, hidden_size 4, swiglu True",
        "  training: seed 0, bf16 True, exit_signals ['TERM']",
        "  80 parameters in 4 tensors; stored: exp_avg, exp_avg_sq, weight",
        "    blocks.0-1.mlp.up.weight  6 x 4  F32",  # equal blocks are one line
        "    embed.tokens.weight  7 x 4  F32",
    ):
        assert line in shown


def test_text_of_blocks_that_differ(tmp_path: Path) -> None:
    state = {("weight", f"blocks.{i}.a.weight"): torch.zeros(3 if i == 4 else 2) for i in range(12)}
    state["weight", "scale"] = torch.tensor(1.0)
    shown = text(describe(save(tmp_path, 1, state)))
    assert "blocks.0-3,5-11.a.weight  2  F32" in shown and "blocks.4.a.weight  3  F32" in shown
    assert "scale  scalar  F32" in shown and "26 parameters in 13 tensors" in shown


def test_describe_what_is_not_complete(root: Path) -> None:
    directory = root / "step_00000010"
    (directory / "rank00001.json").write_bytes(b"x" * (directory / "rank00001.json").stat().st_size)
    found = describe(directory)
    assert not found["complete"] and "rank00001.json does not match its checksum" in found["reason"]
    (directory / "rank00001.json").unlink()
    assert describe(directory)["reason"] == "rank00001.json is missing"
    assert "  not complete: rank00001.json is missing" in text(describe(directory))


def test_describe_a_directory_of_checkpoints(root: Path) -> None:
    (root / "step_00000012.tmp").mkdir()
    (root / "step_00000012").mkdir()
    found = describe_root(root)
    assert [s["name"] for s in found["saves"]] == [
        "step_00000010",
        "step_00000005",
        "step_00000012",
        "step_00000012.tmp",
    ]
    assert found["newest"]["step"] == 10
    shown = text_root(found)
    assert "step_00000012.tmp: a save that is under way, or did not finish" in shown
    assert (
        "step_00000012: no COMPLETE marker" in shown
        and "step_00000005: complete" in shown
        and "  step 10, complete" in shown
    )


def test_command_on_checkpoints(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(root)]) == 0
    assert "2 save(s), the newest first" in capsys.readouterr().out
    assert main(["inspect", str(root / "step_00000005"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 5
    assert main(["inspect", str(root), "--json", "--verify"]) == 0
    assert json.loads(capsys.readouterr().out)["newest"]["problems"] == []


def test_command_verifies(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "step_00000010" / "rank00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["inspect", str(root)]) == 0  # sizes are right
    assert main(["inspect", str(root), "--verify"]) == 1
    assert f"DAMAGED: {path}: bytes 0 to {len(data) - 1} do not match their checksum" in capsys.readouterr().out
    path.unlink()
    assert main(["inspect", str(root / "step_00000010")]) == 1
    assert "not complete: rank00000.safetensors is missing" in capsys.readouterr().out
    assert main(["inspect", str(root)]) == 0 and "  step 5, complete" in capsys.readouterr().out
    (root / "step_00000005" / "COMPLETE").unlink()
    assert main(["inspect", str(root)]) == 1 and "no complete checkpoint" in capsys.readouterr().out


def test_command_on_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = tmp_path / "a.b_document"
    with IndexedWriter(prefix, vocab_size=100, eod_id=9, tokenizer="abc") as writer:
        writer.add_document([1, 2, 9])
        writer.add_document(list(range(40)) + [9])
    for name in (prefix, f"{prefix}.bin", f"{prefix}.idx", f"{prefix}.meta.json"):
        assert main(["inspect", str(name)]) == 0
        shown = capsys.readouterr().out
        assert "2 documents, 2 sequences, 44 tokens of uint16 (88 bytes)" in shown
        assert "tokens of a document: 3 to 41, mean 22.0; 0 empty" in shown
        assert "eod_id 9, vocab_size 100, largest_id 39, tokenizer abc" in shown
        assert "document 0: 1 2 9\n" in shown and "document 1: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 ..." in shown
    assert main(["inspect", str(prefix), "--json", "--verify"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 44
    (tmp_path / "a.b_document.meta.json").unlink()
    assert main(["inspect", str(prefix)]) == 0 and "no .meta.json" in capsys.readouterr().out


def test_command_finds_damage_of_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedWriter(tmp_path / "a", vocab_size=100) as writer:
        writer.add_document([1, 2, 3])
    data = bytearray((tmp_path / "a.bin").read_bytes())
    data[0] ^= 1
    (tmp_path / "a.bin").write_bytes(data)
    assert main(["inspect", str(tmp_path / "a"), "--verify"]) == 1
    assert "DAMAGED: " in capsys.readouterr().out
    (tmp_path / "a.bin").write_bytes(data[:-1])
    assert main(["inspect", str(tmp_path / "a")]) == 2
    assert "a.bin has 5 bytes, but its index describes 6" in capsys.readouterr().err


def test_command_on_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["inspect", ""])
    assert left.value.code == 2 and "PATH is an empty text" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path)]) == 2 and "holds no checkpoint" in capsys.readouterr().err
    assert (
        main(["inspect", str(tmp_path / "none")]) == 2
        and "neither a directory of checkpoints nor" in capsys.readouterr().err
    )
    (tmp_path / "a.idx").write_bytes(b"")
    assert main(["inspect", str(tmp_path / "a")]) == 2 and "a.bin: no such file" in capsys.readouterr().err
