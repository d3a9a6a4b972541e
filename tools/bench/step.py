"""A ZeRO-1 step beside PyTorch's DistributedDataParallel on the same work, in the same run.

Two gloo ranks, one thread each. Both train the same Llama from the same weights on the same batches: ours with the
buckets and the sharded AdamW of this program, the peer as a plain PyTorch statement of the model under DDP
(``gradient_as_bucket_view``, static graph, ``no_sync`` until the last microbatch) with fused AdamW. Steps alternate,
medians are compared, the losses have to agree, and each rate is also given as a share of what a bare matrix product
reaches on this machine at that moment.

    python tools/bench/step.py [--steps 5] [--small]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lite.config.schema import OptimizerConfig, ParallelConfig, RunConfig, TrainingConfig
from megatron_lite.config.schema_io import DataConfig
from megatron_lite.config.transformer import LlamaConfig
from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.testing.layouts import Batches, Case, microbatches
from megatron_lite.testing.ranks import close_pool, run_ranks
from megatron_lite.train.assemble import Assembly, assemble
from megatron_lite.train.step import HostNumbers

FULL = {"num_layers": 8, "hidden_size": 512, "ffn_hidden_size": 1408, "num_attention_heads": 8, "vocab_size": 32000}
SMALL = {"num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 320, "num_attention_heads": 4, "vocab_size": 8064}
LR, DECAY, BETAS, EPS, DP = 1e-3, 0.1, (0.9, 0.95), 1e-8, 2


class PeerBlock(nn.Module):
    """The same block in plain PyTorch."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        h, f = c.hidden_size, c.ffn_size
        self.heads = c.num_attention_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(h, c.norm_epsilon), nn.RMSNorm(h, c.norm_epsilon)
        self.query, self.key, self.value, self.output = (nn.Linear(h, h, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(h, f, bias=False), nn.Linear(h, f, bias=False), nn.Linear(f, h, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        q, k, v = (p(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        q, k = (t * cos + torch.cat([-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]], -1) * sin for t in (q, k))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(a.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Peer(nn.Module):
    """The same model in plain PyTorch."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.blocks = nn.ModuleList(PeerBlock(c) for _ in range(c.num_layers))
        self.norm, self.output = nn.RMSNorm(c.hidden_size, c.norm_epsilon), nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.head_dim, self.base = c.head_dim, c.rotary_base

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        frequency = self.base ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        angle = torch.outer(torch.arange(tokens.shape[1], dtype=torch.float64), frequency).repeat(1, 2)
        cos, sin = angle.cos().float(), angle.sin().float()
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1), targets.flatten())

    def take(self, weights: dict[str, nn.Parameter]) -> None:
        """Our weights under their names here."""
        names = {"tokens": "embed.tokens", "norm": "head.norm", "output": "head.output"}
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                module = name.removesuffix(".weight")
                if module.startswith("blocks."):
                    _, index, part = module.split(".")
                    inner = {"gate": "mlp.gate", "up": "mlp.up", "down": "mlp.down"}.get(part, part)
                    inner = f"attention.{part}" if part in ("query", "key", "value", "output") else inner
                    module = f"blocks.{index}.{inner}"
                else:
                    module = names[module]
                parameter.copy_(weights[f"{module}.weight"])


def case(sizes: dict[str, int], seq: int) -> Case:
    """The work: 8 samples a step in microbatches of 2."""
    model = LlamaConfig(**sizes, max_position_embeddings=seq, init_method_std=0.02)  # type: ignore[arg-type]
    return Case(Layout(dp=DP), model, global_batch=8, micro_batch=2, seq_length=seq, documents=False)


def ours(work: Case, mesh: ProcessMesh) -> Assembly:
    """Our objects, ZeRO-1 with overlapped reductions."""
    config = RunConfig(
        work.model,
        ParallelConfig(zero_stage=1, overlap_grad_reduce=True, ddp_bucket_size=6_000_000),
        TrainingConfig(micro_batch_size=2, global_batch_size=8, train_iters=100),
        OptimizerConfig(lr=LR, weight_decay=DECAY, clip_grad=0.0, adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_eps=EPS),
        DataConfig(seq_length=work.seq_length),
        architecture="llama",
    )
    return assemble(config, mesh)


def measure(sizes: dict[str, int], seq: int, steps: int) -> dict[str, list[float]]:
    """Alternating steps on one rank: seconds and losses of both."""
    work = case(sizes, seq)
    mesh = ProcessMesh.open(Layout(dp=DP))
    mine = ours(work, mesh)
    peer = Peer(work.model)
    peer.take(mine.stage.parameters_by_name())
    ddp = DistributedDataParallel(peer, gradient_as_bucket_view=True, static_graph=True)
    groups = [
        {"params": [p for p in peer.parameters() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in peer.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)
    found: dict[str, list[float]] = {"ours": [], "ddp": [], "loss": [], "ddp_loss": [], "product": []}
    matrix = torch.randn(1024, 1024)
    for step in range(steps + 1):  # the first warms up
        batches = microbatches(work, step, mesh.coords.dp)
        full = [b.__class__(**{**vars(b), "loss_mask": torch.ones_like(b.loss_mask), "valid_tokens": b.tokens.numel()}) for b in batches]
        dist.barrier()
        t0 = time.perf_counter()
        report = mine.step.run(
            Batches(full, step, sum(b.valid_tokens for b in full)),
            seed=0, step=step, loss_scale=1.0, update=step + 1, learning_rates={"": LR}, weight_decay=DECAY,
            host=HostNumbers(0, False, 0.0, 0.0),
        )  # fmt: skip
        dist.barrier()
        t1 = time.perf_counter()
        total = torch.zeros(1)
        for m, batch in enumerate(full):
            # DDP records its static graph in the first step, where it cannot leave a reduction out.
            with ddp.no_sync() if step and m + 1 < len(full) else nullcontext():
                loss = ddp(batch.tokens.view(batch.rows, -1), batch.targets.view(batch.rows, -1)) / len(full)
                loss.backward()
                total += loss.detach()
        adamw.step()
        adamw.zero_grad()
        dist.all_reduce(total)
        peer_loss = float(total) / DP
        dist.barrier()
        t2 = time.perf_counter()
        for _ in range(20):
            matrix @ matrix
        t3 = time.perf_counter()
        if step:
            rate = 20 * 2 * 1024**3 / (t3 - t2)
            new = {"ours": t1 - t0, "ddp": t2 - t1, "loss": report.loss, "ddp_loss": peer_loss, "product": rate}
            for name, value in new.items():
                found[name].append(value)
    flops = type(mine.definition).flops(work.model, 8 * seq, seq, None)
    assert flops is not None
    found["flops"] = [float(flops.model_full)]
    parameters = sum(p.numel() for p in peer.parameters())
    held = sum(mine.optimizer.memory().values())
    theirs = sum(t.numel() * t.element_size() for s in adamw.state.values() for t in s.values() if t.dim()) + 8 * parameters
    found["bytes_per_parameter"] = [held / parameters, theirs / parameters]
    mine.gradients.close()
    mesh.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a smaller model, to see that the script works")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sizes, seq = (SMALL, 128) if args.small else (FULL, 512)
    try:
        found = run_ranks(DP, measure, sizes, seq, args.steps, timeout=3600)[0]
    finally:
        close_pool()
    mine, peer = statistics.median(found["ours"]), statistics.median(found["ddp"])
    ratio = statistics.median(p / m for m, p in zip(found["ours"], found["ddp"], strict=True))
    product = statistics.median(found["product"]) * DP
    worst = max(abs(a - b) / abs(b) for a, b in zip(found["loss"], found["ddp_loss"], strict=True))
    result = {
        "seconds": mine,
        "ddp_seconds": peer,
        "ddp_over_ours": ratio,
        "share_of_matrix_product": found["flops"][0] / mine / product,
        "ddp_share_of_matrix_product": found["flops"][0] / peer / product,
        "largest_relative_loss_difference": worst,
        "bytes_per_parameter": found["bytes_per_parameter"][0],
        "ddp_bytes_per_parameter": found["bytes_per_parameter"][1],
    }
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"ours {mine:.3f} s, DDP {peer:.3f} s a step (medians of {args.steps}); DDP / ours, pair by pair: {ratio:.3f}")
    shares = f"ours {result['share_of_matrix_product']:.1%}, DDP {result['ddp_share_of_matrix_product']:.1%}"
    print(f"share of the rate of a bare matrix product: {shares}")
    print(f"losses differ by a relative {worst:.2e} at most over {args.steps} steps")
    kept = f"ours {result['bytes_per_parameter']:.2f}, DDP {result['ddp_bytes_per_parameter']:.2f}"
    print(f"weights, gradients and optimizer state: {kept} bytes a parameter")
    return 0


if __name__ == "__main__":
    sys.exit(main())
