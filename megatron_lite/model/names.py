"""How a model's tensors are called in a Hugging Face checkpoint, and how they lie there.

The map is data: one :class:`HfTensor` per tensor of the foreign file, naming the tensors of ours that it is made of.
A foreign tensor is ours concatenated along dim 0 and then, where the architecture stores inputs first (GPT-2),
transposed. A head that is tied to the embedding is in no file of theirs and has no entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HfTensor:
    """One tensor of a Hugging Face checkpoint.

    Attributes:
        name: its name there.
        ours: global names of our full tensors, to be concatenated along dim 0.
        transpose: stored with its two dims swapped.
    """

    name: str
    ours: tuple[str, ...]
    transpose: bool = False

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Their tensor from full tensors of ours, in the order of ``ours``."""
        joined = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
        return joined.t().contiguous() if self.transpose else joined

    def split(self, tensor: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Our full tensors, of the given full shapes, from theirs.

        Raises:
            ValueError: the shape is not what the configuration says.
        """
        parts = tensor.t() if self.transpose else tensor
        rows = [shape[0] for shape in shapes]
        if tuple(parts.shape) != (sum(rows), *shapes[0][1:]):
            raise ValueError(
                f"{self.name} has shape {tuple(tensor.shape)}; the configuration makes "
                f"{' + '.join(f'{n} {s}' for n, s in zip(self.ours, shapes, strict=True))}"
                f"{' (transposed)' if self.transpose else ''} of it"
            )
        return [part.contiguous() for part in parts.split(rows)]
