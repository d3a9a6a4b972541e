"""Every figure of the data engine beside its peer, one section after the other, in one run.

A section is a script of this directory, which prints lines of name, ours, peer, ratio and goal and can be run alone, with
options of its own. Example::

    python tools/bench/data.py preprocess windows
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

SECTIONS: dict[str, list[str]] = {
    "preprocess": ["preprocess.py"],
    "quality": ["quality.py"],
    "dedup": ["dedup.py"],
    "windows": ["windows.py"],
    "chat": ["chat.py"],
    "loader": ["loader.py", "--ranks", "8", "--sources", "100", "--seq-length", "4096", "--step-ms", "20"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="*", help=f"of {', '.join(SECTIONS)} (default: all)")
    args = parser.parse_args()
    if unknown := set(args.section) - SECTIONS.keys():
        parser.error(f"no such section: {', '.join(unknown)}; known are {', '.join(SECTIONS)}")
    failed = []
    for name in args.section or SECTIONS:
        print(f"--- {name}", flush=True)
        script, *options = SECTIONS[name]
        if subprocess.run([sys.executable, str(Path(__file__).with_name(script)), *options]).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "every section ran")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
