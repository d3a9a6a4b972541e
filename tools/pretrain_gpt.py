"""Stands where Megatron-LM's ``pretrain_gpt.py`` stood: ``torchrun ... tools/pretrain_gpt.py <the same flags>``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_lite.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
