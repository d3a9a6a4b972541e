"""A step on a GPU that is not there: shapes, dtypes and devices of every operation as on a GPU, and no numbers.

PyTorch's fake tensors say that they lie on ``cuda`` and compute nothing. Under :func:`fake_cuda` the program runs on them
as it would on a GPU, and each operation that would stop the host is noted: a value read back, a copy between host and
device that waits (out of pageable memory, or not ``non_blocking``), a shape that depends on data. Like every dry run it
says nothing about streams or time. ``no_gpu.pretend`` has to come first.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.mesh import collectives
from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.ops import library
from megatron_lite.ops.host import to_device
from megatron_lite.ops.op import Problem, target
from megatron_lite.testing.layouts import Batches, Case, batches_of, tiny_gpt, tiny_llama
from megatron_lite.train.assemble import assemble, kv_heads
from megatron_lite.train.step import HostNumbers

CARD = "cuda:h200"  # the card that ops are chosen for
OPS = (
    *("swiglu_forward", "swiglu_backward", "rms_norm_forward", "rms_norm_backward"),
    *("adamw_", "philox_normal", "philox_keep"),
)
SMALL = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 32}
CASES: dict[str, Case] = {
    "llama fp64": Case(model=tiny_llama(**SMALL)),
    "llama bf16": Case(model=tiny_llama(**SMALL), training={"fp64": False, "bf16": True}),
    "values clipped": Case(model=tiny_llama(**SMALL), training={"fp64": False}, optimizer={"clip_grad_value": 0.5}),
    "gpt with dropout": Case(
        model=tiny_gpt(**SMALL, hidden_dropout=0.2, attention_dropout=0.1, label_smoothing=0.1), architecture="gpt"
    ),
    "recomputed": Case(
        model=tiny_llama(**SMALL), training={"fp64": False, "bf16": True, "recompute_granularity": "full"}
    ),
    "tied, one kv head": Case(
        model=tiny_llama(**SMALL, untie_embeddings_and_output_weights=False, qk_layernorm=True, num_query_groups=1)
    ),
    "one document a row": Case(model=tiny_llama(**SMALL), documents=False, training={"fp64": False, "fp16": True}),
    "deterministic": Case(
        model=tiny_gpt(**SMALL), architecture="gpt", training={"deterministic": True}, parallel={"zero_stage": 1}
    ),
    "tp, pp and dp": Case(
        layout=Layout(tp=2, pp=2, dp=2),
        model=tiny_llama(**{**SMALL, "num_layers": 2}),
        training={"fp64": False, "bf16": True},
        parallel={"sequence_parallel": True, "zero_stage": 1, "overlap_grad_reduce": True},
    ),
    "mean of microbatches": Case(model=tiny_llama(**SMALL), training={"loss_normalization": "microbatch"}),
}


class Read(Exception):
    """Stands for the one host read: what follows it needs numbers."""


class Stops(TorchDispatchMode):
    """Notes what would stop the host.

    Attributes:
        found: one line each, with the place in the code.
        copied: bytes from host to device in copies that are not waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self._note(f"{func} needs a value of a tensor")
            raise
        if func is torch.ops.aten._to_copy.default:
            self._copy(args[0], out, bool(kwargs.get("non_blocking")))
        elif func is torch.ops.aten.copy_.default:
            self._copy(args[1], out, bool(kwargs.get("non_blocking") or args[2:] == (True,)))
        return out

    def _copy(self, source: torch.Tensor, out: torch.Tensor, queued: bool) -> None:
        if source.device.type == out.device.type:
            return
        shape = tuple(source.shape)
        if source.device.type == "cuda":
            self._note(f"{shape} is copied to the host")
        elif not queued:
            self._note(f"{shape} is copied to the device and waited for")
        elif not getattr(source, "is_fake_pinned", False):
            self._note(f"{shape} is copied to the device from pageable memory")
        else:
            self.copied += source.numel() * source.element_size()

    def _note(self, what: str) -> None:
        ours = [f for f in traceback.extract_stack() if "megatron_lite/" in f.filename.replace(os.sep, "/")]
        place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}: {ours[-1].line}" if ours else "not in the package"
        self.found.append(f"{what} ({place})")


