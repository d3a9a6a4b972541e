"""Conversations as tokens, and which of the tokens the loss counts: those that the assistant wrote, with their end tokens.

The template renders a conversation to one text, which is tokenized whole; the template writes every special token, nothing is
added. What the assistant wrote is known from the template's ``{% generation %}`` marks, or else from differences: the
conversation up to the assistant's turn, with the template's request for an answer, is a text, with the turn it is a longer
one, and both must be beginnings of the whole. What lies between is the turn; white space behind its end token is not.

Borders are characters and become tokens under a check too: the tokens of the text before a border must be the first
tokens of the whole, or else a token lies across it, and generation could never start from there. Special tokens cut
a text into parts that are tokenized by themselves, so only the part since the last one is tokenized again, and that is
mostly the same few words (``<|im_start|>assistant``), which are remembered.

What spells a special token in a message is text there (:mod:`.special_places`): it is marked before the template is
rendered, and the places of the marks go with the text.

A conversation for which one of this fails is a bad record. A turn of ``weight`` 0 is text that does not count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_lite.text.chat_checks import coded_twice, missing
from megatron_lite.text.chat_records import ASSISTANT, Conversation
from megatron_lite.text.chat_sandbox import PLAIN
from megatron_lite.text.chat_template import ChatTemplate, Rendered, TemplateRefusal, Templates
from megatron_lite.text.records import BadRecord
from megatron_lite.text.special_places import SpecialPlaces, Tokens
from megatron_lite.text.tokenizer_fast import Encoder

_REMEMBERED = 256  # characters; longer texts before a border are hardly seen again
_SHOWN = 24  # characters on either side of a border in a message


def render(template: ChatTemplate, conversation: Conversation) -> Rendered:
    """The whole text, and where the assistant's turns are in it. Raises BadRecord."""
    messages, tools = conversation.messages, conversation.tools
    try:
        messages = _without_none(template, messages, tools)
        whole = template.render(messages, tools)
        if any(isinstance(m["content"], list) and str(m["content"]) in whole.text for m in messages if m.get("content")):
            raise BadRecord("the template writes an array of parts as it stands: give the 'content' as a string")
        if template.marks:
            return _weighed(whole, messages) if any("weight" in m for m in messages) else whole
        spans = []
        for k in (k for k, m in enumerate(messages) if m["role"] == ASSISTANT and m.get("weight") != 0):
            before = template.render(messages[:k], tools, prompt=True).text
            after = whole.text if k + 1 == len(messages) else template.render(messages[: k + 1], tools).text
            if not (after.startswith(before) and whole.text.startswith(after)):
                raise BadRecord(
                    "the template renders the beginning of the conversation otherwise when it goes on",
                    f" (message {k + 1}); a template with {{% generation %}} marks needs no differences",
                )
            spans.append((len(before), len(after)))
    except TemplateRefusal as why:
        raise BadRecord(f"the template refuses it: {why}") from None
    return replace(whole, marked=tuple(spans))


def _weighed(whole: Rendered, messages: list[dict[str, Any]]) -> Rendered:
    """The marked turns without those of ``weight`` 0. Raises BadRecord where it cannot be told which they are."""
    weights = [m.get("weight") for m in messages if m["role"] == ASSISTANT]
    if 0 not in weights:
        return whole
    if len(whole.marked) != len(weights):
        raise BadRecord(
            "a message has 'weight' 0, and the template has not one {% generation %} block for each turn of the assistant",
            f" ({len(whole.marked)} for {len(weights)})",
        )
    return replace(whole, marked=tuple(span for span, w in zip(whole.marked, weights, strict=True) if w != 0))


