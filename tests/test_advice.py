"""Claims of docs/advice-checked.md that can be shown in a few lines, shown."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_lite.config.transformer import LlamaConfig
from megatron_lite.mesh.layout import Layout
from megatron_lite.model.flops import transformer_flops
from megatron_lite.plan.job import Job
from megatron_lite.plan.memory import rank_memory


def test_clipping_before_the_sum_depends_on_the_layout() -> None:
    """The same eight gradients, clipped on each rank and then averaged, give another update at 2 ranks than at 4."""
    gradients = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 9)[:, None]

    def clipped(g: torch.Tensor) -> torch.Tensor:
        return g * min(1.0, 1.0 / float(g.norm()))

    def local(ranks: int) -> torch.Tensor:
        return torch.stack([clipped(part.mean(0)) for part in gradients.chunk(ranks)]).mean(0)

    whole = clipped(gradients.mean(0))
    assert (local(2) - local(4)).abs().max() > 0.01 and (local(1) - whole).abs().max() < 1e-15
    after_the_sum = [clipped(torch.stack([p.mean(0) for p in gradients.chunk(r)]).mean(0)) for r in (1, 2, 4, 8)]
    assert all((g - whole).abs().max() < 1e-14 for g in after_the_sum)


def test_noise_depends_on_the_batch_and_not_on_the_cards() -> None:
    """The mean gradient of 64 samples is the same on 1, 4 and 16 ranks; its spread falls with the batch."""
    samples = torch.randn(1000, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    spread = [float(samples.view(1000, ranks, -1).mean(2).mean(1).std()) for ranks in (1, 4, 16)]
    assert max(spread) - min(spread) < 1e-12
    assert float(samples[:, :16].mean(1).std()) / spread[0] == pytest.approx(2.0, rel=0.1)


def test_mixed_precision_makes_states_larger_and_activations_smaller() -> None:
    """18 bytes a parameter in bf16 against 16 in fp32; the activations of a block are about half."""
    config = LlamaConfig(
        num_layers=4,
        hidden_size=512,
        num_attention_heads=8,
        ffn_hidden_size=1408,
        vocab_size=4096,
        max_position_embeddings=512,
    )
    full = Job(config, Layout(), seq_length=512, dtype=torch.float32)
    half = replace(full, dtype=torch.bfloat16)
    parameters = sum(spec.numel for held in full.specs.values() for spec in held.values())
    memory = {name: rank_memory(job, 0, "cuda:a100") for name, job in (("fp32", full), ("bf16", half))}

    def states(name: str) -> float:
        m = memory[name]
        return (m.weights + m.gradients + m.masters + m.moments) / parameters

    assert states("fp32") == pytest.approx(16, rel=1e-3) and states("bf16") == pytest.approx(18, rel=1e-3)
    assert memory["bf16"].activations < 0.75 * memory["fp32"].activations


@pytest.mark.parametrize("form", ["loss = loss + x", "loss += x", "loss += x.detach()"])
def test_only_detach_lets_the_graph_go(form: str) -> None:
    """Both ways of adding keep every step's graph; without it nothing is kept."""

    weight = torch.ones(3, requires_grad=True)
    loss = torch.zeros(())
    for _ in range(5):
        x = (weight * weight).sum()
        if form == "loss = loss + x":
            loss = loss + x
        elif form == "loss += x":
            loss += x
        else:
            loss += x.detach()
    assert (len(_nodes(loss.grad_fn)) > 5) == ("detach" not in form)  # nodes of the graph that the loss holds
    assert float(loss.detach()) == 15.0


def _nodes(node: torch.autograd.graph.Node | None, seen: set[object] | None = None) -> set[object]:
    seen = set() if seen is None else seen
    if node is not None and node not in seen:
        seen.add(node)
        for other, _ in node.next_functions:
            _nodes(other, seen)
    return seen


def test_a_stream_sharded_by_worker_alone_is_read_by_every_rank() -> None:
    """Two ranks with two workers each: without the rank in the rule, both ranks read all of it."""
    documents, workers, ranks = range(20), 2, 2
    by_worker = [sorted(d for w in range(workers) for d in documents if d % workers == w) for _ in range(ranks)]
    assert by_worker[0] == by_worker[1] == list(documents)
    by_both = [sorted(d for w in range(workers) for d in documents if d % (workers * ranks) == r * workers + w) for r in range(ranks)]
    assert not set(by_both[0]) & set(by_both[1]) and sorted(by_both[0] + by_both[1]) == list(documents)


def test_stripping_everything_but_word_characters_takes_the_punctuation() -> None:
    assert re.sub(r"[^\w\s]", "", "Yes, it is. Really?") == "Yes it is Really"
    assert re.sub(r"[^\w\s]", "", "好的,这是真的。是吗?") == "好的这是真的是吗"


def test_perplexity_is_of_a_tokenizer() -> None:
    """One text, one probability, two tokenizers: the perplexities differ, the bits per byte do not."""
    nats, size = 400.0, 400  # of a text of 400 bytes
    perplexity = {tokens: math.exp(nats / tokens) for tokens in (80, 120)}
    assert perplexity[80] > 100 > perplexity[120]
    assert {tokens: nats / tokens * tokens / size / math.log(2) for tokens in (80, 120)}[80] == pytest.approx(1.4427, rel=1e-4)


def test_with_enough_documents_every_drift_is_significant() -> None:
    """A shift of a hundredth of a standard deviation: D stays 0.004, p falls to nothing as the sample grows."""
    shift = 0.01
    d = math.erf(shift / 2 / math.sqrt(2))  # the largest gap of two normal distribution functions
    assert d == pytest.approx(0.004, rel=0.01)
    p = {n: min(1.0, 2 * math.exp(-2 * (n / 2) * d * d)) for n in (1_000, 1_000_000, 10_000_000)}  # asymptotic
    assert p[1_000] == 1.0 and p[1_000_000] < 0.01 and p[10_000_000] < 1e-60
    rng = np.random.default_rng(0)
    a, b = np.sort(rng.normal(size=200_000)), np.sort(rng.normal(size=200_000) + shift)
    both = np.concatenate([a, b])
    measured = np.abs(np.searchsorted(a, both, "right") - np.searchsorted(b, both, "right")).max() / len(a)
    assert measured < 0.01  # the statistic on a fixed sample says: no drift worth a word


def test_a_published_rate_against_the_peak() -> None:
    """6.7 billion parameters at 78,000 tokens/s on 8 cards are 392 TFLOP/s on each, by 6 FLOPs a parameter and token."""
    per_card = 6 * 6.7e9 * 78e3 / 8 / 1e12
    assert per_card == pytest.approx(392, abs=0.5) and per_card > 312
    config = LlamaConfig(
        num_layers=32, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=11008, vocab_size=32000, max_position_embeddings=2048
    )
    ours = transformer_flops(config, 78_000, 2048, None).model_full / 8 / 1e12
    assert ours > per_card * 0.95  # with attention counted, and the embedding's look-up not, it is no less
