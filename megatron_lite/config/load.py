"""From a command line and YAML files to a :class:`RunConfig`, and back.

What a person says overrides what follows from nothing, in this order: the schema's defaults, ``--compat``, the files of
``--config`` in their order, flags. Everything that is wrong is collected and raised at once.

The model's dataclass comes from ``resolve``, a function from the text of ``--model`` to a dataclass, which the caller
passes: configuration knows no models. :func:`builtin_model_config`, the default, knows ``gpt`` and ``llama``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
import yaml

from megatron_lite.config import argv as command_line
from megatron_lite.config import flags
from megatron_lite.config.problem import ConfigError, Problem, nearest_name
from megatron_lite.config.schema import Flat, RunConfig
from megatron_lite.config.transformer import LlamaConfig, TransformerConfig
from megatron_lite.config.values import describe, plain
from megatron_lite.config.yaml_file import ConfigFile, Key, from_data, read_file, typed_values

Resolve = Callable[[str], type]

COMPAT: dict[Key, Any] = {  # --compat megatron: every difference in numbers that has a flag
    ("data", "document_mask"): False,
    ("training", "loss_normalization"): "microbatch",
    ("training", "mask_padded_vocab"): False,
    ("data", "sample_order"): "megatron",
    ("optimizer", "initial_loss_scale"): 2.0**32,
}

TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")
TOKENIZER = ("tokenizer_type", *TOKENIZER_FILES, "tiktoken_pattern", "eod_token")
TRAINING_OF_MODEL = frozenset({  # options of a model that decide how it is trained, not what it is
    "attention_dropout", "hidden_dropout", "label_smoothing", "init_method_std", "make_vocab_size_divisible_by",
    "no_weight_decay_patterns",
})  # fmt: skip


@dataclass(frozen=True)
class Loaded:
    """A configuration and how it came about.

    Attributes:
        config: the configuration.
        accepted: (flag, reason) of every flag that was given and has no effect.
        given: (section, field) of everything that flags or files set.
        problems: flags that could not be read and are left out, see ``lenient`` of :func:`load`.
    """

    config: RunConfig[Any]
    accepted: tuple[tuple[str, str], ...] = ()
    given: frozenset[Key] = frozenset()
    problems: tuple[Problem, ...] = ()


BUILTIN: dict[str, type] = {"gpt": TransformerConfig, "llama": LlamaConfig}


def builtin_model_config(architecture: str) -> type:
    """Configuration class of a model of ours."""
    if architecture in BUILTIN:
        return BUILTIN[architecture]
    near = nearest_name(architecture, BUILTIN)
    raise ConfigError([Problem(f"unknown model {architecture}", rule="gpt, llama or MODULE:CLASS", nearest=near or "")])


@dataclass(frozen=True)
class NoModel:
    """The model's section when a command line is read without it."""


def no_model(architecture: str) -> type:
    """The class above, whatever the model."""
    return NoModel


def load(
    argv: Sequence[str],
    resolve: Resolve = builtin_model_config,
    *,
    prog: str = "megatron-lite train",
    without_model: bool = False,
    lenient: bool = False,
) -> Loaded:
    """Read a command line and the files it names.

    Args:
        argv: the flags.
        resolve: from the text of ``--model`` to the model's configuration class.
        prog: name of the program in its help.
        without_model: leave out a team's model (its class, ``--model.FIELD``, ``model:``): what can be known before its
            module is imported. Models of ours are read as always.
        lenient: return what is wrong with names of flags together with what the other flags say, so that all of it can
            be judged and told at once.

    Raises:
        ConfigError: with every problem of flags, files, names and types (not yet of the values against each other).
        SystemExit: after printing the help, if ``--help`` is among the flags.
    """
    files = [read_file(path) for path in command_line.peek(argv, "--config")]
    architecture = _architecture(argv, files)
    if without_model and architecture not in BUILTIN:
        argv = [
            token
            for flag, values in command_line.cut(argv)[0]
            if not flag.startswith("--model")
            for token in (flag, *values)
        ]
        for file in files:
            file.values = {key: value for key, value in file.values.items() if key[0] != "model"}
        resolve = no_model
    model_config = resolve(architecture)
    line = command_line.read(argv, model_config)
    problems = list(line.problems)
    values: dict[Key, Any] = {}
    for file in files:
        its_values, its_problems = typed_values(file, model_config)
        values.update(its_values)
        problems += its_problems
    given = frozenset(values)
    values["", "architecture"] = architecture
    compat = line.given.get("--compat", [values.get(("training", "compat"))])
    base = assemble(model_config, (COMPAT if compat == ["megatron"] else {}) | values, problems)
    if line.help:
        print_help(base, model_config, prog)
        raise SystemExit(0)
    fields = flags.field_flags(model_config)
    config, flag_problems = _apply_flags(base, model_config, line, fields)
    if flag_problems or (problems and not (lenient and problems == line.problems)):
        raise ConfigError(problems + flag_problems)
    given |= {(fields[flag].section, fields[flag].name) for flag in line.given}
    return Loaded(_without_quotes(config), tuple(line.accepted.items()), given, tuple(problems))


