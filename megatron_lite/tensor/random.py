"""Random numbers that are addressed, not drawn.

Every random number is a function of where it stands: an initial weight of (seed, name of the tensor, index in the
full tensor), a dropout decision of (seed, step, layer, site, row of the global batch, position in the row, feature or
head). A rank computes the numbers of the elements it holds and no others; there is no state to save, to fork or to
keep in step, and no layout, dtype, thread count or machine changes a bit. The words come from philox.py.

*Normal.* Word w gives sign w >> 31 and, from n = 2 * (w % 2^31) + 1, the tail p = n * 2^-33 in (0, 1/2). With n = 2^e
* f, 1 <= f < 2, and s = f - 3/2, the number is z = (1/2 - p) * (c0 + s * (c1 + s * (... + s * c13))), c = row e of a
table (normal_table.py), all in fp64, each operation rounded by itself: IEEE + - and * give the same bits everywhere,
which a logarithm, or a fused multiply-add, does not. z * std is rounded to fp32, and then to the dtype asked for. The
largest number is 6.34; within 1e-12 of the exact quantile.

:func:`normal_rows` is that definition in torch; a compiled kernel that follows it exactly may stand in (see there).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_lite.ops.library import missing
from megatron_lite.tensor.normal_table import COEFFICIENTS
from megatron_lite.tensor.philox import name_key, uniform_bits
from megatron_lite.tensor.spec import Rectangle

NormalKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int, float], None]


def normal_of(words: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Standard normal numbers, fp64, of int64 words that hold uint32. ``table`` is :func:`normal_table`."""
    n = ((words & 0x7FFFFFFF) * 2 + 1).to(torch.float64)
    bits = n.view(torch.int64)
    row = (bits >> 52) - 1023
    # the same mantissa under the exponent of 1: f in [1, 2); exact, as is the subtraction
    s = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64) - 1.5
    columns, row = table.t().contiguous(), row.reshape(-1)
    z = columns[-1].index_select(0, row).view(words.shape)
    for k in range(columns.shape[0] - 2, -1, -1):
        z = z.mul_(s).add_(columns[k].index_select(0, row).view(words.shape))
    half_minus_p = ((1 << 32) - n).mul_(2.0**-33)  # exact
    z.mul_(half_minus_p)
    return torch.where(words >> 31 == 1, -z, z)


def normal_table(device: torch.device | str = "cpu") -> torch.Tensor:
    """The polynomials of :func:`normal_of`: fp64 [32, 14], row e for octave e, coefficients of s^0 .. s^13."""
    data = bytes.fromhex(COEFFICIENTS)
    values = struct.unpack(f">{len(data) // 8}d", data)
    return torch.tensor(values, dtype=torch.float64, device=device).view(32, -1)


def normal_rows(out: torch.Tensor, table: torch.Tensor, start: torch.Tensor, key0: int, key1: int, std: float) -> None:
    """Fill rows of normal numbers: the definition, and what a kernel ``philox_normal`` has to do bit for bit.

    For every row r and i < L: j = start[r] + i; counter = (j // 4 mod 2^32, j // 4 div 2^32, 0, 0);
    w = word j % 4 of philox4x32((key0, key1), counter); n = 2 * (w mod 2^31) + 1 as a double; bits = its 64 bits;
    e = (bits >> 52) - 1023; s = double((bits mod 2^52) | 1023 << 52) - 1.5; z = table[e][13], and for k = 12 .. 0:
    z = z * s, z = z + table[e][k]; z = z * ((2^32 - n) * 2^-33); if w >> 31: z = -z; out[r][i] = float(z * std). Every
    operation in double, rounded to nearest, none contracted (-ffp-contract=off; on CUDA __dmul_rn and __dadd_rn).

    A kernel is registered as
    ``megatron_lite::philox_normal(Tensor(a!) out, Tensor table, Tensor start, int key0, int key1, float std) -> ()``.

    Args:
        out: fp32 [R, L], contiguous.
        table: :func:`normal_table`.
        start: int64 [R], index in the full tensor of each row's first element.
        key0, key1: from :func:`name_key`.
    """
    words = uniform_bits((key0, key1), start, out.shape[1])
    out.copy_(normal_of(words, table).mul_(std))  # fp64 -> fp32, to nearest


