"""``run.json``: what ran, where, with which code and settings. One entry per start of the run."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import megatron_lite
from megatron_lite.checkpoint.manifest import TEMPORARY, write_durably
from megatron_lite.train.metrics import reason

PACKAGES = ("torch", "numpy", "tokenizers", "sentencepiece", "tiktoken", "regex", "apex", "flash-attn", "transformer-engine")


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit and whether files differ from it, or None outside a checkout (or without git)."""

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(directory), *args], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed_files": len(git("status", "--porcelain").splitlines())}
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    """Versions of this program and of what it stands on."""
    found = {"megatron_lite": megatron_lite.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def write_run_json(
    log_dir: Path, config: Mapping[str, Any], hosts: Sequence[str], environment: Mapping[str, str], extra: Mapping[str, Any]
) -> None:
    """Write ``run.json``; earlier starts in the same directory are kept under ``starts``.

    Raises:
        ValueError: it cannot be written; nothing of a half-written one is left.
    """
    path = log_dir / "run.json"
    try:
        starts = _earlier_starts(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read, so it is not replaced ({reason(error)}): give another --log-dir") from error
    starts.append(
        {
            "time": time.time(),
            "command": sys.argv,
            "directory": os.getcwd(),
            "hosts": list(hosts),
            "versions": versions(),
            "git": git_state(Path(megatron_lite.__file__).parent),
            "working_directory_git": git_state(Path.cwd()),
            "environment_set": dict(environment),
            **extra,
        }
    )
    data = json.dumps({"config": config, "starts": starts}, indent=1).encode()
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        write_durably(path, data)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.with_name(path.name + TEMPORARY).unlink()
        raise ValueError(f"{path} cannot be written ({reason(error)}): give another --log-dir") from error


def _earlier_starts(path: Path) -> list[Any]:
    if not path.exists():
        return []
    try:
        return list(json.loads(path.read_text())["starts"])
    except (ValueError, KeyError, TypeError):
        return []  # a file that is not ours: the new one replaces it
