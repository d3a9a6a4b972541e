"""Make a real corpus without a download: Python source files of this machine, one JSON line per file.

The standard library comes first; where it is smaller than ``--min-bytes``, files of installed packages are added. A
tenth of the files is held out, chosen by a hash of the path, so that no held-out file is ever trained on.

    python make_corpus.py --out DIR    writes DIR/train.jsonl and DIR/heldout.jsonl
"""

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def source_files() -> Iterator[Path]:
    """Files of the standard library, then of installed packages, each in the order of their paths."""
    stdlib, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    yield from sorted(p for p in stdlib.rglob("*.py") if "site-packages" not in p.parts)
    yield from sorted(packages.rglob("*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--min-bytes", type=int, default=10_000_000, help="stop adding packages at this size (default: 10 MB)")
    parser.add_argument("--max-file-bytes", type=int, default=200_000, help="leave out longer files: tables, not prose")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    stdlib = Path(sysconfig.get_path("stdlib"))
    sizes, counts, seen = {"train": 0, "heldout": 0}, {"train": 0, "heldout": 0}, set()
    outputs = {split: open(args.out / f"{split}.jsonl.tmp", "w", encoding="utf-8") for split in sizes}
    for path in source_files():
        from_package = not path.is_relative_to(stdlib) or "site-packages" in path.parts
        if from_package and sum(sizes.values()) >= args.min_bytes:
            break
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few test files of the standard library are not UTF-8 on purpose
        content = hashlib.blake2b(text.encode()).digest()
        if not text.strip() or len(text) > args.max_file_bytes or content in seen:
            continue
        seen.add(content)
        where = str(path.relative_to(stdlib)) if path.is_relative_to(stdlib) else path.name
        split = "heldout" if hashlib.blake2b(where.encode()).digest()[0] < 26 else "train"
        outputs[split].write(json.dumps({"text": text, "path": where}) + "\n")
        sizes[split] += len(text.encode())
        counts[split] += 1
    for split, f in outputs.items():
        f.close()
        (args.out / f"{split}.jsonl.tmp").replace(args.out / f"{split}.jsonl")
        print(f"{split}: {counts[split]} files, {sizes[split] / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
