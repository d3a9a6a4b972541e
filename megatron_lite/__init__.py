"""megatron_lite: train dense transformers over tensor, pipeline, context and sharded data parallelism.

Every layout of the same run computes the same numbers; see docs/ and DESIGN notes in docs/decisions.md.
This file imports nothing heavy, so that ``megatron-lite --help`` does not pay for an import of torch.
"""

__version__ = "0.1.0"
