"""Initial weights: what each parameter's spec says, this rank's box of it and nothing more.

The full tensor is a function of (seed, name) alone (random.py), so every layout starts from the same model. A tied
tensor is named by its canonical name and starts the same on every holder. Rows that only pad the vocabulary are zero.

Source of the distribution: N(0, std), std / sqrt(2 L) for projections back into the residual stream, as in GPT-2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from megatron_lite.tensor.random import normal_slice
from megatron_lite.tensor.spec import ParamSpec, Rectangle


def initialise(params: Mapping[str, nn.Parameter], seed: int) -> None:
    """Fill parameters from their ``.spec`` and ``.rectangle``; those whose spec has no ``init`` keep what they hold.

    Args:
        params: by any name; the one that counts is in the spec (and ``spec.tie`` before it).
        seed: of the run.
    """
    for parameter in params.values():
        spec: ParamSpec = parameter.spec  # type: ignore[attr-defined]
        if spec.init is not None and not parameter.is_meta:
            fill(parameter.data, spec, parameter.rectangle, seed)  # type: ignore[attr-defined]


def fill(data: torch.Tensor, spec: ParamSpec, rectangle: Rectangle, seed: int) -> None:
    """Write the initial values of a box of a tensor; rows of ``data`` beyond the box are set to zero.

    Raises:
        ValueError: the spec's kind of initialisation is unknown.
    """
    init, name = spec.init, spec.tie or spec.name
    assert init is not None and name, spec
    inside = data[tuple(slice(0, n) for n in rectangle.size)]
    if inside.shape != data.shape:
        data.zero_()
    if init.kind == "constant":
        inside.fill_(init.value)
    elif init.kind == "normal":
        normal_slice(seed, name, spec.full_shape, rectangle, init.value, inside)
    else:
        raise ValueError(f"{name}: no initialisation called {init.kind!r}: use normal or constant")
