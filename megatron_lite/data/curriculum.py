"""A curriculum: which sources are drawn how often, and how long rows are, by the tokens consumed so far.

A schedule file lists stages::

    stages:
      - at: 0
        seq_length: 512
        weights: {corpus/web: 0.9, corpus/code: 0.1}
      - at: 10B
        seq_length: 2048

What a stage does not name stays as it was; before the first naming it is ``--seq-length``, and the weights of the sources.

One sample is one window of ``--seq-length`` tokens in every stage, so tokens follow from samples, a stage begins at the first
sample not below ``at / seq-length``, and the position in the data stays one number. A stage with a shorter length cuts each
window into whole rows: positions restart and attention ends at multiples of its length, while the target across such a
cut is trained, since rows overlap by one token as windows do. That is a batch of the shorter windows, with as many
tokens to a step as before (the shorter sequences first of arXiv:2012.15832, the masks of arXiv:2503.15450).

Each stage's weights make a blend of their own, in which members go on where the stage before left them: how far that is
follows from the sizes of the stages, by the same computation on every rank and after every restart.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import yaml

from megatron_lite.config.problem import ConfigError, Problem, nearest_divisors, nearest_name
from megatron_lite.config.values import convert, whole_amount
from megatron_lite.config.yaml_file import compose_file, construct, mapping_pairs, yaml_words
from megatron_lite.data.blend import Blend, WindowsBlend
from megatron_lite.data.row import Dataset, Row

_FIELDS = ("at", "seq_length", "weights")
_MOST_TOKENS = 1 << 53  # up to which the blend's arithmetic is exact


@dataclass(frozen=True)
class Stage:
    """A part of a training.

    Attributes:
        first: the sample it begins at.
        at: consumed tokens, as given.
        seq_length: tokens of a row; divides the run's.
        weights: source -> weight; sources that are not named are not drawn. None: the weights of the sources.
        line: of the file.
    """

    first: int
    at: int
    seq_length: int
    weights: dict[str, float] | None = None
    line: int = 0


@dataclass(frozen=True)
class Curriculum:
    """The stages of a schedule file.

    Attributes:
        name: the file.
        seq_length: of the run.
        stages: ascending, the first at 0.
    """

    name: str
    seq_length: int
    stages: tuple[Stage, ...]

    @cached_property
    def firsts(self) -> list[int]:
        """The sample at which each stage begins."""
        return [stage.first for stage in self.stages]

    @cached_property
    def mixes(self) -> list[Stage]:
        """The stages at which weights change, the first in any case."""
        changes = [b for a, b in pairwise(self.stages) if a.weights != b.weights]
        return [self.stages[0], *changes]

    def at(self, sample: int) -> Stage:
        """The stage of a sample."""
        return self.stages[bisect_right(self.firsts, sample) - 1]

    def draws(self, name: str) -> bool:
        """Whether any stage gives a source a weight of its own above 0."""
        return any(stage.weights is not None and stage.weights.get(name, 0) > 0 for stage in self.stages)

    def as_data(self) -> list[dict[str, Any]]:
        """What decides about samples, as plain data: to be compared between ranks and with a checkpoint's."""
        return [{"first": s.first, "seq_length": s.seq_length, "weights": s.weights} for s in self.stages]

    def describe(self) -> list[str]:
        """A line for each stage."""
        lines = []
        for stage in self.stages:
            names = [f"{weight:g} {name}" for name, weight in (stage.weights or {}).items()]
            weights = ", ".join(names) if names else "the weights of the sources"
            lines.append(f"  from {stage.at:,} tokens (sample {stage.first:,}): rows of {stage.seq_length:,} tokens, {weights}")
        return lines

    def name_problems(self, names: Sequence[str]) -> list[Problem]:
        """Weights of sources that the run does not have, or has twice."""
        found = []
        for stage in self.mixes:
            for name in stage.weights or {}:
                place = f"{self.name}:{stage.line}: weights.{name}"
                if names.count(name) > 1:
                    found.append(Problem(f"{place}: {names.count(name)} sources have this name", rule="a source once"))
                elif name not in names:
                    near = nearest_name(name, names) or ", ".join(names[:5])
                    found.append(Problem(f"{place}: no source of the training data has this name", nearest=near))
        return found