def _architecture(argv: Sequence[str], files: Sequence[ConfigFile]) -> str:
    named = command_line.peek(argv, "--model")
    if named:
        return named[-1]
    in_files = [file.values["", "architecture"] for file in files if ("", "architecture") in file.values]
    return str(in_files[-1]) if in_files else "gpt"


def assemble(model_config: type, values: Mapping[Key, Any], problems: list[Problem]) -> RunConfig[Any]:
    """A configuration from defaults and typed values; what a model's class refuses is added to ``problems``."""
    sections: dict[str, Any] = {}
    for section, cls in flags.section_classes(model_config).items():
        its = {name: value for (s, name), value in values.items() if s == section}
        required = [f.name for f in dataclasses.fields(cls) if f.init and _is_required(f)]
        # A team's own field may have no default; flags can still give it, so tyro is told that it is missing.
        its = dict.fromkeys(required, tyro.MISSING) | its
        try:
            sections[section] = cls(**its)
        except (TypeError, ValueError) as error:
            problems.append(Problem(f"{section}: {error}"))
            sections[section] = cls(**dict.fromkeys(required, tyro.MISSING))
    return RunConfig(**sections, architecture=values.get(("", "architecture"), "gpt"))


def _is_required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _parser_type(model_config: type) -> Any:
    """The type that tyro reads: a model of ours has flat flags, a team's own ``--model.FIELD``."""
    if flags.is_own(model_config):
        return RunConfig[model_config]  # type: ignore[valid-type]
    return RunConfig[Annotated[model_config, Flat]]  # type: ignore[valid-type]


