"""The sandbox that chat templates run in: what they may use, and what is refused because it has no bound or draws at random.

``{% generation %} ... {% endgeneration %}`` is compiled here, to a mark at either end (see :mod:`.chat_template`).
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

OPEN, CLOSE, PLAIN = "\ufdd0", "\ufdd1", "\ufdd2"
_MOST_STEPS = 10_000_000  # of all loops and macros of a conversation: a second or more
_MOST_BITS = 4096  # of a power: those of powers of powers would not end


def sandbox(now: datetime) -> Any:
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
        """Counts the steps of loops, bounds powers, and makes no sets (the keys of an object without those of another)."""

        intercepted_binops = frozenset(("-", "**"))
        steps = 0

        @property
        def step(self) -> None:
            """Read at each step of a loop and in each macro."""
            self.steps += 1
            if self.steps > _MOST_STEPS:
                _raise(f"its loops take more than {_MOST_STEPS:,} steps")

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" and all(isinstance(n, int) for n in (left, right)) and left.bit_length() * right > _MOST_BITS:
                _raise(f"it makes a number of more than {_MOST_BITS:,} bits")
            found = super().call_binop(context, operator, left, right)
            return found if not isinstance(found, set) else _raise("it makes a set, whose order is another one each time")

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    del environment.filters["random"], environment.globals["lipsum"]  # all of Jinja that draws at random
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = now.replace(hour=0, minute=0, second=0, microsecond=0).strftime
    return environment


def refuse_chance(tree: Any) -> None:
    """Raises ValueError for a template that draws at random."""
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
