"""From step reports to records: rates, FLOPs, MFU, the first-step sanity lines, and the places where records go."""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_lite.config.schema import RunConfig
from megatron_lite.data.batch import Batch
from megatron_lite.data.describe import marked
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.model.protocol import ModelDefinition
from megatron_lite.train.evaluate import Evaluation
from megatron_lite.train.metrics import Console, JsonLines, Sink, TensorBoard, WeightsAndBiases, peak_tflops, reason
from megatron_lite.train.progress import Progress
from megatron_lite.train.step import StepReport

_LISTED = 20  # sources that are listed on the terminal


def memory_gib(device: torch.device) -> float:
    """Peak memory of this rank: of the allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def device_name(device: torch.device) -> str:
    """The GPU's name, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


class Reporter:
    """Writes what happened, on rank 0; on the other ranks every method does nothing.

    A sink that cannot be written when the run starts is an error; one that fails later is named and left out.

    Args:
        config, mesh, definition: of the run.
        log_dir: where metrics.jsonl goes.
        first_step, last_step: of this start.

    Raises:
        ValueError: on rank 0, when a place for records cannot be written.
    """

    def __init__(
        self,
        config: RunConfig[Any],
        mesh: ProcessMesh,
        definition: ModelDefinition,
        log_dir: Path,
        first_step: int,
        last_step: int,
    ) -> None:
        self.config, self.mesh, self.definition = config, mesh, definition
        self.enabled, self.log_dir = mesh.rank == 0, log_dir
        logging = config.logging
        self._peak = peak_tflops(device_name(mesh.device), logging.peak_tflops)
        self.console = Console(first_step, last_step, logging.log_interval, self.enabled)
        self._sinks: list[Sink] = []
        self._board: TensorBoard | None = None
        self.run = 0
        if not self.enabled:
            return
        lines = JsonLines(log_dir / "metrics.jsonl")
        self.run = lines.run
        self._sinks.append(lines)
        if logging.tensorboard_dir:
            self._board = TensorBoard(Path(logging.tensorboard_dir), first_step)
            self._sinks.append(self._board)
        if logging.wandb_project:
            directory = Path(logging.wandb_save_dir or log_dir)
            self._sinks.append(WeightsAndBiases(logging.wandb_project, logging.wandb_exp_name, directory, asdict(config)))

    def say(self, text: str) -> None:
        """A line for people."""
        self.console.say(text)

    def step(
        self,
        report: StepReport,
        progress: Progress,
        *,
        samples: int,
        row_length: int,
        seconds: float,
        learning_rate: float,
        loss_scale: float,
        extra: dict[str, float],
        sources: Callable[[int], dict[str, int]] | None = None,
    ) -> None:
        """Record one step (``progress`` has counted it).

        Args:
            samples: of the global batch.
            row_length: tokens that may see each other: the sequence length, or what a curriculum makes of it.
            sources: tells what the first n samples were drawn from.
        """
        if not self.enabled:
            return
        world, length = self.mesh.layout.world_size, self.config.data.seq_length
        tokens = samples * length
        flops = type(self.definition).flops(self.definition.config, tokens, row_length, report.squared_lengths)
        tflops = None if flops is None else flops.model_full / seconds / world / 1e12
        record: dict[str, Any] = {
            "step": progress.step,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "learning_rate": learning_rate,
            "loss_scale": loss_scale,
            "skipped": report.skipped,
            "consumed_samples": progress.consumed_samples,
            "consumed_tokens": progress.consumed_samples * length,
            "step_seconds": seconds,
            "data_wait_seconds": report.data_wait,
            "tokens_per_second": tokens / seconds,
            "tflops_per_gpu": tflops,
            "tflops_computed": None if flops is None else flops.computed / seconds / world / 1e12,
            "mfu": None if tflops is None or self._peak is None else tflops / self._peak,
            "memory_gib": report.memory_gib,
            **({"aux_loss": report.aux_loss} if report.aux_loss else {}),
            **extra,
        }
        due = progress.step % self.config.logging.log_interval == 0
        if sources is not None and (due or progress.step == self.console.last_step):
            counts = sources(progress.consumed_samples)
            record.update({"source_samples": counts} if len(counts) > 1 else {})
        self._write(record, self._board_record(record) if due else None)
        self.console.step(record)

    def _write(self, record: dict[str, Any], board: dict[str, Any] | None) -> None:
        """Hand a record to every sink, and what TensorBoard is to show to TensorBoard: no log is worth the run."""
        for sink in list(self._sinks):
            what = board if sink is self._board else record
            if what is None:
                continue
            try:
                sink.write(what)
            except Exception as error:  # TensorBoard and W&B raise what they like
                self._sinks.remove(sink)
                self._say_lost(sink, error)
                with contextlib.suppress(Exception):
                    sink.close()

    def _say_lost(self, sink: Sink, error: Exception) -> None:
        self.say(f"{sink.name} cannot be written any more: {reason(error)}; the run goes on without it")

    def _board_record(self, record: dict[str, Any]) -> dict[str, Any]:
        """What goes to TensorBoard: timers and memory only where asked for."""
        logging = self.config.logging
        hidden = set() if logging.log_timers_to_tensorboard else {"step_seconds", "data_wait_seconds", "tokens_per_second"}
        hidden |= set() if logging.log_memory_to_tensorboard else {"memory_gib"}
        return {k: v for k, v in record.items() if k not in hidden and v is not None}

    def evaluation(self, progress: Progress, found: Evaluation, seconds: float, split: str = "validation") -> None:
        """Record one evaluation."""
        if not self.enabled:
            return
        loss = found.loss
        record: dict[str, Any] = {"step": progress.step, "eval_loss": loss, "split": split, "eval_seconds": seconds}
        if found.by_source:
            finite = {name: value if math.isfinite(value) else None for name, value in found.by_source.items()}
            record["eval_loss_by_source"] = finite
        ppl = math.exp(min(loss, 700.0))
        shown = {"step": progress.step, "eval_loss": loss}
        shown.update({f"eval_loss/{name}": value for name, value in found.by_source.items()})
        if self.config.logging.log_validation_ppl_to_tensorboard:
            shown["eval_ppl"] = ppl
        self._write(record, shown)
        self.say(f"step {progress.step}: {split} loss {loss:.4f} nats/token, perplexity {ppl:.2f}")
        self._list([f"{value:.4f} {name}" for name, value in found.by_source.items()])

    def sources(self, progress: Progress, samples: dict[str, int]) -> None:
        """Say how many samples of each source were consumed, where there are several."""
        if len(samples) < 2:
            return
        self.say(f"step {progress.step}: {progress.consumed_samples:,} samples consumed, of these")
        self._list([f"{n:,} {name}" for name, n in samples.items()])

    def _list(self, lines: list[str]) -> None:
        for line in lines[:_LISTED]:
            self.say(f"  {line}")
        if len(lines) > _LISTED:
            self.say(f"  and {len(lines) - _LISTED} more, in {self.log_dir / 'metrics.jsonl'}")

    def close(self) -> None:
        """Flush and close everything."""
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # what was held back so far does not fit either
                self._say_lost(sink, error)
        self._sinks = []
        self.console.close()