def load_curriculum(
    path: str, seq_length: int, names: Sequence[str] | None = None, *, weighted: Sequence[Problem] = ()
) -> Curriculum:
    """Read a schedule file.

    Args:
        path: of the file.
        seq_length: of the run: the longest.
        names: of the sources; None: any.
        weighted: why no stage can have weights.

    Raises:
        ConfigError: everything that is wrong with it, each with file and line.
    """
    node = compose_file("--curriculum", path)
    reader = _Reader(path, seq_length)
    reader.read(node)
    found = Curriculum(path, seq_length, tuple(reader.stages))
    problems = reader.problems + ([] if names is None or not found.stages else found.name_problems(names))
    if any(stage.weights is not None for stage in found.stages):
        problems += weighted
    if problems:
        raise ConfigError(problems)
    return found


class _Reader:
    """Reads a tree of YAML and collects what is wrong with it."""

    def __init__(self, name: str, seq_length: int) -> None:
        self.name, self.seq_length = name, seq_length
        self.problems: list[Problem] = []
        self.stages: list[Stage] = []

    def complain(self, line: int, what: str, rule: str = "", nearest: str = "") -> None:
        self.problems.append(Problem(f"{self.name}:{line}: {what}", rule=rule, nearest=nearest))

    def read(self, node: yaml.Node | None) -> None:
        """The whole file."""
        stages: yaml.Node | None = None
        for key, line, value in [] if node is None else mapping_pairs(self.name, self.problems, node, ""):
            if key == "stages":
                stages = value
            else:
                self.complain(line, f"{key}: unknown field", nearest="stages")
        if isinstance(stages, yaml.SequenceNode) and stages.value:
            for item in stages.value:
                self._read_stage(item)
        elif not self.problems:
            self.complain(1, "stages are missing", "a list, as in '- {at: 0, seq_length: 512}'")

    def _read_stage(self, node: yaml.Node) -> None:
        line, given = node.start_mark.line + 1, {}
        for key, its_line, value in mapping_pairs(self.name, self.problems, node, "stages"):
            if key not in _FIELDS:
                self.complain(its_line, f"{key}: unknown field", nearest=nearest_name(key, _FIELDS) or ", ".join(_FIELDS))
            else:
                given[key] = (its_line, value)
        last = self.stages[-1] if self.stages else Stage(-1, -1, self.seq_length)
        if "at" not in given:
            self.complain(line, "at: is required", "consumed tokens at which the stage begins, such as 0 or 10B")
            return
        at = self._at(*given["at"], last)
        seq_length = self._seq_length(*given["seq_length"]) if "seq_length" in given else last.seq_length
        weights = self._weights(*given["weights"]) if "weights" in given else last.weights
        self.stages.append(Stage(-(-at // self.seq_length), at, seq_length, weights, line))

    def _value(self, line: int, node: yaml.Node, kind: Any, where: str) -> Any:
        """A value of a type; None after a complaint."""
        value: Any = getattr(node, "value", "")
        try:
            value = construct(node)
            return convert(value, kind)
        except (ValueError, yaml.YAMLError) as error:
            self.complain(line, f"{where}: {value!r}", yaml_words(error)[1])
            return None

    def _at(self, line: int, node: yaml.Node, last: Stage) -> int:
        try:
            at = whole_amount(str(construct(node)))
        except (ValueError, yaml.YAMLError) as error:
            self.complain(line, f"at: {yaml_words(error)[1]}")
            return last.at
        if at > _MOST_TOKENS:
            self.complain(line, f"at: {at:,}", f"at most {_MOST_TOKENS:,} tokens")
        elif last.at < 0 < at:
            self.complain(line, f"at: {at:,}", "the first stage begins at 0")
        elif at <= last.at:
            self.complain(line, f"at: {at:,}", f"stages begin one after the other, and the one before at {last.at:,}")
        elif -(-at // self.seq_length) == last.first:
            self.complain(line, f"at: {at:,}", f"a stage has at least one sample, of {self.seq_length:,} tokens")
        return at

    def _seq_length(self, line: int, node: yaml.Node) -> int:
        length = self._value(line, node, int, "seq_length")
        if length is not None and (length < 1 or self.seq_length % length):
            near = nearest_divisors(max(1, length), self.seq_length)
            rule = f"it divides --seq-length {self.seq_length}: each window is cut into whole rows"
            self.complain(line, f"seq_length: {length}", rule, " or ".join(map(str, near)))
        return length or 0

    def _weights(self, line: int, node: yaml.Node) -> dict[str, float]:
        found: dict[str, float] = {}
        pairs = mapping_pairs(self.name, self.problems, node, "weights")
        for name, its_line, value in pairs:
            weight = self._value(its_line, value, float, f"weights.{name}")
            if weight is not None and not (math.isfinite(weight) and weight >= 0):
                self.complain(its_line, f"weights.{name}: {weight:g}", "a number, not negative")
            found[name] = weight or 0.0
        empty = isinstance(node, yaml.ScalarNode) and not node.value
        if empty or (isinstance(node, yaml.MappingNode) and not any(found.values())):
            self.complain(line, "weights: no source is drawn", "one weight at least is above 0")
        return found


class StagedBlend:
    """Blends one after the other; each member goes on where it was left.

    Args:
        stages: (first position, blend of all members), ascending, the first at 0.
    """

    def __init__(self, stages: Sequence[tuple[int, Blend]]) -> None:
        self._firsts = [first for first, _ in stages]
        self._blends = [blend for _, blend in stages]

    @cached_property
    def _before(self) -> list[np.ndarray]:
        """Samples of each member before each stage, int64 [members]."""
        sizes = [b - a for a, b in pairwise(self._firsts)]
        within = [np.array(blend.consumed(n), dtype=np.int64) for blend, n in zip(self._blends, sizes, strict=False)]
        return list(accumulate(within, initial=np.zeros(len(self._blends[0].consumed(0)), dtype=np.int64)))

    def locate(self, i: int) -> tuple[int, int]:
        """(member, sample of that member) at position i."""
        stage = bisect_right(self._firsts, i) - 1
        member, sample = self._blends[stage].locate(i - self._firsts[stage])
        return member, int(self._before[stage][member]) + sample

    def consumed(self, size: int) -> list[int]:
        """Samples of each member in the first ``size`` positions."""
        stage = max(0, bisect_right(self._firsts, size - 1) - 1)
        counts: list[int] = (self._before[stage] + self._blends[stage].consumed(size - self._firsts[stage])).tolist()
        return counts


def staged_blend(curriculum: Curriculum, names: Sequence[str], weights: Sequence[float]) -> Blend:
    """The order of several sources under a curriculum.

    Args:
        names: of the members.
        weights: of the members where a stage does not say its own.
    """
    stages = []
    for mix in curriculum.mixes:
        own = weights if mix.weights is None else [mix.weights.get(name, 0.0) for name in names]
        stages.append((mix.first, WindowsBlend(own)))
    return StagedBlend(stages) if len(stages) > 1 else stages[0][1]


class ShorterRows:
    """The rows of a dataset, cut where a stage has a shorter sequence length."""

    def __init__(self, dataset: Dataset, curriculum: Curriculum) -> None:
        self.dataset, self.curriculum, self.endless = dataset, curriculum, dataset.endless

    def __len__(self) -> int:
        return len(self.dataset)

    def row(self, j: int) -> Row:
        """Sample j."""
        row, length = self.dataset.row(j), self.curriculum.at(j).seq_length
        whole = self.curriculum.seq_length
        return row if length == whole else replace(row, cuts=np.arange(length, whole, length))
