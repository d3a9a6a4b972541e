"""The same matrix over NCCL: one rank per GPU, communicators split from the default one, pipeline queues between two ranks.

Then the fp64 measure again. With one GPU there is nothing to run: NCCL refuses two ranks on one device.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from gpu.equivalence_part import SHARDED, models, tail
from gpu.part import Outcome, Settings, Skipped
from megatron_lite.mesh.layout import Layout
from megatron_lite.testing.equal import Mismatch, RankResult, compare
from megatron_lite.testing.layouts import Case, reference_of, run_case
from megatron_lite.testing.ranks import RankFailed, RankHang, run_ranks

TWO = (Layout(tp=2), Layout(pp=2), Layout(dp=2))
FOUR = (Layout(tp=2, pp=2), Layout(tp=2, dp=2), Layout(pp=2, dp=2))


def on_rank(case: Case) -> RankResult:
    """A case over NCCL; the default group of the ranks' pool makes way for one bound to this rank's GPU."""
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.PrefixStore("nccl", store), rank=rank, world_size=size, device_id=device)
    return run_case(case, backend="nccl", device=str(device))


def run(settings: Settings, outcome: Outcome) -> None:
    """Layouts of two ranks, and of four where there are four GPUs."""
    count = torch.cuda.device_count() if settings.on_gpu else 0
    if count < 2:
        raise Skipped(f"NCCL needs two GPUs, {count} visible")
    outcome.say(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {count} GPUs")
    cases = models(settings)
    for key, options in (("llama", {"parallel": SHARDED}), ("tied, qk-norm, one kv head", {"parallel": SHARDED})):
        want = reference_of(cases[key])
        for layout in (*TWO, *(FOUR if count >= 4 else ())):
            case = replace(cases[key], layout=layout, **options)
            if settings.time_is_short():
                outcome.skip(f"{key}, {case.name}: the time was over")
                continue
            try:
                worst = compare(run_ranks(layout.world_size, on_rank, case, timeout=settings.patience), want)
            except (Mismatch, RankFailed, RankHang) as error:
                outcome.check(False, f"{key}, {case.name}: {tail(error)}")
                continue
            outcome.numbers[f"{key}, {case.name}"] = worst
            outcome.check(True, f"{key}, {case.name}: largest relative deviation {worst:.1e}")
