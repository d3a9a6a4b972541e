"""Philox 4x32-10: random words as a function of a key and a counter.

A bijection of 128-bit counters under a 64-bit key gives four 32-bit words for each counter. Keys are BLAKE2b of the
seed and a name. Along its last axis an address has an index i: word i % 4 of the counter whose first part is i // 4.
Here it is integer arithmetic in int64 that never overflows, the same on every device.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import hashlib
import struct

import torch

MASK = 0xFFFFFFFF
Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(key: tuple[int, int], counter: Words) -> Words:
    """Philox 4x32-10.

    Args:
        key: two uint32.
        counter: four int64 tensors of one shape that hold uint32.

    Returns:
        Four int64 tensors of that shape that hold uint32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1.bitwise_xor_(c1).bitwise_xor_(k0), low1, high0.bitwise_xor_(c3).bitwise_xor_(k1), low0
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def _multiply(x: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of x * m, for uint32 x and 2^31 <= m < 2^32, without overflow of int64.

    x * m = x * 2^32 + x * (m - 2^32), and the last product lies in (-2^63, 0].
    """
    t = x * (m - (1 << 32))
    return (t >> 32).add_(x), t.bitwise_and_(MASK)


def name_key(seed: int, name: str) -> tuple[int, int]:
    """Philox key of a named thing under a seed: 64 bits of BLAKE2b."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    k0, k1 = struct.unpack("<II", digest)
    return k0, k1


def uniform_bits(
    key: tuple[int, int], start: torch.Tensor, length: int, above: tuple[torch.Tensor, ...] | None = None
) -> torch.Tensor:
    """Words at consecutive addresses, for several rows.

    Args:
        start: int64 [R], index of each row's first word.
        length: words of a row.
        above: the counter's parts 1, 2 and 3 of each row, int64 [R] holding uint32 (indices are then below 2^34);
            None: part 1 is the high half of index // 4, the others are 0 (indices up to 2^63).

    Returns:
        int64 [R, length] holding uint32.
    """
    rows = start.shape[0]
    skip = start & 3
    blocks = (length + 6) // 4  # enough for any skip
    block = (start >> 2)[:, None] + torch.arange(blocks, device=start.device)
    c0 = block & MASK
    if above is None:
        zero = torch.zeros_like(c0)
        counter = (c0, block >> 32, zero, zero)
    else:
        c1, c2, c3 = (part[:, None].expand(rows, blocks) for part in above)
        counter = (c0, c1, c2, c3)
    # four of [R, blocks] -> [R, 4 * blocks] -> [R, length]
    words = torch.stack(philox4x32(key, counter), -1).view(rows, 4 * blocks)
    if rows == 1 and start.device.type == "cpu":
        return words[:, int(skip) : int(skip) + length]
    return words.gather(1, skip[:, None] + torch.arange(length, device=start.device))
