"""The batches of a step, built ahead of time.

Threads read rows (copies out of mapped files) and build microbatches while the device computes; pages that are not in
memory yet are waited for there, not in the training loop. Threads and not processes: the work is a few copies, which
need no second interpreter, and what they make needs no copy back. What is ahead is a queue of microbatches in order.
Since the order of a rank's microbatches does not depend on where steps end, the queue stays right when the batch size
ramps; when the loop asks for something else (a rollback), it is dropped and built anew.

The digest of a step is what ranks compare to be sure that they compute on the same samples: sample numbers, document
borders, loss masks, valid-token counts and token ids.

A disk that does not answer, or a function of one's own that does not return, is named after 10 seconds, and again and again.
"""

from __future__ import annotations

import struct
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_lite.data.batch import Batch, make_batch
from megatron_lite.data.row import Dataset, Row
from megatron_lite.data.sampler import Sampler
from megatron_lite.data.transform import TransformedRows

_PATIENCE = 10.0  # seconds that samples are waited for without a word
_BYTES_PER_TOKEN = 32  # tokens, targets, positions: int64; cu_seqlens: int32; loss_mask: float32


class SampleError(ValueError):
    """A sample that could not be read; the message has its number, ``__cause__`` the reason."""


@dataclass(frozen=True)
class StepBatches:
    """One step of one data-parallel rank.

    Attributes:
        microbatches: in order, on the loader's device.
        digest: 32 bits over what was read; equal on all ranks of the same data-parallel index.
        valid_tokens: target tokens that count, over the microbatches.
        wait_seconds: how long the caller waited for them.
        next_consumed: ``consumed`` after this step (skipped ranges included).
        samples: the sample numbers of each microbatch.
    """

    microbatches: list[Batch]
    digest: int
    valid_tokens: int
    wait_seconds: float
    next_consumed: int
    samples: list[list[int]]


_Built = tuple[Batch, int]  # and its digest


