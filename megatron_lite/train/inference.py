"""Text from a model, at any tp x pp, with or without a key/value cache.

Every rank walks through the same loop: the stages compute one after the other, the first tp rank of the last stage
chooses, and its choice goes to all others. Choices are addressed, not drawn: the random number of a token is a function
of (seed, the prompt's tokens, position), so a sampled text does not depend on the layout, on the other prompts or on the
cache.

Prompts of the same length run as one batch. Without the cache the whole text is computed again for every token; the
result is the same and a test says so. A model whose attention takes no cache is noticed, and runs without.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
        top_p: only the fewest most probable tokens that together have at least this probability, 1 for all
            (Holtzman et al., arXiv:1904.09751). With ``top_k`` too, the smaller set of the two.
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


Key = tuple[int, int]


def prompt_keys(prompts: Sequence[Sequence[int]], seed: int) -> list[Key]:
    """Keys of the random numbers of each prompt: of its tokens, and of how often it came before.

    So a prompt's text does not change with the prompts beside it, and the same prompt given twice gives two texts.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    keys = []
    for prompt in map(tuple, prompts):
        digest = hashlib.blake2b(repr((seed, seen[prompt], prompt)).encode(), digest_size=16).digest()
        keys.append((int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")))
        seen[prompt] += 1
    return keys


def probabilities(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """(ids, their probabilities) of the tokens that may be chosen, the likeliest first; equal ones by their ids.

    Args:
        logits: float64 [V].
    """
    order = np.argsort(-logits, kind="stable")
    if sampling.temperature == 0:
        return order[:1], np.ones(1)
    with np.errstate(over="ignore"):  # at a tiny temperature
        ranked = np.exp((logits[order] - logits[order[0]]) / sampling.temperature)
    ranked /= ranked.sum()
    keep = len(ranked) if sampling.top_k == 0 else min(sampling.top_k, len(ranked))
    if sampling.top_p < 1:
        before = np.cumsum(ranked) - ranked
        keep = min(keep, int((before < sampling.top_p).sum()))
    return order[:keep], ranked[:keep] / ranked[:keep].sum()


def choose(logits: np.ndarray, sampling: Sampling, key: Key, position: int) -> int:
    """The next token of one prompt.

    Args:
        logits: float64 [V].
        key: of the prompt, from :func:`prompt_keys`.
        position: of the new token in the text.

    Raises:
        FloatingPointError: a logit is not a number, or the largest is not finite.
    """
    if not np.isfinite(logits.max()):  # of a team's own model some may be -inf
        raise FloatingPointError(f"the logits at position {position} are not finite: the model is damaged")
    if sampling.temperature == 0:
        return int(logits.argmax())  # the first of equal ones
    ids, chances = probabilities(logits, sampling)
    generator = np.random.Generator(np.random.Philox(key=list(key), counter=[position, 0, 0, 0]))
    place = int(np.searchsorted(np.cumsum(chances), generator.random(), side="right"))
    return int(ids[min(place, len(ids) - 1)])


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
    """Generates with a built stage. Its methods are collective over tp and pp.

    Args:
        runtime, mesh: of this rank.
        max_positions: longest text the model was made for, or None for no limit of its own.
        batch_tokens: tokens that run as one batch, at most (one text at least).
    """

    def __init__(
        self, runtime: Runtime, mesh: ProcessMesh, max_positions: int | None = None, *, batch_tokens: int = 16384
    ) -> None:
        self.runtime, self.mesh, self.max_positions, self.batch_tokens = runtime, mesh, max_positions, batch_tokens
        self.takes_cache: bool | None = None  # not known before the first pass with one

    @torch.no_grad()
    def logits(self, tokens: np.ndarray, cache: KVCache | None = None) -> torch.Tensor | None:
        """Logits [rows, n, V] of the tokens [rows, n] (after those in the cache) on the last stage, else None.

        Raises:
            ValueError: a token outside the vocabulary.
        """
        vocab_size = self.runtime.stage.definition.vocab_size
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocab_size):
            raise ValueError(f"token ids {tokens.min()} to {tokens.max()}: the model's vocabulary is 0 to {vocab_size - 1}")
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
        """New tokens of each prompt, up to and without ``stop_id``.

        Args:
            on_token: called with (number of the prompt, token) as tokens are chosen, on every rank.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, or a text longer than the model's positions.
        """
        wrong = prompt_problems(prompts, max_new_tokens, self.max_positions)
        if wrong:
            raise ValueError("; ".join(wrong))
        results: list[list[int]] = [[] for _ in prompts]
        keys = prompt_keys(prompts, sampling.seed)
        for numbers in self._batches(prompts, max_new_tokens):
            text = np.array([prompts[n] for n in numbers], dtype=np.int64)
            done = np.zeros(len(numbers), dtype=bool)
            for column in self._columns(text, [keys[n] for n in numbers], max_new_tokens, sampling, use_cache):
                done |= False if stop_id is None else column == stop_id
                for i, n in enumerate(numbers):
                    if not done[i]:
                        results[n].append(int(column[i]))
                        if on_token is not None:
                            on_token(n, int(column[i]))
                if done.all():
                    break
        return results

    # ---- inside

    def _batches(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[list[int]]:
        """Numbers of prompts of one length, no more than a batch may hold."""
        by_length: dict[int, list[int]] = {}
        for number, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt), []).append(number)
        for length, numbers in by_length.items():
            rows = max(1, self.batch_tokens // (length + max_new_tokens))
            for begin in range(0, len(numbers), rows):
                yield numbers[begin : begin + rows]

    def _columns(
        self, text: np.ndarray, keys: Sequence[Key], max_new_tokens: int, sampling: Sampling, use_cache: bool
    ) -> Iterator[np.ndarray]:
        """The next token of every row, [rows], ``max_new_tokens`` times."""
        cache = KVCache(text.shape[1] + max_new_tokens) if use_cache and self.takes_cache is not False else None
        new = text
        for _ in range(max_new_tokens):
            logits = self.logits(new if cache is not None else text, cache)
            if cache is not None and self.takes_cache is None:
                self.takes_cache = self._all_blocks_in(cache)
                if not self.takes_cache:
                    cache = None
            column = self._choose(logits, sampling, keys, text.shape[1])
            yield column
            new = column[:, None]
            text = np.concatenate([text, new], axis=1)

    def _choose(
        self, logits: torch.Tensor | None, sampling: Sampling, keys: Sequence[Key], position: int
    ) -> np.ndarray:
        """The choice of the first tp rank of the last stage, on every rank: int64 [rows]."""
        layout, at, axis = self.mesh.layout, self.mesh.coords, self.mesh.axis("tp_pp")
        chooser = layout.rank(tp=0, cp=at.cp, dp=at.dp, pp=layout.pp - 1)
        picked = torch.zeros(len(keys), dtype=torch.int64, device=self.mesh.device)
        if self.mesh.rank == chooser:
            assert logits is not None
            rows = logits[:, -1].double().cpu().numpy()
            picked.copy_(torch.tensor([choose(row, sampling, key, position) for row, key in zip(rows, keys, strict=True)]))
        axis.broadcast(picked, src_index=axis.ranks.index(chooser))
        return picked.cpu().numpy()

    def _all_blocks_in(self, cache: KVCache) -> bool:
        """Whether every block of the model put its keys and values into the cache."""
        missing = torch.tensor([len(self.runtime.stage.blocks) - cache.blocks], device=self.mesh.device)
        self.mesh.axis("tp_pp").all_reduce(missing, op="max").wait()
        return not missing.item()


def prompt_problems(prompts: Sequence[Sequence[int]], max_new_tokens: int, max_positions: int | None) -> list[str]:
    """What is wrong with prompts (token ids) for a model of so many positions; prompts are counted from 1."""
    found = []
    for number, prompt in enumerate(prompts, start=1):
        if not len(prompt):
            found.append(f"prompt {number} is empty: give at least one token")
        elif max_positions is not None and len(prompt) + max_new_tokens > max_positions:
            found.append(
                f"prompt {number}: its {len(prompt)} tokens and {max_new_tokens} new ones are more than the model's "
                f"{max_positions} positions; shorten the prompt or give a smaller --max-new-tokens"
            )
    return found
