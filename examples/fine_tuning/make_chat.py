"""A toy for docs/fine-tuning.md: texts, conversations, and a tokenizer with a chat template.

    python examples/fine_tuning/make_chat.py --out chat

Writes ``base.jsonl`` (texts to train a base model on), ``train.jsonl`` and ``heldout.jsonl`` (conversations about capitals),
``tokenizer/`` (``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja``).
"""

import argparse
import json
import random
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

START, END = "<|im_start|>", "<|im_end|>"
CAPITALS = {
    "Austria": "Vienna", "Chile": "Santiago", "China": "Beijing", "Egypt": "Cairo", "France": "Paris",
    "Germany": "Berlin", "India": "New Delhi", "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi",
    "Norway": "Oslo", "Peru": "Lima", "Poland": "Warsaw", "Spain": "Madrid",
}  # fmt: skip
QUESTIONS = ("What is the capital of {}?", "Name the capital of {}.", "Which city is the capital of {}?", "And of {}?")


def conversation(rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """One to four questions and their answers."""
    messages = [{"role": "system", "content": "You are brief."}] if rng.random() < 0.3 else []
    for turn, country in enumerate(rng.sample(sorted(CAPITALS), rng.randint(1, 4))):
        question = rng.choice(QUESTIONS if turn else QUESTIONS[:-1])
        messages.append({"role": "user", "content": question.format(country)})
        messages.append({"role": "assistant", "content": f"{CAPITALS[country]}."})
    return {"messages": messages}


def text(rng: random.Random) -> dict[str, str]:
    """A few sentences."""
    some = rng.sample(sorted(CAPITALS), 5)
    return {"text": " ".join(f"The capital of {country} is {CAPITALS[country]}." for country in some)}


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    rng = random.Random(1)
    files = {
        "base": [text(rng) for _ in range(500)],
        "train": [conversation(rng) for _ in range(1500)],
        "heldout": [conversation(rng) for _ in range(100)],
    }
    (out / "tokenizer").mkdir(parents=True, exist_ok=True)
    for name, records in files.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [r["text"] for r in files["base"]] + [m["content"] for r in files["train"] for m in r["messages"]]
    tokenizer.train_from_iterator([*texts, "user\nassistant\nsystem\n"], trainer)
    tokenizer.save(str(out / "tokenizer" / "tokenizer.json"))
    (out / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}) + "\n")
    shutil.copy(Path(__file__).with_name("chatml.jinja"), out / "tokenizer" / "chat_template.jinja")
    print(f"{out}: {', '.join(f'{len(r)} in {n}.jsonl' for n, r in files.items())}, tokenizer")


if __name__ == "__main__":
    main()
