"""``megatron-lite generate``: text from a checkpoint, at any tp x pp.

The model, its tokenizer and its size come from the checkpoint; the layout and the dtype are chosen here. Started by
``torchrun`` it uses tp x pp ranks, plainly one. A single prompt's text is printed as it comes, several ones in their order.

Whatever is wrong is found on every rank alike before the ranks meet, and printed by rank 0; after that, one rank's failure
ends all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lite.config.exit_codes import CONFIGURATION, DONE, ERROR

if TYPE_CHECKING:
    from megatron_lite.checkpoint.load import Reader
    from megatron_lite.config.schema import RunConfig
    from megatron_lite.mesh.local import RankInfo
    from megatron_lite.text.tokenizer import Tokenizer
    from megatron_lite.train.guard import Guard, Store
    from megatron_lite.train.inference import Sampling

TOKENIZER_FLAGS = ("--tokenizer-model", "--vocab-file", "--merge-file")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser("megatron-lite generate", description="Text from a checkpoint.")
    p.add_argument("--load", required=True, type=Path, metavar="DIR", help="directory of checkpoints (--save of the run)")
    p.add_argument("--ckpt-step", type=int, default=None, help="step to load (default: the newest complete one)")
    files = "of the tokenizer, where it no longer lies where the run found it"
    for flag in TOKENIZER_FLAGS:
        p.add_argument(flag, metavar="FILE", help=files)
    what = p.add_argument_group("what to continue")
    what.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; give it several times for several")
    what.add_argument("--prompts-file", type=Path, metavar="FILE", help="one prompt per line; empty lines are left out")
    what.add_argument("--max-new-tokens", type=int, default=64)
    how = p.add_argument_group("how tokens are chosen")
    how.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    how.add_argument("--greedy", action="store_true", help="the same as --temperature 0")
    how.add_argument("--top-k", type=int, default=0, help="only the k likeliest tokens (default: all)")
    how.add_argument("--top-p", type=float, default=1.0, help="only the likeliest tokens that have this probability together")
    how.add_argument("--seed", type=int, default=1234)
    how.add_argument("--no-cache", action="store_true", help="compute the whole text again for every token (the same text)")
    where = p.add_argument_group("where it runs")
    where.add_argument("--tensor-model-parallel-size", type=int, default=1)
    where.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    where.add_argument("--dtype", choices=("fp32", "bf16", "fp16", "fp64"), default="fp32")
    where.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return p


@dataclasses.dataclass(frozen=True)
class Job:
    """What every rank knows before it meets the others.

    Attributes:
        ids: tokens of each prompt.
    """

    reader: Reader
    config: RunConfig[Any]
    tokenizer: Tokenizer
    sampling: Sampling
    prompts: list[str]
    ids: list[list[int]]
    max_new_tokens: int
    use_cache: bool


def run(argv: Sequence[str]) -> int:
    """The subcommand."""
    args = parser().parse_args(argv)
    from megatron_lite.mesh.local import die_with_parent, rank_info
    from megatron_lite.train.guard import fail_early

    info = rank_info(os.environ)
    if info.world_size > 1:
        die_with_parent()
    try:
        job = prepare(args, info)
    except Exception as error:
        return fail_early(info, error, os.environ)
    return together(info, job.config, lambda guard: write(info, job, guard))


def prepare(args: argparse.Namespace, info: RankInfo) -> Job:
    """Read everything and check it.

    Raises:
        ValueError: with every problem of the options, else with the first of the checkpoint, tokenizer or prompts.
    """
    from megatron_lite.text.tokenizer import tokenizer_of
    from megatron_lite.train.inference import Sampling, prompt_problems
    from megatron_lite.train.load_model import inference_config, open_checkpoint

    sampling = Sampling(0.0 if args.greedy else args.temperature, args.top_k, args.top_p, args.seed)
    prompts, tp, pp = read_prompts(args), args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    problems = sampling.problems()
    if not args.prompt and args.prompts_file is None:
        problems.append("no prompt: give --prompt or --prompts-file")
    elif not prompts:
        problems.append(f"--prompts-file {args.prompts_file} holds no prompt")
    problems += [f"prompt {n} is empty: give at least one character" for n, p in enumerate(prompts, 1) if not p]
    spoilt = [n for n, p in enumerate(prompts, 1) if any("\ud800" <= c <= "\udfff" for c in p)]
    problems += [f"prompt {n} is not UTF-8" for n in spoilt]
    if args.max_new_tokens < 1:
        problems.append(f"--max-new-tokens {args.max_new_tokens}: at least 1")
    if min(tp, pp) < 1:
        problems.append(f"tensor-model-parallel-size {tp}, pipeline-model-parallel-size {pp}: at least 1")
    elif tp * pp != info.world_size:
        start = f"torchrun --nproc-per-node {tp * pp} -m megatron_lite generate ..." if tp * pp > 1 else "without torchrun"
        problems.append(f"tp {tp} x pp {pp} = {tp * pp} ranks, but {info.world_size} were started: start {start}")
    if problems:
        raise ValueError("; ".join(problems))
    reader = open_checkpoint(args.load, args.ckpt_step)
    config = inference_config(reader.state["config"], tp=tp, pp=pp, dtype=args.dtype, device=args.device)
    given = {name: getattr(args, name) for name in (flag[2:].replace("-", "_") for flag in TOKENIZER_FLAGS)}
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, **{name: value for name, value in given.items() if value is not None})
    )
    tokenizer = tokenizer_of(config.data, config.model.vocab_size)
    before = (reader.state.get("tokenizer") or {}).get("fingerprint")
    if before not in (None, tokenizer.fingerprint) and info.rank == 0:
        print("NOTE: the tokenizer is not that of the checkpoint: its ids mean something else", file=sys.stderr)
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    problems = prompt_problems(ids, args.max_new_tokens, getattr(config.model, "max_position_embeddings", None))
    if problems:
        raise ValueError("; ".join(problems))
    return Job(reader, config, tokenizer, sampling, prompts, ids, args.max_new_tokens, not args.no_cache)


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Prompts of the command line, then those of the file. Raises ValueError for a file that cannot be read."""
    prompts = list(args.prompt)
    if args.prompts_file is not None:
        try:
            text = args.prompts_file.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--prompts-file {args.prompts_file}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompts-file {args.prompts_file} is not UTF-8: {error}") from None
        prompts += [line for line in text.split("\n") if line]
    return prompts


