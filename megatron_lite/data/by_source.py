"""The samples of an evaluation sorted by source, so that each microbatch is of one source and its loss is that source's.

The loss of a model is a sum over a microbatch, and a sample's part of it does not depend on its neighbours. So the
first samples of a blend are taken in another order: those of the first member, filled up to whole microbatches
of all data-parallel ranks with rows in which no target counts, then those of the second, and so on. All sums are over
the samples that would have been read anyhow.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_lite.data.blend import BlendedDataset
from megatron_lite.data.row import Row


class BySource:
    """The first samples of a blend, sorted by source; after the last it begins again.

    Args:
        dataset: the blend.
        samples: how many of its samples.
        unit: rows of one microbatch on all data-parallel ranks.

    Attributes:
        names: of the sources.
        counts: samples of each source.
    """

    endless = True

    def __init__(self, dataset: BlendedDataset, samples: int, unit: int) -> None:
        self.dataset, self.names = dataset, dataset.names
        members = np.array([dataset.blend.locate(i)[0] for i in range(samples)], dtype=np.int64)
        self.counts: list[int] = np.bincount(members, minlength=len(self.names)).tolist()
        places, counted, sources = [], [], []
        for member, count in enumerate(self.counts):
            own = np.flatnonzero(members == member)
            units = -(-count // unit)
            places.append(np.resize(own, units * unit))  # repeats fill up the last unit
            counted.append(np.arange(units * unit) < count)
            sources += [member] * units
        self._places, self._counted = np.concatenate(places), np.concatenate(counted)
        self._sources, self._unit = sources, unit

    def __len__(self) -> int:
        return len(self._places)

    def source(self, j: int) -> int:
        """The source of the microbatch that holds row j."""
        return self._sources[j // self._unit]

    def row(self, j: int) -> Row:
        """Row j of the sorted samples."""
        j %= len(self)
        row = self.dataset.row(int(self._places[j]))
        return row if self._counted[j] else replace(row, loss_mask=np.zeros(len(row.tokens) - 1, dtype=np.uint8))
