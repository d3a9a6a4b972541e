"""Train a byte-level BPE tokenizer on a JSONL corpus; DIR gets ``tokenizer.json`` and ``tokenizer_config.json``.

    python train_tokenizer.py --input train.jsonl --vocab-size 8192 --out DIR
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"


def texts(path: Path) -> Iterator[str]:
    """The texts of a JSONL file."""
    with open(path, encoding="utf-8") as f:
        for line in f:
            yield json.loads(line)["text"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(args.input), trainer)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"))
    (args.out / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}) + "\n")
    print(f"tokenizer: {tokenizer.get_vocab_size()} entries, {args.out}")


if __name__ == "__main__":
    main()
