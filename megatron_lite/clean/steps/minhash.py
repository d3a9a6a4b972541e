"""Near de-duplication: MinHash signatures, locality-sensitive hashing by bands, and an exact comparison.

What a shingle, a signature and the similarity of two texts are is said in :mod:`megatron_lite.clean.steps.shingles`. A signature
of k places is cut into b *bands* of r rows; two texts are compared when they agree in all rows of a band, which happens
with the probability 1 - (1 - J^r)^b for texts of similarity J (Broder 1997 for the signatures; Lee et al. 2022,
"Deduplicating training data makes language models better", for their use on corpora). r is the largest number for which
this is still ``recall`` at J = ``threshold``; above the threshold nearly every pair is found, and whatever is found in vain
is refused by the exact comparison, which costs microseconds. So no two texts are taken for near which are not.

**Which documents go.** A document is dropped when it is near *any* earlier document of the corpus, whether that one
stays or goes. Thus of two near documents the later one always goes, and the first of every group stays. The rule asks
about pairs only. This is why the buckets can be decided one by one, on as many machines as one likes, and why a corpus
that comes later gives the same result as one that was there from the start. Two other rules are in use. *Connected
components* drop at least as much: also a document that is near no earlier one, when a later one is near to both; what
has been decided about a corpus would change when it grows. *Near an earlier document that stays* keeps more: in a chain
A, B, C of texts each near the one before, C stays, since only B was near it. There every document that goes has a near
one that stays (here that holds for the first two links of a chain with a similarity of at least 2 threshold - 1), but
a decision waits for all earlier ones, over all buckets.

**Memory and disk.** The keys of one bucket are in memory: with the default 16 bands less than 90 bytes for each document of
the corpus. The shingles are on disk, 4 bytes for each token and, for English, two thirds of the size of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.clean.bucket_file import BucketFile, against_problems, open_bucket_file, write_bucket_file
from megatron_lite.clean.step import CorpusOptions, CorpusStep, Document
from megatron_lite.clean.steps.candidates import KEY, Bucket
from megatron_lite.clean.steps.shingle_sets import SavedSets, SetReader, SetWriter, arrays_of_sets
from megatron_lite.clean.steps.shingles import TOKEN, hasher, mix, powers

_MOST = 10_000  # tokens of a shingle, permutations


@dataclass(frozen=True)
class MinHashOptions(CorpusOptions):
    """Options of near de-duplication."""

    threshold: float = 0.8
    """Jaccard similarity of two documents' shingles from which on the later one is dropped."""
    ngram: int = 5
    """Tokens of a shingle: words, or single characters of scripts without spaces (Chinese, Japanese, Thai ...)."""
    permutations: int = 128
    """Length of a signature."""
    recall: float = 0.9
    """Share of the pairs with a similarity of exactly ``threshold`` that must be found; more similar ones are found more often."""


def bands_and_rows(threshold: float, permutations: int, recall: float) -> tuple[int, int]:
    """(b, r): the most rows for which 1 - (1 - threshold^r)^b >= recall, with b = permutations // r. ValueError: none."""
    for rows in range(permutations, 0, -1):
        bands = permutations // rows
        if 1 - (1 - threshold**rows) ** bands >= recall:
            return bands, rows
    raise ValueError(f"{permutations} permutations find no {recall:g} of the pairs at {threshold:g}")


