"""Speed of tools/preprocess_data.py, from JSON lines to finished ``.bin`` and ``.idx``, beside the tokenizers' own packages.

Every pass is the first of a fresh process, its start included; ours and the peer take turns, and the figures are medians. The
corpora are those of tools/bench/corpus.py; the tokenizers (32,000 tokens) are trained on the start of the corpus. The peer of
the byte-level BPE is ``encode_batch`` of Hugging Face ``tokenizers`` in one process, that of the SentencePiece model one
thread of ``sentencepiece``; both read and parse (``json``) the first megabytes of the same file, their start and the writing of
files left out. A megabyte is one of the file. Example::

    python tools/bench/preprocess.py --megabytes 1000
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
TRAINED_ON = 30_000_000  # characters


def line(name: str, ours: str, peer: str = "", ratio: str = "", goal: str = "") -> None:
    """One figure."""
    print(f"{name:58} {ours:>14} {peer:>14} {ratio:>8}  {goal}", flush=True)


def texts_of(corpus: Path, size: int) -> list[str]:
    """The first documents, of about ``size`` bytes."""
    texts: list[str] = []
    with open(corpus, "rb") as file:
        for row in file:
            texts.append(json.loads(row)["text"])
            size -= len(row)
            if size <= 0:
                break
    return texts


def train(folder: Path, corpus: Path) -> None:
    """``hf/`` and ``sp.model`` in the folder."""
    import sentencepiece
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = texts_of(corpus, TRAINED_ON)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    (folder / "hf").mkdir()
    bpe.save(str(folder / "hf" / "tokenizer.json"))
    (folder / "hf" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    lines = (part for text in texts for part in text.split("\n") if part.strip())
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=islice(lines, 300_000), model_prefix=str(folder / "sp"), vocab_size=32_000, model_type="bpe",
        byte_fallback=True, max_sentence_length=20_000, minloglevel=2,
    )  # fmt: skip


def peer_speed(kind: str, folder: Path, corpus: Path, megabytes: float) -> float:
    """MB/s of the peer; runs in a process of its own."""
    if kind == "hf":
        from tokenizers import Tokenizer

        encode = Tokenizer.from_file(str(folder / "hf" / "tokenizer.json")).encode_batch
    else:
        from sentencepiece import SentencePieceProcessor

        model = SentencePieceProcessor(model_file=str(folder / "sp.model"))
        encode = partial(model.encode, num_threads=1)
    size, began = 0, time.perf_counter()
    with open(corpus, "rb") as file:
        while size < megabytes * 1e6 and (lines := list(islice(file, 1000))):
            encode([json.loads(line)["text"] for line in lines])
            size += sum(map(len, lines))
    return size / 1e6 / (time.perf_counter() - began)


def peer(kind: str, folder: Path, corpus: Path, megabytes: float) -> float:
    """:func:`peer_speed` in a fresh process."""
    command = [sys.executable, __file__, "--peer", kind, str(folder), str(corpus), str(megabytes)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def ours(kind: str, folder: Path, corpus: Path, workers: int) -> tuple[float, str]:
    """Seconds of the tool, and what it says."""
    flags = {
        "hf": ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "hf")],
        "sp": ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(folder / "sp.model")],
    }[kind]
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(corpus), "--append-eod"]
    command += ["--output-prefix", str(folder / "out"), "--overwrite", "--workers", str(workers), "--log-interval", "0"]
    began = time.perf_counter()
    done = subprocess.run([*command, *flags], check=True, capture_output=True, text=True)
    return time.perf_counter() - began, done.stdout


def section(folder: Path, corpora: dict[str, Path], workers: int, peer_megabytes: float, rounds: int) -> None:
    """Print the figures."""
    small = folder / "small.jsonl"
    small.write_text('{"text": "a few words"}\n' * 100)
    goals = {"hf": "80 MB/s and x 25", "sp": "x 8"}
    names = {"hf": "byte-level BPE; tokenizers, one process", "sp": "SentencePiece; sentencepiece, one thread"}
    for title, corpus in corpora.items():
        for kind, name in names.items():
            beside, times = [peer(kind, folder, corpus, peer_megabytes)], []
            for _ in range(rounds):
                seconds, said = ours(kind, folder, corpus, workers)
                times.append(seconds)
                beside.append(peer(kind, folder, corpus, peer_megabytes))
            speed, its = corpus.stat().st_size / 1e6 / median(times), median(beside)
            goal = goals[kind] if title == "mixed" else "none"
            line(f"{title}, {name}", f"{speed:.1f} MB/s", f"{its:.2f} MB/s", f"{speed / its:.1f}", goal)
            print("   ", said.splitlines()[0], *[s for s in said.splitlines() if s.startswith("note")], flush=True)
    for kind in names:
        line(
            f"start and end with {kind}, 100 documents",
            f"{ours(kind, folder, small, workers)[0]:.2f} s",
            goal="under 3 s",
        )


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        kind, folder_name, corpus_name, size = sys.argv[2:]
        print(peer_speed(kind, Path(folder_name), Path(corpus_name), float(size)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="of each corpus")
    parser.add_argument("--corpus", type=Path, help="JSON lines in place of the mixed corpus")
    parser.add_argument("--workers", type=int, default=2, help="of the tool")
    parser.add_argument("--peer-megabytes", type=float, default=30, help="of a pass of the peer")
    parser.add_argument("--rounds", type=int, default=3, help="passes of the tool, of which the median counts")
    parser.add_argument("--directory", help="for temporary files")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        folder = Path(name)
        corpora = {"mixed": args.corpus or folder / "mixed.jsonl", "half Chinese": folder / "chinese.jsonl"}
        for title, corpus in corpora.items():
            if not corpus.exists():
                more = ["--chinese", "0.5"] if "Chinese" in title else []
                script = [sys.executable, str(ROOT / "tools" / "bench" / "corpus.py"), str(corpus)]
                subprocess.run([*script, "--megabytes", str(args.megabytes), *more], check=True)
        train(folder, corpora["mixed"])
        line("", "ours", "peer", "ratio", "goal")
        section(folder, corpora, args.workers, args.peer_megabytes, args.rounds)


if __name__ == "__main__":
    main()
