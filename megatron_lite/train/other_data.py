"""What is said where a run goes on with other data than those of its checkpoint: settings, and what it does to each source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lite.data.mix import Mix
from megatron_lite.data.sources import parse_sources

# Settings that decide which samples come next, and what a sample is.
POSITION = (
    ("training", ("seed", "global_batch_size", "rampup_batch_size", "step_batch_size_schedule")),
    (
        "data",
        (
            "seq_length",
            "data_path",
            "train_data_path",
            "split",
            "blend_temperature",
            "mock_data",
            "sample_order",
            "packing",
            "document_mask",
            "eod_mask_loss",
        ),
    ),
)
_LISTED = 20  # sources


def data_notes(
    state: Mapping[str, Any], config: Mapping[str, Any], facts: Mapping[str, Any] | None, mix: Mix | None
) -> list[str]:
    """Lines about settings that change which samples come next, or what their ids mean.

    Args:
        state: of the checkpoint.
        config: of this run, as plain data; facts: see :func:`megatron_lite.train.resume.load`.
        mix: what this run's training samples are drawn from.
    """
    before, facts = state["config"], facts or {}
    lines = []
    differs = [
        f"{name} {before[section][name]} in the checkpoint, {config[section][name]} now"
        for section, names in POSITION
        for name in names
        if name in before.get(section, {}) and before[section][name] != config[section][name]
    ]
    if differs:
        lines.append(f"NOTE: the data are not those of the checkpoint ({'; '.join(differs)})")
    for name in ("curriculum", "transform"):
        if facts and state.get(name) != facts.get(name):
            lines.append(f"NOTE: the {name} is not that of the checkpoint; samples from here on are those of this run's")
    if lines:
        lines += _what_it_does(state, config, mix)
    theirs, ours = state.get("tokenizer") or {}, facts.get("tokenizer") or {}
    changed = [
        f"{key} {theirs[key]} in the checkpoint, {ours[key]} now"
        for key in theirs
        if ours.get(key) is not None and theirs[key] is not None and theirs[key] != ours[key]
    ]
    if changed:
        lines.append(f"NOTE: the tokenizer is not that of the checkpoint: {'; '.join(changed)}")
    return lines


def _what_it_does(state: Mapping[str, Any], config: Mapping[str, Any], mix: Mix | None) -> list[str]:
    """Which samples of each source are read again or never, and the curriculum with which none is."""
    n = state["progress"]["consumed_samples"]
    goes_on = f"the run goes on at sample {n:,} of its data"
    before = state.get("mix")
    if mix is None and before is None:  # made up
        return [f"  {goes_on}"]
    if mix is None or before is None or not _same_samples(state["config"], config):
        return [f"  {goes_on}; which of them the checkpoint's run has read is not known: its samples were others"]
    then, now = before["places"], mix.places(n)
    moved = {name: (then.get(name, 0), now.get(name, 0)) for name in {**then, **now}}
    lines = []
    for name, (old, new) in moved.items():
        if name not in now:
            lines.append(f"  {name}: {old:,} samples were read, it is not drawn from any more")
        elif old != new:
            what = f"{old - new:,} are read again" if old > new else f"{new - old:,} are skipped"
            lines.append(f"  {name}: {old:,} samples were read, it goes on at its sample {new:,}: {what}")
    if list(then.values()) == list(now.values()) and not then.keys() & now.keys():
        return [f"  {goes_on}; no sample of a source is read again or skipped if these are the same files elsewhere"]
    if not any(a != b for name, (a, b) in moved.items() if name in now):
        return [f"  {goes_on}; no sample of a source is read again, and none is skipped", *lines]
    more = [f"  and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    stages = mix.stages_after(n, before["weights"], state.get("curriculum") or (), config["data"]["seq_length"])
    return [
        f"  {goes_on}, as if their mix had been this from the start:",
        *lines[:_LISTED],
        *more,
        "  With this --curriculum every source would go on where it stands, and none be read again or skipped (the sources of the",
        "  checkpoint stay in --data-path in their order, new ones go behind them):",
        *(f"    {line}" for line in stages.splitlines()),
    ]


def _same_samples(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether sample k of a source is the same: it follows from these settings, and from the source's place in the list."""
    settings = ("seq_length", "split", "sample_order", "packing")
    if before["training"]["seed"] != now["training"]["seed"] or any(before["data"][s] != now["data"][s] for s in settings):
        return False
    if now["data"]["sample_order"] != "windows":
        return False  # its samples depend on how many are asked of each source
    for flag in ("data_path", "train_data_path"):
        theirs, ours = ([s.prefix for s in parse_sources(c["data"][flag])] if c["data"][flag] else [] for c in (before, now))
        if bool(theirs) != bool(ours) or any(a != b and (a in ours or b in theirs) for a, b in zip(theirs, ours, strict=False)):
            return False
    return True
