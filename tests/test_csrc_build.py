"""Building and finding the kernels: killed builds, bad compilers, shared directories, installations without a compiler.

What a compiler would take minutes for is tested with a stand-in that writes empty files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from kernel_cases import need_kernels

from megatron_lite.ops import build, library, toolchain

HERE = Path(__file__).resolve().parent.parent
STAND_IN = """#!/bin/sh
# a compiler that answers what version it is, takes {seconds} s for a file, and writes an empty one
for word in "$@"; do
  [ "$word" = "-E" ] && echo '#define __GNUC__ 99' && exit 0
done
sleep {seconds}
{failure}
while [ $# -gt 0 ]; do
  [ "$1" = "-o" ] && : > "$2"
  shift
done
"""


def stand_in(directory: Path, seconds: float = 0, failure: str = "") -> dict[str, str]:
    """An environment whose compiler is the stand-in."""
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / "compiler"
    script.write_text(STAND_IN.format(seconds=seconds, failure=failure))
    script.chmod(0o755)
    return {**os.environ, "CXX": str(script)}


def start_build(root: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron_lite.ops.build", "--output", str(root)]
    return subprocess.Popen(
        command,
        cwd=HERE,
        env=environment,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def left_over(root: Path) -> list[str]:
    return sorted(p.name for p in root.glob(".*"))


def test_a_killed_build_is_in_nobodys_way(tmp_path):
    """SIGKILL in the middle: nothing is found, nothing hangs, the next build works and sweeps away what is old."""
    root = tmp_path / "builds"
    killed = start_build(root, stand_in(tmp_path / "slow", seconds=60))
    deadline = time.monotonic() + 60
    while not left_over(root):
        assert time.monotonic() < deadline and killed.poll() is None
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert library.find("cpu", [root]) == (None, f"they have not been built; {library.HOW_TO_BUILD}")
    began = time.monotonic()
    second = start_build(root, stand_in(tmp_path / "fast"))
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 0, output
    assert time.monotonic() - began < 30
    assert library.find("cpu", [root])[0] is not None
    assert left_over(root) != []  # the killed one's directory is recent: it could be a build that runs
    for path in root.glob(".building-*"):
        for inside in [*path.rglob("*"), path]:
            os.utime(inside, (0, 0))
    build.sweep(root)
    assert left_over(root) == []


def test_builds_at_once_do_not_disturb_each_other(tmp_path):
    """Four at a time into one directory: each succeeds, one complete build is there."""
    root, environment = tmp_path / "builds", stand_in(tmp_path, seconds=0.2)
    running = [start_build(root, environment) for _ in range(4)]
    for process in running:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    assert len(list(root.iterdir())) == 1 and left_over(root) == []
    assert library.find("cpu", [root])[0] is not None and library.find("index", [root])[0] is not None


def test_a_complete_build_is_not_repeated(tmp_path):
    """The second call returns at once; force builds again."""
    environment, said = stand_in(tmp_path), []
    where, outcome = build.build(tmp_path / "b", environment=environment, say=said.append)
    assert said == ["building cpu ...", "building index ...", "building cuda ..."]  # it takes minutes
    assert where is not None and outcome["cpu"] == outcome["index"] == "built"
    first = (where / "stamp.json").stat().st_mtime_ns
    assert build.build(tmp_path / "b", environment=environment, say=said.append) == (where, outcome) and len(said) == 3
    assert (where / "stamp.json").stat().st_mtime_ns == first
    assert build.build(tmp_path / "b", environment=environment, force=True)[0] == where
    assert (where / "stamp.json").stat().st_mtime_ns > first and left_over(where.parent) == []


def test_bad_compilers_are_messages(tmp_path):
    """A compiler that does not exist, none at all, and one that fails: the reason is said, nothing stays behind."""
    root = tmp_path / "b"
    where, outcome = build.build(root, environment={"CXX": "/no/such/compiler", "PATH": os.environ["PATH"]})
    assert where is None and outcome["cpu"] == "the compiler named by CXX, '/no/such/compiler', does not exist"
    where, outcome = build.build(root, environment={"PATH": str(tmp_path)})
    assert where is None and outcome["cpu"] == "no C++ compiler (c++, g++ or clang++) on PATH"
    where, outcome = build.build(root, environment=stand_in(tmp_path, failure="echo out of luck >&2; exit 3"))
    assert where is None and "code 3" in outcome["cpu"] and "out of luck" in outcome["cpu"]
    assert not root.exists() or list(root.iterdir()) == []
    failed = start_build(root, {**os.environ, "CXX": "/no/such/compiler"})
    output, _ = failed.communicate(timeout=60)
    assert failed.returncode == 1 and "does not exist" in output and "Traceback" not in output


def test_cuda_says_why_not(tmp_path):
    """A torch without CUDA, no nvcc, and an nvcc of another CUDA: three reasons; none of them fails the rest."""
    where, outcome = build.build(tmp_path / "b", environment=stand_in(tmp_path))
    if torch.version.cuda is None:
        assert where is not None and outcome["cuda"].endswith("is built without CUDA")
    assert library.find("cuda", [tmp_path / "b"])[0] is None
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 99.1, V99.1.2'\n")
    nvcc.chmod(0o755)
    environment = {"CUDA_HOME": str(tmp_path / "cuda"), "PATH": os.environ["PATH"]}
    assert toolchain.find_nvcc(environment) == nvcc
    sources = build.source_directory()
    assert sources is not None
    torch_ = toolchain.Torch("2.13.0+cu130", "13.0", tmp_path)
    builder = build.Builder(torch_, ["c++"], sources, tmp_path, tmp_path, environment)
    builder.attempt("cuda", builder.cuda)
    assert builder.outcome["cuda"] == "nvcc is of CUDA 99, torch of CUDA 13.0; they must have one major version"
    found = toolchain.find_nvcc({"CUDA_HOME": str(tmp_path / "nothing"), "PATH": str(tmp_path)})
    assert found in (None, Path("/usr/local/cuda/bin/nvcc"))


def fake_build(root: Path, torch_version: str, sources: str = "", **changes: object) -> Path:
    """A directory that looks like a build."""
    directory = build.source_directory()
    assert directory is not None
    digest = sources or build.source_digest(directory)
    key = build.directory_key(toolchain.Torch(torch_version, None, root), "gcc12", digest)
    path = root / key
    path.mkdir(parents=True)
    stamp = {
        "torch": torch_version,
        "cuda": None,
        "machine": os.uname().machine,
        "sources": digest,
        "outcome": {"cpu": "built"},
    }
    (path / "stamp.json").write_text(json.dumps({**stamp, **changes}))
    (path / library.FILES["cpu"]).touch()
    return path


def test_versions_of_torch_share_a_directory(tmp_path, monkeypatch):
    """An older torch's build serves (stable ABI), the newest of those first; a newer torch's does not."""
    monkeypatch.setattr(library, "torch_versions", lambda: ("2.12.1", None))
    newer = fake_build(tmp_path, "2.13.0+cpu")
    path, reason = library.find("cpu", [tmp_path])
    assert path is None and "built with torch 2.13.0+cpu, this is 2.12.1" in reason and library.HOW_TO_BUILD in reason
    older = fake_build(tmp_path, "2.11.0")
    assert library.find("cpu", [tmp_path])[0] == older / library.FILES["cpu"]
    same = fake_build(tmp_path, "2.12.0")
    assert library.find("cpu", [tmp_path])[0] == same / library.FILES["cpu"]
    assert len({newer.name, older.name, same.name}) == 3


def test_builds_that_are_not_for_us(tmp_path):
    """Changed sources, another machine, a stamp that is no stamp, a file that is gone: each is a reason."""
    for changes, reason in (
        ({"sources": "0123456789ab"}, "the sources have changed"),
        ({"machine": "sparc"}, "built for sparc"),
        ({"outcome": {"cpu": "the compiler had a bad day"}}, "it was not built: the compiler had a bad day"),
        ({"torch": None}, "they have not been built"),
    ):
        root = tmp_path / reason.replace(" ", "_").replace(":", "")
        fake_build(root, torch.__version__, **changes)
        path, text = library.find("cpu", [root])
        assert path is None and reason in text, text
    gone = fake_build(tmp_path / "gone", torch.__version__)
    (gone / library.FILES["cpu"]).unlink()
    assert "there is no libmegatron_lite_cpu.so in it" in library.find("cpu", [gone.parent])[1]
    assert library.find("index", [fake_build(tmp_path / "i", torch.__version__).parent])[0] is None


def test_where_a_build_goes(tmp_path, monkeypatch):
    """Into the package; where that is read-only, into the user's cache, which is searched too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.default_root() == build.PACKAGE / "_compiled"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert build.default_root() == tmp_path / "megatron_lite" / "compiled"
    assert library.roots() == [build.PACKAGE / "_compiled", tmp_path / "megatron_lite" / "compiled"]


def test_baseline_code_stays_baseline():
    """AVX registers appear only in the functions that are chosen at run time."""
    need_kernels()
    if (objdump := shutil.which("objdump")) is None or os.uname().machine != "x86_64":
        pytest.skip("no objdump, or another architecture")
    path, _ = library.find("cpu")
    assert path is not None
    listing = subprocess.run(
        [objdump, "-d", "-C", "--no-show-raw-insn", path], capture_output=True, text=True, check=True
    )
    function, wide, versions = "", set(), set()
    for line in listing.stdout.splitlines():
        if head := re.match(r"^[0-9a-f]+ <(.*)>:$", line):
            function = head.group(1)
        elif "%ymm" in line or "%zmm" in line:
            wide.add(function)
        if found := re.search(r"run_avx\w+", function):
            versions.add(found.group(0))
    assert versions == {"run_avx2", "run_avx512"} and wide
    assert not [name for name in wide if "run_avx" not in name]


def make_environment(root: Path) -> Path:
    """A virtual environment that sees this one's packages, and our package only if it is installed there."""
    venv.create(root, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(root), "platbase": str(root)}))
    site.mkdir(parents=True, exist_ok=True)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "megatron" not in entry.name and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    return root / "bin" / "python"


