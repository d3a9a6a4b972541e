"""Finding and loading the compiled kernels, once, by a function.

Nothing is compiled here, and importing this file loads nothing. :func:`missing` loads a library the first time it is
asked about and remembers the answer: None when it is there, else the reason in words. A process without a compiler,
without CUDA, or with a library of another build runs on the plain path with that reason as its notice.
"""

from __future__ import annotations

import functools


@functools.cache
def missing(kind: str) -> str | None:
    """Why the library ``kind`` ("cpu" or "cuda") cannot be used, or None when it is loaded."""
    return "not built yet"
