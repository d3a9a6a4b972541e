"""Speed of the steps ``language`` and ``quality`` of the cleaning pipeline, on one core.

    python tools/bench/corpus.py /tmp/half.jsonl --megabytes 20 --chinese 0.5
    python tools/bench/quality.py /tmp/half.jsonl

The peer of ``language`` is fastText's model over the whole text of each document, that of ``quality`` the Python form of its
measures, which is what runs where nothing is compiled (on a part of the corpus). Documents are in memory; reading and
writing them is the pipeline's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lite.clean.decontaminate import Decontaminate, DecontaminateOptions
from megatron_lite.clean.language import Language, LanguageOptions
from megatron_lite.clean.languages import LANGUAGES
from megatron_lite.clean.quality import Quality, QualityOptions
from megatron_lite.clean.quality_measures import Measurer, class_table
from megatron_lite.clean.step import Document
from megatron_lite.data.helper import index_helper

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


def quality_section(path: Path, benchmark: Path | None = None) -> None:
    """Print the table for a corpus of JSON lines."""
    texts = [json.loads(row)["text"] for row in path.open(encoding="utf-8")]
    sizes = [len(text.encode()) for text in texts]
    size, part = sum(sizes), max(1, len(texts) // 40)
    print(f"{path.name}: {size / 1e6:.1f} MB, {len(texts)} documents, {size / len(texts):.0f} bytes on average; one core")
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
    line(f"quality, {'compiled' if index_helper() else 'NOT COMPILED'}, beside Python", counted, python)
    both = 1 / (1 / mine + 1 / counted)
    line("cleaning: language + quality", both, goal=f"goal {GOAL:g} MB/s: {'met' if both >= GOAL else 'NOT MET'}")
    if benchmark is not None:
        step = Decontaminate(DecontaminateOptions(benchmarks=(str(benchmark),)))
        line(f"decontaminate against {benchmark.name}", rate(size, lambda: step.apply(documents)))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="JSON lines with the field text")
    parser.add_argument("--benchmark", type=Path, help="also decontaminate against this file")
    args = parser.parse_args()
    quality_section(args.corpus, args.benchmark)


if __name__ == "__main__":
    main()
