"""One table for every operation that has more than one implementation.

An :class:`Op` has a *reference*, written in plain PyTorch, which defines what is correct and runs everywhere, and
:class:`Kernel` entries in order of preference. A kernel says by itself when it applies: its condition looks at a
:class:`Problem` (target device, dtypes, shapes, alignment, options) and returns the reason why not, or None. The rule
of dispatch and the limit of a kernel therefore stand in one place, and :func:`choose` needs no device: the target is an
argument, so that "what would run on an A100" has an answer on a laptop, and the dispatch is tested without a GPU.

What does not apply falls back to the next entry, and never fails; a kernel asked for by name that cannot run is a
``ValueError`` with the limit in it. A fallback on a device for which there is a kernel is told once.

What this does not do: it does not look for the fastest kernel by timing, and nothing is compiled at run time
(see build.py).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lite.ops import library

CAPABILITY: dict[str, tuple[int, int]] = {  # compute capability by the name people use for the card
    "v100": (7, 0),
    "t4": (7, 5),
    "a100": (8, 0),
    "a800": (8, 0),
    "a10": (8, 6),
    "l40s": (8, 9),
    "h100": (9, 0),
    "h800": (9, 0),
    "h200": (9, 0),
    "h20": (9, 0),
    "b200": (10, 0),
}


class FallbackNotice(UserWarning):
    """A faster kernel exists for this device and was not used; the text says why."""


@dataclass(frozen=True)
class Target:
    """The device a problem is for.

    Attributes:
        kind: "cpu", "cuda" or "meta".
        capability: compute capability of a CUDA device, None if unknown or not CUDA.
        present: False for a device that is only asked about; its compiled libraries are then taken to be there.
        name: as given or found, for messages.
    """

    kind: str
    capability: tuple[int, int] | None = None
    present: bool = True
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.kind


@functools.lru_cache(maxsize=64)
def target(device: torch.device | str) -> Target:
    """The target of a device of this process, or of a name like ``cuda:a100``.

    Raises:
        ValueError: for a card whose compute capability is not in :data:`CAPABILITY`.
    """
    kind, _, card = str(device).lower().partition(":")
    if kind != "cuda":
        return Target(kind, name=kind)
    if card and not card.isdigit():
        if card not in CAPABILITY:
            raise ValueError(
                f"unknown device cuda:{card}; known: " + ", ".join(f"cuda:{c}" for c in sorted(CAPABILITY))
            )
        return Target("cuda", CAPABILITY[card], present=False, name=f"cuda:{card}")
    if not torch.cuda.is_available():
        return Target("cuda", None, present=False, name="cuda")
    index = int(card) if card else torch.cuda.current_device()
    return Target("cuda", torch.cuda.get_device_capability(index), name=torch.cuda.get_device_name(index))


@dataclass(frozen=True)
class Problem:
    """What an op is asked to do, as far as the choice of a kernel depends on it.

    Attributes:
        target: the device.
        dtypes, shapes: of the tensors, in the op's order.
        contiguous: every tensor is.
        alignment: the largest power of two, at most 64, that divides every tensor's address.
        options: further (name, value) pairs, sorted by name.
    """

    target: Target
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    contiguous: bool = True
    alignment: int = 64
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, *tensors: torch.Tensor, **options: Any) -> Problem:
        """The problem that these tensors and options pose."""
        where = target(tensors[0].device)
        address = 64
        if where.kind != "meta":
            for t in tensors:
                address |= t.data_ptr()
        return cls(
            where,
            tuple(t.dtype for t in tensors),
            tuple(tuple(t.shape) for t in tensors),
            all(t.is_contiguous() for t in tensors),
            address & -address,
            tuple(sorted(options.items())),
        )

    def option(self, name: str, default: Any = None) -> Any:
        """The value of an option."""
        return dict(self.options).get(name, default)


Reason = str | None


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op.

    Attributes:
        name: short, unique in its op.
        devices: kinds of device it is written for.
        run: called like the op's reference.
        applies: None when it can solve the problem, else the reason with the limit; ``devices`` and ``library`` are
            checked before.
        library: "cpu" or "cuda", the compiled library of ours it lives in; "" for none.
        saves: bytes it keeps from forward to backward.
    """

    name: str
    devices: tuple[str, ...]
    run: Callable[..., Any]
    applies: Callable[[Problem], Reason]
    library: str = ""
    saves: Callable[[Problem], int] | None = None


