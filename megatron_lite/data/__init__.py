"""From token files to batches: reading, ordering, packing, blending, loading. NumPy only, but for ``batch`` and ``loader``."""
