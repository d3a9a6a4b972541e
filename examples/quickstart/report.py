"""How good a checkpoint's model is on held-out files, beside tables of one and of two tokens; and whether it uses context.

    python report.py --load CHECKPOINTS --train PREFIX --heldout PREFIX --text heldout.jsonl

Windows of 257 tokens, each out of one held-out file, are spread evenly over all of them; the three predict the last 256
tokens of each. The tables are counted on the training data. The probe of context: every input token but the last 8 is
drawn anew from the table of one token, and the loss of the last target is compared with what it was.

Exit status 1 where the model is not ``--below`` nats under the table of one token, or the probe rises by less than ``--rise``.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.mesh.local import rank_info
from megatron_lite.train.inference import Generator
from megatron_lite.train.load_model import inference_config, load_model, open_checkpoint

LENGTH = 256  # inputs of a window
KEPT = 8  # of them, in the probe
DISCOUNT = 0.75  # taken from each count of a pair and given to the table of one token (Kneser-Ney's absolute discounting)
BATCH = 2  # windows that run at once


def windows(data: IndexedDataset, count: int) -> np.ndarray:
    """``count`` windows of LENGTH + 1 tokens that do not overlap, each inside one document: int64 [count, LENGTH + 1]."""
    found = [
        (document, begin)
        for document, length in enumerate(data.lengths)
        for begin in range(0, int(length) - LENGTH, LENGTH + 1)
    ]
    if len(found) < count:
        sys.exit(f"the held-out files have only {len(found)} windows of {LENGTH + 1} tokens, not {count}")
    chosen = [found[i * len(found) // count] for i in range(count)]
    return np.stack([data.sequence(d)[b : b + LENGTH + 1].astype(np.int64) for d, b in chosen])


class Tables:
    """Probabilities of a token, and of a token behind another one, counted on a stream of ``vocab_size`` ids."""

    def __init__(self, stream: np.ndarray, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        counts = np.bincount(stream, minlength=vocab_size)
        self.one = (counts + 1) / (counts.sum() + vocab_size)  # add one: no token is impossible
        self._pairs, self._pair_counts = np.unique(stream[:-1] * vocab_size + stream[1:], return_counts=True)
        self._before = np.bincount(stream[:-1], minlength=vocab_size)  # how often a token has a successor
        self._kinds = np.bincount(self._pairs // vocab_size, minlength=vocab_size)  # and how many different ones

    def two(self, before: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Smoothed probability of ``token`` behind ``before``, arrays of one shape."""
        pair = before * self.vocab_size + token
        at = np.searchsorted(self._pairs, pair).clip(max=len(self._pairs) - 1)
        counted = np.where(self._pairs[at] == pair, self._pair_counts[at], 0)
        seen = np.maximum(self._before[before], 1)
        back_off = np.where(self._before[before] > 0, DISCOUNT * self._kinds[before] / seen, 1.0)
        return np.maximum(counted - DISCOUNT, 0) / seen + back_off * self.one[token]


def losses(generator: Generator, text: np.ndarray) -> np.ndarray:
    """Loss in nats of each target of windows [n, LENGTH + 1]: float64 [n, LENGTH]."""
    rows = []
    for begin in range(0, len(text), BATCH):
        part = torch.from_numpy(text[begin : begin + BATCH])
        logits = generator.logits(part[:, :-1].numpy())
        assert logits is not None, "one rank holds the whole model"
        loss = cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        rows.append(loss.view(-1, LENGTH))
    return torch.cat(rows).double().numpy()


def redrawn(text: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The windows with every input token but the last KEPT drawn anew from ``table``."""
    drawn = np.random.default_rng(0).choice(len(table), size=text.shape, p=table)
    drawn[:, LENGTH - KEPT :] = text[:, LENGTH - KEPT :]
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", type=Path, required=True, help="directory of checkpoints")
    parser.add_argument("--train", required=True, help="prefix of the indexed training data")
    parser.add_argument("--heldout", required=True, help="prefix of the indexed held-out data")
    parser.add_argument("--text", type=Path, required=True, help="the held-out text, to count its bytes")
    parser.add_argument("--windows", type=int, default=512)
    parser.add_argument("--below", type=float, help="nats per token that the model has to be below the table of one token")
    parser.add_argument("--rise", type=float, help="nats by which the last target's loss has to rise in the probe")
    args = parser.parse_args()

    reader = open_checkpoint(args.load)
    config = inference_config(reader.state["config"], device="cpu")
    mesh, runtime = load_model(config, rank_info({}), reader)
    generator = Generator(runtime, mesh)
    train, heldout = IndexedDataset(args.train), IndexedDataset(args.heldout)
    tables = Tables(train.read(0, train.num_tokens).astype(np.int64), config.model.vocab_size)
    with open(args.text, encoding="utf-8") as f:
        size = sum(len(json.loads(line)["text"].encode()) for line in f)
    text = windows(heldout, args.windows)
    targets = text[:, 1:]
    model = losses(generator, text)
    nats = {
        "table of one token": float(-np.log(tables.one[targets]).mean()),
        "table of two tokens, smoothed": float(-np.log(tables.two(text[:, :-1], targets)).mean()),
        f"model, step {reader.step}": float(model.mean()),
    }
    bits = heldout.num_tokens / size / math.log(2)  # bits per byte of one nat per token
    print(f"\non {len(text)} windows of {LENGTH} targets from {heldout.num_documents} held-out files")
    print(f"{'':32}{'nats per token':>16}{'bits per byte':>16}")
    for name, loss in nats.items():
        print(f"{name:32}{loss:16.3f}{loss * bits:16.3f}")
    one, _, ours = nats.values()
    rise = float(losses(generator, redrawn(text, tables.one))[:, -1].mean() - model[:, -1].mean())
    good = [
        verdict(f"the model is {one - ours:.3f} nats below the table of one token", one - ours, args.below),
        verdict(f"without what precedes the last {KEPT} tokens the last target costs {rise:.3f} nats more", rise, args.rise),
    ]
    return 0 if all(good) else 1


def verdict(what: str, value: float, least: float | None) -> bool:
    """Print it; whether it is at least what is asked for (if anything is)."""
    if least is None:
        print(f"      {what}")
        return True
    print(f"{'ok   ' if value >= least else 'FAILS'} {what} (at least {least:g})")
    return value >= least


if __name__ == "__main__":
    sys.exit(main())
