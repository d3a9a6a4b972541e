"""A 1.2B Llama at sequence 4,096 in bf16: time of a whole step, beside the same model in other hands.

Ours keeps fp32 gradients and masters; the others are given the faster way, bf16 weights and moments with fused AdamW.
All clip to a norm of 1 and see the same batch. Beside ours: ``transformers`` (SDPA) where it is installed, else a plain
PyTorch statement of the model with SDPA; both with each block under ``torch.compile`` where that works. MFU counts full
attention, as the papers do: matrix products 6 N a token plus 12 L H S, over the card's dense bf16 peak.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from gpu.part import Outcome, Settings, Skipped
from gpu.plain_llama import Llama
from gpu.training import LR, build, train
from megatron_lite.config.transformer import LlamaConfig
from megatron_lite.data.batch import Row, make_batch
from megatron_lite.testing.layouts import Batches
from megatron_lite.train.metrics import peak_tflops

WARM, STEPS = 3, 8
GIB = 2**30


def sizes(settings: Settings) -> tuple[LlamaConfig, int]:
    """The model and the sequence length."""
    shape = (2048, 24, 16, 4, 5632, 32000, 4096) if settings.on_gpu else (64, 2, 4, 2, 128, 256, 64)
    hidden, layers, heads, groups, ffn, vocab, seq = shape
    model = LlamaConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        group_query_attention=True,
        num_query_groups=groups,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        max_position_embeddings=seq,
    )
    return model, seq


def run(settings: Settings, outcome: Outcome) -> None:
    """Ours with the largest microbatch that fits, then the others with the same one."""
    model, seq = sizes(settings)
    rng = np.random.default_rng(1)
    micro = 2
    if settings.on_gpu:
        memory = torch.cuda.get_device_properties(0).total_memory / GIB
        micro = 4 if memory > 120 else 2 if memory > 70 else 1
    rows = [Row(rng.integers(0, model.vocab_size, seq + 1), np.zeros(1, dtype=np.int64), i) for i in range(micro)]
    with torch.device("meta"):
        plain = Llama(model).to(torch.bfloat16)
    plain = plain.to_empty(device="cpu")
    while not fits(partial(ours, model, seq, rows[:micro], plain, settings, outcome)):
        if micro == 1:
            raise Skipped("one sequence of the 1.2B model does not fit this card's memory")
        outcome.say(f"{micro} sequences at a time do not fit the memory")
        micro //= 2
        free()
    free()
    tokens, targets = (
        torch.tensor(np.stack([row.tokens[s] for row in rows[:micro]])) for s in (slice(None, -1), slice(1, None))
    )
    others(model, plain, tokens.to(settings.where), targets.to(settings.where), settings, outcome)


def fits(run: Callable[[], None]) -> bool:
    """Run; False if memory was not enough (what was allocated is let go with the exception)."""
    try:
        run()
    except torch.OutOfMemoryError:
        return False
    return True


def ours(model: LlamaConfig, seq: int, rows: list[Row], plain: Llama, settings: Settings, outcome: Outcome) -> None:
    """Our step; ``plain`` is given the initial weights."""
    assembly = build(model, settings.where, bf16=True, micro=len(rows), batch=len(rows), seq=seq)
    weights = assembly.stage.parameters_by_name()
    plain.take({name: p.detach() for name, p in weights.items()})
    parameters = sum(p.numel() for p in plain.parameters())
    batch = make_batch(rows)
    batch = batch.pin().to(settings.where) if settings.on_gpu else batch
    reports, seconds = train(assembly, lambda step: Batches([batch], step, batch.valid_tokens), WARM + STEPS)
    outcome.numbers["first loss"] = reports[0].loss
    outcome.say(f"{parameters / 1e9:.2f}B parameters, {len(rows)} x {seq:,} tokens a step")
    record("megatron_lite", seconds[WARM:], model, seq, len(rows), settings, outcome)
    if settings.on_gpu and not settings.time_is_short():
        try:
            again = partial(train, assembly, lambda _: Batches([batch], 0, batch.valid_tokens), 1)
            outcome.numbers["where the time goes"] = profile(again)
        except Exception as error:
            outcome.skip(f"the list of kernels: {type(error).__name__}: {error}")
    assembly.gradients.close()


def others(
    model: LlamaConfig, plain: Llama, tokens: torch.Tensor, targets: torch.Tensor, settings: Settings, outcome: Outcome
) -> None:
    """transformers where it is installed, else the plain statement; the plain one's first loss is compared with ours in any case."""
    plain = plain.to(settings.where)
    with torch.no_grad():
        theirs, mine = float(plain(tokens, targets)), outcome.numbers["first loss"]
    apart = abs(theirs - mine) / mine
    outcome.check(apart < 0.005, f"first loss: ours {mine:.4f}, plain PyTorch on the same weights {theirs:.4f}")
    if importlib.util.find_spec("transformers") is not None:
        name, network, call = transformers_model(model, settings.where)
        del plain
        free()
    else:
        outcome.skip("transformers is not installed: a plain PyTorch statement of the model stands in")
        name, network, call = "plain PyTorch, SDPA", plain, plain
    compiled = False
    if settings.time_is_short():
        outcome.skip("torch.compile: the time was over")
    elif settings.on_gpu:
        try:
            for block in network.blocks if isinstance(network, Llama) else network.model.layers:
                block.compile()
            float(call(tokens, targets))
            compiled = True
        except Exception as error:
            torch._dynamo.reset()
            outcome.skip(f"torch.compile does not work here ({type(error).__name__}): {name} runs eagerly")
            name, network, call = rebuilt(name, network, model, settings)
    label = f"{name}{' + torch.compile' if compiled else ''}"
    seconds = timed(network, call, tokens, targets, settings)
    record(label, seconds[WARM:], model, tokens.shape[1], tokens.shape[0], settings, outcome)
    ratio = outcome.numbers[label]["seconds"] / outcome.numbers["megatron_lite"]["seconds"]
    outcome.numbers["their time over ours"] = ratio
    outcome.say(f"their time over ours: {ratio:.2f}")


