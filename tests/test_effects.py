"""Features have their effect: in the objects of a real run, bytes sent and bytes held are what the planner's formulas say.

Layer by layer the formulas are held against counters in test_plan_formulas.py, on parts of a run; here a whole optimizer
step is, built from a run's configuration. That overlapped sums hide time is in test_buckets.py, that every flag changes
something in test_flags_effect.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from test_plan_formulas import Live

from megatron_lite.config.derived import bucket_parameters
from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.model.protocol import ForwardContext, load_definition
from megatron_lite.ops.op import Problem, choose, target
from megatron_lite.ops.rms_norm import RMS_NORM
from megatron_lite.pipeline.stage import Recompute, _run_blocks
from megatron_lite.plan.job import Job
from megatron_lite.plan.memory import block_bytes, rank_memory, recomputed_bytes
from megatron_lite.plan.traffic import add, step_traffic
from megatron_lite.testing.layouts import Case, microbatches, one_step, tiny_gpt, tiny_llama
from megatron_lite.testing.ranks import run_ranks
from megatron_lite.train.assemble import DTYPES, assemble, kv_heads, recompute
from megatron_lite.train.step import FIELDS

STEP, GATHERED = ("world", "all_gather"), 8 * len(FIELDS)  # the one exchange of a step: this rank's numbers in fp64
FP32: dict[str, Any] = {"fp64": False}
BF16: dict[str, Any] = {"fp64": False, "bf16": True}
FULL: dict[str, Any] = {"recompute_granularity": "full"}
ZERO: dict[str, Any] = {"zero_stage": 1, "overlap_grad_reduce": True}


def job_of(case: Case) -> Job:
    """A run's step on paper."""
    config = case.config()
    parallel, training = config.parallel, config.training
    precision = next((name for name in ("fp64", "bf16") if getattr(training, name)), "fp32")
    return Job(
        case.model,
        case.layout,
        case.seq_length,
        case.micro_batch,
        case.global_batch // (case.micro_batch * case.layout.dp),
        dtype=DTYPES[precision],
        sequence_parallel=parallel.sequence_parallel,
        schedule=parallel.pipeline_schedule,
        recompute=recompute(config),
        first=parallel.decoder_first_pipeline_num_layers,
        last=parallel.decoder_last_pipeline_num_layers,
        zero_stage=parallel.zero_stage,
        bucket_size=bucket_parameters(parallel, case.layout.dp),
        reduce_dtype=torch.bfloat16 if config.optimizer.grad_reduce_in_bf16 else None,
        deterministic=training.deterministic,
        definition=load_definition(case.architecture),
    )


@dataclass
class Held:
    """What a rank sent in a step, and what it holds."""

    traffic: dict[tuple[str, str], tuple[int, int]]
    memory: dict[str, int]
    stage: int
    wanted: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)


def _steps(cases: list[Case]) -> list[Held]:
    found = []
    for case in cases:
        mesh = ProcessMesh.open(case.layout, kv_heads=kv_heads(case.model))
        assembly = assemble(case.config(), mesh)
        one_step(assembly, case, 0)
        mesh.traffic.reset()
        one_step(assembly, case, 1)
        traffic, stage = dict(mesh.traffic.counts), mesh.coords.pp
        found.append(Held(traffic, assembly.optimizer.memory(), stage, step_traffic(job_of(case), stage)))
        assembly.gradients.close()
        mesh.close()
    return found


def held(*cases: Case) -> list[list[Held]]:
    """For each case the ranks' findings; all cases have as many ranks."""
    by_rank = run_ranks(cases[0].layout.world_size, _steps, list(cases), timeout=120)
    return [[rank[i] for rank in by_rank] for i in range(len(cases))]


GPT = Case(model=tiny_gpt(), architecture="gpt", training=FP32, micro_batch=2)
LLAMA = Case(model=tiny_llama(qk_layernorm=True), training=FP32, micro_batch=2)
SLICED: dict[str, Any] = {"sequence_parallel": True}
STEPS = [
    replace(GPT, layout=Layout(tp=2, pp=2), parallel=SLICED, training={**FP32, **FULL}),
    replace(LLAMA, layout=Layout(tp=2, dp=2), parallel={**SLICED, **ZERO}),
    replace(GPT, layout=Layout(pp=2, dp=2), parallel={**ZERO, "pipeline_schedule": "gpipe"}, training=BF16),
    replace(LLAMA, layout=Layout(dp=4), micro_batch=1, training={**FP32, "deterministic": True}),
    replace(LLAMA, layout=Layout(dp=4), micro_batch=1, optimizer={"grad_reduce_in_bf16": True}),
    replace(LLAMA, layout=Layout(tp=4), model=tiny_llama(label_smoothing=0.1), parallel=SLICED),
]


