"""A corpus and a vocabulary for the CPU demo of the cluster scripts: a few pages of the documentation, byte by byte.

    python tiny_corpus.py --out DIR    writes DIR/corpus.jsonl, DIR/vocab.json and DIR/merges.txt

The vocabulary has GPT-2's format, an id for each byte and one for the end of a document, and no merges.
"""

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte: its own where it prints, else one from U+0100 on, in order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(256 + i) for i in range(256))
    return [chr(b) if b in printable else next(others) for b in range(256)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    paragraphs = [part for page in pages for part in page.read_text(encoding="utf-8").split("\n\n") if part.strip()]
    with open(out / "corpus.jsonl", "w", encoding="utf-8") as f:
        f.writelines(json.dumps({"text": part}) + "\n" for part in paragraphs)
    ids = {character: byte for byte, character in enumerate(byte_alphabet())} | {"<|endoftext|>": 256}
    (out / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    (out / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")


if __name__ == "__main__":
    main()
