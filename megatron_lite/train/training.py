"""One rank's run, step after step.

The clock is read on rank 0 only, signals and the disk on whichever rank they reach, and whatever decides what happens
next travels in the step's one exchange, so that all ranks save, evaluate and stop after the same step.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron_lite.config import exit_codes
from megatron_lite.config.schema import RunConfig
from megatron_lite.data.loader import SampleError
from megatron_lite.mesh.local import RankInfo, parent_alive
from megatron_lite.optim.replicas import replica_differences
from megatron_lite.train import resume
from megatron_lite.train.build import Built
from megatron_lite.train.evaluate import agreed, evaluate
from megatron_lite.train.guard import Guard
from megatron_lite.train.nonfinite import NonFiniteError, diagnose
from megatron_lite.train.profile import Profiler
from megatron_lite.train.report import first_sample_line, memory_gib, sanity_lines
from megatron_lite.train.signals import SignalRequests
from megatron_lite.train.step import STOP_DATA, STOP_LIMIT, STOP_SIGNAL, BatchMismatch, HostNumbers, StepReport

MAX_ROLLBACKS = 3
GC_INTERVAL = 100  # steps between collections, at the same step on all ranks
STOPPED = {0: exit_codes.DONE, STOP_SIGNAL: exit_codes.SIGNAL, STOP_LIMIT: exit_codes.LIMIT}


class Training:
    """One rank's run; :meth:`run` trains. Collective over the job.

    Args:
        config, info: what, and which rank this is.
        built: the objects of the run.
        guard: hears of every piece of progress.
        signals: installed by the caller.
        parent: the process that started this one.
        began: when the program started (``time.monotonic``).
    """

    def __init__(
        self,
        config: RunConfig[Any],
        info: RankInfo,
        built: Built,
        guard: Guard,
        signals: SignalRequests,
        *,
        parent: int,
        began: float,
    ) -> None:
        self.config, self.info, self.guard, self.signals, self.parent = config, info, guard, signals, parent
        self.mesh, self.data, self.assembly, self.reporter = built.mesh, built.data, built.assembly, built.reporter
        self.batch, self.last_step, self.rates, self.scaler = built.batch, built.last_step, built.rates, built.scaler
        self.progress = built.progress
        found = built.loaded
        self.profiler = Profiler(config.logging, self.mesh.rank, built.log_dir)
        self._began, self._last_save_time = began, time.monotonic()
        self._last_saved = self.progress.step if found is not None else -1
        # Where a rollback finds a checkpoint of this very run.
        whole = found is not None and config.checkpoint.load_optim and not config.checkpoint.finetune
        self._roll_back_to = found.directory.parent if whole and found is not None else None
        self._step_seconds, self._without_loss = 0.0, 0
        self._buffers = {name: b.clone() for name, b in self.assembly.stage.persistent_buffers().items()}

    # ---- the loop

    def run(self) -> int:
        """Train (or evaluate only) to the end; returns the exit code. Every rank calls it and gets the same."""
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            code = self._evaluate_only() if self.config.evaluation.skip_train else self._train()
            self.profiler.close()
            if self.data.mix is not None and not self.config.evaluation.skip_train:
                self.reporter.sources(self.progress, self.data.mix.consumed(self.progress.consumed_samples))
        finally:
            gc.enable()
            gc.unfreeze()
            self.reporter.close()  # what was measured up to an error is worth the most
        self.mesh.axis("world").barrier()
        self.guard.stop()
        self.assembly.gradients.close()
        self.mesh.close()
        return code

    def _evaluate_only(self) -> int:
        if self.data.valid is None:
            self.reporter.say("no validation data: nothing to evaluate")
            return exit_codes.DONE
        return STOPPED[self._evaluate(self.data.valid, "validation")]

    def _train(self) -> int:
        if stop := agreed(self.mesh, self._stop_reason()):
            self.reporter.say("stopped before the first step: there is nothing to save")
            return STOPPED[stop]
        while self.progress.step < self.last_step and not self._data_end():
            try:
                code = self._one_step()
            except ValueError as error:
                raise _of_a_step(error) from error
            if code is not None:
                return code
        if self.config.checkpoint.save is not None and self._last_saved != self.progress.step:
            self._save(final=True)
        if self.data.test is not None and self.config.evaluation.eval_iters > 0:
            return STOPPED[self._evaluate(self.data.test, "test", lambda: STOP_SIGNAL if self.signals.stop else 0)]
        return exit_codes.DONE

    def _data_end(self) -> bool:
        """Whether data that do not repeat have no further batch (after a rollback has left out some)."""
        loader, consumed = self.data.train, self.progress.consumed_samples
        if loader.dataset.endless or loader.sampler.after(consumed, self.batch.size(consumed)) <= len(loader.dataset):
            return False
        at = f"sample {consumed:,} of {len(loader.dataset):,}"
        self.reporter.say(f"the data end at {at}: training ends after step {self.progress.step} of {self.last_step}")
        return True

    def _one_step(self) -> int | None:
        """One step and all that may follow it; an exit code to stop with, or None."""
        progress = self.progress
        if self.info.world_size > 1 and not parent_alive(self.parent):
            raise RuntimeError("the launcher that started this rank is gone")
        self.guard.beat(f"step {progress.step + 1}")
        self.profiler.begin(progress.step)
        began = time.perf_counter()
        size = self.batch.size(progress.consumed_samples)
        unread: SampleError | None = None
        try:
            batches = self.data.train.step(progress.consumed_samples, size)
        except SampleError as error:  # the others wait for this rank: it takes part once more, and nobody makes an update
            unread, batches = error, self.data.train.blank(progress.consumed_samples, size)
        rates = self.rates.learning_rates(progress.scheduled_samples)
        scale = self.scaler.scale
        report = self.assembly.step.run(
            batches,
            seed=self.config.training.seed,
            step=progress.step,
            loss_scale=scale,
            update=progress.updates + 1,
            learning_rates=rates,
            weight_decay=self.rates.weight_decay.at(progress.scheduled_samples),
            host=HostNumbers(
                STOP_DATA if unread else self._stop_reason(),
                self._save_wanted(),
                self._step_seconds,
                memory_gib(self.mesh.device),
            ),
        )
        if report.stop == STOP_DATA:
            self._end_unread(f"step {progress.step + 1}", unread)
        self._step_seconds = time.perf_counter() - began
        self.profiler.end(progress.step)
        counted = replace(progress)
        counted.count(size, batches.next_consumed, report.skipped)
        self.reporter.step(
            report,
            counted,
            samples=size,
            row_length=self._row_length(),
            seconds=self._step_seconds,
            learning_rate=rates[""],
            loss_scale=scale,
            extra=self._extra_numbers(),
            sources=None if self.data.mix is None else self.data.mix.consumed,
        )
        if report.tokens == 0:
            self._without_loss += 1
            if self._without_loss.bit_count() == 1:  # the 1st, 2nd, 4th, ...; one alone may be in order, in small batches
                self.reporter.say(
                    f"warning: no target of the {size:,} samples of step {counted.step} carries loss, so nothing is learned from "
                    f"them ({self._without_loss:,} such steps in this run): look at the loss masks, and at --transform"
                )
        why = self.scaler.update(not report.skipped)
        if report.skipped and self._not_finite(report, batches, scale, why):
            return None  # rolled back: this step does not count
        self.progress = counted
        self._refuse_state()
        if counted.step == 1:
            for line in sanity_lines(report, self.assembly.definition.vocab_size, size, self.config.data.seq_length):
                self.reporter.say(line)
            self.reporter.say(first_sample_line(self.data.decode, batches.microbatches[0], masked=self.data.masked))
        return self._after_step(report)

    def _row_length(self) -> int:
        """Tokens of the rows of the next step (of its first sample, where a stage of a curriculum begins inside it)."""
        stages = self.data.curriculum
        return self.config.data.seq_length if stages is None else stages.at(self.progress.consumed_samples).seq_length

    def _refuse_state(self) -> None:
        """End a run whose first step has changed a buffer: it would be lost in checkpoints and differ between ranks."""
        now = self.assembly.stage.persistent_buffers() if self._buffers else {}
        changed = [name for name, before in self._buffers.items() if not torch.equal(before, now[name])]
        self._buffers = {}
        if changed:
            raise UserError(
                f"{', '.join(changed[:4])}: a buffer that a step changes. It would be lost in checkpoints and differ between "
                "data-parallel ranks: make it a parameter, or compute it from the batch (a mere cache: persistent=False)"
            )

    def _after_step(self, report: StepReport) -> int | None:
        training, evaluation, options = self.config.training, self.config.evaluation, self.config.checkpoint
        step, stop = self.progress.step, report.stop
        every = evaluation.eval_interval
        if not stop and self.data.valid is not None and evaluation.eval_iters > 0 and every and step % every == 0:
            stop = self._evaluate(self.data.valid, "validation")
        self._collect_garbage(step)
        self._check_replicas(step)
        if step >= self.last_step:
            return None  # finished: what follows saves
        exit_now = training.exit_interval is not None and step % training.exit_interval == 0
        due = options.save_interval is not None and step % options.save_interval == 0
        if options.save is not None and (due or report.save or stop or exit_now):
            self._save(final=False)
            stop = stop or agreed(self.mesh, self._stop_reason())  # a save may take long: no further step, no second save
        elif stop or exit_now:
            self.reporter.say(f"there is no --save: no weights of this run are kept (its metrics are, in {self.reporter.log_dir})")
        if stop == STOP_SIGNAL:
            self.reporter.say(f"stopped after step {step} by a signal")
            return exit_codes.SIGNAL
        if stop or exit_now:
            limit = "--exit-interval" if exit_now else "--exit-duration-in-mins"
            self.reporter.say(f"stopped after step {step} by {limit}")
            return exit_codes.LIMIT
        return None

    def _stop_reason(self) -> int:
        if self.signals.stop:
            return STOP_SIGNAL
        limit = self.config.training.exit_duration_in_mins
        over = limit is not None and self.mesh.rank == 0 and time.monotonic() - self._began > 60.0 * limit
        return STOP_LIMIT if over else 0

    def _save_wanted(self) -> bool:
        minutes, rank = self.config.checkpoint.save_interval_minutes, self.mesh.rank
        by_time = minutes is not None and rank == 0 and time.monotonic() - self._last_save_time > 60.0 * minutes
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

    def _check_replicas(self, step: int) -> None:
        """``--check-weight-hash-across-dp-replicas-interval``: copies that drift apart end the run, by name."""
        interval = self.config.training.check_weight_hash_across_dp_replicas_interval
        if interval and step % interval == 0 and (found := replica_differences(self.assembly.gradients)):
            more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
            raise RuntimeError(f"after step {step} copies of weights differ: {'; '.join(found[:4])}{more}")

    def _collect_garbage(self, step: int) -> None:
        training = self.config.training
        interval = training.manual_gc_interval if training.manual_gc else GC_INTERVAL
        if interval and step % interval == 0:
            gc.collect()

    def _evaluate(self, loader: Any, split: str, stop_reason: Callable[[], int] | None = None) -> int:
        """Evaluate and report; returns why any rank wants to stop (then there is no result), or 0."""
        began = time.perf_counter()
        if self.config.training.manual_gc:
            gc.collect()
        found = evaluate(
            self.mesh,
            self.assembly.runtime,
            loader,
            batches=self.config.evaluation.eval_iters,
            global_batch=self.batch.final,
            beat=self.guard.beat,
            stop=stop_reason or self._stop_reason,
        )
        if found.stop == STOP_DATA:
            self._end_unread(f"{split} after step {self.progress.step}", found.unread)
        elif found.stop:
            self.reporter.say(f"step {self.progress.step}: the evaluation was broken off to stop")
        else:
            self.reporter.evaluation(self.progress, found, time.perf_counter() - began, split)
        return found.stop

    def _save(self, *, final: bool) -> None:
        step, mix = self.progress.step, self.data.mix
        self.guard.beat(f"saving step {step}")
        began = time.perf_counter()
        directory = resume.save(
            self.assembly,
            self.config,
            self.progress,
            self.rates,
            self.scaler,
            final=final,
            extra={**self.data.facts, **({} if mix is None else {"mix": mix.state(self.progress.consumed_samples)})},
            beat=lambda: self.guard.beat(f"saving step {step}"),
        )
        self._last_save_time, self._last_saved = time.monotonic(), step
        self._roll_back_to = Path(str(self.config.checkpoint.save))
        self.reporter.say(f"step {step}: saved {directory} in {time.perf_counter() - began:.1f} s")

    def _end_unread(self, what: str, unread: SampleError | None) -> NoReturn:
        """End a run whose samples a rank could not read: what was trained up to here is saved. Collective."""
        where = f" (rank {self.info.rank} on {self.info.host})" if self.info.world_size > 1 else ""
        told = self.mesh.axis("world").gather_json(None if unread is None else f"{unread}{where}")
        error = f"{what}: {next(text for text in told if text)}"
        if self.config.checkpoint.save is not None and self.progress.step > max(0, self._last_saved):
            self.reporter.say(error)  # a save may fail too
            self._save(final=False)
        raise UserError(error) from unread

    # ---- numbers that are not finite

    def _not_finite(self, report: StepReport, batches: Any, scale: float, why: str | None) -> bool:
        """Decide what a step without an update means. True: rolled back. Raises NonFiniteError to stop.

        Args:
            scale: loss scale of the step.
            why: the scaler's reason to stop, if it has one.
        """
        step, training = self.progress.step + 1, self.config.training
        policy = "skip" if self.scaler.kind != "none" else training.on_nan
        if policy == "skip" and why is None:
            numbers = f"loss {report.loss}, gradient norm {report.grad_norm}"
            self.reporter.say(f"step {step}: not finite, the update is skipped ({numbers})")
            return False
        self.guard.beat(f"looking for what is not finite in step {step}")
        micro = batches.microbatches
        scales = self.assembly.step.scales(micro, scale)
        where = diagnose(self.assembly, micro, seed=training.seed, step=self.progress.step, scales=scales)
        if policy != "rollback":
            raise NonFiniteError(where if why is None else f"{why}; {where}")
        if self.progress.rollbacks >= MAX_ROLLBACKS:
            raise NonFiniteError(f"{where}; {MAX_ROLLBACKS} rollbacks did not get past it")
        self._roll_back(where, batches.next_consumed)
        return True

    def _roll_back(self, where: str, end: int) -> None:
        """Load the newest checkpoint of this run and leave out the samples from there to ``end``."""
        if self._roll_back_to is None:
            raise NonFiniteError(f"{where}; this run has no checkpoint yet to roll back to")
        failed = self.progress
        try:
            found = resume.newest_together(self._roll_back_to, self.mesh)
            self.progress, self.rates, found = resume.load(
                self.assembly, self.config, found, self.rates, self.scaler, self.reporter.say, again=True, mix=self.data.mix
            )
        except ValueError as error:
            raise NonFiniteError(f"{where}; no rollback: {error}") from None
        first, end = self.progress.leave_out(failed, end)
        self.data.train.skip(first, end)
        self._last_saved = found.step
        self.reporter.say(
            f"{where}; rolled back to step {found.step} ({self.progress.rollbacks} of {MAX_ROLLBACKS}), "
            f"samples {first:,} to {end - 1:,} are skipped"
        )


class UserError(RuntimeError):
    """What a person can put right, found in the middle of a run."""


def _of_a_step(error: ValueError) -> Exception:
    """What a ValueError in the middle of a run is: data that differ, or a bug of the model's or ours, with its place."""
    if isinstance(error, BatchMismatch):
        return UserError(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")