def test_a_whole_step_sends_what_the_formula_says_to_the_byte() -> None:
    for case, ranks in zip(STEPS, held(*STEPS), strict=True):
        for rank in ranks:
            assert rank.traffic == add(rank.wanted, {STEP: (1, GATHERED)}), case.name


def test_a_rank_holds_what_the_formula_says_to_the_byte() -> None:
    """Weights, gradients, masters and moments; and every kind of parallelism makes them less."""
    alone = replace(LLAMA, training=BF16)
    two = [
        replace(alone, layout=Layout(dp=2)),
        replace(alone, layout=Layout(dp=2), parallel=ZERO),
        replace(alone, layout=Layout(tp=2)),
        replace(alone, layout=Layout(pp=2)),
    ]
    cases = [alone, *two]
    ranks = [*held(alone), *held(*two)]
    for case, its in zip(cases, ranks, strict=True):
        for rank in its:
            plan = rank_memory(job_of(case), rank.stage, "cpu")
            assert rank.memory == {kind: getattr(plan, kind) for kind in rank.memory}, case.name
    whole, plain, sharded, tensor, pipeline = ([r.memory for r in its] for its in ranks)
    padding = 1.02  # alignment of the buckets and of the vocabulary
    for rank in plain:
        assert rank["moments"] >= whole[0]["moments"]
    for rank in sharded:  # optimizer state is halved, what every rank needs is not
        assert rank["weights"] == plain[0]["weights"] and rank["gradients"] == plain[0]["gradients"]
        assert rank["moments"] * 2 == plain[0]["moments"] and rank["masters"] * 2 == plain[0]["masters"]
    for rank in tensor:  # all matrices are halved, norms are not
        assert all(size / 2 < rank[kind] < 0.6 * size for kind, size in whole[0].items())
    for kind, size in whole[0].items():
        assert size <= sum(rank[kind] for rank in pipeline) <= padding * size


def test_a_recomputed_unit_is_as_large_as_the_formula_says() -> None:
    """While its backward pass runs; between the passes only its input is kept (test_plan_formulas.py)."""
    compiled = choose(RMS_NORM, Problem(target("cpu"), (torch.float32,) * 2, ((16, 64), (64,)))).name != "reference"
    base = replace(GPT, global_batch=2, micro_batch=2, documents=False)
    llama = replace(base, model=tiny_llama(), architecture="llama")
    for case in [base, llama] if compiled else [base]:
        for method, blocks in (("uniform", None), ("uniform", 2), ("block", 3)):
            training = {**FP32, **FULL, "recompute_method": method, "recompute_num_layers": blocks}
            unit = replace(case, training=training)
            job = job_of(unit)
            assert job.recompute == Recompute(method, blocks)
            grown = _growth(unit)
            want = recomputed_bytes(job, 0, "cpu")
            assert want > 0.8 * block_bytes(job, "cpu") * (blocks if method == "uniform" and blocks else 1)
            assert max(grown) == pytest.approx(want, rel=0.01), (case.architecture, method, blocks)


class Growth(Live):
    """Bytes that live more after each second forward pass of a unit than before it."""

    def __init__(self) -> None:
        super().__init__()
        self.grown: list[int] = []
        self.begin: int | None = None
        self.over = False  # a second pass has ended; the next operation is of the unit's backward pass

    def run_blocks(self, blocks: Any, hidden: Any, ctx: Any) -> Any:
        """Stands before the function that runs the blocks of a unit."""
        if torch._C._current_graph_task_id() == -1:  # not in backward
            return _run_blocks(blocks, hidden, ctx)
        self.begin = self.bytes
        try:
            return _run_blocks(blocks, hidden, ctx)
        finally:
            self.over = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.over and self.begin is not None:
            self.grown.append(self.bytes - self.begin)
            self.over = False
        return super().__torch_dispatch__(func, types, args, kwargs)


def _growth(case: Case) -> list[int]:
    mesh = ProcessMesh.open(Layout())
    assembly = assemble(case.config(), mesh)
    ctx = ForwardContext(microbatches(case, 0, 0)[0], 1, 0, training=True)
    growth = Growth()
    with mock.patch("megatron_lite.pipeline.stage._run_blocks", growth.run_blocks):
        assembly.stage(None, ctx).loss_sum.backward()  # once, for what is made once
        growth.begin, growth.over = None, False
        with growth:
            assembly.stage(None, ctx).loss_sum.backward()
    assembly.gradients.close()
    mesh.close()
    return growth.grown
