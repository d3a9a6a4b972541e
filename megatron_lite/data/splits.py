"""Which sequences of a dataset are for training, validation and test: three ranges, as Megatron-LM cuts them."""

from __future__ import annotations

import math
import re
from itertools import accumulate, pairwise

SPLIT_NAMES = ("train", "valid", "test")


def parse_split(text: str) -> tuple[float, float, float]:
    """``"969,30,1"`` as three fractions that sum to 1; missing ones are 0.

    Raises:
        ValueError: not one to three numbers, a negative one, none above zero.
    """
    try:
        shares = [float(part) for part in re.split(r"[,/]", text.strip())]
    except ValueError:
        shares = []
    good = 1 <= len(shares) <= 3 and all(math.isfinite(s) and s >= 0 for s in shares) and sum(shares) > 0
    if not good:
        raise ValueError(
            f"--split {text!r} is not a split: give one to three shares for training, validation and test, none negative "
            "and not all zero, such as 969,30,1"
        )
    shares += [0.0] * (3 - len(shares))
    total = shares[0] + shares[1] + shares[2]  # not sum(): it rounds differently from Python 3.12 on
    return shares[0] / total, shares[1] / total, shares[2] / total


def split_ranges(fractions: tuple[float, float, float], sequences: int) -> tuple[range, range, range]:
    """The sequences of each split: adjacent ranges that cover all of them once.

    Borders are the running float sum of the fractions times the number of sequences, rounded half to even (Megatron-LM's
    rule); the last split with a share ends with the last sequence.
    """
    borders = [0, *(round(total * float(sequences)) for total in accumulate(fractions))]
    last = max(i for i, fraction in enumerate(fractions) if fraction > 0)
    for i in range(last + 1, len(borders)):
        borders[i] = sequences
    assert all(a <= b for a, b in pairwise(borders)), borders
    return range(borders[0], borders[1]), range(borders[1], borders[2]), range(borders[2], borders[3])
