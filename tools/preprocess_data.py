#!/usr/bin/env python
"""Index a corpus: JSON lines in, ``PREFIX_text_document.bin`` and ``.idx`` out; see ``--help`` and docs/data.md."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_lite.cli.preprocess import main

if __name__ == "__main__":
    status = main(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt while Python ends would hide the status
    sys.exit(status)
