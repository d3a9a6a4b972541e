"""A corpus for measuring: text that is already on the machine, and a seeded generator for the rest.

Files under the given directories (sources, headers, documentation, manual pages, translations) are cut into documents
of web length; exact duplicates are left out. What is missing to the wanted size is generated from a seed: phrases of
that text put together anew, with 2% invented words. With ``--chinese`` the given share of the bytes is Chinese,
phrases of the Chinese text found, joined by the frequency of their rank (Zipf). The shares are printed. Example::

    python tools/bench/corpus.py /tmp/corpus.jsonl --megabytes 1000
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOTS = ("/usr/share", "/usr/include", "/usr/lib", "/usr/local", "/opt", sys.prefix)
SUFFIXES = frozenset(".py .pyi .md .rst .txt .html .js .ts .h .c .cpp .hpp .go .rs .java .pl .sh .tex .po .css".split())
TAG = re.compile(r"<(script|style).*?</\1>|<[^>]{0,2000}>|\n\s*(?=\n)", re.DOTALL | re.IGNORECASE)
HAN = re.compile(r"[\u4e00-\u9fff]{2,}[\u3001-\u300b\uff00-\uff1f]?")
WORD = re.compile(r"\S+\s*")


def texts_of_machine(roots: list[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """(kind, text) of files, in a seeded order."""
    paths: list[str] = []
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders.sort()
            paths += [os.path.join(folder, n) for n in sorted(names)]
    rng.shuffle(paths)
    for path in paths:
        suffix = os.path.splitext(path)[1].lower()
        manual = "/man/" in path and suffix == ".gz"
        translated = "/zh" in path and suffix == ".mo"
        if not (manual or translated or suffix in SUFFIXES or "/doc/" in path) or os.path.islink(path):
            continue
        try:
            data = Path(path).read_bytes() if os.path.getsize(path) < 8 << 20 else b""
            text = (gzip.decompress(data) if suffix == ".gz" else data).decode(
                "utf-8", "ignore" if translated else "strict"
            )
        except (OSError, ValueError, EOFError):
            continue
        if suffix == ".html":
            text = html.unescape(TAG.sub("", text))
        if "\0" not in text or translated:
            documentation = "/doc/" in path or suffix in (".md", ".rst", ".txt", ".html", ".tex")
            code = suffix.lstrip(".") if suffix in SUFFIXES or translated else "other"
            yield ("manual pages" if manual else code if translated or not documentation else "documentation"), text


def documents(text: str, rng: random.Random) -> Iterator[str]:
    """Pieces of 200 to 40,000 characters (median 3,000), cut at line ends."""
    start = 0
    while start < len(text):
        stop = start + int(min(40_000, max(200, rng.lognormvariate(8.0, 1.0))))
        stop = text.find("\n", stop) + 1 or len(text)
        piece = text[start:stop].strip()
        if len(piece) >= 100:
            yield piece
        start = stop


def invented(rng: random.Random) -> str:
    """A word that is in no dictionary."""
    return "".join(rng.choice("bcdfghklmnprstvwz") + rng.choice("aeiouy") for _ in range(rng.randint(2, 5))) + " "


def generated(phrases: list[str], rng: random.Random) -> str:
    """A document of phrases."""
    size, parts = int(min(40_000, max(200, rng.lognormvariate(8.0, 1.0)))), []
    while size > 0:
        parts.append(invented(rng) if rng.random() < 0.1 else rng.choice(phrases))  # 1 in 10 phrases, about 2% of words
        size -= len(parts[-1])
    return "".join(parts).strip()


def generated_chinese(phrases: list[str], weights: list[float], characters: str, rng: random.Random) -> str:
    """A document of Chinese phrases by Zipf's law, with single characters between them."""
    size, parts = int(min(13_000, max(70, rng.lognormvariate(6.9, 1.0)))), []
    while size > 0:
        for phrase in rng.choices(phrases, cum_weights=weights, k=8):
            parts.append(phrase + rng.choice(characters) * (rng.random() < 0.5))
            size -= len(parts[-1])
        parts.append(rng.choice(("\uff0c", "\u3002", "\uff0c", "\u3002\n")))
    return "".join(parts).strip()


def build(out: Path, size: int, chinese: float, roots: list[str], seed: int) -> dict[str, float]:
    """Write the corpus; share of its bytes by kind."""
    rng = random.Random(seed)
    lines: list[bytes] = []
    seen: set[bytes] = set()
    shares: dict[str, float] = {}
    phrases: list[str] = []
    han: dict[str, int] = {}

    def add(kind: str, text: str) -> int:
        line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
        digest = hashlib.blake2b(text.encode(), digest_size=12).digest()
        if digest in seen:
            return 0
        seen.add(digest)
        lines.append(line)
        shares[kind] = shares.get(kind, 0) + len(line) / size
        return len(line)

    left = int(size * (1 - chinese))
    for kind, text in texts_of_machine(roots, rng):
        for phrase in HAN.findall(text):
            han[phrase] = han.get(phrase, 0) + 1
        if kind == "mo" or left <= 0:
            continue
        for piece in documents(text, rng):
            left -= add(kind, piece)
        if len(phrases) < 2_000_000:
            words = WORD.findall(text[:20_000])
            phrases += ["".join(words[i : i + 5]) for i in range(0, len(words), 5)]
    while left > 0:
        left -= add("generated", generated(phrases, rng))
    left = int(size * chinese)
    ranked = sorted(han, key=lambda p: (-han[p], p))
    weights, total = [], 0.0
    for rank in range(len(ranked)):
        total += 1 / (rank + 3)
        weights.append(total)
    characters = "".join(ranked)
    while left > 0:
        left -= add("generated Chinese", generated_chinese(ranked, weights, characters, rng))
    rng.shuffle(lines)
    with open(out, "wb") as file:
        file.writelines(lines)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--chinese", type=float, default=0.0, help="share of the bytes, 0 to 1")
    parser.add_argument("--root", nargs="+", default=list(ROOTS), help="directories whose text is taken")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shares = build(args.out, args.megabytes * 1_000_000, args.chinese, args.root, args.seed)
    listed = ", ".join(f"{kind} {share:.1%}" for kind, share in sorted(shares.items(), key=lambda s: -s[1]))
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.0f} MB: {listed}; exact duplicates were left out")


if __name__ == "__main__":
    main()
