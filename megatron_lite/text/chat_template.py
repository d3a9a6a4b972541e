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
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_lite.text.chat_records import ASSISTANT, says
from megatron_lite.text.chat_sandbox import CLOSE, OPEN, PLAIN, refuse_chance, sandbox
from megatron_lite.text.tokenizer import read_config, token_text

_MARK = re.compile(f"([{OPEN}{CLOSE}{PLAIN}])")
FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ADDRESS = re.compile(" at 0x[0-9a-f]{6,}")  # Python's text for what has no other: functions, generators
_QUESTION, _ANSWER, _BESIDE = "WhatIsAsked", "WhatIsAnswered", "SomethingBeside"  # a conversation to try a template on
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
        self._environment = environment = sandbox(now)
        try:
            tree = environment.parse(source)
            refuse_chance(tree)
            for body in [node.body for node in tree.find_all((nodes.For, nodes.Macro))]:
                body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("step")).set_lineno(1))
            self._template = environment.from_string(tree)
            self._template.globals = dict(self._template.globals)  # copied at each rendering, which a ChainMap makes slow
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not Jinja: {error.message} (line {error.lineno})") from None
        self.marks = any(OPEN in data.data for data in tree.find_all(nodes.TemplateData))
        texts = (part for n in tree.find_all(nodes.Const) if isinstance(n.value, str) for part in n.value.split("."))
        self._names = {"role", *texts, *(n.attr for n in tree.find_all(nodes.Getattr))}  # what it may read of a message
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

    @cached_property
    def tried(self) -> Tried | None:
        """What it makes of a question and an answer; None: it refuses them."""
        messages = [{"role": r, "content": text, _BESIDE: _BESIDE} for r, text in (("user", _QUESTION), (ASSISTANT, _ANSWER))]
        try:
            whole = self.render(messages)
            before, asked = (self.render(messages[:1], prompt=prompt).text for prompt in (False, True))
        except TemplateRefusal:
            return None
        at = whole.text.find(_ANSWER)
        if at < 0:
            return Tried(writes_all=_BESIDE in whole.text)
        counts = asked == before and whole.text.startswith(asked) and not self.marks
        header = whole.text[len(asked) : at] if counts else ""
        behind = at + len(_ANSWER)
        stop = next((b for a, b in whole.marked if a <= at < b), behind) if self.marks else len(whole.text)
        return Tried(header if header.strip() else "", whole.text[behind:stop].strip(), whole.text[stop:].strip(), _BESIDE in whole.text)

    def unread(self, messages: Sequence[dict[str, Any]]) -> set[str]:
        """Keys of messages that say something and that it does not read: they are nowhere in it, and it does not write all."""
        new = set().union(*messages) - self._names
        if not new or self.tried is None or self.tried.writes_all:
            return set()
        others = [m for m in messages if m["role"] != ASSISTANT]  # the assistant's `weight` is read by :mod:`.chat`
        return {key for key in new if any(says(m.get(key)) for m in (others if key == "weight" else messages))}


@dataclass(frozen=True)
class Tried:
    """What a template writes around an answer.

    Attributes:
        header: before it, where ``add_generation_prompt`` changes nothing and there are no marks: it would count.
        end, outside: behind it, as far as it counts, and behind that; without white space at the ends.
        writes_all: it writes messages with all their keys.
    """

    header: str = ""
    end: str = ""
    outside: str = ""
    writes_all: bool = False


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