def together(info: RankInfo, config: RunConfig[Any], work: Callable[[Guard], None]) -> int:
    """Join the other ranks and do ``work``; the exit code. A failure on any rank ends all of them, with its error."""
    from megatron_lite.mesh.local import leave, start
    from megatron_lite.train.build import backend_of
    from megatron_lite.train.guard import Guard

    minutes = config.parallel.distributed_timeout_minutes
    guards: list[Guard] = []

    def watch(store: Store | None) -> None:
        guards.append(Guard(info, store, 60.0 * minutes))
        guards[0].start()

    store = start(info, backend_of(config), 2.0 * minutes, os.environ, met=watch)
    if store is None:
        watch(None)
    guard = guards[0]
    try:
        work(guard)
    except BaseException as error:  # whatever it is, the other ranks must hear of it
        if info.world_size == 1:
            guard.stop()
            raise
        sys.stdout.flush()
        os._exit(guard.fail(error, CONFIGURATION if isinstance(error, ValueError) else ERROR))
    guard.stop()
    leave()
    return DONE


def write(info: RankInfo, job: Job, guard: Guard) -> None:
    """Load the model, generate, and print on rank 0. Collective."""
    from megatron_lite.train.inference import Generator
    from megatron_lite.train.load_model import load_model

    guard.beat("loading the model")
    mesh, runtime = load_model(job.config, info, job.reader)
    generator = Generator(runtime, mesh, getattr(job.config.model, "max_position_embeddings", None))
    stream = Stream(job.tokenizer, job.prompts[0], job.ids[0]) if info.rank == 0 and len(job.ids) == 1 else None

    def chosen(prompt: int, token: int) -> None:
        guard.beat("generating")
        if stream is not None:
            stream.add(token)

    new = generator.generate(
        job.ids,
        job.max_new_tokens,
        job.sampling,
        stop_id=job.tokenizer.eod_id,
        use_cache=job.use_cache,
        on_token=chosen,
    )
    if stream is not None:
        stream.end()
    elif info.rank == 0:
        for prompt, before, after in zip(job.prompts, job.ids, new, strict=True):
            print(prompt + continuation(job.tokenizer, before, after), flush=True)
    mesh.close()


def continuation(tokenizer: Tokenizer, before: Sequence[int], after: Sequence[int]) -> str:
    """The text of new tokens behind a prompt's: a token may begin with a space that it loses where nothing precedes it."""
    start, whole = tokenizer.decode(before), tokenizer.decode([*before, *after])
    return whole[len(start) :] if whole.startswith(start) else tokenizer.decode(after)


class Stream:
    """Prints a text as its tokens come; characters of several tokens when they are whole."""

    def __init__(self, tokenizer: Tokenizer, prompt: str, before: Sequence[int]) -> None:
        self._tokenizer, self._before = tokenizer, before
        self._after: list[int] = []
        self._printed = ""
        print(prompt, end="", flush=True)

    def add(self, token: int) -> None:
        """One more token."""
        self._after.append(token)
        text = continuation(self._tokenizer, self._before, self._after)
        whole = text.rstrip("\ufffd")  # bytes that may yet become a character
        if whole.startswith(self._printed):
            print(whole[len(self._printed) :], end="", flush=True)
            self._printed = whole

    def end(self) -> None:
        """What was held back, and the end of the line."""
        text = continuation(self._tokenizer, self._before, self._after)
        print(text[len(os.path.commonprefix([text, self._printed])) :], flush=True)
