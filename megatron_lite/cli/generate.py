"""``megatron-lite generate``: text from a checkpoint, at any tp x pp.

The model, its tokenizer and its size come from the checkpoint; the layout and the dtype are chosen here. Started by
``torchrun`` it uses tp x pp ranks, plainly one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lite.config.exit_codes import CONFIGURATION, DONE

if TYPE_CHECKING:
    from megatron_lite.config.schema import RunConfig


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser("megatron-lite generate", description="Text from a checkpoint.")
    p.add_argument("--load", required=True, type=Path, metavar="DIR", help="directory of checkpoints (--save of the run)")
    p.add_argument("--ckpt-step", type=int, default=None, help="step to load (default: the newest complete one)")
    what = p.add_argument_group("what to continue")
    what.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be given several times")
    what.add_argument("--prompts-file", type=Path, metavar="FILE", help="one prompt per line")
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


def run(argv: Sequence[str]) -> int:
    """The subcommand."""
    args = parser().parse_args(argv)
    from megatron_lite.mesh.local import rank_info
    from megatron_lite.train.inference import Sampling

    info = rank_info(os.environ)
    sampling = Sampling(0.0 if args.greedy else args.temperature, args.top_k, args.top_p, args.seed)
    prompts = list(args.prompt)
    if args.prompts_file is not None:
        prompts += [line for line in args.prompts_file.read_text(encoding="utf-8").split("\n") if line]
    problems = sampling.problems()
    if not prompts:
        problems.append("no prompt: give --prompt or --prompts-file")
    if args.max_new_tokens < 1:
        problems.append(f"--max-new-tokens {args.max_new_tokens}: at least 1")
    ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if ranks != info.world_size:
        sizes = f"tp {args.tensor_model_parallel_size} x pp {args.pipeline_model_parallel_size}"
        problems.append(f"{sizes} = {ranks} ranks, but {info.world_size} were started")
    if problems:
        if info.rank == 0:
            print("megatron-lite generate: " + "; ".join(problems), file=sys.stderr)
        return CONFIGURATION
    return _generate(args, info, sampling, prompts)


def inference_config(saved: dict[str, Any], *, tp: int = 1, pp: int = 1, dtype: str = "fp32", device: str = "auto") -> RunConfig[Any]:
    """The configuration of a checkpoint's model for inference in another layout and dtype."""
    from megatron_lite.cli.train import resolve_model
    from megatron_lite.config.load import from_dict

    config = from_dict(saved, resolve_model, "the checkpoint's configuration")
    parallel = dataclasses.replace(
        config.parallel,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=1,
        sequence_parallel=False,  # generation runs on rows of any length
        device=device,  # type: ignore[arg-type]
    )
    flags: dict[str, Any] = {name: name == dtype for name in ("bf16", "fp16", "fp64")}
    training = dataclasses.replace(config.training, recompute_granularity=None, **flags)
    return dataclasses.replace(config, parallel=parallel, training=training)


def continuation(tokenizer: Any, before: list[int], after: list[int]) -> str:
    """The text of new tokens behind a prompt's: a token may begin with a space that it loses where nothing precedes it."""
    start, whole = tokenizer.decode(before), tokenizer.decode([*before, *after])
    return whole[len(start) :] if whole.startswith(start) else tokenizer.decode(after)


def _generate(args: argparse.Namespace, info: Any, sampling: Any, prompts: list[str]) -> int:
    from megatron_lite.checkpoint.load import Reader
    from megatron_lite.checkpoint.manifest import find_checkpoint
    from megatron_lite.data.tokenizer import tokenizer_of
    from megatron_lite.mesh.local import start
    from megatron_lite.train.inference import Generator
    from megatron_lite.train.load_model import load_model
    from megatron_lite.train.loop import backend_of

    found = find_checkpoint(args.load, args.ckpt_step)
    if found is None:
        raise ValueError(f"--load {args.load}: there is no checkpoint in it")
    reader = Reader(found.directory)
    config = inference_config(
        reader.state["config"],
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        dtype=args.dtype,
        device=args.device,
    )
    tokenizer = tokenizer_of(config.data, config.model.vocab_size)
    start(info, backend_of(config), config.parallel.distributed_timeout_minutes, os.environ)
    mesh, runtime = load_model(config, info, reader)
    generator = Generator(runtime, mesh, getattr(config.model, "max_position_embeddings", None))
    ids = [tokenizer.encode(prompt) or [tokenizer.eod_id] for prompt in prompts]
    texts = generator.generate(
        ids, args.max_new_tokens, sampling, stop_id=tokenizer.eod_id, use_cache=not args.no_cache
    )
    if info.rank == 0:
        for prompt, before, after in zip(prompts, ids, texts, strict=True):
            print(prompt + continuation(tokenizer, before, after), flush=True)
    mesh.close()
    return DONE
