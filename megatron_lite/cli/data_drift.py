"""``megatron-lite data drift REFERENCE NEW``: whether a corpus has moved away from another one, and in what.

Exit status: 0 nothing moved, 1 something did, 2 configuration or input.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from megatron_lite.config.exit_codes import CONFIGURATION, DONE, ERROR


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        "megatron-lite data drift",
        description="Compare the documents of two corpora by length, compression ratio and token entropy "
        "(Kolmogorov-Smirnov statistic D).",
    )
    what = "a file, pattern or directory of a corpus, or a profile that --save-profile wrote (.drift.json)"
    p.add_argument("reference", help=what)
    p.add_argument("new", nargs="?", help=what + "; leave it out to write the reference's profile only")
    p.add_argument("--threshold", type=float, default=0.1, metavar="D", help="largest D that is no drift (default: 0.1)")
    p.add_argument("--sample", type=int, default=5000, metavar="N", help="documents of each corpus (default: 5000)")
    p.add_argument("--text-key", default="text", help="field that holds the text (default: text)")
    p.add_argument("--tokenizer-type", metavar="TYPE", help="entropy of these tokens (default: of bytes)")
    p.add_argument("--tokenizer-model", metavar="FILE", help="of the tokenizer")
    p.add_argument("--save-profile", metavar="FILE", help="write the reference's numbers here; the name ends with .drift.json")
    p.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return p


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    p = parser()
    args = p.parse_args(argv)
    from megatron_lite.clean.config import Keys
    from megatron_lite.clean.drift import (
        PROFILE,
        Drift,
        DriftOptions,
        compare,
        limit,
        sample_of,
        save_profile,
        sentence,
    )

    problems = Drift.problems(DriftOptions(args.reference, args.text_key, args.threshold, args.sample))
    if args.new is None and args.save_profile is None:
        problems.append("give NEW, the corpus to compare, or --save-profile")
    if args.save_profile is not None and not args.save_profile.endswith(PROFILE):
        problems.append(f"--save-profile {args.save_profile}: the name ends with {PROFILE}")
    if problems:
        p.print_usage()
        print("\n".join(problems))
        return CONFIGURATION
    tokens = None
    if args.tokenizer_type is not None:
        from megatron_lite.text.tokenizer import build_tokenizer

        tokens = build_tokenizer(args.tokenizer_type, model=args.tokenizer_model).encode
    keys = Keys(text_key=args.text_key)
    reference = sample_of([args.reference], args.sample, keys, tokens)
    if args.save_profile is not None:
        save_profile(args.save_profile, reference, args.sample)
    if args.new is None:
        return DONE
    new = sample_of([args.new], args.sample, keys, tokens)
    moved, most = compare(reference, new), limit(args.threshold, len(reference), len(new))
    if args.json:
        values = {m.feature: {"D": m.d, "median": [m.reference, m.new]} for m in moved}
        print(json.dumps({"threshold": most, "documents": [len(reference), len(new)], "features": values}))
    else:
        print(f"{len(reference)} documents of the reference, {len(new)} new; D above {most:.3g} is drift")
        for m in moved:
            print(f"{m.feature:<18} D {m.d:.3f}   median {m.reference:.4g} -> {m.new:.4g}")
        for m in moved:
            if m.d > most:
                print(sentence(m, most))
    return ERROR if moved[0].d > most else DONE