def sanity_lines(report: StepReport, vocab_size: int, samples: int, seq_length: int) -> list[str]:
    """What the first step should look like, beside what it does."""
    share = 1.0 - report.tokens / (samples * seq_length)
    grad = "finite and not zero" if math.isfinite(report.grad_norm) and report.grad_norm > 0 else "NOT finite and non-zero"
    return [
        f"first step: loss {report.loss:.4f}; ln V of a model that knows nothing is {math.log(vocab_size):.4f}",
        f"first step: gradient norm {report.grad_norm:.4g} is {grad}",
        f"first step: {share:.2%} of the targets carry no loss (borders of documents, padding)",
    ]


def first_sample_line(decode: Callable[[Sequence[int]], str] | None, batch: Batch, *, masked: bool = False, width: int = 160) -> str:
    """The beginning of the first row, as text where a tokenizer is at hand; ``masked``: marks around what the loss counts."""
    ids = batch.tokens[: min(128 if masked else 64, batch.seq_length)].tolist()
    if masked:
        counts = [0, *batch.loss_mask[: len(ids) - 1].int().tolist()]  # the mask is of targets, which stand one further on
        return f"first sample: {marked(decode, ids, counts)[: 4 * width]!r}"
    if decode is None:
        return f"first sample: ids {ids[:16]} ..."
    return f"first sample: {decode(ids)[:width]!r}"


def host_names(mesh: ProcessMesh, host: str) -> list[str]:
    """Host of every rank, in order of rank."""
    return [str(name) for name in mesh.axis("world").gather_json(host)]

