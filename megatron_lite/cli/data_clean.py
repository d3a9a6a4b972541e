"""``megatron-lite data clean``: from dirty text to shards of clean text, by the steps of a YAML file.

Exit status: 0 the output is complete, 8 this part is done as far as it can be and others are missing, 2 configuration or
input, 1 anything else, 130 interrupted. After anything but 2 the same command goes on where the run was.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_lite.cli.corpus import add_reading_flags, at_least_one, status_of, strict
from megatron_lite.config.exit_codes import DONE, WAITING
from megatron_lite.text.shares import parse_part


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser("megatron-lite data clean", description="Clean text by the steps of a YAML file.")
    data = p.add_argument_group("input and output")
    data.add_argument("--config", required=True, metavar="FILE", help="the steps (YAML); docs/cleaning.md lists them")
    text = (
        "files, patterns or directories of JSON lines, plain text, Parquet, packed or not; their order is the corpus's"
    )
    data.add_argument("--input", nargs="+", required=True, metavar="FILE", help=text)
    text = "directory for the shards, which must not be there; the report is DIR.html"
    data.add_argument("--output", required=True, metavar="DIR", help=text)
    data.add_argument("--json", metavar="FILE", type=Path, help="write the report's numbers here too")
    text = "directory for the documents that were dropped, each with its reason and step"
    data.add_argument("--keep-dropped", metavar="DIR", type=Path, help=text)
    text = "text in a shard, as 128MB or 1GB, with its unit (default: 128MB)"
    data.add_argument("--shard-size", type=size, default="128MB", metavar="SIZE", help=text)
    add_reading_flags(data)
    text = "leave bad records out and count them by reason (default: stop at the first)"
    data.add_argument("--skip-bad", action="store_true", help=text)
    run = p.add_argument_group("running")
    run.add_argument("--workers", type=at_least_one, default=1, metavar="N", help="processes (default: 1)")
    text = "do the I-th of N parts of the input, from 0; all parts are started with the same options (default: 0/1)"
    run.add_argument("--part", default="0/1", metavar="I/N", help=text)
    text = "seconds to wait for other parts, before ending to be started again (default: 0)"
    run.add_argument("--wait", type=float, default=0.0, metavar="S", help=text)
    text = "directory that the parts share until all is done (default: DIR.work)"
    run.add_argument("--work", metavar="DIR", type=Path, help=text)
    return p


def size(text: str) -> int:
    """``128MB`` as a number of bytes. A unit is asked for: ``--shard-size 128`` would be a file for each document."""
    found = re.fullmatch("([0-9]*[1-9][0-9]*)([KMG]?B)", text.upper())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text}: expected a size and its unit, such as 128MB")
    return int(found[1]) * {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}[found[2]]


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The flags; exits with 2 and the nearest known name at one that does not exist."""
    p = parser()
    args = strict(p, argv)
    try:
        args.part = parse_part(args.part)
    except ValueError as error:
        p.error(str(error))
    if not args.wait >= 0:
        p.error(f"--wait {args.wait}: give 0 or more seconds")
    if not args.output.strip("/ ") or Path(args.output).name in ("", ".."):
        p.error("--output is given no name: give a directory such as data/clean")
    output = Path(args.output).absolute()
    work = args.work or output.with_name(f"{output.name}.work")
    named = {"--output": output, "--work": work, "--keep-dropped": args.keep_dropped, "--json": args.json}
    if args.json is not None and args.json.resolve() == output.with_name(f"{output.name}.html").resolve():
        p.error(f"--json {args.json}: is the page of the report; give another name")
    for flag, path in named.items():
        if re.search("[\udc80-\udcff]", str(path)):
            p.error(f"{flag} {str(path)!r}: the name is not UTF-8; give another")
        around = [] if path is None else [path.resolve(), *path.resolve().parents]
        holders = [("--output", "holds nothing but shards"), ("--work", "is removed when all is complete")]
        for holder, what in [*holders, ("--keep-dropped", "holds nothing but shards")]:
            if flag != holder and named[holder] is not None and named[holder].resolve() in around:
                p.error(f"{flag} {path}: is inside {holder} {named[holder]}, which {what}")
        for directory in filter(os.path.isdir, args.input):
            if Path(directory).resolve() in around:
                p.error(f"{flag} {path}: is inside --input {directory}, whose files are read when the run goes on")
    if args.part[1] > 1 and "-" in args.input:
        p.error("--input -: standard input cannot be read in parts")
    return args


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    from megatron_lite.clean.pipeline_stage import StepFailed

    args = arguments(argv)
    return status_of(
        partial(_run, args),
        f"nothing was written to {args.output}",
        interrupted="what was read of standard input is lost" if "-" in args.input else "the same command goes on",
        failures=(StepFailed, OSError),
    )


def _run(args: argparse.Namespace) -> tuple[int, str]:
    from megatron_lite.clean.config import load_pipeline
    from megatron_lite.clean.pipeline import Run, RunOptions
    from megatron_lite.clean.pipeline_work import PartsMissing
    from megatron_lite.clean.saved import pipeline_warnings
    from megatron_lite.text.blocks import InputOptions
    from megatron_lite.text.inputs import check_options, expand_inputs

    started = time.monotonic()
    if args.json is not None:
        args.json.absolute().parent.mkdir(parents=True, exist_ok=True)
    pipeline = load_pipeline(args.config)
    for warning in (foreseen := pipeline_warnings(pipeline)):  # also in the report, which a long run is read by
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    tell_slow_steps([step.name for step in pipeline.steps])
    inputs = expand_inputs(args.input)
    reading = InputOptions((pipeline.keys.text_key,), args.encoding, args.document_separator, whole=True, block_bytes=1 << 22)
    check_options(reading, inputs)
    options = RunOptions(
        part=args.part[0],
        parts=args.part[1],
        wait=args.wait,
        workers=args.workers,
        shard_bytes=args.shard_size,
        work=args.work and args.work.resolve(),  # a link cannot be removed like a directory
        keep_dropped=args.keep_dropped,
        json=args.json,
        skip_bad=args.skip_bad,
        reading=reading,
    )
    try:
        report = Run(pipeline, inputs, Path(args.output), options, partial(print, flush=True)).run()
    except PartsMissing as error:
        done = f"part {args.part[0]}/{args.part[1]} is done so far"
        return WAITING, f"{done}: {error}; run the same command again, or with --wait"
    if report is None:
        return DONE, f"{args.output} is complete already"
    return DONE, _told(args, report, foreseen, time.monotonic() - started)


def tell_slow_steps(names: Sequence[str]) -> None:
    """Say it when steps do without the compiled helpers what is many times faster with them."""
    from megatron_lite.ops.library import index_module

    slow = sorted({"quality", "minhash"} & set(names))
    if slow and (reason := index_module()[1]):
        print(f"notice: {' and '.join(slow)} will be many times slower without the compiled helpers: {reason}", file=sys.stderr)


def _told(args: argparse.Namespace, report: dict[str, Any], said: Sequence[str], seconds: float) -> str:
    """The summary; warnings that were ``said`` at the start are not said again."""
    from megatron_lite.clean.report import summary

    for warning in report["warnings"]:
        if warning not in said:
            print(f"warning: {warning}", file=sys.stderr)
    lines = [summary(report), f"written in {seconds:.1f} s: {args.output}, {args.output.rstrip('/')}.html"]
    if args.part[1] > 1:
        work = args.work or args.output.rstrip("/") + ".work"
        lines.append(f"{work} is not needed any more when all parts have ended")
    return "\n".join(lines)
