"""``megatron-lite data drift REFERENCE NEW``: whether a corpus has moved away from another one, and in what.

Exit status: 0 nothing moved, 1 something did, 2 configuration, input, or too few documents to tell.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from megatron_lite.cli.corpus import add_reading_flags, status_of, strict
from megatron_lite.cli.tokenizer_flags import add_tokenizer_flags, tokenizer_options
from megatron_lite.config.exit_codes import CONFIGURATION, DONE, ERROR
from megatron_lite.text.tokenizer import flag_of


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        "megatron-lite data drift",
        description="Compare the documents of two corpora by length, compression ratio and entropy of bytes or tokens "
        "(Kolmogorov-Smirnov statistic D).",
    )
    what = "a file, pattern or directory of a corpus, or a profile that --save-profile wrote (.drift.json)"
    p.add_argument("reference", help=what)
    p.add_argument("new", nargs="?", help=what + "; leave it out to write the reference's profile only")
    p.add_argument("--threshold", type=float, default=0.1, metavar="D", help="largest D that is no drift (default: 0.1)")
    p.add_argument("--sample", type=int, default=5000, metavar="N", help="documents of each corpus (default: 5000)")
    p.add_argument("--text-key", default="text", help="field that holds the text (default: text)")
    add_reading_flags(p.add_argument_group("reading of corpora"))
    add_tokenizer_flags(p.add_argument_group("tokenizer, whose tokens' entropy is compared (default: that of bytes)"))
    text = "leave bad records out and count them by reason (default: stop at the first)"
    p.add_argument("--skip-bad", action="store_true", help=text)
    p.add_argument("--save-profile", metavar="FILE", help="write the reference's numbers here; the name ends with .drift.json")
    p.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return p


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    args = strict(parser(), argv)
    return status_of(partial(_run, args), "no profile was written" if args.save_profile else "nothing was compared")


def _run(args: argparse.Namespace) -> tuple[int, str]:
    from megatron_lite.clean.steps.drift import (
        BYTES,
        MOVED,
        PROFILE,
        SAME,
        TOO_FEW,
        Drift,
        DriftOptions,
        chance,
        check_reading,
        compare,
        finding,
        sample_of,
        save_profile,
    )
    from megatron_lite.text.blocks import InputOptions

    problems = Drift.problems(DriftOptions(args.reference, args.text_key, args.threshold, args.sample))
    if args.new is None and args.save_profile is None:
        problems.append("give NEW, the corpus to compare, or --save-profile")
    if args.save_profile is not None and not args.save_profile.endswith(PROFILE):
        problems.append(f"--save-profile {args.save_profile}: the name ends with {PROFILE}")
    if problems:
        raise ValueError("\n".join(problems))
    tokens, named = None, BYTES
    if args.tokenizer_type is not None or any(value is not None for value in tokenizer_options(args).values()):
        from megatron_lite.text.tokenizer import build_tokenizer, kind_of

        args.tokenizer_type = args.tokenizer_type or kind_of(tokenizer_options(args))
        tokens = build_tokenizer(args.tokenizer_type, **tokenizer_options(args)).encode
        named = _tokenizer_flags(args)
    reading = InputOptions((args.text_key,), args.encoding, args.document_separator)
    if args.document_separator is not None:
        check_reading([path for path in (args.reference, args.new) if path is not None], reading)
    bad: dict[str, Counter[str]] = {"reference": Counter(), "new": Counter()}
    reference = sample_of(args.reference, args.sample, reading, tokens, named, bad["reference"] if args.skip_bad else None)
    if args.new is None:
        save_profile(args.save_profile, reference, args.sample, named)
        return DONE, "\n".join([*_bad(bad), f"{args.save_profile}: {len(reference)} documents of {args.reference}"])
    new = sample_of(args.new, args.sample, reading, tokens, named, bad["new"] if args.skip_bad else None)
    compared = compare(reference, new, named)
    if args.save_profile is not None:  # after all that can be wrong
        save_profile(args.save_profile, reference, args.sample, named)
    by_chance = chance(len(reference), len(new))
    found = {m: finding(m, args.threshold, by_chance) for m in compared}
    kinds = [kind for kind, _ in found.values()]
    result = next((kind for kind in (MOVED, TOO_FEW) if kind in kinds), SAME)
    status = {SAME: DONE, MOVED: ERROR, TOO_FEW: CONFIGURATION}[result]
    if args.json:
        values = {m.feature: {"D": m.d, "median": [m.reference, m.new], "result": kind} for m, (kind, _) in found.items()}
        limits = {"threshold": args.threshold, "chance": by_chance}
        documents = [len(reference), len(new)]
        return status, json.dumps({"result": result, **limits, "documents": documents, "bad": bad, "features": values})
    lines = [*_bad(bad), f"{len(reference)} documents of the reference, {len(new)} new; D above {args.threshold:.3g} is drift"]
    lines += [f"{m.feature:<18} D {m.d:.3f}   median {m.reference:.4g} -> {m.new:.4g}" for m in found]
    return status, "\n".join([*lines, *(told for _, told in found.values() if told)])


def _tokenizer_flags(args: argparse.Namespace) -> str:
    """The flags of the tokenizer, files by their last name: the same wherever they lie."""
    given = {name: value for name, value in tokenizer_options(args).items() if value is not None}
    given.update({name: Path(given[name]).name for name in ("model", "vocab_file", "merge_file") if name in given})
    return " ".join([f"--tokenizer-type {args.tokenizer_type}", *(f"{flag_of(name)} {value}" for name, value in given.items())])


def _bad(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Lines about the records that were left out."""
    return [f"{n:,} bad in the {corpus} corpus: {reason}" for corpus, found in counts.items() for reason, n in found.items()]
