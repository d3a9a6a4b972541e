"""Chat templates: a conversation as the text that the model saw, or will see, in training.

A template is Jinja, as Hugging Face's tokenizers carry it: variables ``messages``, ``tools``, ``add_generation_prompt`` and the
tokenizer's special tokens (``bos_token``, ``eos_token``, ...), functions ``raise_exception`` and ``strftime_now``, a filter ``tojson``
that leaves characters and HTML alone, ``{% break %}`` and ``{% continue %}``. It comes from a file that somebody else wrote,
so it runs in Jinja's sandbox, without a loader, and can change none of the objects it is given. It gives the same text each time:
what draws at random is refused when it is compiled, text that shows where an object lies in memory and sets of keys (whose
order is another one in each process) when they come up; the time is a day; and its loops have a bound.

``{% generation %} ... {% endgeneration %}`` marks what the assistant wrote. Here the two marks write a character each that is
no character (Unicode reserves U+FDD0 to U+FDEF for such uses inside a program), which are found and taken out when
everything is rendered; so they stay where they are through macros, captured blocks and filters. A third one stands in the
messages, behind the first character of what spells a special token and is text.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from megatron_lite.text.tokenizer import read_config, token_text

OPEN, CLOSE, PLAIN = "\ufdd0", "\ufdd1", "\ufdd2"
_MARK = re.compile(f"([{OPEN}{CLOSE}{PLAIN}])")
FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ADDRESS = re.compile(" at 0x[0-9a-f]{6,}")  # Python's text for what has no other: functions, generators
_MOST_STEPS = 10_000_000  # of all loops and macros of a conversation: a second or more
_WITH_TOOLS = "tool_use"  # name of the template of several that is taken for conversations with tools


class TemplateRefusal(ValueError):
    """The template cannot render a conversation; the text says why."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: what is tokenized.
        marked: [start, stop) of each ``{% generation %}`` block in it, ascending; empty where there is none.
        plain: where ``PLAIN`` stood, ascending.
    """

    text: str
    marked: tuple[tuple[int, int], ...] = ()
    plain: tuple[int, ...] = ()


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja.
        tokens: the tokenizer's special tokens by name.
        now: what ``strftime_now`` reads.

    Attributes:
        marks: whether it has ``{% generation %}`` blocks.
        reads_tools, reads_date: whether it uses ``tools``, ``strftime_now``.

    Raises:
        ValueError: it is not Jinja, or draws at random.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], now: datetime) -> None:
        from jinja2 import TemplateSyntaxError, nodes

        self._source = source
        self._environment = environment = _environment(now)
        try:
            tree = environment.parse(source)
            _refuse_chance(tree)
            for body in [node.body for node in tree.find_all((nodes.For, nodes.Macro))]:
                body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("step")).set_lineno(1))
            self._template = environment.from_string(tree)
            self._template.globals = dict(self._template.globals)  # copied at each rendering, which a ChainMap makes slow
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not Jinja: {error.message} (line {error.lineno})") from None
        self.marks = any(OPEN in data.data for data in tree.find_all(nodes.TemplateData))
        names = {name.name for name in tree.find_all(nodes.Name)}
        self.reads_tools, self.reads_date = "tools" in names, "strftime_now" in names
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None = None, *, prompt: bool = False) -> Rendered:
        """The text of a conversation.

        Args:
            prompt: end with what asks the assistant to answer (``add_generation_prompt``).

        Raises:
            TemplateRefusal: the template raised, or failed.
        """
        from jinja2 import TemplateError

        self._environment.steps = 0
        try:
            text = self._template.render(
                messages=messages, tools=tools or None, documents=None, add_generation_prompt=prompt, **self._tokens
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise TemplateRefusal(f"{error}") from None
        except RecursionError:
            raise TemplateRefusal("nested too deeply") from None
        except MemoryError:
            raise TemplateRefusal("it needs more memory than there is") from None
        if " at 0x" in text:
            given = f"{self._source}{messages}{tools}"
            for found in _ADDRESS.finditer(text):
                if found[0] not in given:
                    shown = text[text.rfind("<", 0, found.start()) : found.start()]
                    raise TemplateRefusal(f"it writes where {shown[-60:]!r} lies in memory: `| list` or () is missing")
        return _take_marks_out(text)


@dataclass(frozen=True)
class Templates:
    """What is taken for a conversation without tools and for one with them (mostly the same); and a digest of them."""

    plain: ChatTemplate
    with_tools: ChatTemplate
    digest: str

    def of(self, tools: Sequence[Any] | None) -> ChatTemplate:
        """The template for a conversation."""
        return self.with_tools if tools else self.plain


def load_templates(
    directory: Path | None, file: Path | None, now: datetime, named: Mapping[str, str] | None = None
) -> Templates:
    """The template of a tokenizer.

    Args:
        directory: of the tokenizer: ``chat_template.jinja``, or ``chat_template`` in ``tokenizer_config.json``.
        file: ``--chat-template``, before those two.
        now: see :class:`ChatTemplate`.
        named: special tokens by name, where ``tokenizer_config.json`` does not name them.

    Raises:
        ValueError: there is none, or it cannot be read or compiled.
    """
    if directory is None and file is None:
        raise ValueError("this tokenizer has no files, and so no chat template: give --chat-template FILE")
    directory = directory or Path(os.devnull)  # which holds no file
    config = read_config(directory / CONFIG)
    own = {name: text for name in TOKENS if (text := token_text(config.get(name))) is not None}
    tokens = {**(named or {}), **own}
    path = file if file is not None else directory / FILE
    sources: dict[str, str]
    if file is not None or path.exists():
        sources, where = {"default": _read(path)}, str(path)
    else:
        sources, where = _sources(config.get("chat_template")), str(directory / CONFIG)
    if not sources:
        raise ValueError(
            f"{directory} has no chat template (neither {FILE} nor chat_template in {CONFIG}): write one to {path}, or "
            "give --chat-template FILE"
        )
    if "default" not in sources:
        raise ValueError(
            f"{where} has chat templates named {', '.join(sources)}, none of them default: write the one that is meant to a "
            "file and give it with --chat-template FILE"
        )
    try:
        compiled = {name: ChatTemplate(source, tokens, now) for name, source in sources.items()}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    digest = hashlib.sha256(json.dumps([sources, tokens], sort_keys=True).encode()).hexdigest()
    return Templates(compiled["default"], compiled.get(_WITH_TOOLS, compiled["default"]), digest)


def template_directory(tokenizer_file: str | None) -> Path | None:
    """Where a template may be beside the files of a tokenizer, of which this is one or their directory."""
    if tokenizer_file is None:
        return None
    path = Path(tokenizer_file)
    return path if path.is_dir() else path.parent


def _environment(now: datetime) -> Any:
    """The sandbox with what templates may use."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``: the two marks around the block, which is a scope of its own."""

        tags = {"generation"}  # noqa: RUF012  an attribute of the base class

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)

            def mark(text: str) -> Any:
                return nodes.Output([nodes.TemplateData(text)], lineno=line)

            return [mark(OPEN), nodes.Scope(body, lineno=line), mark(CLOSE)]

    class Sandbox(ImmutableSandboxedEnvironment):
        """Counts the steps of loops, and makes no sets (the keys of an object without those of another)."""

        intercepted_binops = frozenset("-")
        steps = 0

        @property
        def step(self) -> None:
            """Read at each step of a loop and in each macro."""
            self.steps += 1
            if self.steps > _MOST_STEPS:
                _raise(f"its loops take more than {_MOST_STEPS:,} steps")

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            found = super().call_binop(context, operator, left, right)
            return found if not isinstance(found, set) else _raise("it makes a set, whose order is another one each time")

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    del environment.filters["random"], environment.globals["lipsum"]  # all of Jinja that draws at random
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = now.replace(hour=0, minute=0, second=0, microsecond=0).strftime
    return environment


