"""The equivalence matrix: the same run in every layout, against one process, in fp64.

A :class:`Case` is a model, a global batch and a layout. :func:`run_case` trains it for three steps on the ranks of the
layout through the very objects that a training run uses, and :mod:`megatron_lite.testing.equal` holds the result against
the case with one rank: loss and gradient norm of every step, every gradient and every weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from megatron_lite.config.schema import OptimizerConfig, ParallelConfig, RunConfig, TrainingConfig
from megatron_lite.config.schema_io import DataConfig
from megatron_lite.config.transformer import LlamaConfig, TransformerConfig
from megatron_lite.data.batch import Batch, Row, make_batch
from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.optim.shares import slot_shares
from megatron_lite.testing.equal import Piece, RankResult
from megatron_lite.train.assemble import Assembly, assemble, kv_heads
from megatron_lite.train.step import HostNumbers, StepReport

STEPS = 3
LEARNING_RATE = 1e-3
# AdamW divides by |g| + eps: where a gradient happens to be near zero, a rounding of it comes out lr / eps times as large.
ADAM_EPS = 1e-5

TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "vocab_size": 61,
    "max_position_embeddings": 16,
    "make_vocab_size_divisible_by": 8,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.1,
}


def tiny_gpt(**changes: Any) -> TransformerConfig:
    """A GPT of four small blocks."""
    return TransformerConfig(**{**TINY, **changes})


def tiny_llama(**changes: Any) -> LlamaConfig:
    """A Llama of four small blocks, two key/value heads for four query heads."""
    return LlamaConfig(**{**TINY, "group_query_attention": True, "num_query_groups": 2, **changes})


@dataclass(frozen=True)
class Case:
    """One cell of the matrix.

    Attributes:
        layout: sizes of the axes.
        model: the model's configuration; architecture: ``--model``.
        global_batch, micro_batch: samples; the former is the same in every layout of one comparison.
        parallel, training, optimizer: further options of the run, by field name.
        documents: rows hold several documents; otherwise one.
    """

    layout: Layout = field(default_factory=Layout)
    model: Any = field(default_factory=tiny_llama)
    architecture: str = "llama"
    global_batch: int = 12
    micro_batch: int = 1
    seq_length: int = 16
    parallel: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    documents: bool = True

    @property
    def name(self) -> str:
        """A short name for reports."""
        size = self.layout
        parts = [f"tp{size.tp}", f"pp{size.pp}", f"dp{size.dp}", f"mbs{self.micro_batch}"]
        options = {**self.parallel, **self.training, **self.optimizer}
        parts += [k if v is True else f"{k}={v}" for k, v in options.items()]
        return " ".join(parts)

    def config(self) -> RunConfig[Any]:
        """The run's configuration."""
        parallel = ParallelConfig(
            **{
                "tensor_model_parallel_size": self.layout.tp,
                "pipeline_model_parallel_size": self.layout.pp,
                "ddp_bucket_size": 3000,
                **self.parallel,
            }
        )
        training = TrainingConfig(
            **{
                "micro_batch_size": self.micro_batch,
                "global_batch_size": self.global_batch,
                "train_iters": STEPS,
                "fp64": True,
                "seed": 1,
                **self.training,
            }
        )
        defaults = {"lr": LEARNING_RATE, "weight_decay": 0.1, "clip_grad": 1.0, "adam_eps": ADAM_EPS}
        optimizer = OptimizerConfig(**{**defaults, **self.optimizer})
        data = DataConfig(seq_length=self.seq_length, mock_data=True)
        return RunConfig(self.model, parallel, training, optimizer, data, architecture=self.architecture)

    def alone(self) -> Case:
        """The same run in one process."""
        return replace(self, layout=Layout(), micro_batch=2, parallel={}, training=self._numbers_only(self.training))

    @staticmethod
    def _numbers_only(training: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in training.items() if not k.startswith("recompute") and k != "deterministic"}


def sample(case: Case, index: int) -> Row:
    """Row ``index`` of an endless made-up data set: random tokens, documents of random lengths."""
    rng = np.random.default_rng([7, index])
    tokens = rng.integers(0, case.model.vocab_size, case.seq_length + 1)
    starts = [0]
    if case.documents:
        while (cut := starts[-1] + int(rng.integers(1, case.seq_length))) <= case.seq_length:
            starts.append(cut)
    return Row(tokens.astype(np.int64), np.array(starts), index)


