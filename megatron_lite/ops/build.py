"""Compiling csrc/ ahead of time: ``python -m megatron_lite.ops.build``, and what setup.py calls.

Nothing is ever compiled at run time, so no rank waits for another one's compiler and no lock file exists that a killed
build could leave behind. A build happens in a temporary directory beside its destination and is renamed into place when
it is complete: readers see all of it or nothing, two builds at once do not disturb each other, and what a killed build
leaves is swept away by a later one. The destination's name holds the torch, Python, machine and compiler it is for and
a digest of the sources, so that two environments can share a directory and an outdated build is never loaded.

A library that cannot be built is a message, not an error: the program then runs on plain PyTorch. This file imports no
torch, so that it runs in pip's isolated build environments too. Against the stable ABI, a binary built with one torch
serves that one and later ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lite.ops.toolchain import BuildError, Torch, compiler_version, find_compiler, find_nvcc, find_torch, run

PACKAGE = Path(__file__).resolve().parent.parent
TARGET_ABI = "0x020b000000000000"  # the oldest torch whose stable ABI the sources use: 2.11
DEFAULT_ARCHITECTURES = ("80", "90")
CPU_SOURCES = ("library.cpp", "rms_norm_cpu.cpp", "swiglu_cpu.cpp", "adamw_cpu.cpp", "philox_cpu.cpp")
CUDA_SOURCES = ("rms_norm_cuda.cu", "swiglu_cuda.cu", "adamw_cuda.cu", "philox_cuda.cu")
CUDA_HOST_SOURCES = ("cuda_host.cpp",)
INDEX_SOURCES = ("data_index.cpp", "text_measures.cpp", "minhash.cpp", "windows.cpp", "segments.cpp")
# One rounding per operation (no contraction), on every instruction set; errno and traps would forbid vector code.
CXX_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wall", "-fvisibility=hidden"),
)
STABLE_ONLY = f"-DTORCH_TARGET_VERSION={TARGET_ABI}"  # makes any header of torch that is not of the stable ABI an error
NVCC_FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-Xcompiler", "-fPIC", "-Xcompiler", "-fvisibility=hidden")
ABANDONED_SECONDS = 3600


def source_directory() -> Path | None:
    """Where the kernel sources lie: in a checkout beside the package, in an installation inside it."""
    for place in (PACKAGE / "csrc", PACKAGE.parent / "csrc"):
        if (place / "library.cpp").is_file():
            return place
    return None


def source_digest(directory: Path) -> str:
    """A digest of all sources and of the flags."""
    digest = hashlib.sha256(repr((CXX_FLAGS, STABLE_ONLY, NVCC_FLAGS)).encode())
    for path in sorted(directory.rglob("*")):
        if path.suffix in (".cpp", ".cu", ".h"):
            digest.update(path.relative_to(directory).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def directory_key(torch: Torch, compiler: str, digest: str) -> str:
    """The name of a build's directory; library.py reads its parts."""
    major, minor = torch.release
    flavour = f"cu{torch.cuda}" if torch.cuda else "cpu"
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"torch{major}.{minor}-{flavour}-{python}-{platform.machine()}-{compiler}-{digest}"


def nvcc_command(
    nvcc: Path, source: Path, out: Path, architectures: Sequence[str], compiler: Sequence[str] = ()
) -> list[str | Path]:
    """The command that compiles one CUDA source to an object: code for each architecture, and PTX of the newest."""
    host: list[str | Path] = ["-ccbin", compiler[0]] if compiler else []
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    codes.append(f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}")
    return [nvcc, *host, *NVCC_FLAGS, *codes, "-c", source, "-o", out]


def cxx_command(compiler: Sequence[str], includes: Sequence[Path], source: Path, out: Path) -> list[str | Path]:
    """The command that compiles one C++ source to an object."""
    search: list[str | Path] = [part for path in includes for part in ("-isystem", path)]
    limits = [] if source.name in INDEX_SOURCES else [STABLE_ONLY]
    return [*compiler, *CXX_FLAGS, *limits, *search, "-c", source, "-o", out]


