"""Variables of CUDA and of the allocator that follow from a configuration.

They are read once, when those libraries start, so they have to be in the environment before torch is imported. A
variable that is already set is left alone: what a person sets wins. What was set is returned, to be printed and stored
in ``run.json``. These are other libraries' variables; we have none of our own.

NCCL is left to choose its algorithms: Tree exists for all-reduce only and makes the collectives of ZeRO fail.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.config.load import load
from megatron_lite.config.problem import ConfigError
from megatron_lite.config.schema import RunConfig


def gpu_visible(environ: Mapping[str, str]) -> bool:
    """Whether this process can see an NVIDIA GPU, as far as can be told without asking CUDA."""
    return Path("/dev/nvidiactl").exists() and environ.get("CUDA_VISIBLE_DEVICES") != ""


def variables(config: RunConfig[Any], gpu: bool) -> dict[str, str]:
    """Variable -> value that suits this configuration; none for a run on CPUs.

    Args:
        config: the run's.
        gpu: a GPU can be seen (decides what ``--device auto`` means).
    """
    device = config.parallel.device
    if device == "cpu" or (device == "auto" and not gpu):
        return {}
    found = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # buffers of many sizes without holes between them
    if config.parallel.tensor_model_parallel_size > 1:
        # One hardware queue: a collective that was launched first also runs first, beside the product launched after.
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if config.training.deterministic:
        found["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS repeats its sums only with a workspace of its own
    return found


def apply(wanted: Mapping[str, str], environ: MutableMapping[str, str]) -> dict[str, str]:
    """Set what is not set yet; returns what was set."""
    new = {name: value for name, value in wanted.items() if name not in environ}
    if "PYTORCH_CUDA_ALLOC_CONF" in environ:  # the same option under its older name
        new.pop("PYTORCH_ALLOC_CONF", None)
    environ.update(new)
    return new


def apply_early(argv: Sequence[str], environ: MutableMapping[str, str]) -> dict[str, str]:
    """Set the variables of a command line before anything imports torch; a team's model does, to give its options.

    Errors of the command line are left to the reading that follows.
    """
    plain = [token for token in argv if token not in ("--help", "-h")]  # the help shows a team's options: not here
    with contextlib.suppress(ConfigError):
        return apply(variables(load(plain, without_model=True).config, gpu_visible(environ)), environ)
    return {}
