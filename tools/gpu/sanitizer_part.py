"""The kernels under a tool that watches every access: compute-sanitizer, on buffers of exactly the tensors' sizes.

A program without torch (kernels.cu) is compiled with the kernels, so that the tool has little else to watch. Four tools:
accesses outside of an allocation or misaligned, races in shared memory, reads of what was never written, barriers that
not all threads reach. Without a GPU the same program runs on the CPU under the compiler's address and
undefined-behaviour sanitizers, with blocks of threads as tests/cuda_on_cpu.h plays them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from gpu.part import Outcome, Settings, Skipped
from megatron_lite.ops import build, toolchain

HERE = Path(__file__).resolve().parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def run(settings: Settings, outcome: Outcome) -> None:
    """Compile the program and run it plainly and under each tool."""
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        if not settings.on_gpu:
            on_cpu(settings, outcome, Path(folder))
            return
        program = compile_for_gpu(Path(folder))
        done = execute([program], settings)
        outcome.check(done.returncode == 0, f"plainly: {last_line(done)}")
        tool = find_sanitizer()
        if tool is None:
            outcome.skip("compute-sanitizer is not installed ($CUDA_HOME/bin, PATH, /usr/local/cuda/bin)")
            return
        for name in TOOLS:
            if settings.time_is_short():
                outcome.skip(f"{name}: the time was over")
                continue
            done = execute([tool, "--tool", name, "--error-exitcode", "9", program], settings)
            outcome.check(done.returncode == 0, f"{name}: {last_line(done)}")
            if done.returncode != 0:
                outcome.numbers[name] = (done.stdout + done.stderr)[-4000:]


def compile_for_gpu(folder: Path) -> Path:
    """The program for this card, with line numbers."""
    nvcc, sources = toolchain.find_nvcc(os.environ), build.source_directory()
    if nvcc is None or sources is None:
        raise Skipped("nvcc is not installed ($CUDA_HOME/bin, PATH, /usr/local/cuda/bin)")
    major, minor = torch.cuda.get_device_capability()
    compiler = toolchain.find_compiler(os.environ)

    def compile_one(source: Path) -> Path:
        out = folder / f"{source.name}.o"
        command = build.nvcc_command(nvcc, source, out, (f"{major}{minor}",), compiler)
        toolchain.run([*command, "-lineinfo"])
        return out

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_one, [HERE / "kernels.cu", *(sources / name for name in build.CUDA_SOURCES)]))
    toolchain.run([nvcc, "-ccbin", compiler[0], *objects, "-o", folder / "kernels"])
    return folder / "kernels"


def on_cpu(settings: Settings, outcome: Outcome, folder: Path) -> None:
    """The program on the CPU, under the compiler's sanitizers."""
    sources, tests = build.source_directory(), HERE.parents[1] / "tests"
    if sources is None or not (tests / "cuda_on_cpu.h").is_file():
        raise Skipped("tests/cuda_on_cpu.h is not here: it plays a grid of threads on the CPU")
    try:
        compiler = toolchain.find_compiler(os.environ)
    except toolchain.BuildError as error:
        raise Skipped(str(error)) from None
    flags = [
        "-std=c++20",
        "-O1",
        "-g1",
        "-ffp-contract=off",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ]

    def compile_one(source: Path) -> Path:
        out = folder / f"{source.name}.o"
        toolchain.run([*compiler, *flags, "-I", tests, "-x", "c++", "-c", source, "-o", out])
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, [HERE / "kernels.cu", *(sources / name for name in build.CUDA_SOURCES)]))
    toolchain.run([*compiler, *flags, *objects, "-o", folder / "kernels"])
    done = execute([folder / "kernels"], settings)
    outcome.check(done.returncode == 0, f"address and undefined-behaviour sanitizers: {last_line(done)}")


def find_sanitizer() -> str | None:
    """compute-sanitizer, beside nvcc or on the path."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for place in (*(f"{home}/bin" for home in homes), None, "/usr/local/cuda/bin"):
        if (found := shutil.which("compute-sanitizer", path=place)) is not None:
            return found
    return None


def execute(command: Sequence[str | Path], settings: Settings) -> subprocess.CompletedProcess[str]:
    """Run to the end, within the part's time."""
    text = [str(word) for word in command]
    return subprocess.run(text, check=False, capture_output=True, text=True, timeout=settings.seconds)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """What a program had to say at the end."""
    lines = (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"
