"""What one sample of the windows order costs, and what starting it costs; beside a plain statement of Megatron-LM's.

Megatron-LM itself is not run here. The peer is a statement, in this file, of what the ``__getitem__`` of its GPT dataset
(core 0.20) computes for a sample: the document, sample and shuffle indices are looked up, each document's piece is read and
all are joined, made int64, split into inputs and labels, and given a mask of attention, a mask of the loss and positions.
With its defaults the masks are made once and kept; with ``--reset-position-ids --reset-attention-mask --eod-mask-loss``,
which is what separates documents as our rows do, each sample makes its own, the one of attention of S x S elements.
Measured with Megatron-LM itself on a machine of this class, at S = 2048 and with its defaults: 177 microseconds.

    python tools/bench/windows.py
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lite.data.index_format import LENGTH, POINTER, IndexHeader
from megatron_lite.data.indexed import IndexedDataset, IndexedWriter, TokenStream
from megatron_lite.data.megatron_order import MegatronDataset
from megatron_lite.data.windows import WindowDataset

MEGATRON_US = 177.0  # measured with Megatron-LM itself, see above


class Statement:
    """What Megatron-LM's GPT dataset computes for a sample, over the same indices as our megatron order.

    Args:
        apart: documents do not see each other, positions restart, and end tokens carry no loss.
    """

    def __init__(self, dataset: IndexedDataset, seq_length: int, eod_id: int, *, apart: bool) -> None:
        self.dataset, self.seq_length, self.eod_id, self.apart = dataset, seq_length, eod_id, apart
        self.indices = MegatronDataset(dataset, range(len(dataset)), seq_length, None, 1)
        self.bytes = np.memmap(dataset.bin_name, dtype=np.uint8, mode="r")
        self.entry = functools.lru_cache(maxsize=8)(lambda i: (int(dataset.pointers[i]), int(dataset.lengths[i])))
        self.kept: tuple[Any, ...] | None = None

    def read(self, sequence: int, offset: int, length: int | None) -> np.ndarray:
        """Part of a sequence, a view of the mapped file."""
        pointer, whole = self.entry(int(sequence))
        dtype = self.dataset.dtype
        count = whole - offset if length is None else length
        return np.frombuffer(self.bytes.data, dtype, count, pointer + offset * dtype.itemsize)

    def sample(self, j: int) -> dict[str, Any]:
        """One sample."""
        import torch

        k = self.indices.shuffle[j]
        first, begin = self.indices.samples[k]
        last, end = self.indices.samples[k + 1]
        if first == last:
            parts = [self.read(self.indices.order[first], begin, end - begin + 1)]
        else:
            parts = [
                self.read(self.indices.order[i], begin if i == first else 0, end + 1 if i == last else None)
                for i in range(first, last + 1)
            ]
        text = torch.from_numpy(np.concatenate(parts)).long()
        tokens, labels = text[:-1].contiguous(), text[1:].contiguous()
        if self.apart or self.kept is None:
            self.kept = self.masks(tokens)
        attention, loss, positions = self.kept
        padding = -1
        loss[labels == padding] = 0.0
        tokens[tokens == padding] = 0
        labels[labels == padding] = 0
        return {
            "tokens": tokens, "labels": labels, "attention_mask": attention, "loss_mask": loss, "position_ids": positions,
        }  # fmt: skip

    def masks(self, tokens: Any) -> tuple[Any, ...]:
        """(attention, loss, positions) of a row."""
        import torch

        size = self.seq_length
        attention = torch.tril(torch.ones((size, size))).unsqueeze(0)
        loss, positions = torch.ones(size), torch.arange(size)
        if self.apart:
            loss[tokens == self.eod_id] = 0.0
            positions, before = positions.clone(), 0
            for place in torch.nonzero(tokens == self.eod_id).flatten().tolist():
                attention[0, place + 1 :, : place + 1] = 0
                positions[place + 1 :] -= place + 1 - before
                before = place + 1
        return attention < 0.5, loss, positions


def write(prefix: Path, tokens: int, mean: int = 600) -> IndexedDataset:
    """A corpus of documents of about ``mean`` tokens, each with its end (id 0)."""
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, vocab_size=50_000, eod_id=0) as writer:
        while writer.tokens < tokens:
            writer.add_document(np.append(rng.integers(1, 50_000, int(rng.geometric(1 / mean)), dtype=np.uint16), np.uint16(0)))
    return IndexedDataset(prefix)


def write_sparse(prefix: Path, sequences: int, length: int) -> None:
    """A pair of equal uint16 sequences whose ``.bin`` holds nothing but a hole."""
    header = IndexHeader(np.dtype("<u2"), sequences, sequences + 1)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(header.pack())
        np.full(sequences, length, LENGTH).tofile(file)
        (np.arange(sequences, dtype=POINTER) * (2 * length)).tofile(file)
        np.arange(sequences + 1, dtype=POINTER).tofile(file)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * sequences * length)


def microseconds(*rows: Callable[[int], Any], count: int = 500, repeats: int = 15) -> list[float]:
    """CPU time of one call of each, from a warm page cache: medians over repeats, in which they take turns."""
    found: list[list[float]] = [[] for _ in rows]
    for r in range(-2, repeats):  # the first two warm up
        for row, seconds in zip(rows, found, strict=True):
            first = (r % 8) * count
            began = time.process_time()
            for j in range(first, first + count):
                row(j)
            seconds += [(time.process_time() - began) / count * 1e6] if r >= 0 else []
    return [float(np.median(seconds)) for seconds in found]


def line(name: str, ours: float, peer: float | None, goal: str, unit: str) -> str:
    """One figure: ours, the peer's, their ratio, the goal."""
    beside = "" if peer is None else f"   peer {peer:10.1f} {unit}   x {peer / ours:6.1f}"
    return f"{name:78} {ours:10.1f} {unit}{beside}   goal: {goal}"


def section(directory: Path, seq_length: int = 2048, tokens: int = 60_000_000) -> None:
    """Print the figures of the windows order."""
    import torch

    torch.set_num_threads(1)
    write_sparse(directory / "sparse", 1_000_000, 102_400)
    began = time.perf_counter()
    dataset = IndexedDataset(directory / "sparse")
    opened = WindowDataset(TokenStream(dataset, range(len(dataset))), seq_length, 1)
    opened.row(0)
    print(line(f"start with {len(opened):,} samples", 1000 * (time.perf_counter() - began), None, "under 50", "ms"))
    dataset = write(directory / "corpus", tokens)
    windows = WindowDataset(TokenStream(dataset, range(len(dataset))), seq_length, 1, vocab_size=50_000)
    kept, apart = (Statement(dataset, seq_length, 0, apart=apart) for apart in (False, True))
    mapped = dataset.raw(0, dataset.num_tokens)
    ours, peer, bare = microseconds(windows.row, kept.sample, lambda j: mapped[j * 2048 : j * 2048 + 2049].astype(np.int64))
    (slow,) = microseconds(apart.sample, count=10, repeats=3)
    what = f"a window of {seq_length} with its documents"
    print(line(f"{what}; peer: Megatron-LM, measured before", ours, MEGATRON_US, "under 35, x 5", "us"))
    print(line(f"{what}; peer: the statement, masks kept", ours, peer, "x 5", "us"))
    print(line(f"{what}; peer: the statement, documents apart", ours, slow, "x 5", "us"))
    print(line("  of which a bare slice as int64", bare, None, "none", "us"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=60_000_000, help="of the corpus that is made")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        section(Path(directory), args.seq_length, args.tokens)


if __name__ == "__main__":
    main()
