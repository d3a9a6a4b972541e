"""``megatron-lite check [MODEL]``: prove that a model computes the same numbers in every layout.

Runs the equivalence matrix (docs/equivalence.md) on a built-in or a team's own model, on one to four gloo ranks of this
machine, in fp64: loss, gradient norm, every gradient and every weight after three steps against one process. Sizes that
neither flags nor the model's defaults give are tiny ones. It prints a table, one line for each layout and set of options.
Exit status: 0 every line is equal or refused by the model, 1 one is not equal.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

OPTIONS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (  # name, parallel, training
    ("plain", {}, {}),
    (
        "sequence parallel, ZeRO-1, overlap",
        {"sequence_parallel": True, "zero_stage": 1, "overlap_grad_reduce": True},
        {},
    ),
    ("ZeRO-1, full recompute", {"zero_stage": 1}, {"recompute_granularity": "full"}),
)
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "vocab_size", "max_position_embeddings")


def run(argv: Sequence[str]) -> int:
    """The subcommand."""
    parser = argparse.ArgumentParser(
        "megatron-lite check",
        description="Prove that a model computes the same numbers in every layout (fp64, gloo, up to four ranks here).",
        epilog="Further flags are those of the model, as for `megatron-lite train` (--num-layers 3, --model.FIELD value).",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="gpt, llama or MODULE:CLASS (default: small ones of gpt and llama)"
    )
    parser.add_argument("--max-ranks", type=int, default=4, choices=(1, 2, 3, 4), help="most ranks (default: 4)")
    parser.add_argument("--seq-length", type=int, default=16, help="tokens of a row (default: 16)")
    parser.add_argument("--global-batch-size", type=int, default=12, help="rows of a step (default: 12)")
    args, rest = parser.parse_known_args(argv)
    if args.seq_length < 2 or args.global_batch_size < 1:
        raise ValueError("--seq-length is at least 2 tokens, --global-batch-size at least 1 row")
    models = list(_models(args.model, rest, args.seq_length))
    from megatron_lite.testing.ranks import close_pool

    try:
        passed = [_check(architecture, model, args) for architecture, model in models]
    finally:
        close_pool()
    return 0 if all(passed) else 1


def _models(name: str | None, rest: Sequence[str], seq_length: int) -> Iterator[tuple[str, Any]]:
    """(architecture, configuration) of what is to be checked."""
    from megatron_lite.testing.layouts import TINY, tiny_gpt, tiny_llama

    small = {**TINY, "max_position_embeddings": max(16, seq_length)}
    builtin: dict[str, Callable[..., Any]] = {"gpt": tiny_gpt, "llama": tiny_llama}
    if not rest and (name is None or name in builtin):
        for key, make in builtin.items():
            if name in (None, key):
                yield key, make(max_position_embeddings=small["max_position_embeddings"])
        return
    yield name or "gpt", _model(name or "gpt", rest, small)


def _model(name: str, rest: Sequence[str], small: dict[str, Any]) -> Any:
    """The configuration that flags give, with tiny sizes where nothing is given."""
    from megatron_lite.cli.train import resolve_model
    from megatron_lite.config import argv as command_line
    from megatron_lite.config import flags
    from megatron_lite.config.load import load

    config_class = resolve_model(name)
    fields = {f.name: f for f in dataclasses.fields(config_class)}
    given = {flag for flag, _ in command_line.cut(rest)[0]}
    argv = ["--model", name, *rest]
    for flag, its in flags.field_flags(config_class).items():
        if (
            its.section == "model"
            and its.name in SIZES
            and flag not in given
            and fields[its.name].default is dataclasses.MISSING
        ):
            argv += [flag, str(small[its.name])]  # a team's required field has to stand on the command line
    loaded = load(argv, resolve_model, prog="megatron-lite check")
    others = sorted(key[1] for key in loaded.given if key[0] not in ("model", ""))
    if others:
        raise ValueError(f"{', '.join(others)}: `check` takes the model's flags; layouts and options are its own")
    model = loaded.config.model
    missing = {
        key: small[key]
        for key in SIZES
        if key in fields and ("model", key) not in loaded.given and getattr(model, key) in (0, None)
    }
    if "hidden_size" not in missing:
        missing.pop("ffn_hidden_size", None)  # it follows from the hidden size
    return dataclasses.replace(model, **missing)


def _check(architecture: str, model: Any, args: argparse.Namespace) -> bool:
    """Run and print the table of one model; whether every line holds."""
    from megatron_lite.model.problems import model_problems
    from megatron_lite.model.protocol import load_definition
    from megatron_lite.testing.equal import without_gradient
    from megatron_lite.testing.layouts import Case, legal_layouts, reference_of

    base = Case(model=model, architecture=architecture, global_batch=args.global_batch_size, seq_length=args.seq_length)
    wrong = model_problems(
        load_definition(architecture), model, base.layout, sequence_parallel=False, seq_length=args.seq_length
    )
    if wrong:
        raise ValueError(f"{architecture} cannot run on one rank: {'; '.join(wrong)}")
    sizes = f"{args.global_batch_size} rows of {args.seq_length} tokens"
    print(f"{architecture}: three steps of {sizes} in fp64, against one process", flush=True)
    print(f"  {'layout':<18} | {'options':<34} | result", flush=True)
    reference, good, rounded, stories = reference_of(base), True, False, []
    for layout in legal_layouts(args.max_ranks):
        if layout.world_size == 1 and args.max_ranks > 1:
            continue
        for title, verdict in _rows(base, layout, reference):
            first, _, story = verdict.partition("\n")
            print(f"  {f'tp {layout.tp} x pp {layout.pp} x dp {layout.dp}':<18} | {title:<34} | {first}", flush=True)
            if verdict.startswith(NOT_EQUAL):
                good = False
                rounded = rounded or FP32 in verdict
                stories += [f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}, {title}:\n{story}"] if story else []
    print("\n".join(stories[:1]), end="\n" if stories else "")  # what a rank raised, once
    if idle := without_gradient(reference):
        more = f" and {len(idle) - 6} more" if len(idle) > 6 else ""
        print(f"NO GRADIENT in any step: {', '.join(idle[:6])}{more}: never used, or cut off from the loss")
    if rounded:
        print(
            "Deviations around 1e-8 are fp32 in a model of fp64: look for .float() or a dtype that is written out in the model, "
            "and for buffers and constants made in fp32"
        )
    print(f"{architecture}: {'every layout that it takes computes the same' if good else NOT_EQUAL}", flush=True)
    return good


NOT_EQUAL, FP32 = "NOT EQUAL", "; looks like fp32"


def _rows(base: Any, layout: Any, reference: Any) -> Iterator[tuple[str, str]]:
    """(options, verdict) of a layout, all its cases on the same ranks."""
    from megatron_lite.testing.layouts import micro_batch_of

    cases: dict[str, Any] = {}
    verdicts: dict[str, str] = {}
    for title, parallel, training in OPTIONS:
        if base.global_batch % layout.dp:
            verdicts[title] = f"left out: {base.global_batch} rows do not divide by {layout.dp} data-parallel ranks"
            continue
        size = micro_batch_of(layout, base.global_batch)
        case = dataclasses.replace(base, layout=layout, parallel=parallel, training=training, micro_batch=size)
        refused = _refused(case)
        if refused:
            verdicts[title] = f"refused: {refused}"
        else:
            cases[title] = case
    for title, _, _ in OPTIONS:
        if title in cases and title not in verdicts:
            verdicts.update(_verdicts(cases, reference))
        yield title, verdicts[title]


def _refused(case: Any) -> str:
    """Why this cell cannot run, or ""."""
    from megatron_lite.config.check import check
    from megatron_lite.model.problems import model_problems
    from megatron_lite.model.protocol import load_definition

    found = [str(p) for p in check(case.config(), case.layout.world_size, [])]
    found += model_problems(
        load_definition(case.architecture),
        case.model,
        case.layout,
        sequence_parallel=bool(case.parallel.get("sequence_parallel")),
        seq_length=case.seq_length,
    )
    return found[0] if found else ""


def _verdicts(cases: dict[str, Any], reference: Any) -> dict[str, str]:
    """Run the cases of one layout and hold each against the reference; where a rank fails, each case on its own."""
    from megatron_lite.testing.equal import Mismatch, compare
    from megatron_lite.testing.layouts import run_cases
    from megatron_lite.testing.ranks import RankFailed, RankHang, run_ranks

    began = time.monotonic()
    ranks = next(iter(cases.values())).layout.world_size
    try:
        by_rank = run_ranks(ranks, run_cases, list(cases.values()), timeout=600)
    except (RankFailed, RankHang) as error:
        if len(cases) > 1:
            return {t: v for title, case in cases.items() for t, v in _verdicts({title: case}, reference).items()}
        lines = str(error).split("\nvalues at the last line:")[0].strip().splitlines()
        return {next(iter(cases)): "\n".join([f"{NOT_EQUAL}: {lines[-1]}", *lines])}
    seconds = (time.monotonic() - began) / len(cases)
    found = {}
    for i, title in enumerate(cases):
        try:
            worst = compare([results[i] for results in by_rank], reference)
            found[title] = f"equal, deviation {worst:.1e} ({seconds:.1f} s)"
        except Mismatch as mismatch:
            found[title] = f"{NOT_EQUAL}: {mismatch}{FP32 if mismatch.looks_like_fp32 else ''}"
    return found
