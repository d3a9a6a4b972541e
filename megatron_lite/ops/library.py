"""Finding and loading the compiled kernels, once, by a function.

Importing this file loads nothing, and nothing is compiled here (build.py does that ahead of time). :func:`missing` loads
a library the first time it is asked about and remembers the answer: None when it is there, else the reason in words. A
process without a compiler, without CUDA, or with a library of another build runs on the plain path with that reason as
its notice.

A build is used when it is for this Python and machine, was made with this torch or an earlier one (that is what the
stable ABI promises), and its sources are those that lie beside the package. A library whose sources have changed is not
loaded: its signatures could be others.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_lite.ops import build, toolchain

HOW_TO_BUILD = "build them with: python -m megatron_lite.ops.build"
FILES = {"cpu": "libmegatron_lite_cpu.so", "cuda": "libmegatron_lite_cuda.so"}


def roots() -> list[Path]:
    """Where builds are looked for: in the package, then in the user's cache."""
    return [build.PACKAGE / "_compiled", build.user_root()]


def candidates(where: Sequence[Path]) -> list[tuple[Path, dict[str, Any]]]:
    """Complete builds with their stamps, in the order of ``where``, newest torch first."""
    found = []
    for root in where:
        stamped = [(path, build.read_stamp(path)) for path in root.glob("torch*")]
        known = [(path, stamp) for path, stamp in stamped if stamp is not None]
        found += sorted(known, key=lambda entry: (toolchain.release(entry[1]["torch"]), entry[0].name), reverse=True)
    return found


def unfit(stamp: dict[str, Any], directory: Path, torch_version: str, cuda: str | None, kind: str) -> str | None:
    """Why a build cannot serve this process, or None."""
    if stamp["machine"] != platform.machine():
        return f"built for {stamp['machine']}, this is {platform.machine()}"
    if toolchain.release(stamp["torch"]) > toolchain.release(torch_version):
        return f"built with torch {stamp['torch']}, this is {torch_version}"
    if kind == "cuda" and (stamp.get("cuda") or "").split(".")[0] != (cuda or "").split(".")[0]:
        return f"built for CUDA {stamp.get('cuda')}, this torch is of CUDA {cuda}"
    sources = build.source_directory()
    if sources is not None and build.source_digest(sources) != stamp["sources"]:
        return "the sources have changed since it was built"
    if stamp["outcome"].get(kind) != "built":
        return "it was not built: " + str(stamp["outcome"].get(kind, "not asked for")).splitlines()[0]
    name = file_name(kind)
    return None if (directory / name).is_file() else f"there is no {name} in it"


def file_name(kind: str) -> str:
    """The file of a library; that of "index" holds the Python it is for."""
    return FILES[kind] if kind in FILES else "_index" + sysconfig.get_config_var("EXT_SUFFIX")


def torch_versions() -> tuple[str, str | None]:
    """torch's version and the CUDA release it was built with; torch is not imported for it unless it already is."""
    if "torch" in sys.modules:
        import torch

        return torch.__version__, torch.version.cuda
    found = toolchain.find_torch()
    return found.version, found.cuda


def find(kind: str, where: Sequence[Path] | None = None) -> tuple[Path | None, str]:
    """The file of library ``kind`` ("cpu", "cuda" or "index") and "", or None and the reason."""
    where = roots() if where is None else where
    try:
        version, cuda = torch_versions()
    except toolchain.BuildError as error:
        return None, str(error)
    reasons: list[str] = []
    for directory, stamp in candidates(where):
        reason = unfit(stamp, directory, version, cuda, kind)
        if reason is None:
            return directory / file_name(kind), ""
        reasons.append(f"{directory}: {reason}")
    if reasons:
        return None, f"{reasons[0]}; {HOW_TO_BUILD}"
    return None, f"they have not been built; {HOW_TO_BUILD}"


@functools.cache
def missing(kind: str) -> str | None:
    """Why the library ``kind`` ("cpu" or "cuda") cannot be used, or None when it is loaded (this loads it)."""
    import torch

    path, reason = find(kind)
    if path is None:
        return reason
    if kind == "cuda" and (reason_cpu := missing("cpu")) is not None:  # the signatures are in the CPU library
        return reason_cpu
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return f"{path} could not be loaded: {error}"
    return None


@functools.cache
def index_module() -> tuple[ModuleType | None, str]:
    """The compiled data-index helpers and "", or None and the reason."""
    path, reason = find("index")
    if path is None:
        return None, reason
    try:
        spec = importlib.util.spec_from_file_location("_index", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module, ""
    except ImportError as error:
        return None, f"{path} could not be loaded: {error}"
