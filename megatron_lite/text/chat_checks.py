"""Faults of templates and messages that no renderer complains of: what a name that is misspelled, or that nobody reads, leaves out.

A template gives nothing for a name that it does not find, so the text of a conversation can lack its answers and look like one.
What is seen here is counted, and told at the end of a run (:func:`told`); what would spoil all of it is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from megatron_lite.text.chat_template import ChatTemplate, Rendered
from megatron_lite.text.encode import Counts
from megatron_lite.text.tokenizer import Tokenizer

# What parts an answer: a template may cut one (its reasoning), and escape or change what is between.
_BETWEEN = re.compile(r"""[\r\n\t"'\\<>&\[\]{}|]+""")


def missing(answers: Sequence[dict[str, Any]], rendered: Rendered, without_special: Callable[[str], str]) -> tuple[int, int]:
    """How many answers were looked at, those with text and no call of a tool; and of how many no part is in what was made of them."""
    aligned = len(answers) == len(rendered.marked)
    looked = absent = 0
    for k, message in enumerate(answers):
        content = message.get("content")
        if not isinstance(content, str) or not (said := content.strip()) or _calls(message):
            continue
        looked += 1
        start, stop = rendered.marked[k] if aligned else (0, len(rendered.text))
        if rendered.text.startswith(said, start) or said in (turn := rendered.text[start:stop]):  # mostly the first, which is quick
            continue
        turn = without_special(turn).casefold()
        parts = (part.strip() for part in _BETWEEN.split(content.casefold()))
        absent += not any(part in turn for part in parts if part)
    return looked, absent


def coded_twice(messages: Sequence[dict[str, Any]], text: str) -> bool:
    """Whether arguments of a tool that are JSON in a string were written as a string inside JSON."""
    for call in (call for message in messages for call in _calls(message)):
        inner = call.get("function")
        arguments = (inner if isinstance(inner, dict) else call).get("arguments")
        if isinstance(arguments, str) and arguments.lstrip()[:1] == "{" and json.dumps(arguments, ensure_ascii=False) in text:
            return True
    return False


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of tools in a message."""
    found = message.get("tool_calls") or message.get("function_call") or []
    return [call for call in (found if isinstance(found, list) else [found]) if isinstance(call, dict)]


def refuse_header(template: ChatTemplate) -> None:
    """Raises ValueError where what says that the assistant speaks would count."""
    if template.tried is not None and (header := template.tried.header):
        raise ValueError(
            f"the chat template writes nothing for add_generation_prompt, so the loss would count {header.strip()!r} before each answer: "
            f"put {{% if add_generation_prompt %}}{{{{ {header!r} }}}}{{% endif %}} at its end, or {{% generation %}} ... "
            "{% endgeneration %} around each answer and its end token"
        )


def told(counts: Counts) -> list[str]:
    """What was seen, for people."""
    lines = []
    if counts.missing:
        lines.append(
            f"in {counts.missing:,} of {counts.looked:,} turns the answer's 'content' is not in the text that the template makes: "
            "is a name misspelled in it?"
        )
    if counts.unread_inside:
        lines.append(f"message keys that the template does not read: {named(counts.unread_inside)}")
    if counts.coded_twice:
        lines.append(
            f"{counts.coded_twice:,} with arguments of tools that are JSON in a string, which the template writes as a string inside JSON "
            '("{\\"...): give them as objects, "arguments": {...}'
        )
    return lines


def named(found: Any) -> str:
    """Keys and how often they are, the most frequent first."""
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    return ", ".join(f"{key[:24]} ({n:,})" for key, n in found.most_common(10)) + more


def no_end(template: ChatTemplate, tokenizer: Tokenizer, number: int) -> str:
    """Why turns do not end with a special token."""
    said = f"{number:,} turns do not end with a special token, and the model does not learn to stop there"
    tried = template.tried
    end = "" if tried is None else tried.end or tried.outside
    if tried is None or any(text in tried.end for text in tokenizer.special):
        return said
    if not end:
        return f"{said}: the template writes none behind an answer"
    why = [] if tried.end else ["that belongs into its {% generation %} block"]
    if not any(text in end for text in tokenizer.special):
        tokens = len(tokenizer.encode(end)) - len(tokenizer.encode(""))
        why.append(
            f"this tokenizer has that as plain text ({tokens} token{'s' * (tokens != 1)}): write a special token that it has "
            f"({', '.join([*tokenizer.special][:4]) or 'there is none'}), or train it with this one as a special token"
        )
    return f"{said}: the template writes {end[:40]!r} behind an answer, and {'; '.join(why)}"
