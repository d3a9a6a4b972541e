"""Speed of the steps ``language`` and ``quality`` of the cleaning pipeline, on one core, on long and on short documents.

The corpus is one of tools/bench/corpus.py, half Chinese (made when ``--corpus`` is not given), in documents of at most 4,000
and of at most 600 bytes. The peer of ``language`` is fastText's model over the whole text of each document, that of
``quality`` the Python form of its measures, which is what runs where nothing is compiled (on a part of the corpus).
Documents are in memory; reading and writing them is the pipeline's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lite.clean.step import Document
from megatron_lite.clean.steps.decontaminate import Decontaminate, DecontaminateOptions
from megatron_lite.clean.steps.language import Language, LanguageOptions
from megatron_lite.clean.steps.languages import LANGUAGES
from megatron_lite.clean.steps.quality import Quality, QualityOptions
from megatron_lite.clean.steps.quality_measures import Measurer, class_table
from megatron_lite.ops.library import index_module

GOAL = 10.0  # MB/s of language + quality, one core


def rate(size: int, work: Callable[[], object]) -> float:
    """MB/s of processor time."""
    began = time.process_time()
    work()
    return size / (time.process_time() - began) / 1e6


def line(name: str, ours: float, peer: float | None = None, goal: str = "") -> None:
    """A row of the table."""
    beside = f"{peer:>8.1f} MB/s {ours / peer:>7.1f}x" if peer else " " * 22
    print(f"{name:<44} {ours:>8.1f} MB/s {beside}  {goal}", flush=True)


def pieces(corpus: Path, size: int) -> list[str]:
    """Texts of at most ``size`` bytes that the texts of a corpus are cut into."""
    whole = (json.loads(row)["text"].encode() for row in corpus.open(encoding="utf-8"))
    cut = (text[at : at + size].decode("utf-8", "ignore") for text in whole for at in range(0, len(text), size))
    return [text for text in cut if text.strip()]


def quality_section(texts: list[str], benchmark: Path | None = None) -> None:
    """Print the table for some documents."""
    sizes = [len(text.encode()) for text in texts]
    size, part = sum(sizes), max(1, len(texts) // 40)
    print(f"{size / 1e6:.1f} MB, {len(texts)} documents, {size / len(texts):.0f} bytes on average; one core")
    documents = [Document(text) for text in texts]
    language, quality = Language(LanguageOptions()), Quality(QualityOptions())
    language.language_of(texts[0][:1000] + " loads the model")
    mine = rate(size, lambda: language.apply(documents))
    detector = language.detector
    whole = rate(sum(sizes[:part]), lambda: [detector.detect(" ".join(t.split()), model="lite") for t in texts[:part]])
    line("language, beside the model on whole texts", mine, whole)
    counted = rate(size, lambda: quality.apply(documents))
    plain = Measurer(LANGUAGES["en"], class_table())
    python = rate(sum(sizes[:part]), lambda: [plain.measure(text) for text in texts[:part]])
    line(f"quality, {'compiled' if index_module()[0] else 'NOT COMPILED'}, beside Python", counted, python)
    both = 1 / (1 / mine + 1 / counted)
    line("cleaning: language + quality", both, goal=f"goal {GOAL:g} MB/s: {'met' if both >= GOAL else 'NOT MET'}")
    if benchmark is not None:
        step = Decontaminate(DecontaminateOptions(benchmarks=(str(benchmark),)))
        line(f"decontaminate against {benchmark.name}", rate(size, lambda: step.apply(documents)))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="JSON lines with the field text; made when it is not given")
    parser.add_argument("--megabytes", type=int, default=20, help="of the corpus that is made")
    parser.add_argument("--benchmark", type=Path, help="also decontaminate against this file")
    parser.add_argument("--directory", help="for temporary files")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        corpus = args.corpus or Path(folder) / "corpus.jsonl"
        if args.corpus is None:
            script = Path(__file__).with_name("corpus.py")
            command = [sys.executable, str(script), str(corpus), "--megabytes", str(args.megabytes), "--chinese", "0.5"]
            subprocess.run(command, check=True)
        for size in (4000, 600):
            quality_section(pieces(corpus, size), args.benchmark)


if __name__ == "__main__":
    main()