@dataclass(frozen=True)
class Op:
    """An operation: its reference and its kernels, best first."""

    name: str
    reference: Callable[..., Any]
    kernels: tuple[Kernel, ...] = ()
    saves: Callable[[Problem], int] | None = None

    def pick(self, *tensors: torch.Tensor, kernel: str | None = None, **options: Any) -> Callable[..., Any]:
        """The function to call for these tensors; ``kernel`` forces one by name ("reference" for the reference)."""
        return choose(self, Problem.of(*tensors, **options), kernel).run


@dataclass(frozen=True)
class Choice:
    """What runs, and why nothing better does.

    Attributes:
        name: the kernel's name, "reference" for the reference.
        passed_over: (kernel, reason) for each kernel that comes before it in the table.
        bytes_saved: bytes kept from forward to backward, None if unknown.
    """

    name: str
    run: Callable[..., Any]
    passed_over: tuple[tuple[str, str], ...]
    bytes_saved: int | None


def reason_against(kernel: Kernel, problem: Problem, missing: Callable[[str], Reason]) -> Reason:
    """Why ``kernel`` cannot solve ``problem``, or None."""
    where = problem.target
    if where.kind not in kernel.devices:
        return f"runs on {' and '.join(kernel.devices)}, this is {where}"
    if (reason := kernel.applies(problem)) is not None:
        return reason
    if kernel.library and where.present and (reason := missing(kernel.library)) is not None:
        return f"the compiled {kernel.library} kernels are not loaded: {reason}"
    return None


@functools.lru_cache(maxsize=4096)  # a pure function, asked the same few questions in every layer of every step
def choose(
    op: Op, problem: Problem, kernel: str | None = None, missing: Callable[[str], Reason] = library.missing
) -> Choice:
    """Pick the implementation of ``op`` for ``problem``.

    Args:
        kernel: the name of the one to use, None for the best.
        missing: tells why a compiled library is not there, or None (an argument, for tests).

    Raises:
        ValueError: when the kernel asked for does not exist or cannot solve this problem.
    """
    passed_over: list[tuple[str, str]] = []
    if kernel is not None and kernel not in [k.name for k in op.kernels] + ["reference"]:
        names = ", ".join([k.name for k in op.kernels] + ["reference"])
        raise ValueError(f"{op.name} has no kernel {kernel!r}; it has: {names}")
    for entry in op.kernels:
        if kernel not in (None, entry.name):
            continue
        reason = reason_against(entry, problem, missing)
        if reason is None:
            return Choice(entry.name, entry.run, tuple(passed_over), entry.saves(problem) if entry.saves else None)
        if kernel is not None:
            raise ValueError(f"{op.name}: kernel {kernel!r} was asked for and cannot run: {reason}")
        passed_over.append((entry.name, reason))
        if problem.target.present and problem.target.kind in entry.devices:
            _tell(op.name, entry, reason)
    saves = op.saves(problem) if op.saves else None
    return Choice("reference", op.reference, tuple(passed_over), saves)


def _tell(op_name: str, kernel: Kernel, reason: str) -> None:
    """Tell that a kernel is passed over. Python's warning filter shows each text once per process."""
    if reason.startswith("the compiled"):  # the same for every op: one notice, not one each
        text = f"plain PyTorch runs in place of kernels: {reason}"
    else:
        text = f"{op_name}: kernel {kernel.name!r} is passed over: {reason}"
    warnings.warn(text, FallbackNotice, stacklevel=2)


# Conditions that several ops share.

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def dtype_reason(problem: Problem, allowed: tuple[torch.dtype, ...] = FLOATS) -> Reason:
    """The reason against a problem with a dtype outside ``allowed``."""
    for dtype in problem.dtypes:
        if dtype not in allowed:
            return f"takes {', '.join(short(d) for d in allowed)}, not {short(dtype)}"
    return None


def capability_reason(problem: Problem, least: tuple[int, int]) -> Reason:
    """The reason against a CUDA device older than ``least``; an unknown capability passes."""
    have = problem.target.capability
    if problem.target.kind == "cuda" and have is not None and have < least:
        return f"needs compute capability {least[0]}.{least[1]}, {problem.target} has {have[0]}.{have[1]}"
    return None


def short(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an op on ``dtype`` computes: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def numel(shape: tuple[int, ...]) -> int:
    """Elements of a tensor of this shape."""
    n = 1
    for size in shape:
        n *= size
    return n
