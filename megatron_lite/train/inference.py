"""Text from a model, at any tp x pp, with or without a key/value cache.

Every rank walks through the same loop: the stages compute one after the other, the last one's logits are the same on all
of its tp ranks, each of them picks the same token, and the choice goes back to the other stages. Choices are addressed,
not drawn: the random number of a token is a function of (seed, prompt, position), so a sampled text does not depend on
the layout, on the other prompts or on the cache.

Prompts of the same length run as one batch. Without the cache the whole text is computed again for every token; the
result is the same and a test says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_lite.data.batch import Batch
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.model.cache import KVCache
from megatron_lite.model.protocol import ForwardContext
from megatron_lite.pipeline.runtime import Runtime


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: logits are divided by it; 0 takes the largest logit (greedy).
        top_k: only the k largest logits, 0 for all.
        top_p: only the most probable tokens that together have at least this probability, 1 for all
            (Holtzman et al., arXiv:1904.09751).
        seed: of the choices.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def problems(self) -> list[str]:
        """What is wrong with the options; empty when nothing is."""
        found = []
        if not self.temperature >= 0:
            found.append(f"--temperature {self.temperature}: 0 (greedy) or more")
        if self.top_k < 0:
            found.append(f"--top-k {self.top_k}: 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            found.append(f"--top-p {self.top_p}: above 0, at most 1 (all tokens)")
        return found


def choose(logits: torch.Tensor, sampling: Sampling, prompt: int, position: int) -> int:
    """The next token of one prompt.

    Args:
        logits: [V], any float dtype.
        prompt, position: which token is chosen; they key the random number.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    scores = logits.double().cpu() / sampling.temperature
    order = torch.argsort(scores, descending=True, stable=True)
    ranked = torch.softmax(scores[order], dim=0)
    keep = len(ranked) if sampling.top_k == 0 else min(sampling.top_k, len(ranked))
    if sampling.top_p < 1:
        before = torch.cumsum(ranked, 0) - ranked
        keep = min(keep, int((before < sampling.top_p).sum()))
    ranked = ranked[:keep] / ranked[:keep].sum()
    bits = np.random.Philox(key=[sampling.seed & (2**64 - 1), prompt], counter=[position, 0, 0, 0])
    draw = float(np.random.Generator(bits).random())
    place = int(torch.searchsorted(torch.cumsum(ranked, 0), torch.tensor(draw, dtype=torch.float64), right=True))
    return int(order[min(place, keep - 1)])


def inference_batch(tokens: np.ndarray, first_position: int, device: torch.device) -> Batch:
    """A batch of rows of equal length that start at ``first_position``; nothing in it is trained.

    Args:
        tokens: int64 [rows, n].
    """
    rows, length = tokens.shape
    total = rows * length
    offsets = torch.full((total + 1,), total, dtype=torch.int32)
    offsets[: rows + 1] = torch.arange(0, total + 1, length, dtype=torch.int32)
    flat = torch.from_numpy(np.ascontiguousarray(tokens.reshape(-1)))
    return Batch(
        tokens=flat,
        targets=torch.zeros_like(flat),
        positions=torch.arange(first_position, first_position + length).repeat(rows),
        cu_seqlens=offsets,
        loss_mask=torch.zeros(total),
        rows=rows,
        seq_length=length,
        first_row=0,
        max_seqlen=length,
        valid_tokens=0,
        num_documents=rows,
        squared_lengths=rows * length * length,
    ).to(device)


class Generator:
    """Generates with a built stage.

    Args:
        runtime, mesh: of this rank.
        max_positions: longest text the model was made for, or None for no limit of its own.
    """

    def __init__(self, runtime: Runtime, mesh: ProcessMesh, max_positions: int | None = None) -> None:
        self.runtime, self.mesh, self.max_positions = runtime, mesh, max_positions

    @torch.no_grad()
    def logits(self, tokens: np.ndarray, cache: KVCache | None = None) -> torch.Tensor | None:
        """Logits [rows, n, V] of the tokens [rows, n] (after those in the cache) on the last stage, else None."""
        first = cache.length if cache is not None else 0
        batch = inference_batch(tokens, first, self.mesh.device)
        out = self.runtime.infer(ForwardContext(batch, cache=cache))
        if cache is not None:
            cache.advance(tokens.shape[1])
        return None if out is None else out.view(*tokens.shape, -1)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        *,
        stop_id: int | None = None,
        use_cache: bool = True,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """New tokens of each prompt, up to and without ``stop_id``. Collective over tp and pp.

        Raises:
            ValueError: an empty prompt, or a text longer than the model's positions.
        """
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {number} is empty: give at least one token")
            if self.max_positions is not None and len(prompt) + max_new_tokens > self.max_positions:
                raise ValueError(
                    f"prompt {number}: {len(prompt)} tokens and {max_new_tokens} new ones are more than the model's "
                    f"{self.max_positions} positions; shorten the prompt or --max-new-tokens"
                )
        results: list[list[int]] = [[] for _ in prompts]
        by_length: dict[int, list[int]] = {}
        for number, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt), []).append(number)
        for numbers in by_length.values():
            self._generate_alike(prompts, numbers, results, max_new_tokens, sampling, stop_id, use_cache, on_token)
        return results

    def _generate_alike(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: list[int],
        results: list[list[int]],
        max_new_tokens: int,
        sampling: Sampling,
        stop_id: int | None,
        use_cache: bool,
        on_token: Callable[[int, int], None] | None,
    ) -> None:
        text = np.array([prompts[n] for n in numbers], dtype=np.int64)
        cache = KVCache(text.shape[1] + max_new_tokens) if use_cache else None
        done = np.zeros(len(numbers), dtype=bool)
        new = text
        for _ in range(max_new_tokens):
            logits = self.logits(new if cache is not None else text, cache)
            position = text.shape[1]
            picked = torch.zeros(len(numbers), dtype=torch.int64)
            if logits is not None:
                picked = torch.tensor([choose(logits[i, -1], sampling, n, position) for i, n in enumerate(numbers)])
            picked = picked.to(self.mesh.device)
            self.mesh.axis("pp").broadcast(picked, src_index=self.mesh.layout.pp - 1)
            column = picked.cpu().numpy()
            for i, n in enumerate(numbers):
                done[i] |= stop_id is not None and column[i] == stop_id
                if not done[i]:
                    results[n].append(int(column[i]))
                    if on_token is not None:
                        on_token(n, int(column[i]))
            if done.all():
                return
            new = column[:, None]
            text = np.concatenate([text, new], axis=1)