def _refuse_chance(tree: Any) -> None:
    from jinja2 import meta, nodes

    filters = {node.name for node in tree.find_all(nodes.Filter)}
    used = "filter random" if "random" in filters else "function lipsum" if "lipsum" in meta.find_undeclared_variables(tree) else None
    if used:
        raise ValueError(f"the chat template uses Jinja's {used}, which gives another text each time")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace("\\ufdd2", PLAIN) if ensure_ascii else text


def _raise(message: object) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(str(message))


def _take_marks_out(text: str) -> Rendered:
    """Raises TemplateRefusal for marks that are not pairs (one lies inside another, or a filter lost one)."""
    if not any(mark in text for mark in (OPEN, CLOSE, PLAIN)):
        return Rendered(text)
    spans: list[tuple[int, int]] = []
    plain: list[int] = []
    length, began = 0, None
    for piece in _MARK.split(text):
        if piece == PLAIN:
            plain.append(length)
        elif piece == OPEN and began is None:
            began = length
        elif piece == CLOSE and began is not None:
            spans.append((began, length))
            began = None
        elif piece in (OPEN, CLOSE):
            raise TemplateRefusal("its generation blocks lie inside each other")
        else:
            length += len(piece)
    if began is not None:
        raise TemplateRefusal("its generation blocks lie inside each other")
    return Rendered(_MARK.sub("", text), tuple(spans), tuple(plain))


def _sources(value: Any) -> dict[str, str]:
    """``chat_template`` of a tokenizer_config.json: one template, or a list of named ones."""
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else []
    good = [e for e in entries if isinstance(e, dict) and isinstance(e.get("template"), str)]
    return {str(e.get("name")): e["template"] for e in good}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chat-template {path}: {error}") from None
