"""On a GPU a step reads the device once, and every copy to it is queued: shown on fake tensors, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import CASES
from kernel_cases import need_kernels
from no_gpu import compile_stand_in

from megatron_lite.ops.toolchain import BuildError

HERE = Path(__file__).resolve().parent
RUN = "import sys, pathlib, no_gpu; no_gpu.pretend(pathlib.Path(sys.argv[1])); import fake_cuda; fake_cuda.main(pathlib.Path(sys.argv[2]))"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process with a pretended GPU saw."""
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA: tools/gpu_check.py looks at the real thing")
    need_kernels()
    folder = tmp_path_factory.mktemp("pretend")
    try:
        compile_stand_in(folder / "stand_in.so")
    except BuildError as error:
        pytest.skip(f"no stand-in for CUDA: {str(error).splitlines()[0]}")
    command = [sys.executable, "-c", RUN, str(folder / "stand_in.so"), str(folder / "report.json")]
    path = f"{HERE}:{HERE.parent}"
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_step_reads_the_device_once(report: dict[str, Any], name: str) -> None:
    """Nothing stops the host before the one read, whatever the model, precision and options."""
    case = report["cases"][name]
    assert "error" not in case, case["error"]
    assert case["found"] == []
    assert 96 <= case["copied"] < 1 << 16  # the vector of host numbers, and where documents begin


def test_stops_are_noticed(report: dict[str, Any]) -> None:
    """Reads, copies that wait and shapes that depend on data are each noted, queued copies are not."""
    assert len(report["known stops"]) == 9
    assert report["copied by it"] == 12
