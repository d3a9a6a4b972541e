"""What training samples are drawn from, and how many of each source a run has consumed, whatever the mix was before.

The position in the data is one number, n: the next sample is number n of this run's mix. The mix itself tells how many
of its first n samples are of which source, which is where each source stands. What a run has consumed of a source is
another number where the mix was changed at a restart: that of the checkpoint, and from there on what this mix has given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from megatron_lite.data.blend import BlendedDataset
from megatron_lite.data.curriculum import Curriculum
from megatron_lite.data.row import Dataset


class Mix:
    """The sources of the training samples.

    Args:
        dataset: the training data, a blend of the sources or of the only one.
        weights: of the sources, by name, where no stage of a curriculum has its own.
        curriculum: of the run.
    """

    def __init__(self, dataset: Dataset, weights: Mapping[str, float], curriculum: Curriculum | None = None) -> None:
        self._dataset, self.weights, self.curriculum = dataset, dict(weights), curriculum
        self._since, self._before = 0, dict.fromkeys(self.places(0), 0)

    def places(self, n: int) -> dict[str, int]:
        """Of each source the samples among the first n of this mix: where it stands at position n."""
        if isinstance(self._dataset, BlendedDataset):
            return self._dataset.consumed(n)
        return dict.fromkeys(self.weights, n)

    def go_on(self, n: int, consumed: Mapping[str, int] | None) -> None:
        """Go on at position n, up to which a run has consumed so much; None: what this mix gives up to there."""
        self._since, self._before = n, dict(self.places(n) if consumed is None else consumed)

    def consumed(self, n: int) -> dict[str, int]:
        """How many samples of each source the run has consumed when it stands at position n; their sum is n."""
        now, then = self.places(n), self.places(self._since)
        return {name: self._before.get(name, 0) + now.get(name, 0) - then.get(name, 0) for name in {**now, **self._before}}

    def state(self, n: int) -> dict[str, Any]:
        """What a checkpoint at position n tells of the mix."""
        return {"consumed": self.consumed(n), "places": self.places(n), "weights": self.weights}

    def stages_after(self, n: int, weights: Mapping[str, float], stages: Sequence[Mapping[str, Any]], length: int) -> str:
        """The curriculum that leads from another mix to this one at position n, so that its sources go on where they stand.

        Args:
            weights, stages: of the other mix: its :attr:`weights`, and its curriculum as plain data.
            length: tokens of a sample.
        """
        own = [] if self.curriculum is None else self.curriculum.as_data()
        whole = {"first": 0, "seq_length": length, "weights": None}
        now = [s for s in own if s["first"] <= n][-1:] or [whole]
        found = [(s["first"], s, weights) for s in stages or [whole] if s["first"] < n]
        found += [(max(n, s["first"]), s, self.weights) for s in (*now, *(s for s in own if s["first"] > n))]
        lines = ["stages:"]
        for first, stage, default in found:
            line: dict[str, Any] = {"at": first * length, "weights": dict(stage["weights"] or default)}
            if stages or own:
                line["seq_length"] = stage["seq_length"]
            lines.append("- " + yaml.safe_dump(line, default_flow_style=True, sort_keys=False, width=1 << 30).strip())
        return "\n".join(lines)
