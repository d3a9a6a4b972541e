"""A whole model in one module, and batches for it: what the tests of the model room share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from megatron_lite.data.batch import Batch, Row, make_batch
from megatron_lite.mesh.collectives import Axis
from megatron_lite.model.protocol import ForwardContext, ModelDefinition, build_part, part_names
from megatron_lite.tensor.init import initialise
from megatron_lite.tensor.spec import TensorParallel


class Whole(nn.Module):
    """Embed, blocks and head of one definition; tied parameters are one parameter."""

    def __init__(self, definition: ModelDefinition, seed: int = 1) -> None:
        super().__init__()
        self.definition = definition
        self.parts = nn.ModuleDict(
            {n.replace(".", "/"): build_part(definition, n, seed) for n in part_names(definition)}
        )
        held: dict[str, nn.Parameter] = {}
        for module in list(self.modules()):
            for local, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[local] = held.setdefault(parameter.spec.name, parameter)
        self.by_name = held
        initialise(held, seed)

    def hidden(self, ctx: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states behind the last block, and the sum of auxiliary losses."""
        hidden, aux = self.parts["embed"](ctx), torch.zeros((), dtype=torch.float64)
        for index in range(self.definition.num_blocks):
            out = self.parts[f"blocks/{index}"](hidden, ctx)
            hidden, extra = out if isinstance(out, tuple) else (out, 0.0)
            aux = aux + extra
        return hidden, aux

    def loss(self, batch: Batch, **context: Any) -> torch.Tensor:
        """Loss sum plus auxiliary sum."""
        ctx = ForwardContext(batch, **context)
        hidden, aux = self.hidden(ctx)
        return self.parts["head"](hidden, ctx) + aux

    def logits(self, batch: Batch, **context: Any) -> torch.Tensor:
        """[T, V]."""
        ctx = ForwardContext(batch, **context)
        return self.parts["head"].logits(self.hidden(ctx)[0], ctx)

    def gradients(self, batch: Batch, **context: Any) -> dict[str, torch.Tensor]:
        """Gradients of the loss by global name (this rank's)."""
        names, parameters = zip(*self.by_name.items(), strict=True)
        grads = torch.autograd.grad(self.loss(batch, **context), parameters)
        return dict(zip(names, grads, strict=True))


def make_whole(
    definition: type[ModelDefinition],
    config: Any,
    *,
    axis: Axis | None = None,
    dtype: torch.dtype = torch.float64,
    sequence_parallel: bool = False,
    vocab_multiple: int = 1,
    seed: int = 1,
) -> Whole:
    """Build and initialise a model on the CPU."""
    parallel = TensorParallel(
        axis or Axis.single("tp"),
        kv_heads=getattr(config, "kv_heads", None),
        sequence_parallel=sequence_parallel,
        dtype=dtype,
        vocab_multiple=vocab_multiple,
    )
    return Whole(definition(config, parallel), seed)


def random_batch(
    seq_length: int, starts: list[list[int]], *, vocab: int = 61, seed: int = 0, first_row: int = 0, **options: Any
) -> Batch:
    """One row for each list of document starts."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (len(starts), seq_length + 1))
    rows = [Row(t, np.array(s), i) for i, (t, s) in enumerate(zip(tokens, starts, strict=True))]
    return make_batch(rows, first_row, **options)


def enlarge(model: Whole, factor: float = 8.0) -> Whole:
    """Scale matrices up, so that attention is far from uniform and errors show."""
    with torch.no_grad():
        for parameter in model.by_name.values():
            if parameter.ndim > 1:
                parameter.mul_(factor)
            else:
                generator = torch.Generator().manual_seed(parameter.numel())
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.1 * noise.to(parameter.dtype))
    return model


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], floor: float = 1e-3) -> None:
    """Equal in fp64: max|a - b| <= 1e-12 * max(max|b|, floor * root mean square of all)."""
    assert got.keys() == expected.keys()
    squares = sum(float(t.square().sum()) for t in expected.values())
    rms = (squares / sum(t.numel() for t in expected.values())) ** 0.5
    for name, want in expected.items():
        error = float((got[name] - want).abs().max())
        allowed = 1e-12 * max(float(want.abs().max()), floor * rms)
        assert error <= allowed, f"{name}: off by {error:.2e}, allowed {allowed:.2e}"
