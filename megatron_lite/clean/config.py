"""The YAML file of a cleaning pipeline, read strictly: every complaint has its line, and all come before any document.

The file names the keys of the records and lists the steps in their order; a step may stand there several times::

    text_key: text
    steps:
      - normalise
      - mask: {phone: false}

A step's options are the fields of its ``Options`` dataclass, and nothing else defines them. Steps are imported when a
file names them, so a package that one step needs is needed by those alone who use that step.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from megatron_lite.clean.step import SAVED_BY, CorpusOptions, Step
from megatron_lite.config.flags import field_kinds
from megatron_lite.config.problem import ConfigError, Problem, nearest_name
from megatron_lite.config.values import NUMBER, convert, plain
from megatron_lite.config.yaml_file import compose_file, construct, mapping_pairs, yaml_words

# name of a step -> module:class
STEPS: Mapping[str, str] = {
    "normalise": "megatron_lite.clean.steps.normalise:Normalise",
    "mask": "megatron_lite.clean.steps.mask:Mask",
    "chinese": "megatron_lite.clean.steps.chinese:Chinese",
    "quality": "megatron_lite.clean.steps.quality:Quality",
    "language": "megatron_lite.clean.steps.language:Language",
    "perplexity": "megatron_lite.clean.steps.perplexity:Perplexity",
    "decontaminate": "megatron_lite.clean.steps.decontaminate:Decontaminate",
    "drift": "megatron_lite.clean.steps.drift:Drift",
    "bloom": "megatron_lite.clean.steps.bloom:Bloom",
    "exact": "megatron_lite.clean.steps.exact:Exact",
    "minhash": "megatron_lite.clean.steps.minhash:MinHash",
}


# Of a dropped document: the reason, what dropped it, what was measured, and where it was read.
DROPPED_FIELDS = ("dropped", "step", "dropped_detail", "dropped_at")


@dataclass(frozen=True)
class Keys:
    """Which fields of a record mean something."""

    text_key: str = "text"
    """Field that holds the text."""
    source_key: str = ""
    """Field (text or number) by which the report tells sources apart; of records without it the file is the source."""
    language_key: str = ""
    """Field of the language's ISO 639-1 code: read where the record has it, written where a step found it; empty: none."""


@dataclass(frozen=True)
class StepConfig:
    """One step of a pipeline.

    Attributes:
        name: key of :data:`STEPS`.
        options: instance of the step's ``Options``.
        kind: its class.
    """

    name: str
    options: Any
    kind: type[Step]

    def build(self) -> Step:
        """The step, ready for documents."""
        return self.kind(self.options)


@dataclass(frozen=True)
class Pipeline:
    """A whole pipeline."""

    steps: tuple[StepConfig, ...]
    keys: Keys = Keys()

    def labels(self) -> list[str]:
        """What the report calls each step: its number and name."""
        return [f"{number} {step.name}" for number, step in enumerate(self.steps, 1)]

    def as_data(self) -> dict[str, Any]:
        """All options, defaults too, as plain data."""
        return {**plain(self.keys), "steps": [{step.name: plain(step.options)} for step in self.steps]}


def step_class(name: str) -> type[Step]:
    """The class of a step."""
    module, _, its_name = STEPS[name].partition(":")
    found: type[Step] = getattr(importlib.import_module(module), its_name)
    return found


def load_pipeline(path: str) -> Pipeline:
    """Read a file.

    Raises:
        ConfigError: everything that is wrong with it, each with file and line.
    """
    node = compose_file("--config", path)
    reader = _Reader(path)
    if node is None:
        reader.complain(1, "the file is empty", "list the steps under 'steps:'")
    else:
        reader.read(node)
    if reader.problems:
        raise ConfigError(reader.problems)
    return Pipeline(tuple(reader.steps), Keys(**reader.keys))