def _without_none(template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[dict[str, Any]]:
    """The messages, those without content with an empty one if the template would write the word None, or fail.

    There are templates that tell a call of a tool by its content being none, so it stays for those that look.
    """
    empty = [{**m, "content": ""} if m.get("content", "") is None else m for m in messages]
    if empty == messages:
        return messages
    try:
        without = template.render(empty, tools).text
    except TemplateRefusal:
        return messages
    try:
        text = template.render(messages, tools).text
    except TemplateRefusal:
        return empty
    return empty if text.replace("None", "") == without.replace("None", "") else messages


@dataclass(frozen=True)
class Example:
    """A conversation for training.

    Attributes:
        ids: int64 [tokens].
        mask: uint8 [tokens], 1 where the token counts as a target.
        begins: of each turn of the assistant that counts, its first token and whether the template ends it with a special one.
        spells: whether a message spells a special token, which is text there.
        looked, missing: answers that were looked for in the text, and those of which no part was found.
        coded_twice: whether arguments of a tool were written as a string inside JSON.
        unread: keys of messages that the template does not read.
    """

    ids: np.ndarray
    mask: np.ndarray
    begins: tuple[tuple[int, bool], ...]
    spells: bool = False
    looked: int = 0
    missing: int = 0
    coded_twice: bool = False
    unread: frozenset[str] = frozenset()

    @property
    def turns(self) -> int:
        """How many count."""
        return len(self.begins)

    @property
    def ended(self) -> int:
        """How many of them the template ends with a special token, which may be cut off."""
        return sum(ended for _, ended in self.begins)

    def cut(self, most: int) -> Example:
        """The first tokens, and the turns that begin among them."""
        left = tuple(begin for begin in self.begins if begin[0] < most)
        return replace(self, ids=self.ids[:most], mask=self.mask[:most], begins=left)


class ChatEncoder:
    """From conversations to tokens and masks, with one tokenizer and its templates."""

    def __init__(self, encoder: Encoder, templates: Templates) -> None:
        self.templates, self.vocab_size = templates, encoder.tokenizer.vocab_size
        self._places = SpecialPlaces(encoder)
        self._remembered = lru_cache(maxsize=1 << 12)(self._ids)

    def encode(self, conversations: Sequence[Conversation], hasty: bool = False) -> list[Example | BadRecord]:
        """For each conversation its tokens and mask, or why it is bad; ``hasty``: none after the first that is not rendered."""
        rendered: list[Rendered | BadRecord] = []
        for conversation in conversations:
            rendered.append(self.render(conversation))
            if hasty and isinstance(rendered[-1], BadRecord):
                break
        good = [r for r in rendered if isinstance(r, Rendered)]
        tokens = iter(self._places.encode([r.text for r in good], [r.plain for r in good]))
        return [
            self._example(r, next(tokens), c) if isinstance(r, Rendered) else r
            for r, c in zip(rendered, conversations, strict=False)
        ]

    def render(self, conversation: Conversation) -> Rendered | BadRecord:
        """The text of a conversation and its assistant's turns, or why it is bad."""
        try:
            messages = [{k: v if k == "role" else self._plain(v) for k, v in m.items()} for m in conversation.messages]
            plain = Conversation(messages, self._plain(conversation.tools))
            rendered = render(self.templates.of(conversation.tools), plain)
            rendered.text.encode("utf-8")
        except BadRecord as why:
            return why
        except UnicodeEncodeError:
            return BadRecord("it holds a lone surrogate, which is no text")
        return rendered

    def _plain(self, value: Any) -> Any:
        """The same with a mark in whatever spells a special token."""
        if isinstance(value, str):
            return self._places.spelled(value, PLAIN)
        if isinstance(value, list):
            return [self._plain(v) for v in value]
        if isinstance(value, dict):
            return {self._places.spelled(k, PLAIN): self._plain(v) for k, v in value.items()}
        return value

    def _example(self, rendered: Rendered, tokens: Tokens | BadRecord, said: Conversation) -> Example | BadRecord:
        if isinstance(tokens, BadRecord):
            return tokens
        template = self.templates.of(said.tools)
        special = {token for token, _, _ in tokens.special}
        stops = [stop for _, _, stop in tokens.special]
        mask = np.zeros(len(tokens.ids), dtype=np.uint8)
        begins = []
        try:
            for start, stop in rendered.marked:
                if not template.marks:
                    stop = _without_space_behind(rendered.text, start, stop, stops)
                first, last = (self._token_at(rendered, tokens, stops, at) for at in (start, stop))
                mask[first:last] = 1
                if last > first:
                    begins.append((first, last - 1 in special))
        except BadRecord as why:
            return why
        mask[:1] = 0  # nothing predicts the first token
        looked, absent = missing(said.answers, rendered, self._places.without_special)
        twice, unread = coded_twice(said.messages, rendered.text), frozenset(template.unread(said.messages))
        return Example(tokens.ids, mask, tuple(begins), bool(rendered.plain), looked, absent, twice, unread)

    def _token_at(self, rendered: Rendered, tokens: Tokens, stops: list[int], at: int) -> int:
        """The first token behind a character; BadRecord where one lies across."""
        text = rendered.text
        last = bisect_right(stops, at) - 1
        token, begin = tokens.special[last][:2] if last >= 0 else (0, 0)
        part = text[begin:at]
        plain = tuple(place - begin for place in rendered.plain if begin < place <= at)
        head = self._remembered(part) if len(part) <= _REMEMBERED and not plain else self._ids(part, plain)
        if tokens.ids[token : token + len(head)].tolist() != head:
            around = f"{text[max(0, at - _SHOWN) : at]!r} | {text[at : at + _SHOWN]!r}"
            raise BadRecord("a token lies across the border of an assistant's turn", f" ({around})")
        return token + len(head)

    def _ids(self, text: str, plain: tuple[int, ...] = ()) -> list[int]:
        (found,) = self._places.encode([text], [plain])
        if isinstance(found, BadRecord):
            raise found
        ids: list[int] = found.ids.tolist()
        return ids


def _without_space_behind(text: str, start: int, stop: int, special_stops: list[int]) -> int:
    """The end of a turn without white space behind a special token."""
    shorter = start + len(text[start:stop].rstrip())
    place = bisect_right(special_stops, stop) - 1
    return special_stops[place] if place >= 0 and shorter <= special_stops[place] <= stop else stop