def copy_of_the_tree(to: Path) -> Path:
    """What a checkout has, without builds."""
    to.mkdir(parents=True)
    ignore = shutil.ignore_patterns("_compiled", "__pycache__", "*.so", "build", "*.egg-info")
    for name in ("megatron_lite", "csrc"):
        shutil.copytree(HERE / name, to / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md"):
        if (HERE / name).exists():
            shutil.copy(HERE / name, to / name)
    return to


USE = """
import sys, warnings, torch
warnings.simplefilter("default")
from megatron_lite.ops.rms_norm import rms_norm, reference
from megatron_lite.ops.swiglu import swiglu
from megatron_lite.ops.adamw import adamw_
from megatron_lite.data import megatron_order
import megatron_lite
x, w = torch.randn(3, 8), torch.ones(8)
assert torch.equal(rms_norm(x, w, 1e-5), reference(x, w, 1e-5))
rms_norm(x[:2], w, 1e-5), swiglu(x, x)
adamw_(w, w, w, w, w.clone(), lr=1., beta1=.9, beta2=.9, eps=1., weight_decay=0., step=1)
print(megatron_lite.__file__)
"""


def quietly(
    command: list[str | Path], directory: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command; its output and exit code."""
    return subprocess.run(
        command, check=False, env=environment, cwd=directory, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("editable", (False, True))
def test_installation_without_a_compiler(tmp_path, editable):
    """pip install with no compiler on PATH, in a path with spaces: it works elsewhere, with one notice that says how to build."""
    python = make_environment(tmp_path / "an environment")
    tree = copy_of_the_tree(tmp_path / "a tree")
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC", "PYTHONPATH")}
    environment |= {"PATH": str(empty), "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, *(["-e"] if editable else []), tree], env=environment, check=True, timeout=120, cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = quietly([python, "-c", USE], elsewhere, environment)
    assert done.returncode == 0, done.stderr
    assert str(tree if editable else tmp_path / "an environment") in done.stdout
    assert done.stderr.count("FallbackNotice") == 1 and library.HOW_TO_BUILD in done.stderr, done.stderr
    if editable:
        return  # where the sources are is no question then
    script = python.with_name("megatron-lite")
    doctor = quietly([script, "doctor", "--json"], elsewhere, environment)
    assert doctor.returncode == 0, doctor.stderr
    found = json.loads(doctor.stdout)
    assert found["tools"]["compiler"].startswith("no C++ compiler") and not found["libraries"]["cpu"]["built"]
    assert next(r for r in found["ops"] if r["op"] == "rms_norm" and r["selected"])["kernel"] == "reference"
    # an installation has the sources, so that it can be built later, wherever it is
    late = quietly(
        [python, "-m", "megatron_lite.ops.build"], elsewhere, {**environment, **stand_in(tmp_path), "PYTHONPATH": ""}
    )
    assert late.returncode == 0, late.stdout + late.stderr
    # the stand-in's library is an empty file: it cannot be loaded, which is one more reason, and no crash
    done = quietly([python, "-c", USE], elsewhere, environment)
    assert done.returncode == 0 and "could not be loaded" in done.stderr, done.stderr


def test_our_sources_are_built_where_a_compiler_is():
    """Otherwise the tests of what they hold would be left out unnoticed. Already there after tools/test.sh."""
    try:
        toolchain.find_compiler(os.environ)
    except toolchain.BuildError as error:
        pytest.skip(str(error))
    _, outcome = build.build(build.default_root(), only=("cpu", "index"))
    assert outcome["cpu"] == outcome["index"] == "built"


# Without the headers that take half a minute.
TINY_MODULE = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_index", "small", -1, nullptr};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__index() { return PyModule_Create(&module); }
"""


@pytest.mark.parametrize("source", [TINY_MODULE, pytest.param("", marks=pytest.mark.nightly)], ids=["tiny", "our own"])
def test_real_build_in_a_path_with_spaces(tmp_path, source, monkeypatch):
    """Compiled by the real compiler, linked and imported."""
    try:
        toolchain.find_compiler(os.environ)
    except toolchain.BuildError as error:
        pytest.skip(str(error))
    if source:
        (tmp_path / "the sources").mkdir()
        (tmp_path / "the sources" / "tiny.cpp").write_text(source)
        monkeypatch.setattr(build, "source_directory", lambda: tmp_path / "the sources")
        monkeypatch.setattr(build, "INDEX_SOURCES", ("tiny.cpp",))
    where, outcome = build.build(tmp_path / "with space", only=("index",))
    assert where is not None, outcome
    what = "_index.__doc__" if source else "_index.greedy([1.0], 3, 0, [0], None).tolist()"
    code = f"import sys; sys.path.insert(0, {str(where)!r}); import _index; print({what})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ("small" if source else "[0, 0, 0]")
