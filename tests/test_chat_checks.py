"""Faults of templates and messages that no renderer complains of: what is told, what is refused, and what is no fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_toys import (
    CHATML,
    CHATML_MARKED,
    LLAMA3,
    NOW,
    TALK,
    TEMPLATES,
    chat_encoder,
    counted,
    encode,
    save_tokenizer,
    tokenizer_with,
    why_bad,
)

from megatron_lite.cli.data import run as data
from megatron_lite.text.chat import Example
from megatron_lite.text.chat_records import Conversation, Keys, conversation_of
from megatron_lite.text.chat_template import ChatTemplate, TemplateRefusal
from megatron_lite.text.records import BadRecord

WITHOUT_PROMPT = CHATML.split("{% if add")[0]
# What public models do with reasoning, with calls of tools and with roles of their own.
REASONING = """{% for m in messages %}<|im_start|>{{ m.role }}
{% set said = m.content if m.content is string else '' %}
{% if m.role == 'assistant' %}
{% set thought = m.reasoning_content or '' %}
{% if '</think>' in said %}{% set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{% generation %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' if thought and loop.last else '' }}{{ said }}
{%- for c in m.tool_calls or [] %}{{ '<call>' + (c.function or c).arguments | tojson + '</call>' }}{% endfor %}<|im_end|>{% endgeneration %}
{% else %}{{ said }}<|im_end|>{% endif %}
{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
WRITTEN = "{{ m['content'] | trim }}"
CALL = "{{ m.tool_calls[0].function.arguments | tojson }}"
CALLS_ALONE = LLAMA3.replace(WRITTEN, "{% if m.tool_calls %}" + CALL + "{% else %}" + WRITTEN + "{% endif %}")
MODEL = """{{ bos_token }}{% for m in messages %}{% set who = 'model' if m['role'] == 'assistant' else m['role'] %}
{{ '<|im_start|>' + who + '\\n' + m['content'] | trim + '<|im_end|>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"""
CODE = "{% for c in m.tool_calls or [] %}{{ '```json\\n' + c.function.arguments + '```' }}{% endfor %}"
STRINGS = CHATML.replace("{{ m.content }}", "{{ m.content }}" + CODE)
ANSWER = "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"  # in CHATML_MARKED


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def answer(text: str | None, **more: Any) -> list[dict[str, Any]]:
    return [TALK[0], {"role": "assistant", "content": text, **more}]


def call(arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}]}


def chat(capsys: pytest.CaptureFixture[str], folder: Path, *talks: list[dict[str, Any]], code: int = 0) -> str:
    """What ``data chat`` says of conversations."""
    source, out = folder / "in.jsonl", folder / "out"
    source.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    argv = ["chat", "--input", str(source), "--output-prefix", str(out), "--tokenizer-model", str(folder), "--overwrite"]
    assert data(argv) == code
    assert bool(list(folder.glob("out*"))) == (code == 0)
    return "".join(capsys.readouterr())


# ---- answers that are not in the text


@pytest.mark.parametrize(
    "source", [CHATML.replace("m.content", "m.contant"), CHATML_MARKED.replace(ANSWER, ANSWER.replace("content", "text"))]
)
def test_answers_that_the_template_does_not_write_are_refused(
    source: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = chat(capsys, tokenizer_with(model, tmp_path / "t", source), TALK, answer("I im_end"), code=2)
    assert "no conversations were written: in 3 of 3 turns the answer's 'content' is not in the text that the template makes" in said
    assert ("message keys that the template does not read: content (2)" in said) == ("contant" in source)


def test_some_answers_that_it_does_not_write_are_told(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tokenizer_with(model, tmp_path / "t", CHATML.replace("{{ m.content }}", "{{ m.content if m.content != 'Paris' else 'x' }}"))
    said = chat(capsys, folder, answer("Paris"), TALK, answer("Rome"))
    assert "in 1 of 4 turns the answer's 'content' is not in the text" in said


FAMILIES = {
    **TEMPLATES,
    "reasoning": REASONING,
    "calls alone": CALLS_ALONE,
    "model": MODEL,
    "strings": STRINGS,
    "capitals": CHATML.replace("m.content", "m.content | upper"),
    "json": CHATML.replace("{{ m.content }}", "{{ m.content | tojson }}"),
    "last": CHATML_MARKED.replace("== 'assistant'", "== 'assistant' and loop.last"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_no_false_alarm(name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What public models do to answers: cut their reasoning, trim, escape, call tools without them; a template of one turn's marks."""
    folder = tokenizer_with(model, tmp_path / "t", FAMILIES[name])
    talks = [TALK, answer("  Paris,\nit <is>.\n "), answer('"I" <|im_end|>'), answer("😀")]
    if name == "reasoning":
        thought = "<think>\nI know \"it\".\n</think>\n\n"
        talks += [answer(f"{thought}Paris."), [*answer(f"{thought}A"), *TALK], answer("Paris.", reasoning_content="Easy.")]
    if name in ("reasoning", "calls alone"):
        talks += [answer(None, **call({"a": 1})), answer("I shall look.", **call({"a": 1}))]
    if name == "strings":
        talks += [answer("", **call('{"a": 1}'))]
    said = chat(capsys, folder, *talks)
    assert f"{len(talks)} conversations" in said
    for alarm in ("is not in the text", "does not read", "inside JSON", "do not end"):
        assert alarm not in said


# ---- keys of messages


def test_keys_of_messages_that_nobody_reads_are_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talks = [answer("a", reasoning_content="r", name="bob", audio=None, refusal=""), answer("b", name="x"), TALK]
    told = "message keys that the template does not read: name (2), reasoning_content (1)\n"
    assert told in chat(capsys, tokenizer_with(model, tmp_path / "a", CHATML), *talks)
    for place in ("m['name']", "m.get('name')", "[m] | map(attribute='name') | first"):
        source = CHATML.replace("{{ m.role }}", f"{{{{ m.role }}}}{{{{ {place} or '' if m.role != 'assistant' else '' }}}}")
        said = chat(capsys, tokenizer_with(model, tmp_path / "b", source), *talks)
        assert "does not read: reasoning_content (1)\n" in said
    everything = CHATML.replace("{{ m.content }}", "{% for key, value in m.items() %}{{ key }}={{ value }};{% endfor %}")
    assert "does not read" not in chat(capsys, tokenizer_with(model, tmp_path / "c", everything), *talks)


def test_turns_of_weight_0_do_not_count(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = [TALK[0], {**TALK[1], "weight": 0}, TALK[2], {**TALK[3], "weight": 1}]
    for name in TEMPLATES:
        folder = tokenizer_with(model, tmp_path / name, TEMPLATES[name])
        example, all_count = encode(folder, talk), encode(folder, TALK)
        assert counted(folder, example) == counted(folder, all_count)[1:] and example.turns == 1
        assert example.ids.tolist() == all_count.ids.tolist() and example.looked == 1
    said = chat(capsys, folder, talk, [TALK[0], {**TALK[1], "weight": 0}])
    assert "of 1 turns" in said and "1 dropped: without a token that the loss counts" in said and "does not read" not in said
    assert "does not read: weight (1)" in chat(capsys, folder, [{**TALK[0], "weight": 1}, *TALK[1:]])
    spoken = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "", "weight": 0}]
    found = conversation_of({"conversations": spoken}, Keys())
    assert found.answers == [] and not found.has_empty_answer and found.unread == ()
    for weight in (0.5, "0", -1, []):
        with pytest.raises(BadRecord, match=r"the 'weight' of a message is neither 0 \(not trained\) nor 1"):
            conversation_of({"messages": answer("a", weight=weight)}, Keys())
    twice = CHATML_MARKED.replace("{% generation %}", "{% generation %}{{ ' ' }}{% endgeneration %}{% generation %}")
    why = why_bad(tokenizer_with(model, tmp_path / "u", twice), talk)
    assert "not one {% generation %} block for each turn of the assistant (4 for 2)" in why


def test_arguments_that_are_json_in_a_string(model: Path, tmp_path: Path) -> None:
    for source, doubled in ((REASONING, True), (STRINGS, False), (CHATML.replace("m.content", "(m.tool_calls or []) | tojson"), True)):
        folder = tokenizer_with(model, tmp_path / "t", source)
        assert encode(folder, answer("", **call('{"a": "é"}'))).coded_twice == doubled
    folder = tokenizer_with(model, tmp_path / "u", REASONING)
    assert not encode(folder, answer("", **call({"a": '{"b": 1}'}))).coded_twice
    assert encode(folder, answer("", tool_calls=[{"name": "f", "arguments": "{}"}])).coded_twice
    for odd in ([None], "x", {"function": 1}, [{"function": {"arguments": 3}}]):
        (found,) = chat_encoder(tokenizer_with(model, tmp_path / "v", CHATML)).encode([Conversation(answer("a", tool_calls=odd))])
        assert isinstance(found, Example) and not found.coded_twice


# ---- templates


def test_a_header_that_would_count_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = chat(capsys, tokenizer_with(model, tmp_path / "t", WITHOUT_PROMPT), TALK, code=2)
    assert "writes nothing for add_generation_prompt, so the loss would count '<|im_start|>assistant' before each answer" in said
    remedy = said.split("put ")[1].split(" at its end")[0]
    said = chat(capsys, tokenizer_with(model, tmp_path / "u", WITHOUT_PROMPT + remedy), TALK)
    assert said.split("from")[0] == chat(capsys, tokenizer_with(model, tmp_path / "v", CHATML), TALK).split("from")[0]
    said = chat(capsys, tokenizer_with(model, tmp_path / "w", WITHOUT_PROMPT + "<|im_end|>"), TALK, code=2)
    assert "renders the beginning of the conversation otherwise when it goes on" in said and "would count" not in said


OUTSIDE = "{% generation %}{{ message.content }}{% endgeneration %}<|im_end|>"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (CHATML.replace("im_end", "stop"), "'<|stop|>' behind an answer, and this tokenizer has that as plain text ("),
        (CHATML_MARKED.replace(ANSWER, OUTSIDE), "'<|im_end|>' behind an answer, and that belongs into its {% generation %} block\n"),
        (CHATML_MARKED.replace(ANSWER, OUTSIDE.replace("im_end", "stop")), "block; this tokenizer has that as plain text ("),
        ("{% for m in messages %}<s>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "writes none behind an answer"),
    ],
)  # fmt: skip
def test_why_turns_do_not_end(source: str, why: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = chat(capsys, tokenizer_with(model, tmp_path / "t", source), TALK)
    assert " turns do not end with a special token" in said and why in said


def test_powers_have_a_bound() -> None:
    assert ChatTemplate("{{ 2**10 }} {{ 2.0**3 }} {{ 2**-1 }}", {}, NOW).render([]).text == "1024 8.0 0.5"
    for endless in ("9**(9**9)", "9**9**9**9**9**9"):
        with pytest.raises(TemplateRefusal, match="a number of more than 4,096 bits"):
            ChatTemplate(f"{{{{ {endless} }}}}", {}, NOW).render([])
