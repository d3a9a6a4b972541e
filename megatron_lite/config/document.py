"""``docs/configuration.md``, written from the schema: every flag, its default, its difference from Megatron-LM.

``python -m megatron_lite.config.document`` writes it; a test compares.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any

from megatron_lite.config import flags
from megatron_lite.config.schema import RunConfig
from megatron_lite.config.summary import DIFFERENCE_TABLE
from megatron_lite.config.transformer import LlamaConfig, TransformerConfig
from megatron_lite.config.values import describe

PATH = "docs/configuration.md"

INTRO = """# Configuration

<!-- Written by `python -m megatron_lite.config.document`; a test keeps it current. Do not edit by hand. -->

A run is configured by flags, by YAML files, or both:

```text
megatron-lite train --config examples/presets/gpt2_124m.yaml --config run.yaml --lr 3e-4
```

Flags win over files, later files over earlier ones, files over `--compat`, and that over the defaults below. Flags are
Megatron-LM's where it has them, and so are the defaults; `--compat megatron` sets the few that differ on purpose. In a
file each option stands under its section (the headings below), with `_` for `-`:

```yaml
architecture: llama          # --model llama
model:
  num_layers: 16
training:
  global_batch_size: 256
```

A boolean `--flag` has a twin `--no-flag`. `--model their_package.module:TheirModel` takes a team's own model; its
options are the fields of its configuration class, `--model.FIELD` on the command line and `model:` in a file.

Before any weight exists the whole configuration is checked, and every problem is listed with the numbers, the rule and
the nearest valid values; the exit code is then 2. `--use-checkpoint-args` takes the model and the tokenizer from the
checkpoint that `--load` names ([what may be given beside it](checkpoints.md#options-from-the-checkpoint)).
"""


def field_help(cls: type) -> dict[str, str]:
    """Field name -> the text under it in the source, for a dataclass and its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
            ):
                found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def default_text(value: Any) -> str:
    """A default as the table shows it."""
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def _theirs(name: str) -> str:
    if name in flags.DIFFERENCES:
        return flags.DIFFERENCES[name]
    return "no such flag" if name in flags.OURS else "same"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _section(name: str, cls: type, about: str) -> list[str]:
    texts, kinds = field_help(cls), flags.field_kinds(cls)
    lines = [
        f"## `{name}`",
        "",
        about,
        "",
        _row("flag", "value", "default", "what", "Megatron-LM"),
        "|---|---|---|---|---|",
    ]
    llama = {f.name: _default(f) for f in dataclasses.fields(LlamaConfig)}
    for f in dataclasses.fields(cls):
        value = default_text(_default(f))
        if cls is TransformerConfig and llama[f.name] != _default(f):
            value += f" (llama: {default_text(llama[f.name])})"
        kind = "on, off" if f.name in flags.ON_OFF else "" if kinds[f.name] is bool else describe(kinds[f.name])
        lines.append(_row(f"`--{f.name.replace('_', '-')}`", kind, value, texts[f.name], _theirs(f.name)))
    return [*lines, ""]


def document() -> str:
    """The text of ``docs/configuration.md``."""
    lines = [INTRO, "## Where we differ from Megatron-LM on purpose", ""]
    lines += ["The first start of a run lists the lines that are in force.", ""]
    lines += [_row("item", "ours", "Megatron-LM", "their way"), "|---|---|---|---|"]
    for item, _, ours, theirs, flag in DIFFERENCE_TABLE:
        lines.append(_row(item, ours, theirs, f"`{flag}`" if flag else "none"))
    lines += ["", "## Top level", "", _row("flag", "default", "what"), "|---|---|---|"]
    top = field_help(RunConfig)
    lines.append(_row("`--model` (`architecture:` in a file)", "gpt", top["architecture"]))
    lines += [_row("`--config FILE.yaml`", "-", "Read options from a file; may be given several times."), ""]
    for name, cls in flags.section_classes(TransformerConfig).items():
        lines += _section(name, cls, top[name])
    lines += ["## Other names", "", _row("flag", "means"), "|---|---|"]
    lines += [_row(f"`{flag}`", f"`{' '.join(a.becomes)}`".replace("{}", "VALUE")) for flag, a in flags.ALIASES.items()]
    lines += ["", "## Accepted without effect", "", "Said once at start.", "", _row("flag", "why"), "|---|---|"]
    lines += [_row(f"`{flag}`", a.reason) for flag, a in flags.ACCEPTED.items()]
    lines += ["", "## Not in this version", "", "Refused by name, exit code 2.", "", _row("flag", "what"), "|---|---|"]
    for flag, absent in flags.ABSENT.items():
        but = f" (other than {', '.join(absent.harmless)})" if absent.harmless else ""
        lines.append(_row(f"`{flag}`{but}", absent.what))
    lines.append(_row("`--zero-stage 2`, `--zero-stage 3`", "sharding gradients, sharding parameters"))
    lines.append(_row("`--recompute-granularity selective`", "recomputing parts of a block"))
    lines += ["", "## Refused", "", "What this program does not set out to do; flags that begin with:", ""]
    lines += [_row("flags", "what"), "|---|---|", *(_row(f"`{p}`", what) for p, what in flags.REFUSED.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(PATH).write_text(document(), encoding="utf-8")
    sys.stdout.write(f"{PATH} written\n")