def rebuilt(
    name: str, network: nn.Module, model: LlamaConfig, settings: Settings
) -> tuple[str, Any, Callable[..., Any]]:
    """The same model without compiled blocks."""
    if not isinstance(network, Llama):
        return transformers_model(model, settings.where)
    with settings.where:
        fresh = Llama(model).to(torch.bfloat16)
    return name, fresh, fresh


def transformers_model(model: LlamaConfig, device: torch.device) -> tuple[str, Any, Callable[..., Any]]:
    """(name, model, function of tokens and targets that gives the loss) of transformers' Llama, random weights."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.kv_heads,
        intermediate_size=model.ffn_size,
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        rms_norm_eps=model.norm_epsilon,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with device:  # made there: filling a billion weights on the host would take longer than the rest
        network = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()

    def call(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = network(input_ids=tokens).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return f"transformers {transformers.__version__}, SDPA", network, call


def timed(
    network: nn.Module, call: Callable[..., Any], tokens: torch.Tensor, targets: torch.Tensor, settings: Settings
) -> list[float]:
    """Seconds of whole training steps."""
    adamw = torch.optim.AdamW(network.parameters(), lr=LR, fused=True)
    seconds = []
    for _ in range(WARM + STEPS):
        began = time.perf_counter()
        loss = call(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        loss.item()
        if settings.on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


def record(
    name: str, seconds: list[float], model: LlamaConfig, seq: int, rows: int, settings: Settings, outcome: Outcome
) -> None:
    """Median time, rate and MFU under a name."""
    from megatron_lite.model.flops import transformer_flops

    middle = median(seconds)
    tflops = transformer_flops(model, rows * seq, seq).model_full / middle / 1e12
    found: dict[str, Any] = {"seconds": middle, "tokens per second": rows * seq / middle, "TFLOP/s": tflops}
    text = f"{name}: {middle * 1000:.0f} ms a step, {rows * seq / middle:,.0f} tokens/s, {tflops:,.1f} TFLOP/s"
    if settings.on_gpu:
        found["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
        peak = peak_tflops(torch.cuda.get_device_name(0))
        text += f", {found['peak GiB']:.0f} GiB"
        if peak is not None:
            found["MFU"] = tflops / peak
            text += f", MFU {tflops / peak:.1%}"
    outcome.numbers[name] = found
    outcome.say(text)


def profile(step: Callable[[], Any], most: int = 25) -> list[dict[str, Any]]:
    """The kernels that take the most time of a step."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as seen:
        step()
    kernels = [
        e
        for e in seen.key_averages()
        if e.self_device_time_total > 0 and e.device_type == torch.autograd.DeviceType.CUDA
    ]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    return [{"kernel": e.key[:120], "calls": e.count, "ms": e.self_device_time_total / 1000} for e in kernels[:most]]


def free() -> None:
    """Give memory back between runs."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
