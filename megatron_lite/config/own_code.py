"""A team's own code: modules that flags name, found in the working directory or among what is installed."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


def import_own(name: str) -> ModuleType:
    """Import a module with the working directory first on the path; it stays on the path, behind everything else.

    Raises:
        ValueError: there is none, or it cannot be imported; says why.
    """
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ValueError(f"no module {name} in {here} or among the installed packages") from error
        raise ValueError(f"module {name} was found, but it needs {error.name}, which is not installed") from error
    except SyntaxError as error:
        raise ValueError(f"module {name}: {error.filename}, line {error.lineno}: {error.msg}") from error
    except SystemExit as error:
        raise ValueError(f"module {name} ends the program when it is imported (exit code {error.code})") from error
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)


def own_digest(module: str, others: Iterable[str] = ()) -> str:
    """Digest of the source files of a module, the rest of its package and others, as far as they are loaded; ours not."""
    package = module.partition(".")[0]
    total = hashlib.sha256()
    for name in sorted({module, *others} | {name for name in sys.modules if name.partition(".")[0] == package}):
        source = getattr(sys.modules.get(name), "__file__", None)
        if source and source.endswith(".py") and not name.startswith("megatron_lite."):  # ours: see mesh.agreement
            total.update(name.encode() + b"\0" + hashlib.sha256(Path(source).read_bytes()).digest())
    return total.hexdigest()[:16]
