"""The compiled index helpers (csrc/data_index.cpp); importing this is an ImportError where they have not been built.

The callers have NumPy forms with identical results.
"""

from __future__ import annotations

from megatron_lite.ops.library import index_module

_compiled, _reason = index_module()
if _compiled is None:
    raise ImportError(_reason)

build_sample_index = _compiled.build_sample_index
blend_indices = _compiled.blend_indices
Permutation = _compiled.Permutation
Borders = _compiled.Borders
TextMeasures = _compiled.TextMeasures
MinHasher = _compiled.MinHasher
shared = _compiled.shared