@dataclass
class Builder:
    """One build: the tools, where it writes, and what became of each library."""

    torch: Torch
    compiler: list[str]
    sources: Path
    work: Path  # the temporary directory; libraries end up in it
    objects: Path
    environment: Mapping[str, str]
    architectures: Sequence[str] = DEFAULT_ARCHITECTURES
    say: Callable[[str], None] = print
    outcome: dict[str, str] = field(default_factory=dict)  # library: "built" or the reason why not

    def attempt(self, name: str, build: Callable[[], None]) -> None:
        """Build one library, and note what became of it."""
        self.say(f"building {name} ...")
        try:
            build()
            self.outcome[name] = "built"
        except BuildError as error:
            self.outcome[name] = str(error)

    def compile(self, names: Sequence[str], includes: Sequence[Path]) -> list[Path]:
        """Compile C++ sources, as many at a time as there are cores."""
        outs = [self.objects / f"{name}.o" for name in names]
        commands = [
            cxx_command(self.compiler, includes, self.sources / name, out)
            for name, out in zip(names, outs, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, commands))
        return outs

    def link(self, objects: Sequence[Path], out: str, libraries: Sequence[str] = (), nvcc: Path | None = None) -> None:
        """Link a shared library, with nvcc where device code is in it (its own static CUDA run-time library then).

        torch's libraries are found by their names at load time, when they are in memory already.
        """
        linker: list[str | Path] = [*self.compiler] if nvcc is None else [nvcc, "-ccbin", self.compiler[0]]
        search = ["-L" + str(self.torch.root / "lib"), *(f"-l{name}" for name in libraries)]
        run([*linker, "-shared", *objects, "-o", self.work / out, *search])

    def cpu(self) -> None:
        """The CPU kernels and the signatures of all kernels."""
        objects = self.compile(CPU_SOURCES, [self.torch.root / "include"])
        self.link(objects, "libmegatron_lite_cpu.so", ["torch_cpu", "torch", "c10"])

    def index(self) -> None:
        """The data-index helpers, a Python extension module (pybind11's headers come with torch)."""
        headers = Path(sysconfig.get_path("include"))
        if not (headers / "Python.h").is_file():
            raise BuildError(f"the headers of this Python are not installed (no {headers / 'Python.h'})")
        objects = self.compile(INDEX_SOURCES, [headers, self.torch.root / "include"])
        self.link(objects, "_index" + sysconfig.get_config_var("EXT_SUFFIX"))

    def cuda(self) -> None:
        """The CUDA kernels: nvcc sees no header of torch."""
        if self.torch.cuda is None:
            raise BuildError(f"torch {self.torch.version} is built without CUDA")
        nvcc = find_nvcc(self.environment)
        if nvcc is None:
            raise BuildError("nvcc was not found ($CUDA_HOME/bin, PATH, /usr/local/cuda/bin)")
        version = re.search(r"release (\d+)\.", run([nvcc, "--version"]))
        if version is None or version.group(1) != self.torch.cuda.split(".")[0]:
            have = version.group(1) if version else "unknown"
            raise BuildError(
                f"nvcc is of CUDA {have}, torch of CUDA {self.torch.cuda}; they must have one major version"
            )
        outs = [self.objects / f"{name}.o" for name in CUDA_SOURCES]
        commands = [
            nvcc_command(nvcc, self.sources / name, out, self.architectures, self.compiler)
            for name, out in zip(CUDA_SOURCES, outs, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, commands))
        outs += self.compile(CUDA_HOST_SOURCES, [self.torch.root / "include"])
        self.link(outs, "libmegatron_lite_cuda.so", ["torch_cuda", "torch_cpu", "c10"], nvcc)


