"""``megatron-lite doctor``: complete without a GPU, honest about what is set in the environment."""

from __future__ import annotations

import json

import pytest

from megatron_lite.cli import doctor


def test_json_and_text_tell_the_same(capsys):
    """Every part is there, in both forms."""
    assert doctor.run(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"versions", "devices", "backends", "tools", "libraries", "ops", "settings", "warnings"} <= found.keys()
    assert found["versions"]["torch"] and set(found["libraries"]) == {"cpu", "cuda", "index"}
    for row in found["ops"]:
        assert {"op", "kernel", "built", "loadable", "selected", "reason"} <= row.keys()
    assert doctor.run([]) == 0
    text = capsys.readouterr().out
    for op in {row["op"] for row in found["ops"]}:
        assert op in text


def test_a_card_that_is_not_here(capsys):
    """The same conditions answer for a card by name."""
    assert doctor.run(["--device", "cuda:a100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dtype"] == "bf16"
    assert next(r["kernel"] for r in found["ops"] if r["op"] == "swiglu" and r["selected"]) == "compiled-cuda"
    with pytest.raises(ValueError, match="cuda:nonsense"):
        doctor.doctor_report("cuda:nonsense")


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("NCCL_ALGO", "Tree", "ZeRO"),
        ("NCCL_ALGO", "allreduce:tree;broadcast:ring", "chooses"),
        ("NCCL_ALGO", "Ring", "chooses"),
        ("NCCL_SOCKET_IFNAME", "eth0", "InfiniBand"),
        ("NCCL_NSOCKS_PERTHREAD", "4", "TCP"),
        ("NCCL_IB_DISABLE", "1", "TCP"),
        ("CUDA_LAUNCH_BLOCKING", "1", "debugging"),
    ],
)
def test_settings_that_are_worth_a_word(name, value, word):
    """Advice from articles that does harm, or nothing, is answered."""
    found = doctor.doctor_report("cpu", environment={name: value, "PATH": ""})
    assert found["settings"] == {name: value}
    assert len(found["warnings"]) == 1 and f"{name}={value}" in found["warnings"][0] and word in found["warnings"][0]


def test_nothing_set_nothing_said():
    assert doctor.doctor_report("cpu", environment={"NCCL_IB_DISABLE": "0", "PATH": ""})["warnings"] == []
