"""From text to an indexed dataset.

Workers parse and tokenize blocks of the input (:mod:`.encode`; threads with the fast tokenizer, else processes), in a run as
:mod:`.run` has it. What a record is, and which lines are bad, says :mod:`.records`. A bad one ends the run with file, line,
reason and its first 80 characters, or is counted by reason (``--skip-bad``); a text that the tokenizer refuses makes its
record bad.

A record in which a text is empty, only white space, or without a single token is *empty*: it is skipped for all keys,
so that the outputs of several keys stay aligned, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from megatron_lite.text.blocks import Block, InputOptions
from megatron_lite.text.encode import SENTENCE_END, Counts, Encoded, Options, Work, encode_block, texts_of
from megatron_lite.text.run import Job, Stream, in_order, run_job
from megatron_lite.text.tokenizer_fast import Encoder, encoder_of

__all__ = ["SENTENCE_END", "Counts", "Options", "preprocess", "summary"]

_TRIED = 1 << 16  # characters of the input's start that the fast tokenizer is tried on
_SHARING = 4  # threads with one encoder that remembers words


def preprocess(
    inputs: Sequence[Path],
    output_prefix: str,
    options: Options,
    *,
    reading: InputOptions | None = None,
    **running: Any,
) -> Counts:
    """Tokenize files into ``PREFIX_KEY_document.bin/.idx/.meta.json`` (``_sentence`` with ``split_sentences``), a pair for each key.

    Args:
        inputs: files, as :func:`megatron_lite.text.inputs.expand_inputs` gives them.
        output_prefix: PREFIX.
        options: what is done to the texts.
        reading: how files are read; the keys are those of ``options``.
        running: see :func:`megatron_lite.text.run.run_job`, as for what it raises.

    Raises:
        ValueError: a tokenizer that cannot be used, or a key given twice.
    """
    return run_job(_Texts(output_prefix, options, reading or InputOptions()), inputs, output_prefix, **running)


class _Texts(Job):
    """The job of tokenizing texts."""

    def __init__(self, prefix: str, options: Options, reading: InputOptions) -> None:
        keys = options.keys
        if len(set(keys)) != len(keys):
            raise ValueError(f"--json-keys {' '.join(keys)}: each key once, since each has an output of its own")
        own = {"json_keys": list(keys), "append_eod": options.append_eod, "split_sentences": options.split_sentences}
        outputs = {options.output(prefix, key): key for key in keys}
        super().__init__(outputs, replace(reading, keys=keys), options, options.append_eod, separator=reading.separator, **own)

    def begin(self, first: Block | None, say: Callable[[str], None]) -> None:
        if not self.options.append_eod and first is not None and self.texts(first):  # and no record of something else
            say("note: without --append-eod a model does not learn where a document ends")
        super().begin(first, say)

    def texts(self, block: Block) -> list[str]:
        return texts_of(block, self.options.keys, _TRIED)

    @staticmethod
    def work(options: Options, encoder: Encoder) -> Callable[[Work], Encoded]:
        return partial(encode_block, encoder, options)

    def encoded(self, stream: Stream, workers: int, stack: ExitStack) -> Iterator[Encoded]:
        if self.encoder.is_fast and not self.options.split_sentences:
            return _in_threads(stream, self.encoder, self.options, workers, stack)
        return super().encoded(stream, workers, stack)


def _in_threads(
    stream: Stream, encoder: Encoder, options: Options, workers: int, stack: ExitStack
) -> Iterator[Encoded]:
    """As processes would, without the cost of sending: nearly all of the fast path runs outside of the interpreter's lock."""
    sharing = _SHARING if encoder.remembers else 1
    encoders: list[Encoder | None] = [encoder, *[None] * ((workers - 1) // sharing)]
    turns: SimpleQueue[int] = SimpleQueue()
    for number in range(workers):
        turns.put(number // sharing)

    def encode(work: Work) -> Encoded:
        turn = turns.get()
        try:
            own = encoders[turn] = encoders[turn] or encoder_of(encoder.tokenizer, prove=False)
            return encode_block(own, options, work)
        finally:
            turns.put(turn)

    pool = ThreadPoolExecutor(workers)
    stack.callback(pool.shutdown, cancel_futures=True)
    return in_order(pool, encode, stream.work(), 2 * workers)


def summary(counts: Counts, seconds: float) -> str:
    """What happened, for people."""
    lines = [f"{counts.documents:,} documents, {counts.tokens:,} tokens from {counts.size} in {seconds:.1f} s", *counts.skipped()]
    if counts.compared:
        lines.append(
            f"{counts.compared:,} texts on the way were compared with the reference tokenizer, with the same ids"
        )
    if counts.holds_eod:
        lines.append(
            f"{counts.holds_eod} texts hold the end-of-document token themselves: "
            "--sample-order megatron sees a border there"
        )
    return "\n".join(lines)
