"""From token files to batches: reading, ordering, blending, loading. NumPy only, but for ``batch`` and ``loader``."""
