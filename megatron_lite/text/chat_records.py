"""What a record of a file of conversations says: its messages, in one form whatever the record's own.

Forms are ``messages``, ``conversations`` (turns with speakers), and a prompt with its answer. Whoever reads one learns too what
of it says nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lite.text.records import BadRecord, text_of

ASSISTANT = "assistant"
PROMPT_KEYS = ("prompt", "instruction", "question", "query")
COMPLETION_KEYS = ("completion", "response", "answer", "output")
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "system": "system",
    "tool": "tool",
}
_NAMES = ("role", "name")  # of a message, which say who speaks
_SAY = ("content", "tool_calls", "function_call")  # of an answer; other keys are beside it
_ROLE = re.compile(r"[\w-]+")  # templates write roles as they stand, and no special token is spelled so
_SHOWN = 24  # characters in a message


@dataclass(frozen=True)
class Conversation:
    """What a record says.

    Attributes:
        messages: objects with ``role`` and ``content``, and whatever else the template reads.
        tools: descriptions of tools, or None.
        unread: keys of the record that say nothing here.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    unread: tuple[str, ...] = ()

    @property
    def has_answer(self) -> bool:
        """Whether there is a turn of the assistant."""
        return any(m["role"] == ASSISTANT for m in self.messages)

    @property
    def answers(self) -> list[dict[str, Any]]:
        """The turns of the assistant that count: all but those of ``weight`` 0."""
        return [m for m in self.messages if m["role"] == ASSISTANT and m.get("weight") != 0]

    @property
    def has_empty_answer(self) -> bool:
        """Whether one of them says nothing at all, no call of a tool either."""
        return any(not any(says(m.get(key)) for key in _SAY) for m in self.answers)

    @property
    def unknown_roles(self) -> list[str]:
        """Roles that are not among the known."""
        return sorted({m["role"] for m in self.messages} - set(SPEAKERS.values()))


@dataclass(frozen=True)
class Keys:
    """Names of the two texts of prompt-and-answer records; None: the first of the known names."""

    prompt: str | None = None
    completion: str | None = None


def conversation_of(record: dict[str, Any], keys: Keys) -> Conversation:
    """The conversation of a record: ``messages``, ``conversations``, or a prompt and its answer. Raises BadRecord."""
    listed = keys.prompt is None and keys.completion is None
    if listed and "messages" in record:
        messages, read = [_message(m) for m in _list(record, "messages")], {"messages"}
    elif listed and "conversations" in record:
        messages, read = [_spoken(m) for m in _list(record, "conversations")], {"conversations"}
    else:
        messages, read = _pair(record, keys)
    if record.get("system") is not None and messages and all(m["role"] != "system" for m in messages):
        read.add("system")
        messages = [{"role": "system", "content": text_of(record, "system")}, *messages]
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadRecord("the value of 'tools' is not an array")
    unread = [key for key in record if key not in read and key != "tools" and (key != "system" or record[key])]
    if "conversations" in read:
        inside = {key: None for message in record["conversations"] if "from" in message for key in message}
        unread += [f"conversations.{key}" for key in inside if key not in ("from", "value", "weight")]
    return Conversation(messages, tools or None, tuple(unread))


def says(value: Any) -> bool:
    """Whether a value is more than nothing, or white space."""
    return bool(value.strip()) if isinstance(value, str) else bool(value)


def _list(record: dict[str, Any], key: str) -> list[Any]:
    value = record[key]
    if not isinstance(value, list):
        raise BadRecord(f"the value of {key!r} is not an array")
    return value


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRecord("a message is not an object with a string under 'role'")
    if not _ROLE.fullmatch(message["role"]):
        raise BadRecord("the 'role' of a message is no plain word", f" ({message['role'][:_SHOWN]!r})")
    if message.get("weight") not in (None, 0, 1):
        raise BadRecord("the 'weight' of a message is neither 0 (not trained) nor 1", f" ({str(message['weight'])[:_SHOWN]!r})")
    content = message.get("content")
    if content == []:
        return {**message, "content": ""}
    if not (content is None or isinstance(content, (str, list))):
        raise BadRecord("the 'content' of a message is neither a string nor an array of parts")
    if content is None and not any(value for key, value in message.items() if key not in _NAMES):
        raise BadRecord("a message has no 'content'")  # templates would write the word None
    return message


def _spoken(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or "from" not in message:
        return _message(message)
    role = SPEAKERS.get(message["from"]) if isinstance(message["from"], str) else None
    if role is None:
        raise BadRecord(f"a message is 'from' none of {', '.join(SPEAKERS)}", f" ({str(message['from'])[:_SHOWN]!r})")
    return _message({"role": role, "content": text_of(message, "value"), **{k: message[k] for k in ("weight",) if k in message}})


def _pair(record: dict[str, Any], keys: Keys) -> tuple[list[dict[str, Any]], set[str]]:
    """The messages, and the keys that they are from."""
    prompt_key = keys.prompt or _one_of(record, PROMPT_KEYS, "prompt")
    completion_key = keys.completion or _one_of(record, COMPLETION_KEYS, "completion")
    prompt, answer = text_of(record, prompt_key), text_of(record, completion_key)
    read = {prompt_key, completion_key, "history"}
    if prompt_key == "instruction":
        read.add("input")
        prompt = f"{prompt}\n\n{text_of(record, 'input')}" if record.get("input") else prompt
    turns = [*_history(record), (prompt, answer)]
    pairs = [({"role": "user", "content": q}, {"role": ASSISTANT, "content": a}) for q, a in turns]
    return [message for pair in pairs for message in pair], read


def _history(record: dict[str, Any]) -> list[list[str]]:
    """The turns before: pairs of a question and its answer."""
    turns = record.get("history") or []
    if not isinstance(turns, list) or not all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn) for turn in turns
    ):
        raise BadRecord("the value of 'history' is not an array of [question, answer] pairs of strings")
    return turns


def _one_of(record: dict[str, Any], names: Sequence[str], what: str) -> str:
    found = [name for name in names if name in record]
    if len(found) == 1:
        return found[0]
    if found:
        raise BadRecord(f"several keys could be the {what}", f" ({', '.join(found)}): name one with --{what}-key")
    text = "; of texts `megatron-lite data preprocess` makes data" if "text" in record else ""
    raise BadRecord("neither 'messages' nor a prompt and its answer", f" (no {', '.join(map(repr, names))}){text}")
