#!/usr/bin/env python
"""Index a corpus: JSON lines in, ``PREFIX_text_document.bin`` and ``.idx`` out; see ``--help`` and docs/data.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_lite.cli.preprocess import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
