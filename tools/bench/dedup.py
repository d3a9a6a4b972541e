"""Speed of de-duplication, beside packages that do the same; and of near de-duplication, which pairs it finds.

The corpus is one of tools/bench/corpus.py (made when ``--corpus`` is not given), to which a tenth of exact copies and a
fifth of copies with changes is added. Sections:

* ``bloom``: ``megatron-lite data clean`` with a Bloom filter, from JSON lines to compressed shards; the peer is a plain
  loop of one process over orjson, hashlib and rbloom that writes what it keeps uncompressed.
* ``minhash``: signatures, candidates and comparison of documents in memory by one process; the peer is datasketch, MinHash and
  MinHashLSH, with the same shingles, permutations and threshold. Blocks of documents alternate between the two. The
  pairs of both are compared with each other and with the true similarity of every pair that either found. Two kinds of
  changes: few (up to one word or character in 100) or many (one in five), as in text from the web; and of any number,
  where many pairs are near the threshold and the peer, which compares nothing exactly, errs by itself.

    python tools/bench/dedup.py --megabytes 200
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from operator import index
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lite.clean.step import Document
from megatron_lite.clean.steps.candidates import Bucket
from megatron_lite.clean.steps.minhash import MinHash, MinHashOptions
from megatron_lite.clean.steps.shingle_sets import SetReader
from megatron_lite.clean.steps.shingles import ALONE_RANGES
from megatron_lite.ops.library import index_module

Pairs = set[tuple[int, int]]


def line(name: str, ours: str, peer: str = "", ratio: str = "", goal: str = "") -> None:
    """One figure."""
    print(f"{name:64} {ours:>14} {peer:>14} {ratio:>8}  {goal}", flush=True)


FEW_OR_MANY = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.2)
ANY = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04)


def changed(text: str, rng: random.Random, rates: Sequence[float]) -> str:
    """A copy in which a share of the words (or characters, where there are few spaces) are others."""
    spaced = text.count(" ") > len(text) / 20
    pieces = text.split(" ") if spaced else list(text)
    rate = rng.choice(rates)
    return (" " if spaced else "").join(rng.choice(pieces) if rng.random() < rate else piece for piece in pieces)


def with_duplicates(texts: list[str], rng: random.Random, rates: Sequence[float] = FEW_OR_MANY) -> list[str]:
    """Texts in a random order, with a tenth of exact copies and a fifth of copies with changes."""
    copies = [rng.choice(texts) for _ in range(len(texts) // 7)]
    copies += [changed(rng.choice(texts), rng, rates) for _ in range(2 * len(texts) // 7)]
    mixed = texts + copies
    rng.shuffle(mixed)
    return mixed


def write(path: Path, texts: list[str]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


# ---- exact duplicates


def plain_loop(source: Path, target: Path, expected: int) -> None:
    """What a short script does: one process, one pass."""
    import orjson
    import rbloom

    seen = rbloom.Bloom(expected, 0.001, index)
    with open(source, "rb") as file, open(target, "wb") as out:
        for row in file:
            digest = hashlib.blake2b(orjson.loads(row)["text"].encode(), digest_size=16).digest()
            value = int.from_bytes(digest, "little", signed=True)
            if value not in seen:
                seen.add(value)
                out.write(row)


def bloom(folder: Path, source: Path, workers: int, repeats: int) -> None:
    """Print the figures of exact de-duplication: by document and by line, with one worker and with several."""
    size = source.stat().st_size / 1e6
    kinds = [(unit, number) for unit in ("document", "line") for number in sorted({1, workers})]
    found: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    peer = []
    for _ in range(repeats):
        for unit, number in kinds:
            config, output = folder / f"{unit}.yaml", folder / "clean"
            config.write_text(f"steps:\n  - bloom: {{unit: {unit}, expected: 20000000}}\n")
            command = [sys.executable, "-m", "megatron_lite", "data", "clean", "--config", str(config)]
            command += ["--input", str(source), "--output", str(output), "--workers", str(number)]
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found[unit, number].append(size / (time.perf_counter() - began))
            shutil.rmtree(output)
        began = time.perf_counter()
        plain_loop(source, folder / "plain.jsonl", 20_000_000)
        peer.append(size / (time.perf_counter() - began))
    for (unit, number), ours in found.items():
        name = f"bloom, by {unit}, {size:.0f} MB of JSON lines to shards, {number} worker{'s' * (number > 1)}"
        is_document = unit == "document"
        beside = (f"{max(peer):.0f} MB/s", f"{max(ours) / max(peer):.2f}") if is_document else ("", "")
        line(name, f"{max(ours):.0f} MB/s", *beside, "at least 100 MB/s" if is_document else "")


# ---- near duplicates


def token_pattern() -> str:
    """Our tokens, for a regular expression."""
    alone = "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ALONE_RANGES)
    return rf"[{alone}]|[^\W_{alone}]+"


class Datasketch:
    """The peer: signatures, and the pairs that share a band with an earlier document."""

    def __init__(self, options: MinHashOptions) -> None:
        import regex
        from datasketch import MinHash as Signature
        from datasketch import MinHashLSH

        self.options, self.signature = options, Signature
        self.index = MinHashLSH(threshold=options.threshold, num_perm=options.permutations)
        self.tokens = regex.compile(token_pattern()).findall
        self.pairs: Pairs = set()

    def add(self, documents: list[Document]) -> None:
        n = self.options.ngram
        for document in documents:
            tokens = self.tokens(document.text.lower())
            shingles = {" ".join(tokens[i : i + n]).encode() for i in range(max(1, len(tokens) - n + 1))}
            signature = self.signature(num_perm=self.options.permutations)
            signature.update_batch(shingles)
            self.pairs.update((earlier, document.number) for earlier in self.index.query(signature))
            self.index.insert(document.number, signature)


def all_pairs(step: MinHash, keys: np.ndarray) -> Iterator[tuple[int, int, float]]:
    """(earlier, later, similarity) of every pair with a common band."""
    sets, seen = SetReader(step.scratch), set()
    for number in range(step.buckets):
        bucket = Bucket(keys[keys["bucket"] == number], sets, None, None)
        for group in bucket.groups():
            for place, later in enumerate(group):
                for earlier in group[:place]:
                    pair = bucket.number(earlier), bucket.number(later)
                    if pair not in seen:
                        seen.add(pair)
                        yield *pair, bucket.similarity(earlier, later)


def f1(found: Pairs, wanted: Pairs) -> float:
    """The harmonic mean of precision and recall."""
    return 2 * len(found & wanted) / max(1, len(found) + len(wanted))


def minhash(folder: Path, texts: list[str], title: str) -> None:
    """Print the figures of near de-duplication."""
    options = MinHashOptions()
    step, peer = MinHash(options), Datasketch(options)
    step.scratch = str(folder)
    documents = [Document(text, number) for number, text in enumerate(texts)]
    ours_seconds = peer_seconds = 0.0
    keys = []
    for at in range(0, len(documents), 500):
        began = time.perf_counter()
        keys.append(step.keys(documents[at : at + 500]))
        between = time.perf_counter()
        peer.add(documents[at : at + 500])
        ours_seconds, peer_seconds = ours_seconds + between - began, peer_seconds + time.perf_counter() - between
    began = time.perf_counter()
    together = np.concatenate(keys)
    dropped = set()
    for bucket in range(step.buckets):
        some = together[together["bucket"] == bucket]
        dropped |= set(some["number"][step.decide(bucket, some)].tolist())
    ours_seconds += time.perf_counter() - began
    size = sum(len(text.encode()) for text in texts) / 1e6
    speeds = [f"{size / seconds:.1f} MB/s" for seconds in (ours_seconds, peer_seconds)]
    line(
        f"minhash, {title}, {size:.0f} MB, {len(texts)} documents",
        *speeds,
        f"{peer_seconds / ours_seconds:.1f}",
        "x 10",
    )
    candidates = {(a, b): similarity for a, b, similarity in all_pairs(step, together)}
    ours = {pair for pair, similarity in candidates.items() if similarity >= options.threshold}
    sets = {n: step._hash(texts[n])[1] for n in {n for pair in peer.pairs for n in pair}}
    true = {pair: similarity_of(sets[pair[0]], sets[pair[1]]) for pair in peer.pairs - candidates.keys()} | candidates
    near = {pair for pair, similarity in true.items() if similarity >= options.threshold}
    line("  F1 of ours against the peer's pairs", f"{f1(ours, peer.pairs):.3f}", goal="at least 0.95")
    line("  F1 against the pairs of both that are near", f"{f1(ours, near):.3f}", f"{f1(peer.pairs, near):.3f}")
    line(
        "  pairs; dropped documents",
        f"{len(ours)}; {len(dropped)}",
        f"{len(peer.pairs)}; {len({b for _, b in peer.pairs})}",
    )


def similarity_of(left: np.ndarray, right: np.ndarray) -> float:
    both = len(np.intersect1d(left, right, assume_unique=True))
    return both / max(1, len(left) + len(right) - both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="*", default=["bloom", "minhash"], help="bloom, minhash")
    parser.add_argument("--corpus", type=Path, help="JSON lines; made when it is not given")
    parser.add_argument("--megabytes", type=int, default=200, help="of the corpus for bloom")
    parser.add_argument("--minhash-megabytes", type=float, default=20)
    parser.add_argument("--chinese", type=float, default=0.25, help="share of the corpus")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", help="for temporary files")
    args = parser.parse_args()
    if index_module()[0] is None:
        print("csrc is not built: NumPy makes the signatures, at a tenth of the speed (python -m megatron_lite.ops.build)")
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        folder = Path(name)
        corpus = args.corpus or folder / "corpus.jsonl"
        if args.corpus is None:
            script = Path(__file__).with_name("corpus.py")
            size = ["--megabytes", str(args.megabytes), "--chinese", str(args.chinese)]
            subprocess.run([sys.executable, str(script), str(corpus), *size], check=True)
        rng = random.Random(0)
        with open(corpus, encoding="utf-8") as file:
            texts = [json.loads(row)["text"] for row in file]
        line("", "ours", "peer", "ratio", "goal")
        if "bloom" in args.section:
            write(folder / "bloom.jsonl", with_duplicates(texts, rng))
            bloom(folder, folder / "bloom.jsonl", args.workers, args.repeats)
        if "minhash" in args.section:
            share = args.minhash_megabytes * 1e6 / sum(len(t.encode()) for t in texts) / 1.43
            some = texts[: max(1, int(share * len(texts)))]
            minhash(folder, with_duplicates(some, rng), "few changes or many")
            minhash(folder, with_duplicates(some, rng, ANY), "any number of changes")


if __name__ == "__main__":
    main()
