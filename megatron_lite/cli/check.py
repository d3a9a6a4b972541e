"""``megatron-lite check [MODULE:CLASS]``: prove that a model computes the same numbers in every layout.

Runs the equivalence matrix (docs/equivalence.md) on a built-in or a team's own model, on one to four gloo ranks of this
machine, in fp64: loss, gradient norm, every gradient and every weight after three steps against one process. Flags of the
model (``--num-layers 2``, ``--model.FIELD value``) make it small enough to be quick.
Exit status: 0 every layout agrees or is refused by the model, 1 one does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

OPTIONS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("plain", {}, {}),
    ("sequence parallel, ZeRO-1, overlap", {"sequence_parallel": True, "zero_stage": 1, "overlap_grad_reduce": True}, {}),
    ("ZeRO-1, full recompute", {"zero_stage": 1}, {"recompute_granularity": "full"}),
)


def run(argv: Sequence[str]) -> int:
    """The subcommand."""
    parser = argparse.ArgumentParser(
        "megatron-lite check",
        description="Prove that a model computes the same numbers in every layout (fp64, gloo, up to four ranks here).",
        epilog="Further flags are those of the model, as for `megatron-lite train`.",
    )
    parser.add_argument("model", nargs="?", default=None, metavar="MODULE:CLASS", help="gpt, llama or a class of your own (default: small ones of both)")
    parser.add_argument("--max-ranks", type=int, default=4, choices=(1, 2, 3, 4), help="largest number of ranks (default: 4)")
    parser.add_argument("--seq-length", type=int, default=16, help="tokens of a row (default: 16)")
    parser.add_argument("--global-batch-size", type=int, default=12, help="rows of a step (default: 12)")
    args, rest = parser.parse_known_args(argv)
    from megatron_lite.testing.ranks import close_pool

    try:
        passed = True
        for architecture, model in _models(args.model, rest, args.seq_length):
            passed = _check(architecture, model, args) and passed
    finally:
        close_pool()
    return 0 if passed else 1


def _models(name: str | None, rest: Sequence[str], seq_length: int) -> list[tuple[str, Any]]:
    """(architecture, configuration) of what is to be checked."""
    from megatron_lite.cli.train import resolve_model
    from megatron_lite.config.load import load
    from megatron_lite.config.transformer import TransformerConfig
    from megatron_lite.testing.layouts import TINY, tiny_gpt, tiny_llama

    small = {"gpt": tiny_gpt, "llama": tiny_llama}
    if not rest and (name is None or name in small):
        size = {"max_position_embeddings": max(16, seq_length)}
        return [(key, make(**size)) for key, make in small.items() if name in (None, key)]
    loaded = load(["--model", name or "gpt", *rest], resolve_model, prog="megatron-lite check")
    model = loaded.config.model
    if isinstance(model, TransformerConfig):  # sizes that nobody gave are those of the small models
        missing = {k: v for k, v in TINY.items() if ("model", k) not in loaded.given and getattr(model, k) in (0, None)}
        model = dataclasses.replace(model, **missing)
    return [(loaded.config.architecture, model)]


def _check(architecture: str, model: Any, args: argparse.Namespace) -> bool:
    """Run and print the table of one model; whether every cell holds."""
    from megatron_lite.config.check import check
    from megatron_lite.model.problems import model_problems
    from megatron_lite.model.protocol import load_definition
    from megatron_lite.testing.layouts import Case, Mismatch, compare, legal_layouts, micro_batch_of, reference_of, run_case
    from megatron_lite.testing.ranks import RankFailed, RankHang, run_ranks

    definition = load_definition(architecture)
    base = Case(model=model, architecture=architecture, global_batch=args.global_batch_size, seq_length=args.seq_length)
    wrong = model_problems(definition, model, base.layout, sequence_parallel=False, seq_length=args.seq_length)
    if wrong:
        raise ValueError(f"{architecture} cannot run on one rank: {'; '.join(wrong)}")
    print(f"{architecture}: against one process, fp64, {args.global_batch_size} rows of {args.seq_length} tokens", flush=True)
    reference = reference_of(base)
    good = True
    for layout in legal_layouts(args.max_ranks):
        if layout.world_size == 1 and args.max_ranks > 1:
            continue
        for title, parallel, training in OPTIONS:
            case = dataclasses.replace(
                base, layout=layout, parallel=parallel, training=training, micro_batch=micro_batch_of(layout, base.global_batch)
            )
            refused = [str(p) for p in check(case.config(), layout.world_size, [])]
            refused += model_problems(
                definition, model, layout, sequence_parallel=bool(parallel.get("sequence_parallel")), seq_length=args.seq_length
            )
            began = time.monotonic()
            if refused:
                verdict = f"refused: {refused[0]}"
            else:
                try:
                    worst = compare(run_ranks(layout.world_size, run_case, case, timeout=600), reference)
                    verdict = f"equal, deviation {worst:.1e} ({time.monotonic() - began:.1f} s)"
                except (Mismatch, RankFailed, RankHang) as error:
                    good = False
                    verdict = f"NOT EQUAL: {error}"
            print(f"  tp {layout.tp} x pp {layout.pp} x dp {layout.dp} | {title:<35} | {verdict}", flush=True)
    return good
