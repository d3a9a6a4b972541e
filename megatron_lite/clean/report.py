"""The numbers of a cleaning run's report, as plain data; ``--json`` writes them, and the HTML shows the same.

Everything in it follows from the input and the pipeline alone: no times, no workers, no parts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Any

from megatron_lite.clean.config import Pipeline, StepConfig
from megatron_lite.clean.counts import OTHERS, SOURCES, Flow, Sample, StageCounts, StepCounts
from megatron_lite.clean.saved import pipeline_warnings
from megatron_lite.clean.step import NO_BOUNDS, NO_LANGUAGE, Facts, place_name
from megatron_lite.config.values import plain

_FORMAT = "megatron-lite cleaning report"


def report_data(pipeline: Pipeline, inputs: Sequence[str], counts: StageCounts) -> dict[str, Any]:
    """The report of the whole corpus; ``counts`` are those of all stages and parts."""
    no_source = pipeline.keys.source_key and set(counts.read) <= {*inputs, OTHERS}
    counts.fold_sources()
    steps = [
        _step(label, config, counts.step(position), counts.decided.get(position, {}), inputs)
        for position, (label, config) in enumerate(zip(pipeline.labels(), pipeline.steps, strict=True))
    ]
    first, last = counts.step(0), counts.step(len(steps) - 1)
    sources = {
        source: _rates(
            {
                "documents_in": first.flows.get(source, Flow()).documents_in,
                "documents_out": last.flows.get(source, Flow()).documents_out,
                "characters_in": first.flows.get(source, Flow()).characters_in,
                "characters_out": last.flows.get(source, Flow()).characters_out,
            }
        )
        for source in sorted(counts.read)
    }
    total = {name: sum(flow[name] for flow in sources.values()) for name in _FLOW}
    found = pipeline_warnings(pipeline) + ([] if total["documents_out"] else ["no document is left"])
    if OTHERS in counts.read:
        found.append(f"there are more than {SOURCES:,} sources: {SOURCES:,} of them are told apart, and the rest is {OTHERS!r}")
    if no_source:
        found.append(f"no record has a text or number in the field {pipeline.keys.source_key!r} (source_key): files are the sources")
    return {
        "format": _FORMAT,
        "version": 1,
        "pipeline": pipeline.as_data(),
        "inputs": list(inputs),
        "records": {
            "read": sum(counts.read.values()) + sum(counts.bad.values()),
            "documents": total["documents_in"],
            "empty": counts.empty,
            "bad": _by_count(counts.bad),
            "bad_samples": [{n: v for n, v in plain(sample).items() if n != "number"} for sample in counts.bad_samples],
        },
        "total": _rates(total),
        "sources": sources,
        "lengths_in": _lengths(first.lengths_in),
        "lengths_out": _lengths(counts.lengths),
        "steps": steps,
        "warnings": found + [f"step {step['step']}: {warning}" for step in steps for warning in step["warnings"]],
    }


_FLOW = ("documents_in", "documents_out", "characters_in", "characters_out")


def _step(
    label: str, config: StepConfig, counts: StepCounts, decided: Mapping[int, Any], inputs: Sequence[str]
) -> dict[str, Any]:
    kind: Any = config.kind
    done = Counter(counts.done)
    sums: dict[str, list[float]] = {}
    for bucket in sorted(decided):
        done.update(decided[bucket]["done"])
        for name, value in decided[bucket]["facts"].items():
            sums.setdefault(name, []).append(value)
    facts: Facts
    if decided:
        facts = kind.facts(config.options, {name: fsum(values) for name, values in sums.items()})
    elif counts.notes is not None or not hasattr(kind, "decide"):
        facts = kind.facts(config.options, counts.notes)
    else:
        facts = Facts()
    total = {name: sum(getattr(flow, name) for flow in counts.flows.values()) for name in _FLOW}
    for what in (NO_LANGUAGE, NO_BOUNDS):
        if 2 * done[what] > total["documents_in"]:
            facts.warnings.append(f"judged {done[what]:,} of {total['documents_in']:,} {what}: rules that need one were off")
    return {
        "step": label,
        "total": _rates(total),
        "sources": {source: _rates(plain(flow)) for source, flow in sorted(counts.flows.items())},
        "reasons": _by_count(counts.reasons),
        "reasons_by_source": {source: _by_count(reasons) for source, reasons in sorted(counts.by_source.items())},
        "reasons_by_language": {code: _by_count(reasons) for code, reasons in sorted(counts.by_language.items())},
        "done": dict(sorted(done.items())),
        "facts": facts.numbers,
        "histograms": facts.histograms,
        "warnings": facts.warnings,
        "lengths_in": _lengths(counts.lengths_in),
        "lengths_dropped": _lengths(counts.lengths_dropped),
        "samples": [_sample(sample, inputs) for sample in counts.samples],
    }


def _rates(flow: dict[str, int]) -> dict[str, Any]:
    """In and out, with the shares that were kept; null where nothing came."""
    kept: dict[str, Any] = dict(flow)
    for what in ("documents", "characters"):
        came = flow[f"{what}_in"]
        kept[f"{what}_kept"] = round(flow[f"{what}_out"] / came, 6) if came else None
    return kept


def _by_count(counts: Mapping[str, int]) -> dict[str, int]:
    """The largest first."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _lengths(bins: Mapping[int, int]) -> dict[str, int]:
    """Documents by the number of their characters; empty bins between full ones too."""
    if not bins:
        return {}
    return {
        "0" if b == 0 else "1" if b == 1 else f"{2 ** (b - 1):,} to {2**b - 1:,}": bins.get(b, 0)
        for b in range(min(bins), max(bins) + 1)
    }


