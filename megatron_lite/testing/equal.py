"""What *equal* means, and the comparison of a layout's results with one process's.

The bound is derived, not tuned: a tensor agrees when max|a - b| <= 1e-12 * max(max|ref|, s), s being a thousandth of the
root mean square of all gradients (or weights). Rounding alone stays below it, a fault lies at 1e-4 and above. Initial
weights, and all copies of a replicated parameter, are equal bit by bit. What is reported is what a run computes first:
a wrong gradient of the first step names its parameter, while a step later everything differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOLERANCE = 1e-12
# Softmax does not see what is added to all scores of a query, so without rotary positions and qk-norm the gradient of
# key biases is exactly zero, and what is computed is rounding, which Adam's quotient magnifies. Where one process leaves
# them where they started, to this distance, other layouts must too.
EXACT_ZERO, STAYS = "attention.key.bias", 1e-12

Piece = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], np.ndarray]
"""Name, full shape, start, size, values."""


@dataclass
class RankResult:
    """What one rank reports of a case: gradients of the loss sum after the first and the last step, and so on."""

    losses: list[float]
    aux_losses: list[float]
    norms: list[float]
    initial: list[Piece]
    first_gradients: list[Piece]
    gradients: list[Piece]
    weights: list[Piece]


class Mismatch(AssertionError):
    """A layout that does not compute what one process computes; ``relative``: by how much, where that is what differs."""

    def __init__(self, text: str, relative: float | None = None) -> None:
        super().__init__(text)
        self.relative = relative

    @property
    def looks_like_fp32(self) -> bool:
        """Whether the deviation is one of fp32's roundings, and neither one of fp64's nor a fault's."""
        return self.relative is not None and 1e-10 < self.relative < 3e-6


def full_tensors(results: Sequence[list[Piece]], what: str, *, once: bool) -> dict[str, np.ndarray]:
    """Full tensors from the ranks' pieces. Copies must be equal bit by bit; ``once``: there may be none."""
    full: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    for rank, pieces in enumerate(results):
        for name, shape, start, size, values in pieces:
            array = full.setdefault(name, np.zeros(shape))
            count = seen.setdefault(name, np.zeros(shape, dtype=np.int32))
            box = tuple(slice(b, b + n) for b, n in zip(start, size, strict=True))
            if once and (count[box] > 0).any():
                raise Mismatch(f"{what} {name}: rank {rank} counts elements that another rank counts too")
            known = count[box] > 0
            if not np.array_equal(array[box][known], values[known]):
                worst = np.abs(array[box] - values)[known].max()
                raise Mismatch(
                    f"{what} {name}: rank {rank} holds another copy than the ranks before it (by {worst:.3g})"
                )
            array[box] = values
            count[box] += 1
    for name, count in seen.items():
        if not (count > 0).all():
            raise Mismatch(f"{what} {name}: {int((count == 0).sum())} of {count.size} elements are on no rank")
    return full


def deviation(a: dict[str, np.ndarray], ref: dict[str, np.ndarray], what: str) -> float:
    """Largest max|a - b| / max(max|ref|, s) over the tensors. Raises Mismatch with those above the tolerance."""
    if a.keys() != ref.keys():
        raise Mismatch(f"{what}: tensors differ: {sorted(a.keys() ^ ref.keys())}")
    total = sum(float((v**2).sum()) for v in ref.values())
    scale = 1e-3 * (total / max(1, sum(v.size for v in ref.values()))) ** 0.5
    worst, wrong = 0.0, []
    for name, value in ref.items():
        if a[name].shape != value.shape:
            raise Mismatch(f"{what} {name} has shape {a[name].shape}, not {value.shape}")
        if name.endswith(EXACT_ZERO) and np.abs(value).max() <= STAYS:  # biases start at zero
            if not np.abs(a[name]).max() <= STAYS:
                wrong.append(f"{name} ({np.abs(a[name]).max():.3g}, exactly zero in theory)")
            continue
        error = float(np.abs(a[name] - value).max(initial=0.0)) / max(float(np.abs(value).max(initial=0.0)), scale)
        if not error <= TOLERANCE:
            wrong.append(f"{name} (by a relative {error:.3g})")
        worst = max(worst, error)
    if wrong:
        more = f" and {len(wrong) - 3} of {len(ref)} more" if len(wrong) > 3 else ""
        raise Mismatch(f"{what} differs from one process's (allowed {TOLERANCE}): {', '.join(wrong[:3])}{more}", worst)
    return worst


def without_gradient(result: RankResult) -> list[str]:
    """Parameters of one process whose gradient is zero in the first and in the last step, and not for a reason."""
    steps = [full_tensors([pieces], "gradient", once=True) for pieces in (result.first_gradients, result.gradients)]
    zero = [{name for name, value in step.items() if not value.any()} for step in steps]
    return sorted(name for name in zero[0] & zero[1] if not name.endswith(EXACT_ZERO))


NUMBERS = ("losses", "aux_losses", "norms")


def _compare_numbers(
    results: Sequence[RankResult], reference: RankResult, steps: range, which: Sequence[str] = NUMBERS
) -> float:
    """Losses and norms of some steps, on every rank; the largest relative deviation."""
    worst = 0.0
    for what in which:
        for rank, result in enumerate(results):
            for step in steps:
                x, y = getattr(result, what)[step], getattr(reference, what)[step]
                error = abs(x - y) / max(abs(y), 1e-300) if x != y else 0.0
                if not error <= TOLERANCE:
                    text = f"{what} of step {step + 1} on rank {rank}: {x!r}, one process has {y!r} (a relative {error:.1e})"
                    raise Mismatch(text, error)
                worst = max(worst, error)
    return worst


def _compare_tensors(results: Sequence[RankResult], reference: RankResult, which: str, what: str) -> float:
    once = which != "weights"
    full = full_tensors([getattr(r, which) for r in results], what, once=once)
    return deviation(full, full_tensors([getattr(reference, which)], what, once=once), what)


def compare(results: Sequence[RankResult], reference: RankResult) -> float:
    """Hold a layout's results against one process's; returns the largest relative deviation.

    Raises:
        Mismatch: what differs first, in the order in which a run computes it.
    """
    first = full_tensors([r.initial for r in results], "initial weight", once=False)
    for name, value in full_tensors([reference.initial], "initial weight", once=False).items():
        if not np.array_equal(first.get(name, np.empty(0)), value):
            raise Mismatch(f"initial weight {name} is not bitwise that of one process")
    return max(
        _compare_numbers(results, reference, range(1), ("losses", "aux_losses")),
        _compare_tensors(results, reference, "first_gradients", "gradient of step 1"),
        _compare_numbers(results, reference, range(len(reference.losses))),
        _compare_tensors(results, reference, "gradients", f"gradient of step {len(reference.losses)}"),
        _compare_tensors(results, reference, "weights", "weight"),
    )
