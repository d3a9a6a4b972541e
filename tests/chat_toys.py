"""A toy tokenizer with chat templates, and conversations: what the tests of fine-tuning data share."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.text.chat import ChatEncoder, Example
from megatron_lite.text.chat_records import Conversation
from megatron_lite.text.chat_template import load_templates
from megatron_lite.text.records import BadRecord
from megatron_lite.text.tokenizer import HuggingFaceTokenizer
from megatron_lite.text.tokenizer_fast import Encoder, encoder_of

SPECIAL = [
    "<|begin|>",
    "<|end_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|head|>",
    "<|tail|>",
    "<|eot|>",
    "<s>",
    "</s>",
]
NOW = datetime(2024, 5, 6)
ROOT = Path(__file__).resolve().parents[1]

# In the styles of public models.
CHATML = """{% for m in messages %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
CHATML_MARKED = (ROOT / "examples" / "fine_tuning" / "chatml.jinja").read_text(encoding="utf-8")
LLAMA3 = """{{ bos_token }}{% if tools %}<|head|>tools<|tail|>\n\n{{ tools | tojson }}<|eot|>{% endif %}
{% for m in messages %}<|head|>{{ m['role'] }}<|tail|>

{{ m['content'] | trim }}<|eot|>{% endfor %}
{% if add_generation_prompt %}<|head|>assistant<|tail|>

{% endif %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}
{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "marked": CHATML_MARKED, "llama3": LLAMA3, "mistral": MISTRAL}

TALK = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris, naïvely: 巴黎 😀."},
    {"role": "user", "content": "And\n\nof Italy?  "},
    {"role": "assistant", "content": "Rome\n\nis it."},
]
SYSTEM = [{"role": "system", "content": "You are terse."}, *TALK]


def save_tokenizer(folder: Path) -> Path:
    """A byte-level BPE that has merged much, with special tokens of several families."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    fast = Tokenizer(models.BPE())
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"  # as Llama 3 cuts
    cut = Regex(words + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(cut, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    fast.decoder = decoders.ByteLevel()
    texts = [m["content"] for m in SYSTEM] + ["user\n assistant\n system\n\n [INST] [/INST]\n\n tools"] * 9
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    fast.save(str(folder / "tokenizer.json"))
    return folder


def tokenizer_with(model: Path, folder: Path, template: Any, **config: Any) -> Path:
    """A tokenizer directory with a template."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    facts = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "tokenizer_class": "PreTrainedTokenizerFast",
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts | ({"chat_template": template} if template else {})))
    return folder


def chat_encoder(folder: Path, fast: bool = True) -> ChatEncoder:
    tokenizer = HuggingFaceTokenizer(str(folder))
    encoder = encoder_of(tokenizer, prove=False) if fast else Encoder(tokenizer)
    return ChatEncoder(encoder, load_templates(folder, None, NOW))


def encode(folder: Path, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> Example:
    found = chat_encoder(folder, fast=False).encode([Conversation(messages, tools)])[0]
    assert isinstance(found, Example), found
    return found


def why_bad(folder: Path, messages: list[dict[str, Any]]) -> str:
    found = chat_encoder(folder, fast=False).encode([Conversation(messages)])[0]
    assert isinstance(found, BadRecord), found
    return str(found)


def counted(folder: Path, example: Example) -> list[str]:
    """The texts of the runs of tokens that count."""
    tokenizer = HuggingFaceTokenizer(str(folder))
    edges = np.flatnonzero(np.diff(example.mask, prepend=0, append=0)).reshape(-1, 2).tolist()
    return [tokenizer.decode(example.ids[a:b].tolist()) for a, b in edges]
