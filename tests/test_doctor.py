"""``megatron-lite doctor``: complete without a GPU, honest about what is set in the environment."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

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


def test_packages_that_are_not_there_are_named_with_what_is_lost(monkeypatch):
    """Every package that may be missing, so also those of the extras."""
    listed = {re.split("[<>=]", line)[0] for line in setup_requirements() if "ruff" not in line}
    not_of_users = {"pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "mypy", "setuptools", "wheel"}
    assert listed - not_of_users <= {*doctor.PACKAGES}

    def missing(name):
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    found = doctor.versions()
    assert found["pyarrow"] == "absent, and needed for .parquet inputs: pip install pyarrow"
    assert all("pip install" in found[name] for name in doctor.PACKAGES)


def setup_requirements():
    tree = ast.parse((Path(__file__).resolve().parent.parent / "setup.py").read_text())
    return [
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and re.fullmatch(r"[a-z0-9-]+>=[\d.]+(,<[\d.]+)?", n.value)
    ]


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