class Loader:
    """Microbatches of one data-parallel rank.

    Args:
        dataset: what to read.
        micro_batch_size, dp_size, dp_index: see :class:`Sampler`.
        seq_length: S; every row must have S + 1 tokens.
        num_workers: threads; 0 builds in :meth:`step`.
        device: where batches go; to CUDA they are copied on a stream of their own.
        pin_memory: with CUDA, build in page-locked memory, so that copies go on beside the computation.
        document_mask, eod_id, eod_mask_loss: see :func:`make_batch`.
        skipped: ranges of samples that are not read.
        bytes_ahead: how many bytes of batches are kept built: as many steps as fit, but at least 2 and at most 8.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        micro_batch_size: int,
        seq_length: int,
        dp_index: int = 0,
        dp_size: int = 1,
        num_workers: int = 2,
        device: torch.device | str = "cpu",
        pin_memory: bool = True,
        document_mask: bool = True,
        eod_id: int | None = None,
        eod_mask_loss: bool = False,
        skipped: Iterable[tuple[int, int]] = (),
        bytes_ahead: int = 32 << 20,
    ) -> None:
        if eod_mask_loss and eod_id is None:
            raise ValueError(
                "--eod-mask-loss needs the end-of-document id, and neither the tokenizer nor the data tell it"
            )
        self.dataset, self.seq_length, self.device = dataset, seq_length, torch.device(device)
        self.sampler = Sampler(micro_batch_size, dp_size, dp_index, tuple(skipped))
        self._options = {"document_mask": document_mask, "eod_id": eod_id, "eod_mask_loss": eod_mask_loss}
        self._bytes_ahead, self.pin_memory = bytes_ahead, pin_memory
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(num_workers, "loader", self._enter_thread) if num_workers else None
        self._queue: deque[tuple[int, list[int], Future[_Built]]] = deque()  # (consumed before it, samples, microbatch)
        self._tail = 0  # consumed after the last one in the queue
        self._reading: set[int] = set()  # samples that threads are at

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, consumed: int, global_batch_size: int) -> None:
        """Begin to build a step before it is asked for (for example while the model is being set up)."""
        if self._pool is not None:
            self._seek(consumed)
            self._fill(self.sampler.microbatches(global_batch_size))

    def step(self, consumed: int, global_batch_size: int) -> StepBatches:
        """The microbatches of the step that starts after ``consumed`` samples.

        Raises:
            ValueError: the global batch does not divide.
            SampleError: a sample could not be read.
        """
        count = self.sampler.microbatches(global_batch_size)
        began = time.perf_counter()
        self._seek(consumed)
        self._fill(count)
        built: list[_Built] = []
        samples: list[list[int]] = []
        try:
            for _ in range(count):
                _, ids, future = self._queue.popleft()
                samples.append(ids)
                built.append(self._result(future))
        except BaseException:
            self._drop()
            raise
        waited = time.perf_counter() - began
        if self._pool is not None:
            self._fill(count * self._steps_ahead(count))
        digest = 0
        for _, one in built:
            digest = zlib.crc32(struct.pack("<I", one), digest)
        batches = [replace(batch, first_row=self.sampler.first_row(m)) for m, (batch, _) in enumerate(built)]
        return StepBatches(
            microbatches=self._to_device(batches),
            digest=digest,
            valid_tokens=sum(batch.valid_tokens for batch in batches),
            wait_seconds=waited,
            next_consumed=self.sampler.after(consumed, global_batch_size),
            samples=samples,
        )

    def blank(self, consumed: int, global_batch_size: int) -> StepBatches:
        """In place of a step that cannot be read: the same shapes, samples and number of microbatches, and no target that counts."""
        zeros = np.zeros(self.seq_length + 1, dtype=np.int64)
        row = Row(zeros, zeros[:1], consumed, np.zeros(self.seq_length, dtype=np.uint8))
        batch, samples, at = make_batch([row] * self.sampler.micro_batch_size), [], consumed
        for _ in range(self.sampler.microbatches(global_batch_size)):
            samples.append(self.sampler.rows(at, 0))
            at = self.sampler.after(at, self.sampler.stride)
        batches = [replace(batch, first_row=self.sampler.first_row(m)) for m in range(len(samples))]
        return StepBatches(self._to_device(batches), 0, 0, 0.0, self.sampler.after(consumed, global_batch_size), samples)

    def skip(self, start: int, stop: int) -> None:
        """Take samples [start, stop) out of the order from now on (a rollback)."""
        self._drop()
        self.sampler = replace(self.sampler, skipped=(*self.sampler.skipped, (start, stop)))

    def close(self) -> None:
        """Stop the threads. The loader can still be used: it goes on without them."""
        self._drop()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _result(self, future: Future[_Built]) -> _Built:
        waited, patience = 0.0, _PATIENCE
        while not future.done() and not wait([future], patience).done:
            waited, patience = waited + patience, 2 * patience
            through = f", in --transform {self.dataset.transform.name}" if isinstance(self.dataset, TransformedRows) else ""
            samples = ", ".join(map(str, sorted(self._reading)))
            rank = self.sampler.dp_index
            print(f"waiting {waited:.0f} s for sample {samples} (data-parallel rank {rank}){through}", file=sys.stderr, flush=True)
        return future.result()

    def _seek(self, consumed: int) -> None:
        """Make the queue begin at ``consumed``."""
        if self._queue and self._queue[0][0] != consumed:
            self._drop()
        if not self._queue:
            self._tail = consumed

    def _fill(self, count: int) -> None:
        """Have ``count`` microbatches in the queue, built or under way."""
        while len(self._queue) < count:
            ids = self.sampler.rows(self._tail, 0)
            if self._pool is not None:
                future = self._pool.submit(self._build, ids)
            else:
                future = Future()
                future.set_result(self._build(ids))
            self._queue.append((self._tail, ids, future))
            self._tail = self.sampler.after(self._tail, self.sampler.stride)

    def _steps_ahead(self, microbatches: int) -> int:
        """Steps to keep built ahead. Several small ones ride out a stall of the disk or of the scheduler."""
        size = microbatches * self.sampler.micro_batch_size * self.seq_length * _BYTES_PER_TOKEN
        return min(8, max(2, self._bytes_ahead // size))

    def _drop(self) -> None:
        for _, _, future in self._queue:
            future.cancel()
        self._queue.clear()

    def _build(self, ids: list[int]) -> _Built:
        """One microbatch, on the host."""
        batch = make_batch([self._row(j) for j in ids], **self._options)  # type: ignore[arg-type]
        offsets = batch.cu_seqlens.numpy()[: batch.num_documents + 1]
        digest = zlib.crc32(struct.pack(f"<{len(ids)}qq", *ids, batch.valid_tokens))
        for part in (
            offsets,
            batch.tokens.numpy(),
            batch.targets.numpy()[self.seq_length - 1 :: self.seq_length].copy(),
            batch.loss_mask.numpy(),
        ):
            digest = zlib.crc32(part.data, digest)
        return batch.pin() if self._stream is not None and self.pin_memory else batch, digest

    def _enter_thread(self) -> None:
        """Page-locked memory belongs to a device's context: without this, threads would open one on the first GPU."""
        if self._stream is not None:
            torch.cuda.set_device(self.device)

    def _row(self, j: int) -> Row:
        self._reading.add(j)
        try:
            row = self.dataset.row(j)
            if len(row.tokens) != self.seq_length + 1:
                raise ValueError(f"it has {len(row.tokens)} tokens, not the {self.seq_length + 1} of a row")
        except Exception as error:
            raise SampleError(
                f"sample {j} (data-parallel rank {self.sampler.dp_index}) could not be read: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._reading.discard(j)
        return row

    def _to_device(self, batches: list[Batch]) -> list[Batch]:
        """Copies on the copy stream, which the current stream waits for."""
        if self._stream is None:
            return batches if self.device.type == "cpu" else [batch.to(self.device) for batch in batches]
        with torch.cuda.stream(self._stream):
            moved = [batch.to(self.device) for batch in batches]
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for batch in moved:
            batch.record_stream(current)
        return moved
