"""The compiled index arithmetic, where it has been built."""

from __future__ import annotations

import importlib
from typing import Any


def index_helper() -> Any:
    """The extension module ``megatron_lite.data._index``, or None; callers have the same in NumPy."""
    try:
        return importlib.import_module("megatron_lite.data._index")
    except ImportError:
        return None
