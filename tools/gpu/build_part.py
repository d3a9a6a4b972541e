"""The kernels are compiled for this machine's card, by the installation's own build, and loaded."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from gpu.part import Outcome, Settings, Skipped
from megatron_lite.ops import build, library, toolchain

OPS = (
    *("swiglu_forward", "swiglu_backward", "rms_norm_forward", "rms_norm_backward"),
    *("adamw_", "philox_normal", "philox_keep"),
)


def run(settings: Settings, outcome: Outcome) -> None:
    """Build, load, and look up that every op has an implementation for the device."""
    kind = settings.device
    architectures = build.DEFAULT_ARCHITECTURES
    if settings.on_gpu:
        nvcc = toolchain.find_nvcc(os.environ)
        if nvcc is None:
            raise Skipped("nvcc is not installed ($CUDA_HOME/bin, PATH, /usr/local/cuda/bin): ops run on plain PyTorch")
        outcome.say(toolchain.run([nvcc, "--version"]).strip().splitlines()[-1])
        major, minor = torch.cuda.get_device_capability()
        architectures = (f"{major}{minor}",)
    began = time.monotonic()
    where, results = (
        build_for(architectures) if settings.on_gpu else build.build(build.default_root(), only=("cpu", "index"))
    )
    seconds = time.monotonic() - began
    outcome.numbers.update(seconds=seconds, architectures=list(architectures), results=results)
    wanted = ("cpu", "index", "cuda") if settings.on_gpu else ("cpu", "index")
    for name, result in results.items():
        if name not in wanted:
            continue
        outcome.check(
            result == "built",
            f"library {name}: {result} ({seconds:.0f} s)" if result == "built" else f"library {name}: {result}",
        )
    outcome.say(f"in {Path(where).name}" if where is not None else "nothing was built")
    reason = library.missing(kind)
    outcome.check(
        reason is None, f"the {kind} library is loaded" if reason is None else f"the {kind} library: {reason}"
    )
    key = "CUDA" if settings.on_gpu else "CPU"
    lacking = [op for op in OPS if not torch._C._dispatch_has_kernel_for_dispatch_key(f"megatron_lite::{op}", key)]
    outcome.check(
        not lacking, f"{len(OPS) - len(lacking)} of {len(OPS)} ops have a kernel for {key} {lacking or ''}".rstrip()
    )


def build_for(architectures: tuple[str, ...]) -> tuple[Path | None, dict[str, str]]:
    """Build everything for these architectures, unless what is there has code for them already."""
    path, _ = library.find("cuda")
    if path is not None:
        stamp = build.read_stamp(path.parent)
        if stamp is not None and set(architectures) <= set(stamp.get("architectures", ())):
            return path.parent, {name: str(text) for name, text in stamp["outcome"].items()}
    return build.build(build.default_root(), architectures=architectures)
