"""How much of a step the data loader costs: ranks as processes, the step replaced by a sleep.

Prints the share of the time that each rank waited for its batches. Example::

    python tools/bench/loader.py --ranks 8 --sources 20 --seq-length 4096 --step-ms 20
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def write_sources(directory: Path, sources: int, tokens: int) -> list[str]:
    """WEIGHT PREFIX pairs of files with documents of about 500 tokens."""
    from megatron_lite.data.indexed import IndexedWriter

    rng = np.random.default_rng(0)
    entries = []
    for i in range(sources):
        prefix = directory / f"source{i}"
        with IndexedWriter(prefix, vocab_size=50_000, eod_id=0) as writer:
            while writer.tokens < tokens:
                writer.add_document(rng.integers(1, 50_000, size=int(rng.geometric(1 / 500)) + 1, dtype=np.uint16))
        entries += [str(1 + i % 5), str(prefix)]
    return entries


def rank(index: int, args: argparse.Namespace, entries: list[str], barrier, results) -> None:
    """One data-parallel rank: build, then load and sleep."""
    import torch

    from megatron_lite.config.schema_io import DataConfig
    from megatron_lite.data.build import build_datasets
    from megatron_lite.data.loader import Loader

    torch.set_num_threads(1)
    began = time.perf_counter()
    batch = args.ranks * args.micro_batch_size * args.microbatches
    data = DataConfig(seq_length=args.seq_length, data_path=tuple(entries), split="1", sample_order=args.sample_order)
    built = build_datasets(data, asked=(batch * args.steps, 0, 0), seed=1, vocab_size=50_000)
    assert built.train is not None, built.problems
    loader = Loader(
        built.train, micro_batch_size=args.micro_batch_size, seq_length=args.seq_length, dp_index=index,
        dp_size=args.ranks, num_workers=args.num_workers,
    )  # fmt: skip
    loader.start(0, batch)
    ready = time.perf_counter() - began
    consumed, waits, valid = loader.step(0, batch).next_consumed, [], 0
    barrier.wait()
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(args.steps - 1):
        time.sleep(args.step_ms / 1000)
        step = loader.step(consumed, batch)
        consumed, valid = step.next_consumed, valid + step.valid_tokens
        waits.append(step.wait_seconds)
    wall = time.perf_counter() - began
    loader.close()
    results.put({
        "rank": index, "setup_s": ready, "wait_share": sum(waits) / wall, "longest_wait_ms": 1000 * max(waits),
        "cpu_share": (time.process_time() - cpu) / wall, "step_ms": 1000 * wall / len(waits), "valid_tokens": valid,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--sources", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="tokens of each source")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=2, help="microbatches of a step and rank")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=20.0, help="how long a step sleeps")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--sample-order", default="windows", choices=("windows", "megatron"))
    parser.add_argument("--limit", type=float, default=None, help="fail when a rank waits for more than this share")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        entries = write_sources(Path(directory), args.sources, args.tokens)
        barrier, queue = context.Barrier(args.ranks), context.Queue()
        processes = [context.Process(target=rank, args=(i, args, entries, barrier, queue)) for i in range(args.ranks)]
        for process in processes:
            process.start()
        results = sorted((queue.get(timeout=600) for _ in processes), key=lambda r: r["rank"])
        for process in processes:
            process.join()
    for result in results:
        print(json.dumps({k: round(v, 4) for k, v in result.items()}))
    worst = max(r["wait_share"] for r in results)
    print(f"waiting: {100 * worst:.2f}% of the time on the worst of {args.ranks} ranks")
    if args.limit is not None and worst > args.limit:
        sys.exit(f"that is more than {100 * args.limit:.2f}%")


if __name__ == "__main__":
    main()