def _pinned(host: torch.Tensor) -> torch.Tensor:
    assert host.device.type == "cpu"
    copy = host.clone()
    copy.is_fake_pinned = True  # type: ignore[attr-defined]
    return copy


def _problem(cls: type[Problem], *tensors: torch.Tensor, **options: Any) -> Problem:
    """Problem.of without addresses: a fake tensor has none."""
    dtypes, shapes = tuple(t.dtype for t in tensors), tuple(tuple(t.shape) for t in tensors)
    contiguous = all(t.is_contiguous() for t in tensors)
    return cls(target(CARD), dtypes, shapes, contiguous, 64, tuple(sorted(options.items())))


def _copy(out: torch.Tensor, t: torch.Tensor) -> collectives.Handle:
    out.view(-1).copy_(t.view(-1))
    return collectives.Handle()


@contextlib.contextmanager
def fake_cuda() -> Iterator[Stops]:
    """Within this, tensors made on or moved to ``cuda`` are fake ones on a GPU; yields what notes where the host stops."""
    stops = Stops()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Problem, "of", classmethod(_problem)))
        stack.enter_context(mock.patch.object(collectives, "_copy", _copy))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", _pinned))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(stops)
        yield stops


def one_step(case: Case) -> Stops:
    """A step of a case on fake CUDA tensors up to its host read, which has to come."""
    made = batches_of(case, 0, 0)
    with fake_cuda() as stops:
        ranks = case.layout.world_size
        backend = {"backend": "fake", "rank": ranks - 1} if ranks > 1 else {}
        mesh = ProcessMesh.open(case.layout, device="cuda:0", kv_heads=kv_heads(case.model), **backend)
        assembly = assemble(case.config(), mesh)
        moved = [batch.pin().to(mesh.device) for batch in made.microbatches]
        assert all(p.is_cuda and p.main_grad.is_cuda for p in assembly.stage.parameters())  # type: ignore[attr-defined]

        def read(numbers: torch.Tensor) -> torch.Tensor:
            assert numbers.is_cuda
            raise Read

        assembly.step.read = read  # type: ignore[method-assign]
        stops.found, stops.copied = [], 0
        came = False
        try:
            assembly.step.run(
                Batches(moved, made.digest, made.valid_tokens),
                seed=1,
                step=0,
                loss_scale=1.0,
                update=1,
                learning_rates={"": 1e-3},
                weight_decay=0.1,
                host=HostNumbers(0, False, 0.0, 0.0),
            )
        except Read:
            came = True
        assert came
        assembly.gradients.close()
        mesh.close()
    return stops


def known_stops() -> Stops:
    """The watcher's own test: nine operations that stop the host, and some that do not."""
    with fake_cuda() as stops:
        x = torch.ones(4, device="cuda")
        torch.tensor([1.0, 2.0], device="cuda")
        torch.zeros(3).to("cuda", non_blocking=True)
        torch.zeros(3).pin_memory().to("cuda")
        x.cpu()
        reads: list[Callable[[], Any]] = [
            lambda: x.sum().item(),
            lambda: x.nonzero(),
            lambda: x[x > 0],
            lambda: bool(x.any()),
        ]
        for read in reads:
            with contextlib.suppress(DataDependentOutputException, DynamicOutputShapeException):
                read()
        x[0] = 1.0  # a slice is filled, one element is copied to
        assert len(stops.found) == 9, stops.found
        to_device(torch.zeros(3), torch.device("cuda"))
        x[1:] = 0
        torch.where(x > 0, x, 0)
        torch.full_like(x, 2.0).clamp_(-x, x)
        assert len(stops.found) == 9, stops.found
    return stops


def main(out: Path) -> None:
    """Run every case; write, for each, the stops and the bytes copied."""
    assert library.missing("cpu") is None
    torch.set_num_threads(1)
    for name in OPS:
        torch.library.register_fake(f"megatron_lite::{name}", lambda *_args, **_options: None)
    results = {"known stops": (stops := known_stops()).found, "copied by it": stops.copied}
    cases = {}
    for name, case in CASES.items():
        try:
            stops = one_step(replace(case, micro_batch=2, global_batch=4))
            cases[name] = {"found": stops.found, "copied": stops.copied}
        except Exception:
            cases[name] = {"error": traceback.format_exc()}
    out.write_text(json.dumps({**results, "cases": cases}))
