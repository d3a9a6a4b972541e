"""``python -m megatron_lite``: the same program as the console script ``megatron-lite``.

Subcommands that compute read their configuration first and set the variables of CUDA, NCCL and the allocator from it
(:mod:`megatron_lite.cli.environment`) before torch is imported; this file therefore imports nothing that does.
"""

from __future__ import annotations

import sys

from megatron_lite.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
