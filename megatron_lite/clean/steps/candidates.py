"""The documents of one bucket of near de-duplication: which of them share a band, and how similar two are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_lite.clean.bucket_file import BucketFile
from megatron_lite.clean.steps.shingle_sets import SavedSets, SetReader
from megatron_lite.clean.steps.shingles import shared_by_numpy, similarity
from megatron_lite.ops.library import index_module

# `band`: hash of a band of the signature and its number; `home`: the bucket of the first band, where the set is saved;
# `file`, `position`: where the set lies meanwhile.
KEY = np.dtype(
    [("number", "<u8"), ("bucket", "<u2"), ("home", "<u2"), ("band", "<u8"), ("file", "<u8"), ("position", "<u8")]
)
SAVED = {"band": "<u8", "number": "<u8", "home": "<u2", "corpus": "<u2"}  # what is kept of a key for corpora to come


class Bucket:
    """All keys of a bucket: those of earlier corpora, and after them those of this one. A document is named by its index.

    Attributes:
        old: keys of earlier corpora; a document from this index on is of this corpus.
    """

    def __init__(self, keys: np.ndarray, sets: SetReader, file: BucketFile | None, saved: SavedSets | None) -> None:
        self._keys, self._sets, self._saved = keys, sets, saved
        self._old = {name: np.empty(0, dtype) if file is None else file.read(name) for name, dtype in SAVED.items()}
        self.old = len(self._old["band"])
        helper = index_module()[0]
        self._shared = shared_by_numpy if helper is None else helper.shared

    def groups(self) -> Iterator[list[int]]:
        """Documents with the same band, in the order of the corpora, where there are several and the last is of this corpus."""
        bands = np.concatenate([self._old["band"], self._keys["band"]])
        order = np.argsort(bands, kind="stable")
        in_order = bands[order]
        ends = np.flatnonzero(np.append(in_order[1:] != in_order[:-1], len(bands) > 0)) + 1
        begins = np.concatenate([[0], ends])[: len(ends)]
        several = (ends - begins > 1) & (order[ends - 1] >= self.old)
        for begin, end in zip(begins[several].tolist(), ends[several].tolist(), strict=True):
            yield order[begin:end].tolist()

    def number(self, index: int) -> int:
        """The number of a document of this corpus."""
        return int(self._keys["number"][index - self.old])

    def similarity(self, left: int, right: int) -> float:
        """The Jaccard similarity of two documents."""
        return similarity(self._set(left), self._set(right), self._shared)

    def _set(self, index: int) -> np.ndarray:
        if index < self.old:
            assert self._saved is not None
            return self._saved.read(*(int(self._old[name][index]) for name in ("home", "corpus", "number")))
        number, _, _, _, file, position = self._keys[index - self.old].item()  # the fields of KEY
        return self._sets.read(file, position, number)

    def at_home(self, bucket: int) -> np.ndarray:
        """Keys of the documents of this corpus whose home the bucket is, one for each, by number."""
        home = self._keys[self._keys["home"] == bucket]
        return home[np.unique(home["number"], return_index=True)[1]]

    def saved_keys(self, corpus: int) -> dict[str, list[np.ndarray]]:
        """The columns ``SAVED`` of all keys; those of this corpus get its number."""
        new = {name: self._keys[name] for name in SAVED if name != "corpus"}
        new["corpus"] = np.full(len(self._keys), corpus)
        return {name: [self._old[name], new[name].astype(dtype)] for name, dtype in SAVED.items()}