def _sample(sample: Sample, inputs: Sequence[str]) -> dict[str, Any]:
    told = {name: value for name, value in plain(sample).items() if name not in ("hash", "number")}
    return {"place": place_name(sample.number, inputs), **told}


def is_report(path: Path) -> bool:
    """Whether a file is a report, as numbers or as a page; nothing else is written over."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        begin = file.read(200)
    return _FORMAT.encode() in begin or (begin.startswith(b"<!DOCTYPE html>") and b"<title>Cleaning report</title>" in begin)


def as_json(report: dict[str, Any]) -> bytes:
    """The report as a file of JSON."""
    return json.dumps(report, indent=1, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def summary(report: dict[str, Any]) -> str:
    """A few lines for the terminal: what each step kept."""
    records, total = report["records"], report["total"]
    bad = sum(records["bad"].values())
    lines = [f"{records['read']:,} records read: {records['documents']:,} documents, {records['empty']:,} empty, {bad:,} bad"]
    first = {sample["reason"]: sample["place"] for sample in reversed(records["bad_samples"])}
    lines += [f"  {n:,} bad: {reason} (the first is {first[reason]})" for reason, n in records["bad"].items()]
    width = max(len(step["step"]) for step in report["steps"])
    for step in report["steps"]:
        flow = step["total"]
        lines.append(
            f"  {step['step']:<{width}}  {flow['documents_in']:>12,} -> {flow['documents_out']:>12,} documents"
            f"  {percent(flow['documents_kept']):>8}  characters {percent(flow['characters_kept']):>8}"
        )
        for what, counts in (("dropped: ", step["reasons"]), ("", _by_count(step["done"]))):
            lines += [f"  {'':<{width}}    {n:>12,} {what}{name}" for name, n in list(counts.items())[:5]]
    kept = f"{percent(total['documents_kept'])} of the documents, {percent(total['characters_kept'])} of the characters"
    return "\n".join([*lines, f"kept: {total['documents_out']:,} documents: {kept}"])


def percent(share: float | None) -> str:
    """A share for people; ``-`` where there is none."""
    return "-" if share is None else f"{share:.2%}"
