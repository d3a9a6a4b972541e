"""The YAML form of a configuration, read strictly: every key known, every type right, every complaint with its line.

A file holds sections (``model:``, ``training:`` ...) with fields, and ``architecture:``. It may hold any part of a
configuration: presets hold a model and the settings it is usually trained with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_lite.config import flags
from megatron_lite.config.problem import ConfigError, Problem, nearest_name
from megatron_lite.config.values import convert

Key = tuple[str, str]  # (section, field); ("", "architecture") for a field of RunConfig itself


@dataclass
class ConfigFile:
    """A configuration as plain data.

    Attributes:
        name: how complaints call it (a path).
        values: (section, field) -> plain value.
        lines: (section, field) -> line number, where known.
        problems: what is wrong with its shape.
    """

    name: str
    values: dict[Key, Any] = field(default_factory=dict)
    lines: dict[Key, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, key: Key) -> str:
        """``run.yaml:12: training.seed``."""
        line = f":{self.lines[key]}" if key in self.lines else ""
        return f"{self.name}{line}: {'.'.join(part for part in key if part)}"


def compose_file(flag: str, path: str) -> yaml.Node | None:
    """The tree of a YAML file that a flag names; None: it is empty. Raises ConfigError: it is missing or is not YAML."""
    try:
        return yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(f"{flag} {path}: cannot be read ({getattr(error, 'strerror', None) or error})")]) from None
    except yaml.YAMLError as error:
        line, words = yaml_words(error)
        raise ConfigError([Problem(f"{flag} {path}{line}: not YAML ({words})")]) from None


def yaml_words(error: Exception) -> tuple[str, str]:
    """(``:LINE``, or nothing where it is unknown; what is wrong) of an error of reading YAML."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f":{error.problem_mark.line + 1}", ", ".join(filter(None, (error.context, error.problem)))
    return "", str(error).split("\n")[0]


def read_file(path: str) -> ConfigFile:
    """Read a YAML file. Raises ConfigError: it is missing or is not YAML."""
    node = compose_file("--config", path)
    found = ConfigFile(path)
    try:
        if node is not None:
            _read_sections(found, node)
    except yaml.YAMLError as error:  # a tag that names no type, an alias of itself
        line, words = yaml_words(error)
        raise ConfigError([Problem(f"--config {path}{line}: {words}")]) from None
    return found


def from_data(name: str, data: dict[str, Any]) -> ConfigFile:
    """A configuration saved as plain data (``run.json``, a checkpoint's manifest) in the same form."""
    found = ConfigFile(name)
    for section, content in data.items():
        if section in flags.SECTIONS and isinstance(content, dict):
            found.values.update({(section, key): value for key, value in content.items()})
        else:
            found.values["", section] = content
    return found


def _read_sections(found: ConfigFile, node: yaml.Node) -> None:
    for section, line, value in mapping_pairs(found.name, found.problems, node, ""):
        if section in flags.SECTIONS:
            for name, its_line, its_value in mapping_pairs(found.name, found.problems, value, section):
                found.values[section, name] = construct(its_value)
                found.lines[section, name] = its_line
        else:
            found.values["", section] = construct(value)
            found.lines["", section] = line


def mapping_pairs(name: str, problems: list[Problem], node: yaml.Node, where: str) -> list[tuple[str, int, yaml.Node]]:
    """(key, line, value node) of a mapping in file ``name``; a section without content is empty. Adds to ``problems``."""
    line = node.start_mark.line + 1
    if isinstance(node, yaml.ScalarNode) and node.value == "" and where:
        return []
    if not isinstance(node, yaml.MappingNode):
        what = f"{where}: " if where else ""
        problems.append(Problem(f"{name}:{line}: {what}expected fields, as in 'name: value'"))
        return []
    pairs, seen = [], set()
    for key_node, value in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen:
            place = f"{where}.{key}" if where else key
            problems.append(Problem(f"{name}:{line}: {place} is given twice"))
        seen.add(key)
        pairs.append((key, line, value))
    return pairs


NOT_DECIMAL = re.compile(r"[-+]?0[0-9_]*[1-9a-zA-Z_]|.*:")
# YAML 1.1 reads 016 as 14 and 1:30 as 90: numbers that are not plain decimals stay text here.
_Loader: Any = type("_Loader", (yaml.SafeLoader,), {})


def _number(loader: Any, node: yaml.ScalarNode) -> Any:
    if NOT_DECIMAL.match(node.value):
        return node.value
    return loader.construct_yaml_int(node) if node.tag.endswith(":int") else loader.construct_yaml_float(node)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _number)


def construct(node: yaml.Node) -> Any:
    """The plain value of a node. Raises yaml.YAMLError."""
    loader = _Loader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


def typed_values(found: ConfigFile, model_config: type) -> tuple[dict[Key, Any], list[Problem]]:
    """The file's values with the types of the schema, and every unknown key and wrong type."""
    kinds: dict[Key, Any] = {("", "architecture"): str}
    for section, cls in flags.section_classes(model_config).items():
        kinds.update({(section, name): kind for name, kind in flags.field_kinds(cls).items()})
    values: dict[Key, Any] = {}
    problems = list(found.problems)
    for key, value in found.values.items():
        if key not in kinds:
            problems.append(_unknown_key(found, key, kinds))
            continue
        try:
            values[key] = convert(value, kinds[key])
        except ValueError as error:
            problems.append(Problem(f"{found.place(key)}: {value!r}", rule=str(error)))
    return values, problems


def _unknown_key(found: ConfigFile, key: Key, kinds: dict[Key, Any]) -> Problem:
    section, name = key
    flag = "--" + name.replace("_", "-")
    if flag in flags.ABSENT:
        return Problem(f"{found.place(key)} is not in this version: {flags.ABSENT[flag].what}")
    if flag in flags.ALIASES:
        return Problem(f"{found.place(key)} is only a flag's other name", nearest=" ".join(flags.ALIASES[flag].becomes))
    if flag in flags.ACCEPTED:
        return Problem(f"{found.place(key)} has no effect: {flags.ACCEPTED[flag].reason}", nearest="leave it out")
    homes = [s for s, n in kinds if n == name and s]
    if homes:
        return Problem(f"{found.place(key)}: {name} belongs under '{homes[0]}:'")
    if not section:
        near = nearest_name(name, [*flags.SECTIONS, "architecture"])
        return Problem(f"{found.place(key)}: unknown section", nearest=near or ", ".join(flags.SECTIONS))
    near = nearest_name(name, [n for s, n in kinds if s == section])
    if near is None:
        near = nearest_name(name, [n for _, n in kinds])
    return Problem(f"{found.place(key)}: unknown field", nearest=near or "docs/configuration.md lists all fields")
