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

STDLIB, PACKAGES = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))


def standard_library() -> list[tuple[str, Path]]:
    """(name, path) of the files of the standard library, in the order of their names."""
    found = (p for p in STDLIB.rglob("*.py") if "site-packages" not in p.parts)
    return sorted((p.relative_to(STDLIB).as_posix(), p) for p in found)


def packages() -> Iterator[tuple[str, Path]]:
    """The same of installed packages; looked for only when they are needed."""
    yield from sorted((f"packages/{p.relative_to(PACKAGES).as_posix()}", p) for p in PACKAGES.rglob("*.py"))


def texts(files: Iterator[tuple[str, Path]], longest: int, seen: set[bytes]) -> Iterator[tuple[str, str]]:
    """(name, text) of those that are UTF-8, not empty, not too long and not a copy of an earlier one."""
    for name, path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few test files of the standard library are not UTF-8 on purpose
        content = digest(text)
        if text.strip() and len(text) <= longest and content not in seen:
            seen.add(content)
            yield name, text


def digest(text: str) -> bytes:
    """Of the text."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--min-bytes", type=int, default=10_000_000, help="add packages below this size (default: 10 MB)")
    parser.add_argument("--max-bytes", type=int, help="stop at this size, with files from everywhere (default: take all)")
    parser.add_argument("--max-file-bytes", type=int, default=200_000, help="leave out longer files: tables, not prose")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    library, seen, written = standard_library(), set(), 0
    if args.max_bytes is not None:
        library.sort(key=lambda file: digest(file[0])[::-1])
        args.min_bytes = min(args.min_bytes, args.max_bytes)
    sizes, counts = {"train": 0, "heldout": 0}, {"train": 0, "heldout": 0}
    outputs = {split: open(args.out / f"{split}.jsonl.tmp", "w", encoding="utf-8") for split in sizes}
    for files, enough in ((iter(library), args.max_bytes), (packages(), args.min_bytes)):
        if enough is not None and written >= enough:
            break
        for name, text in texts(files, args.max_file_bytes, seen):
            split = "heldout" if digest(name)[0] < 26 else "train"
            outputs[split].write(json.dumps({"text": text, "path": name}) + "\n")
            sizes[split] += len(text.encode())
            counts[split] += 1
            written = sum(sizes.values())
            if enough is not None and written >= enough:
                break
    for split, f in outputs.items():
        f.close()
        (args.out / f"{split}.jsonl.tmp").replace(args.out / f"{split}.jsonl")
        print(f"{split}: {counts[split]} files, {sizes[split] / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
