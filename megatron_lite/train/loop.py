"""The training program of one rank, from its configuration to its exit code.

``train`` joins the job, builds everything, loads what is to be loaded and walks through the steps. It reads the clock,
signals and the disk on rank 0 only or on every rank alike, and whatever decides what happens next travels in the step's
one exchange, so that all ranks save, evaluate and stop after the same step. Every way to end has a code of its own
(:mod:`megatron_lite.config.exit_codes`).
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import megatron_lite
from megatron_lite.checkpoint.save import SaveError
from megatron_lite.config import exit_codes
from megatron_lite.config.derived import log_directory
from megatron_lite.config.load import to_dict
from megatron_lite.config.schema import RunConfig
from megatron_lite.mesh.agreement import agree, code_digest
from megatron_lite.mesh.layout import layout_for
from megatron_lite.mesh.local import RankInfo, parent_alive, start
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.optim import from_config
from megatron_lite.train import resume
from megatron_lite.train.assemble import assemble, kv_heads
from megatron_lite.train.datasets import Data, open_data
from megatron_lite.train.evaluate import evaluate
from megatron_lite.train.guard import Guard
from megatron_lite.train.nonfinite import NonFiniteError, diagnose
from megatron_lite.train.profile import Profiler
from megatron_lite.train.progress import Progress
from megatron_lite.train.provenance import write_run_json
from megatron_lite.train.report import Reporter, first_sample_line, host_names, memory_gib, sanity_lines
from megatron_lite.train.signals import SignalRequests
from megatron_lite.train.step import STOP_LIMIT, STOP_SIGNAL, HostNumbers, StepReport

MAX_ROLLBACKS = 3
GC_INTERVAL = 100  # steps between collections, at the same step on all ranks


def train(config: RunConfig[Any], info: RankInfo, *, environment: Mapping[str, str] | None = None) -> int:
    """Run the whole training of this rank; returns its exit code. ``environment``: variables that we set, for run.json."""
    parent = os.getppid()
    minutes = config.parallel.distributed_timeout_minutes
    backend = backend_of(config)
    # The watchdog is to speak first, so that a hang ends with a place instead of a back end's timeout.
    store = start(info, backend, 2.0 * minutes, os.environ)
    guard = Guard(info, store, 60.0 * minutes, None)
    guard.start()
    try:
        code = Training(config, info, backend, guard, parent, dict(environment or {})).run()
    except (ValueError, FileExistsError) as error:
        code = guard.fail(error, exit_codes.CONFIGURATION)
    except SaveError as error:
        code = guard.fail(error, exit_codes.SAVE_FAILED)
    except NonFiniteError as error:
        code = guard.fail(error, exit_codes.NON_FINITE)
    except BaseException as error:  # whatever it is, the other ranks must hear of it
        code = guard.fail(error, exit_codes.ERROR)
    else:
        guard.stop()
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    if info.world_size > 1:
        os._exit(code)  # communicators whose peers are gone may wait for them when they are torn down
    return code


def backend_of(config: RunConfig[Any]) -> str:
    """``--distributed-backend``, else nccl on GPUs and gloo on CPUs."""
    return config.parallel.distributed_backend or ("nccl" if device_type(config) == "cuda" else "gloo")


def device_type(config: RunConfig[Any]) -> str:
    """``cuda`` or ``cpu``."""
    wanted = config.parallel.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: torch sees no GPU on this machine; give --device cpu, or check the driver with `megatron-lite doctor`"
        )
    return wanted if wanted != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")


class Training:
    """One rank's run. The constructor builds, :meth:`run` trains."""

    def __init__(
        self, config: RunConfig[Any], info: RankInfo, backend: str, guard: Guard, parent: int, environment: dict[str, str]
    ) -> None:
        self.config, self.info, self.guard, self.parent = config, info, guard, parent
        parallel, training = config.parallel, config.training
        self.layout = layout_for(
            info.world_size,
            tp=parallel.tensor_model_parallel_size,
            pp=parallel.pipeline_model_parallel_size,
            cp=parallel.context_parallel_size,
        )
        if training.deterministic:
            torch.use_deterministic_algorithms(True)
        device = torch.device("cuda", info.local_rank) if device_type(config) == "cuda" else torch.device("cpu")
        self.mesh = ProcessMesh.open(self.layout, backend=backend, device=device, kv_heads=kv_heads(config.model))
        agree(self.mesh, {"configuration": to_dict(config), "code": code_digest(Path(megatron_lite.__file__).parent)})
        now = time.strftime("%Y%m%d-%H%M%S")
        self.log_dir = Path(self.mesh.axis("world").gather_json(log_directory(config, now))[0])
        guard.log_dir = self.log_dir
        self.batch = from_config.batch_schedule(training, config.data.seq_length, self.layout.dp)
        self.last_step, self.samples = from_config.training_length(training, self.batch)
        self.rates = from_config.rates(training, config.optimizer, self.batch)
        self.scaler = from_config.loss_scaler(training, config.optimizer)
        guard.beat("opening the data")
        self.data: Data = open_data(config, self.mesh, self.batch, self.last_step, self.samples)
        found = self._find()
        guard.beat("building the model")
        self.assembly = assemble(config, self.mesh, initialise=found is None)
        self.progress = Progress()
        notices: list[str] = []
        if found is not None:
            guard.beat(f"loading {found.directory}")
            self.progress, self.rates = resume.load(self.assembly, config, found, self.rates, self.scaler, notices.append)
        self.reporter = Reporter(config, self.mesh, self.assembly.definition, self.log_dir, self.progress.step, self.last_step)
        for line in [*self.data.summary, *notices]:
            self.reporter.say(line)
        self._write_provenance(environment, str(found.directory) if found is not None else None)
        self.signals = SignalRequests(training.exit_signals, training.save_signals)
        self.profiler = Profiler(config.logging, self.mesh.rank, self.log_dir)
        self._started = self._last_save_time = time.monotonic()
        self._last_saved = self.progress.step if found is not None else -1
        self._step_seconds = 0.0

    def _find(self) -> Any:
        """Rank 0 decides which checkpoint is loaded; the others see the same one or fail."""
        found: dict[str, Any] = {}
        if self.mesh.rank == 0:
            try:
                checkpoint = resume.find(self.config)
            except ValueError as error:
                found = {"error": str(error)}
            else:
                found = {**asdict(checkpoint), "directory": str(checkpoint.directory)} if checkpoint is not None else {}
        answer = self.mesh.axis("world").gather_json(found)[0]
        if "error" in answer:
            raise ValueError(answer["error"])
        if not answer:
            if self.config.checkpoint.load is not None and self.mesh.rank == 0:
                print(f"--load {self.config.checkpoint.load} holds no checkpoint and is the same as --save: starting fresh", flush=True)
            return None
        return resume.Found(answer["step"], Path(answer["directory"]), answer["notice"])

    def _write_provenance(self, environment: dict[str, str], loaded: str | None) -> None:
        hosts = host_names(self.mesh, self.info.host)
        if self.mesh.rank == 0:
            extra = {"run": self.reporter.run, "layout": asdict(self.layout), "loaded": loaded, "first_step": self.progress.step}
            write_run_json(self.log_dir, to_dict(self.config), hosts, environment, extra)

    # ---- the loop

    def run(self) -> int:
        """Train (or evaluate only) to the end; returns the exit code."""
        if self.config.evaluation.skip_train:
            self._evaluate()
            self._close()
            return exit_codes.DONE
        self.signals.install()
        gc.collect()
        gc.freeze()
        gc.disable()
        code = exit_codes.DONE
        try:
            while self.progress.step < self.last_step:
                stop = self._one_step()
                if stop is not None:
                    code = stop
                    break
            if self.config.checkpoint.save is not None and self._last_saved != self.progress.step:
                self._save(final=code == exit_codes.DONE)
        finally:
            gc.enable()
            self.signals.restore()
        if code == exit_codes.DONE and self.data.test is not None and self._evaluates():
            self._evaluate_on(self.data.test, "test")
        self._close()
        return code

    def _close(self) -> None:
        self.data.close()
        self.reporter.close()
        self.mesh.axis("world").barrier()
        self.mesh.close()

    def _one_step(self) -> int | None:
        """One step and all that may follow it; an exit code to stop with, or None."""
        config, progress = self.config, self.progress
        if self.info.world_size > 1 and not parent_alive(self.parent):
            raise RuntimeError("the launcher that started this rank is gone")
        self.guard.beat(f"step {progress.step + 1}")
        self.profiler.begin(progress.step)
        began = time.perf_counter()
        size = self.batch.size(progress.consumed_samples)
        batches = self.data.train.step(progress.consumed_samples, size)
        rates = self.rates.learning_rates(progress.scheduled_samples)
        scale = self.scaler.scale
        host = HostNumbers(self._stop_reason(), self._save_wanted(), self._step_seconds, memory_gib(self.mesh.device))
        report = self.assembly.step.run(
            batches,
            seed=config.training.seed,
            step=progress.step,
            loss_scale=scale,
            update=progress.updates + 1,
            learning_rates=rates,
            weight_decay=self.rates.weight_decay.at(progress.scheduled_samples),
            host=host,
        )
        self._step_seconds = time.perf_counter() - began
        self.profiler.end(progress.step)
        if report.skipped and self._not_finite(report, batches, size):
            return None  # rolled back: this step is not counted
        if not report.skipped:
            self.scaler.update(True)
        progress.count(size, report.skipped)
        extra = self._extra_numbers()
        self.reporter.step(
            report,
            progress,
            samples=size,
            seconds=self._step_seconds,
            learning_rate=rates[""],
            loss_scale=scale,
            extra=extra,
        )
        if progress.step == 1:
            for line in sanity_lines(report, self.assembly.definition.vocab_size, size, config.data.seq_length):
                self.reporter.say(line)
            self.reporter.say(first_sample_line(self.data.decode, batches.microbatches[0].tokens))
        return self._after_step(report)

    def _after_step(self, report: StepReport) -> int | None:
        config, step = self.config, self.progress.step
        options = config.checkpoint
        if self._evaluates() and config.evaluation.eval_interval and step % config.evaluation.eval_interval == 0:
            self._evaluate()
        self._collect_garbage(step)
        exit_now = bool(config.training.exit_interval) and step % int(config.training.exit_interval or 1) == 0
        due = options.save_interval is not None and step % options.save_interval == 0
        if options.save is not None and (due or report.save or report.stop or exit_now) and step < self.last_step:
            self._save(final=False)
        if report.stop == STOP_SIGNAL:
            self.reporter.say(f"stopped after step {step} by a signal")
            return exit_codes.SIGNAL
        if report.stop == STOP_LIMIT or exit_now:
            limit = "--exit-interval" if exit_now else "--exit-duration-in-mins"
            self.reporter.say(f"stopped after step {step} by {limit}")
            return exit_codes.LIMIT
        return None

    def _stop_reason(self) -> int:
        if self.signals.stop:
            return STOP_SIGNAL
        limit = self.config.training.exit_duration_in_mins
        over = limit is not None and self.mesh.rank == 0 and time.monotonic() - self._started > 60.0 * limit
        return STOP_LIMIT if over else 0

    def _save_wanted(self) -> bool:
        minutes = self.config.checkpoint.save_interval_minutes
        by_time = minutes is not None and self.mesh.rank == 0 and time.monotonic() - self._last_save_time > 60.0 * minutes
        return self.signals.take_save() or by_time

    def _extra_numbers(self) -> dict[str, float]:
        """Numbers that cost a collective of their own, where asked for."""
        logging, optimizer = self.config.logging, self.assembly.optimizer
        wanted = {}
        if logging.log_params_norm:
            wanted["params_norm"] = optimizer.weight_norm_squared()
        if logging.log_num_zeros_in_grad:
            wanted["num_zeros_in_grad"] = optimizer.count_zeros()
        if not wanted:
            return {}
        values = torch.stack(list(wanted.values()))
        self.mesh.axis("world").all_reduce(values).wait()
        found = dict(zip(wanted, values.tolist(), strict=True))
        if "params_norm" in found:
            found["params_norm"] = math.sqrt(found["params_norm"])
        return found

    def _collect_garbage(self, step: int) -> None:
        interval = self.config.training.manual_gc_interval if self.config.training.manual_gc else GC_INTERVAL
        if interval and step % interval == 0:
            gc.collect()

    # ---- what happens now and then

    def _evaluates(self) -> bool:
        return self.data.valid is not None and self.config.evaluation.eval_iters > 0

    def _evaluate(self) -> None:
        if self.data.valid is None:
            self.reporter.say("no validation data: nothing to evaluate")
            return
        self._evaluate_on(self.data.valid, "validation")

    def _evaluate_on(self, loader: Any, split: str) -> None:
        began = time.perf_counter()
        if self.config.training.manual_gc:
            gc.collect()
        loss = evaluate(
            self.mesh,
            self.assembly.runtime,
            loader,
            batches=self.config.evaluation.eval_iters,
            global_batch=self.batch.final,
            beat=self.guard.beat,
        )
        self.reporter.evaluation(self.progress, loss, time.perf_counter() - began, split)

    def _save(self, *, final: bool) -> None:
        self.guard.beat(f"saving step {self.progress.step}")
        began = time.perf_counter()
        directory = resume.save(
            self.assembly,
            self.config,
            self.progress,
            self.rates,
            self.scaler,
            final=final,
            extra={"tokenizer": self.data.tokenizer_facts},
            beat=lambda: self.guard.beat(f"saving step {self.progress.step}"),
        )
        self._last_save_time, self._last_saved = time.monotonic(), self.progress.step
        self.reporter.say(f"step {self.progress.step}: saved {directory} in {time.perf_counter() - began:.1f} s")

    def _not_finite(self, report: StepReport, batches: Any, size: int) -> bool:
        """Decide what a step without an update means. True: rolled back. Raises NonFiniteError to stop."""
        why = self.scaler.update(False) if self.scaler.kind != "none" else None
        policy = "skip" if self.scaler.kind != "none" else self.config.training.on_nan
        step = self.progress.step + 1
        if policy == "skip" and why is None:
            self.reporter.say(f"step {step}: not finite, the update is skipped (loss {report.loss}, gradient norm {report.grad_norm})")
            return False
        where = diagnose(self.assembly, batches.microbatches, seed=self.config.training.seed, step=step)
        if policy == "rollback" and self.config.checkpoint.save is not None:
            if self.progress.rollbacks >= MAX_ROLLBACKS:
                raise NonFiniteError(f"{where}; {MAX_ROLLBACKS} rollbacks did not get past it")
            self._roll_back(where, size)
            return True
        raise NonFiniteError(where if why is None else f"{why}; {where}")

    def _roll_back(self, where: str, size: int) -> None:
        root = Path(str(self.config.checkpoint.save))
        answer = self.mesh.axis("world").gather_json(_newest(root) if self.mesh.rank == 0 else None)[0]
        if answer is None:
            raise NonFiniteError(f"{where}; there is no complete checkpoint in {root} to roll back to")
        found = resume.Found(answer[0], Path(answer[1]), f"rollback to {answer[1]}")
        failed = self.progress
        self.progress, self.rates = resume.load(
            self.assembly, self.config, found, self.rates, self.scaler, self.reporter.say, again=True
        )
        self.progress.jump(failed, size)
        self._last_saved = found.step
        first, end = self.progress.skipped_ranges[-1]
        self.reporter.say(
            f"{where}; rolled back to step {found.step} ({self.progress.rollbacks} of {MAX_ROLLBACKS}), "
            f"samples {first} to {end - 1} are skipped"
        )


def _newest(root: Path) -> list[Any] | None:
    try:
        found = resume.find_checkpoint(root)
    except ValueError:
        return None
    return None if found is None else [found.step, str(found.directory)]