def build(
    root: Path,
    *,
    force: bool = False,
    only: Sequence[str] = ("cpu", "index", "cuda"),
    architectures: Sequence[str] = DEFAULT_ARCHITECTURES,
    environment: Mapping[str, str] = os.environ,
    say: Callable[[str], None] = print,
) -> tuple[Path | None, dict[str, str]]:
    """Build the libraries into a directory of their own under ``root``; ``say`` prints a line as each is begun.

    Returns:
        the directory (None when nothing could be built) and, for each of "cpu", "index" and "cuda", "built" or the
        reason why not.
    """
    try:
        torch = find_torch()
        compiler = find_compiler(environment)
        sources = source_directory()
        if sources is None:
            raise BuildError(f"the kernel sources are not beside the package ({PACKAGE})")
        key = directory_key(torch, compiler_version(compiler), source_digest(sources))
        final = root / key
        if not force and (known := read_stamp(final)) is not None and known.get("architectures") == list(architectures):
            needed = [name for name in only if name != "cuda" or torch.cuda is not None]
            if all(known["outcome"].get(name) == "built" for name in needed):
                return final, dict(known["outcome"])
        root.mkdir(parents=True, exist_ok=True)
        sweep(root)
        work = Path(tempfile.mkdtemp(prefix=".building-", dir=root))
    except (BuildError, OSError) as error:
        return None, dict.fromkeys(only, str(error))
    try:
        objects = work / "objects"
        objects.mkdir()
        builder = Builder(torch, compiler, sources, work, objects, environment, architectures, say)
        for name in only:
            builder.attempt(name, {"cpu": builder.cpu, "index": builder.index, "cuda": builder.cuda}[name])
        shutil.rmtree(objects)
        if "built" not in builder.outcome.values():
            return None, builder.outcome
        stamp = {
            "torch": torch.version,
            "cuda": torch.cuda,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "compiler": " ".join(compiler),
            "sources": source_digest(sources),
            "architectures": list(architectures),
            "outcome": builder.outcome,
        }
        (work / "stamp.json").write_text(json.dumps(stamp, indent=1) + "\n")
        work.chmod(0o755)  # mkdtemp makes it private
        publish(work, final)
        return final, builder.outcome
    finally:
        shutil.rmtree(work, ignore_errors=True)


def read_stamp(directory: Path) -> dict[str, Any] | None:
    """What a complete build says about itself, or None when it is no build of ours."""
    try:
        stamp = json.loads((directory / "stamp.json").read_text())
        texts = all(isinstance(stamp[key], str) for key in ("torch", "machine", "sources"))
        return stamp if texts and isinstance(stamp["outcome"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def publish(work: Path, final: Path) -> None:
    """Put a complete build in its place. Whatever another build puts there meanwhile is as good as ours."""
    for _ in range(5):
        try:
            os.rename(work, final)
            return
        except OSError:  # there is one already
            aside = Path(tempfile.mkdtemp(prefix=".old-", dir=final.parent))
            try:
                os.rename(final, aside / "build")
            except OSError:
                pass  # another process was faster
            shutil.rmtree(aside, ignore_errors=True)
    raise OSError(f"{final} could not be replaced")


def sweep(root: Path) -> None:
    """Remove what builds that were killed have left: temporary directories that nobody has written to for an hour."""
    for path in [*root.glob(".building-*"), *root.glob(".old-*")]:
        try:
            age = time.time() - max([path.stat().st_mtime, *(p.stat().st_mtime for p in path.rglob("*"))])
        except OSError:
            continue
        if age > ABANDONED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def remove_outdated(root: Path, keep: Path) -> None:
    """Remove builds of other sources for the same torch, Python, machine and compiler. Not for a shared directory."""
    for path in root.glob(keep.name.rpartition("-")[0] + "-*"):
        if path != keep:
            shutil.rmtree(path, ignore_errors=True)


def default_root() -> Path:
    """Inside the package when that can be written to, else in the user's cache."""
    inside = PACKAGE / "_compiled"
    writable = inside if inside.exists() else PACKAGE
    return inside if os.access(writable, os.W_OK) else user_root()


def user_root() -> Path:
    """The directory for builds in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "megatron_lite" / "compiled"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: build, print what became of each library; 0 if the CPU libraries are there."""
    parser = argparse.ArgumentParser("python -m megatron_lite.ops.build", description="Compile the kernels of csrc/.")
    parser.add_argument(
        "--output", type=Path, help="directory for builds (default: in the package, or the user's cache)"
    )
    parser.add_argument("--force", action="store_true", help="build even if an up-to-date build is there")
    parser.add_argument("--cuda-architectures", default=",".join(DEFAULT_ARCHITECTURES), help="for instance 80,90")
    args = parser.parse_args(argv)
    began = time.monotonic()

    def say(line: str) -> None:
        print(line, flush=True)

    architectures = [a.strip() for a in args.cuda_architectures.split(",") if a.strip()]
    where, outcome = build(args.output or default_root(), force=args.force, architectures=architectures, say=say)
    if where is not None and where.parent == PACKAGE / "_compiled":
        remove_outdated(where.parent, where)
    for name, text in outcome.items():
        print(f"{name:<6} {text}")
    print(f"{where or 'nothing was built'} ({time.monotonic() - began:.1f} s)")
    return 0 if outcome.get("cpu") == "built" and outcome.get("index") == "built" else 1


if __name__ == "__main__":
    sys.exit(main())