def _tyro(base: RunConfig[Any], model_config: type, tokens: Sequence[str]) -> RunConfig[Any] | None:
    """What tyro makes of the tokens, or None if it refuses them."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            kind = _parser_type(model_config)
            return tyro.cli(kind, args=list(tokens), default=base, console_outputs=False)  # type: ignore[no-any-return]
    except SystemExit:
        return None


def _apply_flags(
    base: RunConfig[Any], model_config: type, line: command_line.CommandLine, fields: dict[str, flags.FieldFlag]
) -> tuple[RunConfig[Any], list[Problem]]:
    config = _tyro(base, model_config, line.tokens(fields))
    if config is not None:
        return config, []
    problems = []
    missing = _missing(base, line, fields)
    for flag, values in line.given.items():  # which of them was it? each alone, with what is required beside it
        alone = command_line.CommandLine(given={flag: values})
        if not missing and _tyro(base, model_config, alone.tokens(fields)) is None:
            text = " ".join([flag, *values])
            problems.append(Problem(f"{text}: expected {describe(fields[flag].kind)}"))
    problems += [Problem(f"{flag} is required by --model {base.architecture}") for flag in missing]
    return base, problems or [Problem(f"these flags do not fit together: {' '.join(line.tokens(fields))}")]


def _missing(base: RunConfig[Any], line: command_line.CommandLine, fields: dict[str, flags.FieldFlag]) -> list[str]:
    """Flags of required fields that neither files nor flags gave."""
    absent = {f.name for f in dataclasses.fields(base.model) if getattr(base.model, f.name, None) is tyro.MISSING}
    return [flag for flag, f in fields.items() if f.section == "model" and f.name in absent and flag not in line.given]


def _without_quotes(config: RunConfig[Any]) -> RunConfig[Any]:
    """``--split '99,1,0'`` inside a bash array arrives with its quotes; Megatron-LM reads past them, so do we."""
    split = config.data.split.strip("'\" ")
    return dataclasses.replace(config, data=dataclasses.replace(config.data, split=split))


def print_help(base: RunConfig[Any], model_config: type, prog: str) -> None:
    """The help of every flag, on stdout."""
    with contextlib.suppress(SystemExit):
        tyro.cli(_parser_type(model_config), args=["--help"], default=base, prog=prog)
    print(
        "  --config FILE.yaml   read options from a file (may be given several times; flags win)\n"
        "  --check-only N       check everything for N ranks, print what a start would say, and start nothing\n"
        "  Other names and Megatron-LM's flags without effect are listed in docs/configuration.md."
    )


def to_dict(config: RunConfig[Any]) -> dict[str, Any]:
    """The whole configuration as plain data: ``architecture`` and the sections; :func:`from_dict` takes it back."""
    found: dict[str, Any] = {"architecture": config.architecture}
    found.update({section: plain(getattr(config, section)) for section in flags.SECTIONS})
    return found


def to_yaml(config: RunConfig[Any], *, only_changed: bool = False) -> str:
    """The configuration as YAML; with ``only_changed`` just what differs from the defaults."""
    data = to_dict(config)
    if only_changed:
        keep = changed(config)
        for section in flags.SECTIONS:
            data[section] = {name: value for name, value in data[section].items() if (section, name) in keep}
        data = {key: value for key, value in data.items() if value != {}}
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def to_json(config: RunConfig[Any]) -> str:
    """The configuration as JSON."""
    return json.dumps(to_dict(config), indent=1)


def from_dict(
    data: Mapping[str, Any], resolve: Resolve = builtin_model_config, name: str = "saved configuration"
) -> RunConfig[Any]:
    """A configuration from plain data, strictly.

    Raises:
        ConfigError: unknown fields, wrong types.
    """
    file = from_data(name, dict(data))
    model_config = resolve(_architecture([], [file]))
    values, problems = typed_values(file, model_config)
    config = assemble(model_config, values, problems)
    if problems:
        raise ConfigError(problems)
    return config


def changed(config: RunConfig[Any]) -> dict[Key, tuple[Any, Any]]:
    """(section, field) -> (value, default) of every field that differs from its default."""
    found: dict[Key, tuple[Any, Any]] = {}
    if config.architecture != "gpt":
        found["", "architecture"] = (config.architecture, "gpt")
    for section in flags.SECTIONS:
        its = getattr(config, section)
        for f in dataclasses.fields(its):
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            value = getattr(its, f.name)
            if f.init and value != default:
                found[section, f.name] = (value, None if default is dataclasses.MISSING else default)
    return found


def with_checkpoint_args(
    loaded: Loaded, saved: Mapping[str, Any], resolve: Resolve = builtin_model_config, name: str = "checkpoint"
) -> Loaded:
    """``--use-checkpoint-args``: the model, and the tokenizer and sequence length unless given, from a saved
    configuration (plain data, as :func:`to_dict` makes it).

    What was given of the model and is not the checkpoint's becomes a problem, except for :data:`TRAINING_OF_MODEL`, which may
    be given. A tokenizer whose kind and files are given is taken whole, else what was not given of it is the checkpoint's.

    Raises:
        ConfigError: the saved configuration does not fit the schema.
    """
    theirs = from_dict({k: v for k, v in saved.items() if k in ("architecture", "model", "data")}, resolve, name)
    given, ours = {field for section, field in loaded.given if section == "data"}, loaded.config
    its = [f.name for f in dataclasses.fields(theirs.model) if ("model", f.name) in loaded.given and hasattr(ours.model, f.name)]
    free = {field: getattr(ours.model, field) for field in its if field in TRAINING_OF_MODEL}
    both = [(field, *_meanings(theirs.model, field, getattr(ours.model, field))) for field in its if field not in free]
    if ("", "architecture") in loaded.given:
        both.insert(0, ("model", ours.architecture, theirs.architecture))
    wrong = [(field.replace("_", "-"), value, stored) for field, value, stored in both if value != stored]
    problems = loaded.problems
    if wrong:
        numbers = "; ".join(f"{option} {value} given, {stored} in the checkpoint" for option, value, stored in wrong)
        nearest = f"leave {', '.join(option for option, _, _ in wrong)} out, or leave --use-checkpoint-args out"
        problems += (Problem("--use-checkpoint-args takes the model of the checkpoint, and another one is given", numbers, "", nearest),)
    whole = "tokenizer_type" in given and not given.isdisjoint(TOKENIZER_FILES)
    taken = ("seq_length", *(() if whole else TOKENIZER))
    config = dataclasses.replace(
        ours,
        architecture=theirs.architecture,
        model=dataclasses.replace(theirs.model, **free),
        data=dataclasses.replace(ours.data, **{field: getattr(theirs.data, field) for field in taken if field not in given}),
    )
    return dataclasses.replace(loaded, config=config, problems=problems)


def _meanings(model: Any, field: str, value: Any) -> tuple[Any, Any]:
    """A given value of a model's option and the model's own: what they come to, where sizes follow from others."""
    derived = {"ffn_hidden_size": "ffn_size", "kv_channels": "head_dim", "num_query_groups": "kv_heads"}
    if isinstance(model, TransformerConfig) and field in derived:
        return getattr(dataclasses.replace(model, **{field: value}), derived[field]), getattr(model, derived[field])
    stored = getattr(model, field)
    return (stored if field == "vocab_size" and value == 0 else value), stored  # 0: the tokenizer's