def microbatches(case: Case, step: int, dp: int) -> list[Batch]:
    """The batches of one data-parallel rank in one step; every fifth row has no valid target at all."""
    size, ranks = case.micro_batch, case.layout.dp
    batches = []
    for m in range(case.global_batch // (size * ranks)):
        first = m * size * ranks + dp * size
        rows = [sample(case, step * case.global_batch + first + b) for b in range(size)]
        batch = make_batch(rows, first)
        mask = batch.loss_mask.clone().view(size, -1)
        for b, row in enumerate(rows):
            if row.index % 5 == 4:
                mask[b] = 0
        batches.append(replace(batch, loss_mask=mask.view(-1), valid_tokens=int(mask.sum())))
    return batches


@dataclass(frozen=True)
class Batches:
    """What a loader gives for a step."""

    microbatches: list[Batch]
    digest: int
    valid_tokens: int
    wait_seconds: float = 0.0


def batches_of(case: Case, step: int, dp: int, device: torch.device | None = None) -> Batches:
    """The batches of a step as the trainer takes them, on the device where one is given."""
    micro = microbatches(case, step, dp)
    if device is not None and device.type == "cuda":
        micro = [batch.pin().to(device) for batch in micro]
    return Batches(micro, digest=step * 1000 + dp, valid_tokens=sum(b.valid_tokens for b in micro))


def one_step(assembly: Assembly, case: Case, step: int) -> StepReport:
    """Train one step of a case."""
    config = case.config()
    return assembly.step.run(
        batches_of(case, step, assembly.mesh.coords.dp, assembly.mesh.device),
        seed=config.training.seed,
        step=step,
        loss_scale=1.0,
        update=step + 1,
        learning_rates={"": LEARNING_RATE},
        weight_decay=config.optimizer.weight_decay,
        host=HostNumbers(0, False, 0.0, 0.0),
    )


def weights_of(assembly: Assembly) -> list[Piece]:
    """Every parameter of this rank as a rectangle of its full tensor (padding left out)."""
    pieces = []
    for name, parameter in assembly.stage.parameters_by_name().items():
        box = assembly.definition.parallel.rectangle(parameter.spec)  # type: ignore[attr-defined]
        local = parameter.detach()[tuple(slice(0, n) for n in box.size)]
        pieces.append((name, parameter.spec.full_shape, box.start, box.size, local.cpu().numpy().copy()))  # type: ignore[attr-defined]
    return pieces


def gradients_of(assembly: Assembly) -> list[Piece]:
    """This rank's share of the summed gradients; with the other ranks' every element once."""
    pieces = []
    for part in assembly.optimizer.measure.counted():
        flat = assembly.gradients.gradients[part.bucket.buffer][part.begin : part.end]
        state = {"weight": flat, "exp_avg": flat, "exp_avg_sq": flat}
        for share in slot_shares(assembly.definition.parallel, part.slot, part.begin - part.slot.begin, state):
            if share.kind == "weight":
                box = share.rectangle
                values = share.tensor.view(box.size).cpu().numpy().copy()
                pieces.append((share.name, share.full_shape, box.start, box.size, values))
    return pieces


def run_case(case: Case, backend: str = "gloo", device: str = "cpu") -> RankResult:
    """Train a case on this rank; the default group has the size of its layout and is on ``backend``."""
    mesh = ProcessMesh.open(case.layout, backend=backend, device=device, kv_heads=kv_heads(case.model), numbered=True)
    assembly = assemble(case.config(), mesh)
    result = RankResult([], [], [], weights_of(assembly), [], [], [])
    # Backward carries 1 / (B * S); times B * S it is the gradient of the loss sum, the same number in every layout.
    factor = case.micro_batch * case.seq_length
    for step in range(STEPS):
        report = one_step(assembly, case, step)
        result.losses.append(report.loss)
        result.aux_losses.append(report.aux_loss)
        result.norms.append(report.grad_norm)
        if step in (0, STEPS - 1):
            result.gradients = [(n, f, s, z, v * factor) for n, f, s, z, v in gradients_of(assembly)]
        if step == 0:
            result.first_gradients = result.gradients
    result.weights = weights_of(assembly)
    assembly.gradients.close()
    mesh.close()
    return result


def run_cases(cases: Sequence[Case]) -> list[RankResult]:
    """Several cases one after the other on the same ranks, whose start and groups cost more than a case does."""
    return [run_case(case) for case in cases]


def legal_layouts(most_ranks: int = 4, tp: Sequence[int] = (1, 2, 4)) -> Iterator[Layout]:
    """Every tp x pp x dp of one to four ranks."""
    for ranks in range(1, most_ranks + 1):
        for t in tp:
            for p in range(1, ranks + 1):
                if ranks % (t * p) == 0:
                    yield Layout(tp=t, pp=p, dp=ranks // (t * p))


def micro_batch_of(layout: Layout, global_batch: int, most: int = 4) -> int:
    """The largest microbatch up to ``most`` with which every data-parallel rank has several, if there is one.

    Raises:
        ValueError: the batch does not divide by the data-parallel ranks.
    """
    rows, rest = divmod(global_batch, layout.dp)
    if rest:
        raise ValueError(f"a global batch of {global_batch} does not divide by {layout.dp} data-parallel ranks")
    return next((m for m in range(most, 0, -1) if rows % m == 0 and rows > m), 1)


def layouts(
    most_ranks: int = 4, tp: Sequence[int] = (1, 2, 4), least_ranks: int = 1, pp: Sequence[int] = (1, 2, 3, 4)
) -> Callable[[Any], Any]:
    """Decorator: run a test once for each legal layout, given as its argument ``layout``."""
    import pytest

    found = [x for x in legal_layouts(most_ranks, tp) if x.world_size >= least_ranks and x.pp in pp]
    return pytest.mark.parametrize("layout", found, ids=lambda x: f"tp{x.tp}-pp{x.pp}-dp{x.dp}")


def reference_of(case: Case) -> RankResult:
    """The case in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run_case(case.alone())
    finally:
        torch.set_num_threads(threads)
