"""How much of a step the data loader costs: ranks as processes, the step replaced by a sleep.

Prints the share of the time that each rank waited for its batches (``data_wait_seconds``), for a blend of 100 sources in
windows of 4,096 tokens, documents packed in each; and how many tokens one worker makes into batches when nothing waits
for it. There is no peer: the goal is a share of the step. Example::

    python tools/bench/loader.py --ranks 8 --sources 100 --seq-length 4096 --step-ms 20 --limit 0.01
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
    from megatron_lite.data.access import Access
    from megatron_lite.data.build import build_datasets
    from megatron_lite.data.loader import Loader

    torch.set_num_threads(1)
    began = time.perf_counter()
    batch = args.ranks * args.micro_batch_size * args.microbatches
    data = DataConfig(
        seq_length=args.seq_length, data_path=tuple(entries), split="1", sample_order=args.sample_order, packing=args.packing
    )  # fmt: skip
    access = Access(args.data_access)
    built = build_datasets(data, asked=(batch * args.steps, 0, 0), seed=1, vocab_size=50_000, access=access)
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
    cpu = time.process_time() - cpu
    loader.close()
    began = time.process_time()  # without threads now
    for _ in range(100):
        consumed = loader.step(consumed, batch).next_consumed
    alone = (time.process_time() - began) / (100 * args.micro_batch_size * args.microbatches * args.seq_length)
    results.put({
        "rank": index, "setup_s": ready, "wait_share": sum(waits) / wall, "longest_wait_ms": 1000 * max(waits),
        "cpu_share": cpu / wall, "mtokens_per_cpu_s": 1e-6 / alone, "step_ms": 1000 * wall / len(waits), "valid_tokens": valid,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--sources", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=500_000, help="tokens of each source")
    parser.add_argument("--packing", default="windows", choices=("windows", "best-fit"))
    parser.add_argument("--data-access", default="mmap", choices=("mmap", "pread"))
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
    print(f"waiting: {100 * worst:.2f}% of the time on the worst of {args.ranks} ranks   goal: under 1%")
    slowest = min(r["mtokens_per_cpu_s"] for r in results)
    print(f"one worker makes {slowest:.1f}M tokens into batches in a second of its core")
    if args.limit is not None and worst > args.limit:
        sys.exit(f"that is more than {100 * args.limit:.2f}%")


if __name__ == "__main__":
    main()