def keep_rows(
    out: torch.Tensor,
    start: torch.Tensor,
    above1: torch.Tensor,
    above2: torch.Tensor,
    above3: torch.Tensor,
    key0: int,
    key1: int,
    threshold: int,
) -> None:
    """Fill rows of dropout decisions: word >= threshold. The definition of a kernel ``philox_keep``.

    Args:
        out: bool [R, L], contiguous.
        start: int64 [R], index of each row's first element, below 2^34.
        above1, above2, above3: int64 [R] holding uint32, the other parts of each row's counters.
        threshold: probability of dropping times 2^32, in [0, 2^32].
    """
    step = max(1, _piece(out, compiled=False) // max(1, out.shape[1]))
    for r in range(0, len(start), step):
        above = (above1[r : r + step], above2[r : r + step], above3[r : r + step])
        words = uniform_bits((key0, key1), start[r : r + step], out.shape[1], above)
        torch.ge(words, threshold, out=out[r : r + step])


def compiled(name: str, device: torch.device) -> Callable[..., None] | None:
    """The compiled ``philox_normal`` or ``philox_keep`` for this device, if there is one."""
    if device.type in ("cpu", "cuda") and missing(device.type) is None and hasattr(torch.ops.megatron_lite, name):
        found: Callable[..., None] = getattr(torch.ops.megatron_lite, name)
        return found
    return None


def _piece(out: torch.Tensor, compiled: bool) -> int:
    """Elements to make at a time.

    On a CPU the torch definition works on few: results stay in the cache, and torch runs an operation of so few
    elements on one thread. A barrier between threads after each of a hundred short operations costs more than it
    gains, and on a busy machine far more.
    """
    return 1 << (14 if out.device.type == "cpu" and not compiled else 22)


def normal_slice(
    seed: int,
    name: str,
    full_shape: tuple[int, ...],
    rectangle: Rectangle,
    std: float,
    out: torch.Tensor,
    kernel: NormalKernel | None = None,
) -> None:
    """Fill ``out`` with a box of the tensor of N(0, std) that (seed, name) stand for.

    Args:
        full_shape: of the whole tensor.
        rectangle: which box; nothing outside it is computed (rows start and end inside a block of four).
        out: of the box's shape, any floating dtype and device.
        kernel: what fills rows; None: the compiled kernel where there is one, else :func:`normal_rows`.
    """
    assert tuple(out.shape) == rectangle.size, (out.shape, rectangle)
    if out.is_meta or rectangle.numel == 0:
        return
    kernel = kernel or compiled("philox_normal", out.device) or normal_rows
    start, length = _spans(full_shape, rectangle, out.device)
    flat = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    rows, table = flat.view(-1, length), normal_table(out.device)
    key0, key1 = name_key(seed, name)
    piece = _piece(out, compiled=kernel is not normal_rows)
    for column in range(0, length, piece):
        width = min(piece, length - column)
        step = max(1, piece // width)
        for row in range(0, len(start), step):
            here = rows[row : row + step, column : column + width]
            wide = torch.empty(here.shape, dtype=torch.float32, device=out.device)
            kernel(wide, table, start[row : row + step] + column, key0, key1, float(std))
            here.copy_(wide)
    if flat is not out:
        out.copy_(flat)


def _spans(full_shape: tuple[int, ...], box: Rectangle, device: torch.device) -> tuple[torch.Tensor, int]:
    """A box as runs of consecutive elements: (int64 [R] index of each run's first element, length of a run)."""
    length, inner, d = 1, 1, len(full_shape)
    while d > 0:  # dims that are whole join the run; the first that is not ends it
        d -= 1
        length *= box.size[d]
        first = box.start[d] * inner
        inner *= full_shape[d]
        if box.size[d] != full_shape[d]:
            break
    else:
        first = 0
    start = torch.tensor([first], dtype=torch.int64, device=device)
    for k in range(d - 1, -1, -1):
        along = torch.arange(box.start[k], box.start[k] + box.size[k], device=device) * inner
        start = (along[:, None] + start).view(-1)
        inner *= full_shape[k]
    return start, length


@dataclass(frozen=True)
class DropoutKey:
    """Which dropout this is: nothing in it depends on the layout, on recompute or on the microbatch size.

    Attributes:
        seed: the run's.
        step: optimizer step, so that masks differ from step to step.
        layer: index of the block in the whole model (-1: before the blocks).
        site: which of the layer's dropouts, e.g. ``attention_output``.
    """

    seed: int
    step: int
    layer: int
    site: str

    def words(self) -> tuple[int, int]:
        """The Philox key."""
        return name_key(self.seed, f"dropout\0{self.step}\0{self.layer}\0{self.site}")


def dropout(
    x: torch.Tensor, p: float, key: DropoutKey, rows: torch.Tensor, positions: torch.Tensor, first_feature: int = 0
) -> torch.Tensor:
    """Zero elements of hidden states with probability p, and divide the others by 1 - p.

    Args:
        x: [t, F], any tokens and a run of features.
        rows: int64 [t], each token's row in the global batch.
        positions: int64 [t], its position in the row.
        first_feature: index of x's first feature in the whole hidden dim.
    """
    if p == 0.0:
        return x
    start = torch.full_like(rows, first_feature)
    keep = _keep(p, key, start, x.shape[1], (positions, rows, torch.zeros_like(rows)))
    return _drop(x, keep, p)


def attention_dropout(
    weights: torch.Tensor,
    p: float,
    key: DropoutKey,
    rows: torch.Tensor,
    first_positions: torch.Tensor,
    first_head: int = 0,
) -> torch.Tensor:
    """Zero attention weights with probability p, and divide the others by 1 - p.

    Args:
        weights: [n, heads, L, L] (query, key) of n documents.
        rows: int64 [n], each document's row in the global batch.
        first_positions: int64 [n], position in the row of its first token.
        first_head: index in the whole model of the first of these heads.
    """
    if p == 0.0:
        return weights
    n, heads, queries, keys = weights.shape
    shape, device = (n, heads, queries), weights.device
    query = first_positions[:, None, None] + torch.arange(queries, device=device)
    head = torch.arange(first_head, first_head + heads, device=device)[:, None]
    start = first_positions[:, None, None].expand(shape).reshape(-1)
    above = tuple(part.expand(shape).reshape(-1) for part in (query, rows[:, None, None], head))
    return _drop(weights, _keep(p, key, start, keys, above).view(weights.shape), p)


def _keep(p: float, key: DropoutKey, start: torch.Tensor, length: int, above: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """bool [R, length]: word >= p * 2^32."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability {p} is not in [0, 1]")
    keep = torch.empty((len(start), length), dtype=torch.bool, device=start.device)
    if not start.is_meta:
        kernel = compiled("philox_keep", start.device) or keep_rows
        above1, above2, above3 = (part.contiguous() for part in above)
        key0, key1 = key.words()
        kernel(keep, start.contiguous(), above1, above2, above3, key0, key1, round(p * (1 << 32)))
    return keep


def _drop(x: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
    return torch.where(keep, x * (1.0 / (1.0 - p)) if p < 1.0 else x, 0)
