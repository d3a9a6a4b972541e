"""De-duplication with a set of hashes: no document, line or paragraph is dropped wrongly.

The set takes about 100 bytes of memory for each different unit, the :mod:`Bloom filter <megatron_lite.clean.steps.bloom>` two.
With several parts the buckets are decided one after another, and only one of them is in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from megatron_lite.clean.bucket_file import against_problems, open_bucket_file, write_bucket_file
from megatron_lite.clean.steps.seen import Seen, SeenOptions


class Exact(Seen):
    """Remembers every hash."""

    name = "exact"
    Options = SeenOptions

    def __init__(self, options: SeenOptions) -> None:
        super().__init__(options)
        self._sets: dict[int, set[int]] = {}

    def seen(self, bucket: int, hashes: Iterable[int]) -> list[bool]:
        held = self._sets.setdefault(bucket, set())
        result = []
        for value in hashes:
            before = len(held)
            held.add(value)
            result.append(len(held) == before)
        return result

    @staticmethod
    def problems(options: Any) -> list[str]:
        return Seen.problems(options) or against_problems(options.against, Exact(options).settings())

    def bucket_facts(self, bucket: int) -> dict[str, float]:
        return {f"{self.options.unit}s held": len(self._sets.get(bucket, ()))}

    def save(self, bucket: int, path: str) -> None:
        held = sorted(self._sets.get(bucket, ()))
        data = b"".join(value.to_bytes(16, "little", signed=True) for value in held)
        write_bucket_file(path, {"settings": self.settings()}, {"hashes": [np.frombuffer(data, "<u8")]})

    def load(self, bucket: int, path: str) -> None:
        data = open_bucket_file(path, self.settings(), bucket).read("hashes").tobytes()
        self._sets[bucket] = {int.from_bytes(data[i : i + 16], "little", signed=True) for i in range(0, len(data), 16)}

    def close(self, bucket: int) -> None:
        self._sets.pop(bucket, None)
