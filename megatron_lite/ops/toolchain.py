"""The tools that a build of the kernels uses, and the torch it is for: found, never imported.

All of this works without torch in ``sys.path`` (in pip's isolated build environments), and every failure is a
:class:`BuildError` whose text is what the user reads.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LEAST_TORCH = (2, 11)
TIMEOUT_SECONDS = 900


class BuildError(Exception):
    """A library cannot be built, for the reason in the text."""


@dataclass(frozen=True)
class Torch:
    """The torch to build against: its version, the CUDA release it was built with, where its files lie."""

    version: str
    cuda: str | None
    root: Path

    @property
    def release(self) -> tuple[int, int]:
        """(major, minor)."""
        return release(self.version)


def release(version: str) -> tuple[int, int]:
    """(2, 13) for "2.13.0+cpu"."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def find_torch() -> Torch:
    """The torch of this interpreter, without importing it; also from inside pip's isolated build environment.

    Raises:
        BuildError: when there is none, or it is too old.
    """
    places = []
    if (spec := importlib.util.find_spec("torch")) is not None and spec.origin is not None:
        places.append(Path(spec.origin).parent)
    # pip's isolation hides site-packages from sys.path; the interpreter still knows where they are
    places += [Path(sysconfig.get_path(kind)) / "torch" for kind in ("platlib", "purelib")]
    for root in places:
        if (root / "version.py").is_file() and (root / "include/torch/csrc/stable").is_dir():
            text = (root / "version.py").read_text()
            version = re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.MULTILINE)
            cuda = re.search(r"^cuda\b[^=]*= ['\"](.+?)['\"]", text, re.MULTILINE)
            assert version is not None
            found = Torch(version.group(1), cuda.group(1) if cuda else None, root)
            if found.release < LEAST_TORCH:
                raise BuildError(f"torch is {found.version}; the kernels need 2.11 or later")
            return found
    raise BuildError(f"no torch with headers in this environment ({sys.prefix})")


def find_compiler(environment: Mapping[str, str]) -> list[str]:
    """The C++ compiler: $CXX if set, else the first of c++, g++, clang++ on the path.

    Raises:
        BuildError: when there is none.
    """
    if command := environment.get("CXX", "").split():
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            raise BuildError(f"the compiler named by CXX, {command[0]!r}, does not exist")
        return command
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name, path=environment.get("PATH")):
            return [path]
    raise BuildError("no C++ compiler (c++, g++ or clang++) on PATH")


def compiler_version(compiler: Sequence[str]) -> str:
    """For instance "gcc12" or "clang17".

    Raises:
        BuildError: when the compiler does not run.
    """
    text = run([*compiler, "-dM", "-E", "-x", "c++", "/dev/null"])
    defined = dict(re.findall(r"^#define (\w+) (\S+)", text, re.MULTILINE))
    if "__clang_major__" in defined:
        return f"clang{defined['__clang_major__']}"
    return f"gcc{defined.get('__GNUC__', '')}"


def find_nvcc(environment: Mapping[str, str]) -> Path | None:
    """nvcc of $CUDA_HOME, on the path, or in /usr/local/cuda."""
    homes = [environment[name] for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    candidates = [Path(home) / "bin/nvcc" for home in homes]
    if found := shutil.which("nvcc", path=environment.get("PATH")):
        candidates.append(Path(found))
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((path for path in candidates if path.is_file()), None)


def run(command: Sequence[str | Path]) -> str:
    """Run a command; its output, or BuildError with the end of it."""
    text = [str(part) for part in command]
    try:
        done = subprocess.run(text, check=False, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{text[0]} could not be run: {error}") from error
    if done.returncode != 0:
        raise BuildError(
            f"{' '.join(text)}\nended with code {done.returncode}:\n{(done.stderr or done.stdout)[-3000:]}"
        )
    return done.stdout
