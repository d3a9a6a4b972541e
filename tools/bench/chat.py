"""Fine-tuning data: packing millions of documents, conversations to tokens, and the loader over a packed mix of them.

    python tools/bench/chat.py

Prints for each what was measured, its peer on the same data in the same run, and the goal. The peer of packing is the same
rule one document at a time; of ``data chat``, ``apply_chat_template`` of transformers with its mask of assistant tokens. The
conversations are made of words from this repository's documentation; tokenizer and template are made here.
"""

from __future__ import annotations

import argparse
import bisect
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lite.config.schema_io import DataConfig
from megatron_lite.data.build import build_datasets
from megatron_lite.data.loader import Loader
from megatron_lite.data.packing import plan_rows

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (ROOT / "examples" / "fine_tuning" / "chatml.jinja").read_text(encoding="utf-8")
WITHOUT_MARKS = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def line(name: str, ours: str, peer: str = "-", ratio: str = "-", goal: str = "-") -> None:
    """One row of the result."""
    print(f"{name:<44} {ours:>22}  {peer:>22}  {ratio:>7}  {goal}", flush=True)


def one_at_a_time(lengths: np.ndarray, capacity: int) -> int:
    """Rows that best fit decreasing makes; the free places kept in a sorted list."""
    free: list[int] = []
    rows = 0
    for length in sorted(lengths.tolist(), reverse=True):
        place = bisect.bisect_left(free, length)
        if place == len(free):
            rows, left = rows + 1, capacity - length
        else:
            left = free.pop(place) - length
        if left:
            bisect.insort(free, left)
    return rows


def packing(documents: int) -> None:
    """Plans for documents of two distributions, and the peer on a tenth of them."""
    rng = np.random.default_rng(0)
    for name, lengths in (
        ("geometric, mean 500", rng.geometric(1 / 500, documents) + 1),
        ("log-normal, median 400", np.exp(rng.normal(6, 1.2, documents)).astype(np.int64) + 2),
    ):
        for size in (2048, 4096, 32768):
            began = time.perf_counter()
            plan = plan_rows(np.cumsum(lengths) - lengths, lengths, size)
            ours = time.perf_counter() - began
            few = np.minimum(lengths[: documents // 10], size + 1)
            began = time.perf_counter()
            one_at_a_time(few, size + 1)
            peer = 10 * (time.perf_counter() - began)
            cuts = int(np.count_nonzero(np.diff((np.cumsum(lengths) - 1) // size, prepend=0)))
            title = f"pack {documents / 1e6:g}M documents ({name}), S {size}"
            line(title[:70], f"{ours:.2f} s", f"{peer:.1f} s", f"{peer / ours:.1f}", "seconds")
            share = plan.padding / (plan.rows * (size + 1))
            print(f"    padding {100 * share:.4f}%, {plan.cut:,} documents cut (windows cut {cuts:,})")


def make_tokenizer(folder: Path, words: list[str]) -> None:
    """A byte-level BPE with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=16000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator([" ".join(words)], trainer)
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    facts = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


def conversations(words: list[str], megabytes: float, seed: int) -> list[dict[str, list[dict[str, str]]]]:
    """Of one to six exchanges, short questions and longer answers."""
    rng = random.Random(seed)
    made, size = [], 0.0
    while size < megabytes * 1e6:
        messages = []
        for _ in range(rng.randint(1, 6)):
            for role, most in (("user", 60), ("assistant", 300)):
                messages.append({"role": role, "content": " ".join(rng.choices(words, k=rng.randint(3, most)))})
        made.append({"messages": messages})
        size += sum(len(m["content"]) for m in messages)
    return made


def chat(folder: Path, megabytes: float, workers: int) -> list[str]:
    """``data chat`` over three files, beside transformers; the prefixes."""
    from transformers import PreTrainedTokenizerFast

    words = [
        w for p in sorted((ROOT / "docs").glob("*.md")) for w in re.findall(r"[^\s`|]+", p.read_text(encoding="utf-8"))
    ]
    make_tokenizer(folder / "tokenizer", words)
    (folder / "unmarked.jinja").write_text(WITHOUT_MARKS)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    prefixes = []
    for seed in range(3):
        made = conversations(words, megabytes, seed)
        source = folder / f"chat{seed}.jsonl"
        source.write_text("".join(json.dumps(c) + "\n" for c in made))
        prefixes.append(str(folder / f"chat{seed}"))
        few = made[: max(1, len(made) // 100)]
        began = time.perf_counter()
        for one in few:
            theirs.apply_chat_template(one["messages"], return_dict=True, return_assistant_tokens_mask=True)
        peer = sum(len(json.dumps(c)) for c in few) / 1e6 / (time.perf_counter() - began)
        for title, number, template in (
            ("marks", 1, ()),
            ("marks", workers, ()),
            ("differences", 1, ("--chat-template", str(folder / "unmarked.jinja"))),
            ("differences", workers, ("--chat-template", str(folder / "unmarked.jinja"))),
        )[1 if seed else 0 : 2 if seed else None]:
            argv = [
                "--input",
                str(source),
                "--output-prefix",
                prefixes[-1],
                "--tokenizer-model",
                str(folder / "tokenizer"),
            ]
            began = time.perf_counter()
            command = [
                sys.executable,
                "-m",
                "megatron_lite",
                "data",
                "chat",
                *argv,
                *template,
                "--workers",
                str(number),
            ]
            subprocess.run(
                [*command, "--log-interval", "0", "--overwrite"], check=True, stdout=subprocess.DEVNULL, cwd=ROOT
            )
            ours = source.stat().st_size / 1e6 / (time.perf_counter() - began)
            name = f"data chat, {title}, {number} worker(s), {source.stat().st_size / 1e6:.0f} MB"
            line(name, f"{ours:.1f} MB/s", f"{peer:.1f} MB/s", f"{ours / peer:.1f}")
    return prefixes


def loader(prefixes: list[str], size: int, steps: int) -> None:
    """Tokens a second of one loader thread over a packed mix."""
    entries = tuple(text for weight, prefix in zip((1, 2, 3), prefixes, strict=True) for text in (str(weight), prefix))
    data = DataConfig(seq_length=size, data_path=entries, split="1", packing="best-fit")
    began = time.perf_counter()
    built = build_datasets(data, asked=(4 * steps, 0, 0), seed=1)
    assert built.train is not None, built.problems
    start = time.perf_counter() - began
    for workers in (0, 1):
        with Loader(built.train, micro_batch_size=4, seq_length=size, num_workers=workers) as found:
            consumed = found.step(0, 4).next_consumed
            began = time.perf_counter()
            for _ in range(steps):
                consumed = found.step(consumed, 4).next_consumed
            speed = 4 * size * steps / (time.perf_counter() - began)
        where = "in the loop" if workers == 0 else "1 thread"
        line(f"loader, packed chat mix, S {size}, {where}", f"{speed / 1e6:.2f}M tokens/s", goal="at least 0.5M")
    print(f"    start {1000 * start:.0f} ms; {built.summary[0].split(': ', 1)[1]}")


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=5_000_000)
    parser.add_argument("--megabytes", type=float, default=60, help="of conversations in each of three files")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--directory", help="for temporary files")
    args = parser.parse_args()
    line("", "ours", "peer", "ratio", "goal")
    packing(args.documents)
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        prefixes = chat(Path(folder), args.megabytes, args.workers)
        for size in (4096, 32768):
            loader(prefixes, size, args.steps if size == 4096 else args.steps // 8)


if __name__ == "__main__":
    main()
