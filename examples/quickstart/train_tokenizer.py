"""Train a byte-level BPE tokenizer on files of text; DIR gets ``tokenizer.json`` and ``tokenizer_config.json``.

    python train_tokenizer.py --input train.jsonl more/ 'shards/*.zst' --vocab-size 8192 --out DIR

Reads what preprocessing reads. Of a large corpus a sample is taken: from 64 places evenly over the input, in proportion to
the sizes of the files, always the same. Every 50th text is held out, to say at the end how many bytes a token has.

Conversations need tokens that no text has, and they are to be in the tokenizer from the first day, since a trained model
takes no new ones: --special-tokens '<|im_start|>' '<|im_end|>'
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megatron_lite.cli.corpus import add_reading_flags
from megatron_lite.text.blocks import InputOptions
from megatron_lite.text.encode import texts_of
from megatron_lite.text.inputs import STANDARD_INPUT, check_options, expand_inputs
from megatron_lite.text.shares import read, shares

END = "<|endoftext|>"
PLACES, HELD_OUT = 64, 50
# How text is cut into words before pairs are merged: expressions one after the other, as in the public tokenizers of these
# names (facts, which have to be these to the character: the fast path of preprocessing knows these and no others).
PATTERNS = {
    "llama3": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek": [  # Han and kana are words of their own, and not joined with the letters or the space beside them
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*""".replace(
            r"\r\n", "\r\n"
        )
        + "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ],
}


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """What cuts text into words, by the name of its pattern."""
    if name == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[name]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def texts(paths: list[Path], options: InputOptions, most: int) -> Iterator[tuple[int, str]]:
    """The texts of the sample, of about ``most`` bytes, with the number of their file; bad records are passed over."""
    parts = [None] if STANDARD_INPUT in map(str, paths) else [(i, PLACES) for i in range(PLACES)]
    total = sum(share.size for share in shares(paths, options)) if parts != [None] else 0
    for share in (share for part in parts for share in shares(paths, options, part)):
        left = most * share.size // total if total else most
        for _, block in read([share], options):
            for text in texts_of(block, options.keys, left):
                left -= len(text.encode())
                yield share.file, text
            if left <= 0:
                break


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="files, patterns, directories, or -")
    add_reading_flags(parser)
    text = "of the texts in a record (default: text)"
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help=text)
    parser.add_argument("--sample-mb", type=float, default=500, metavar="MB", help="of text to train on (default: 500)")
    parser.add_argument(
        "--pattern", choices=("gpt2", *PATTERNS), default="deepseek", help="cuts words (default: deepseek)"
    )
    text = "bytes; a Chinese character has three (default: 24)"
    parser.add_argument("--longest-token", type=int, default=24, metavar="N", help=text)
    text = f"tokens that texts never become, beside {END}: those of a chat template (default: none)"
    parser.add_argument("--special-tokens", nargs="+", default=[], metavar="TOKEN", help=text)
    text = "entries, special ones and the 256 bytes too (default: 8192)"
    parser.add_argument("--vocab-size", type=int, default=8192, metavar="N", help=text)
    text = "directory that gets tokenizer.json and tokenizer_config.json"
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=text)
    args = parser.parse_args()
    special = [END, *args.special_tokens]
    if len(set(special)) < len(special) or not all(map(str.strip, special)):
        parser.error(f"--special-tokens: {' '.join(map(repr, args.special_tokens))} beside {END!r}: each once, and none empty")
    if args.vocab_size < 256 + len(special):
        parser.error(f"--vocab-size {args.vocab_size}: at least {256 + len(special)}, of the bytes and special tokens")
    return args


def main() -> None:
    args = parse()
    options = InputOptions(tuple(args.json_keys), args.encoding, args.document_separator, block_bytes=1 << 16)
    try:
        found = [(argument, path) for argument in args.input for path in expand_inputs([argument])]
        paths = [path for _, path in found]
        check_options(options, paths)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizer(args.pattern)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=args.vocab_size,
            special_tokens=[END, *args.special_tokens],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            max_token_length=args.longest_token,
            show_progress=False,
        )
        held_out: dict[str, list[str]] = defaultdict(list)

        def training() -> Iterator[str]:
            for number, (file, text) in enumerate(texts(paths, options, int(args.sample_mb * 1e6))):
                if number % HELD_OUT == HELD_OUT - 1:
                    held_out[found[file][0]].append(text)
                else:
                    yield text

        first = next(rest := training(), None)
        if first is None:
            raise ValueError(f"--input {' '.join(args.input)}: no text under {' '.join(args.json_keys)} to train on")
        tokenizer.train_from_iterator(chain([first], rest), trainer)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"))
    (args.out / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}) + "\n")
    print(f"tokenizer: {tokenizer.get_vocab_size()} entries, {args.out}")
    report(tokenizer, held_out)


def report(tokenizer: Tokenizer, held_out: dict[str, list[str]]) -> None:
    """Print how many bytes and characters a token has in texts that were not trained on, by input and script."""
    for argument, its_texts in held_out.items():
        for script in ("mostly Han", "other"):
            those = [
                t
                for t in its_texts
                if (sum("\u3400" <= c <= "\u9fff" for c in t) * 3 > len(t)) == (script == "mostly Han")
            ]
            tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(those))
            if tokens:
                size = sum(len(t.encode()) for t in those)
                per_token = f"{size / tokens:.2f} bytes, {sum(map(len, those)) / tokens:.2f} characters per token"
                print(f"  {argument}, {script}: {len(those)} texts held out, {per_token}")


if __name__ == "__main__":
    main()