class _Reader:
    """Reads a tree of YAML and collects what is wrong with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problems: list[Problem] = []
        self.steps: list[StepConfig] = []
        self.keys: dict[str, Any] = {}

    def complain(self, line: int, what: str, nearest: str = "") -> None:
        self.problems.append(Problem(f"{self.name}:{line}: {what}", nearest=nearest))

    def read(self, node: yaml.Node) -> None:
        """The whole file."""
        kinds, listed = field_kinds(Keys), False
        for key, line, value in mapping_pairs(self.name, self.problems, node, ""):
            if key == "steps":
                listed = True
                self._read_steps(line, value)
            elif key in kinds:
                self._set(self.keys, key, kinds[key], line, value)
            else:
                known = [*kinds, "steps"]
                self.complain(line, f"{key}: unknown field", nearest_name(key, known) or ", ".join(known))
        for name in ("source_key", "language_key"):
            if self.keys.get(name) == self.keys.get("text_key", Keys.text_key):
                self.complain(1, f"{name}: {self.keys[name]}: that field holds the text", "another field, or none")
        for name in ("text_key", "language_key"):
            if self.keys.get(name) in DROPPED_FIELDS:
                self.complain(1, f"{name}: {self.keys[name]}: what --keep-dropped writes has its own field of that name", "another name")
        if not listed and not self.problems:
            self.complain(1, "no steps", "list them under 'steps:'")

    def _read_steps(self, line: int, node: yaml.Node) -> None:
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            empty = "the list is empty; " if not node.value else ""
            self.complain(line, f"steps: {empty}expected a list of one step or more, as in '- normalise'")
            return
        for item in node.value:
            line = item.start_mark.line + 1
            if isinstance(item, yaml.ScalarNode):
                self._read_step(item.value, line, None)
            elif isinstance(item, yaml.MappingNode) and len(item.value) == 1 and isinstance(item.value[0][0], yaml.ScalarNode):
                self._read_step(item.value[0][0].value, line, item.value[0][1])
            else:
                options = isinstance(item, yaml.MappingNode) and item.value and not item.value[0][1].value
                hint = "options stand two spaces further in than their step's name" if options else ""
                self.complain(line, "steps: expected a step's name, or 'name: {option: value}'", hint)

    def _read_step(self, name: str, line: int, node: yaml.Node | None) -> None:
        if name not in STEPS:
            self.complain(line, f"{name}: unknown step", nearest_name(name, STEPS) or ", ".join(STEPS))
            return
        try:
            kind = step_class(name)
        except ImportError as error:
            self.complain(line, f"{name}: cannot be used ({error})")
            return
        kinds, before = field_kinds(kind.Options), len(self.problems)
        values: dict[str, Any] = {}
        pairs = [] if node is None else mapping_pairs(self.name, self.problems, node, name)
        for key, its_line, value in pairs:
            if key in kinds:
                self._set(values, key, kinds[key], its_line, value, f"{name}.")
            else:
                self.complain(
                    its_line, f"{name}.{key}: unknown option", nearest_name(key, kinds) or ", ".join(kinds) or "none"
                )
        for f in dataclasses.fields(kind.Options):
            missing = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if missing and f.name not in [key for key, _, _ in pairs]:
                self.complain(line, f"{name}.{f.name} is required")
        if len(self.problems) == before:
            options = kind.Options(**values)
            for problem in [*_file_problems(kind, options), *kind.problems(options)]:
                self.complain(line, f"{name}: {problem}")
            self.steps.append(StepConfig(name, options, kind))

    def _set(self, into: dict[str, Any], key: str, kind: Any, line: int, node: yaml.Node, where: str = "") -> None:
        try:
            value = construct(node)
            into[key] = convert(value, kind)
        except ValueError as error:
            self.complain(line, f"{where}{key}: {value!r}: {error}", _yaml_hint(node, value, error))
        except yaml.YAMLError as error:
            self.complain(line, f"{where}{key}: {yaml_words(error)[1]}")


def _yaml_hint(node: yaml.Node, value: Any, error: ValueError) -> str:
    """What YAML reads otherwise than it is meant."""
    inner = [str(n.value) for n in node.value if n.tag.endswith(":bool")] if isinstance(node, yaml.SequenceNode) else []
    if value is None:
        return "a value, or leave the option out" + ('; "" for an empty text' if str(error) == "expected text" else "")
    words = [str(node.value)] if isinstance(value, bool) else inner
    if words:
        return f'"{words[0]}" in quotes, if the word is meant (YAML reads yes, no, on and off as true and false)'
    if isinstance(value, str) and "whole number" in str(error) and NUMBER.match(value) and float(value).is_integer():
        return f"{float(value):.0f}"
    return ""


def _file_problems(kind: type[Step], options: Any) -> list[str]:
    found = []
    for path in kind.files(options):
        if not os.path.isfile(path):
            found.append(f"{path}: no such file" if not os.path.isdir(path) else f"{path}: a directory, not a file")
    against = options.against if isinstance(options, CorpusOptions) else ""
    if against and not os.path.isfile(os.path.join(against, SAVED_BY)):
        found.append(f"against {against}: not a directory that 'save' wrote")
    return found
