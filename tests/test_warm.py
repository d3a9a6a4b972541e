"""The programs of warm.py end as the real ones do, and with who started them."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from warm import programs

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = "import os, sys\nprint(sys.argv[1:], sys.stdin.read(), os.getcwd(), os.environ['OF_OURS'])\nsys.exit({end})\n"


@pytest.mark.parametrize(
    "command",
    [
        "python -m megatron_lite compare here there",
        "megatron-lite train --nothing 'two words'",
        "echo in | python3 -u script.py a 'b c'",
        "echo in | python text.py",
        "echo in | python raises.py",
        "python -m no_such_module",
        "python -c 'raise SystemExit(3)'",
        "echo 'print(5)' | python -",
    ],
)
def test_as_the_real_ones(command: str, tmp_path: Path) -> None:
    for name, end in (("script", "7"), ("text", "'a reason'"), ("raises", "None + 1")):
        (tmp_path / f"{name}.py").write_text(SCRIPT.format(end=end))
    (tmp_path / "megatron_lite").symlink_to(ROOT / "megatron_lite")
    found = []
    for name in ("warm", "real"):
        path = os.pathsep.join([programs(tmp_path / name, warm=name == "warm"), os.environ["PATH"]])
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PATH": path, "OF_OURS": "1"}
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        found.append((done.returncode, done.stdout, done.stderr.strip().splitlines()[-1:]))
    warm, (code, out, error) = found
    assert warm[:2] == (code, out)
    if "no_such_module" not in command:
        assert warm[2] == error


def test_a_killed_one_is_gone(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    program = Path(programs(tmp_path / "bin")) / "python"
    with subprocess.Popen([program, tmp_path / "waits.py"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert pid != process.pid
        process.kill()
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
