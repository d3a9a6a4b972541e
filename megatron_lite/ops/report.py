"""What would run for each op on a device, and why the others would not: the table behind ``megatron-lite doctor``.

The device may be one that is not here (``cuda:a100``): the same conditions are asked that decide at run time, on a problem
of ordinary size. For a device that is only asked about, compiled libraries are taken to be there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_lite.ops import library
from megatron_lite.ops.adamw import ADAMW
from megatron_lite.ops.attention import ATTENTION
from megatron_lite.ops.gelu import GELU
from megatron_lite.ops.layer_norm import LAYER_NORM
from megatron_lite.ops.op import Op, Problem, Target, choose, reason_against, target
from megatron_lite.ops.rms_norm import RMS_NORM
from megatron_lite.ops.swiglu import SWIGLU

TOKENS, HIDDEN, FFN, HEADS, KV_HEADS = 4096, 4096, 14336, 32, 8  # one layer of an 8-billion-parameter model
NOT_ASKED = "a kernel before it in the table is selected"


@dataclass(frozen=True)
class Row:
    """One implementation of one op.

    Attributes:
        selected: it is the one that runs.
        built: its compiled library has been built; None where it has none, or the device is only asked about.
        loadable: that library is loaded; None as for ``built``.
        reason: why it is not selected, "" if it is.
        bytes_saved: bytes kept from forward to backward for the problem of the report; None if unknown.
    """

    op: str
    kernel: str
    selected: bool
    built: bool | None
    loadable: bool | None
    reason: str
    bytes_saved: int | None


def problems(where: Target, dtype: torch.dtype) -> list[tuple[Op, Problem]]:
    """Every op with a problem of ordinary size for this device."""
    hidden, ffn = (TOKENS, HIDDEN), (TOKENS, FFN)
    heads = tuple((TOKENS, n, HIDDEN // HEADS) for n in (HEADS, KV_HEADS, KV_HEADS))
    flat = ((HIDDEN * HIDDEN,),) * 5
    state = torch.float64 if dtype == torch.float64 else torch.float32
    return [
        (RMS_NORM, Problem(where, (dtype,) * 2, (hidden, (HIDDEN,)))),
        (LAYER_NORM, Problem(where, (dtype,) * 3, (hidden, (HIDDEN,), (HIDDEN,)))),
        (SWIGLU, Problem(where, (dtype,) * 2, (ffn, ffn))),
        (GELU, Problem(where, (dtype,), (ffn,))),
        (ATTENTION, Problem(where, (dtype,) * 3, heads)),
        (ADAMW, Problem(where, (dtype, state, state, state, state), flat)),
    ]


def rows_of(op: Op, problem: Problem) -> list[Row]:
    """The rows of one op, in the order of its table; the reference comes last."""
    chosen = choose(op, problem)
    rows = []
    for kernel in op.kernels:
        reason = reason_against(kernel, problem, library.missing)
        selected = kernel.name == chosen.name
        if reason is None and not selected:
            reason = NOT_ASKED
        built = loadable = None
        if kernel.library and problem.target.present:
            built = library.find(kernel.library)[0] is not None
            loadable = built and library.missing(kernel.library) is None
        saved = kernel.saves(problem) if kernel.saves else None
        rows.append(Row(op.name, kernel.name, selected, built, loadable, reason or "", saved))
    selected = chosen.name == "reference"
    saved = op.saves(problem) if op.saves else None
    rows.append(Row(op.name, "reference", selected, None, None, "" if selected else NOT_ASKED, saved))
    return rows


def report(device: torch.device | str, dtype: torch.dtype | None = None) -> list[Row]:
    """Every op and kernel with what would happen to it on ``device``.

    Args:
        device: of this process, or a name like "cuda:a100".
        dtype: of the model; None: bf16 on CUDA, fp32 elsewhere.

    Raises:
        ValueError: for a card that is not known.
    """
    where = target(device)
    dtype = dtype or (torch.bfloat16 if where.kind == "cuda" else torch.float32)
    return [row for op, problem in problems(where, dtype) for row in rows_of(op, problem)]
