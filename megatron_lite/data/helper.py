"""The compiled index arithmetic, where it has been built."""

from __future__ import annotations

from typing import Any

from megatron_lite.ops.library import index_module


def index_helper() -> Any:
    """The extension module of csrc/data_index.cpp, or None; callers have the same in Python and NumPy."""
    return index_module()[0]