class MinHash(CorpusStep):
    """Drops documents that are near an earlier one."""

    name = "minhash"
    Options = MinHashOptions
    needs_barrier = True
    key_dtype = KEY

    def __init__(self, options: MinHashOptions) -> None:
        super().__init__(options)
        self._bands, self._rows = bands_and_rows(options.threshold, options.permutations, options.recall)
        self._hash = hasher(options.ngram, options.permutations)
        self._writer: SetWriter | None = None
        self._reader: SetReader | None = None
        self._known: dict[int, BucketFile] = {}
        self._saved: SavedSets | None = None
        self._decided: dict[int, Bucket] = {}
        self._facts: dict[int, dict[str, float]] = {}

    def keys(self, documents: Sequence[Document]) -> np.ndarray:
        found = [(document.number, *self._hash(document.text)) for document in documents]
        found = [entry for entry in found if len(entry[2])]
        self.count("documents without a word", len(documents) - len(found))
        keys = np.zeros((len(found), self._bands), KEY)
        if not found:
            return keys.reshape(-1)
        numbers, signatures, sets = zip(*found, strict=True)
        self._writer = self._writer or SetWriter(self.scratch)
        bands = self._band_hashes(np.stack(signatures))
        keys["number"] = np.array(numbers, np.uint64)[:, None]
        keys["band"] = bands
        keys["bucket"] = bands % np.uint64(self.buckets)
        keys["home"] = keys["bucket"][:, :1]
        keys["file"] = self._writer.name
        keys["position"] = np.array(self._writer.append(numbers, sets), np.uint64)[:, None]
        return keys.reshape(-1)

    def _band_hashes(self, signatures: np.ndarray) -> np.ndarray:
        """uint32 [documents, permutations] -> uint64 [documents, bands]."""
        used = (
            signatures[:, : self._bands * self._rows]
            .reshape(len(signatures), self._bands, self._rows)
            .astype(np.uint64)
        )
        sums = (used * mix(powers(TOKEN, self._rows))).sum(axis=2, dtype=np.uint64)
        return mix(sums + mix(np.arange(1, self._bands + 1, dtype=np.uint64)))

    def decide(self, bucket: int, keys: np.ndarray) -> np.ndarray:
        """Of all keys of a bucket, those of documents that are near an earlier one with the same band."""
        assert bucket not in self._facts, "a bucket is decided once"
        self._reader = self._reader or SetReader(self.scratch)
        known = self._known.get(bucket)
        found = self._decided[bucket] = Bucket(keys, self._reader, known, self._saved)
        near: set[int] = set()
        compared = 0
        for group in found.groups():
            for place, later in enumerate(group):
                if place == 0 or later < found.old or (number := found.number(later)) in near:
                    continue
                for earlier in group[:place]:
                    compared += 1
                    if found.similarity(earlier, later) >= self.options.threshold:
                        near.add(number)
                        break
        self._facts[bucket] = {"pairs compared": compared}
        return np.isin(keys["number"], np.array(sorted(near), np.uint64))

    def apply(self, document: Document, units: np.ndarray) -> None:
        document.dropped = "near an earlier document"

    def bucket_facts(self, bucket: int) -> dict[str, float]:
        return self._facts[bucket]

    def settings(self) -> dict[str, Any]:
        """What must be equal for signatures to be comparable."""
        names = ("ngram", "permutations")
        shape = {"bands": self._bands, "rows": self._rows, "buckets": self.buckets}
        return {"step": self.name, **{n: getattr(self.options, n) for n in names}, **shape}

    def load(self, bucket: int, path: str) -> None:
        settings = self.settings()
        self._known[bucket] = open_bucket_file(path, settings, bucket)
        self._saved = self._saved or SavedSets(str(Path(path).parent), settings)

    def save(self, bucket: int, path: str) -> None:
        known, found = self._known.get(bucket), self._decided[bucket]
        reader = self._reader
        assert reader is not None
        home = found.at_home(bucket)
        places = zip(home["file"].tolist(), home["position"].tolist(), home["number"].tolist(), strict=True)
        earlier = [] if known is None else known.about["sets"]
        write_bucket_file(
            path,
            {"settings": self.settings(), "sets": [*earlier, len(home)]},
            {
                **found.saved_keys(len(earlier)),
                **arrays_of_sets(known, home["number"], (reader.read(*place) for place in places)),
            },
        )

    def close(self, bucket: int) -> None:
        self._decided.pop(bucket, None)
        self._known.pop(bucket, None)

    @staticmethod
    def problems(options: Any) -> list[str]:
        found = [
            f"{n}: {getattr(options, n)} must be between 1 and {_MOST:,}"
            for n in ("ngram", "permutations")
            if not 1 <= getattr(options, n) <= _MOST
        ]
        for name in ("threshold", "recall"):
            if not 0 < getattr(options, name) < 1:
                found.append(f"{name}: {getattr(options, name)} must lie between 0 and 1")
        if not found:
            try:
                bands_and_rows(options.threshold, options.permutations, options.recall)
            except ValueError as error:
                found.append(f"{error}; take more permutations")
        return found or against_problems(options.against, MinHash(options).settings())
