"""Mixes that change at a restart: counts that stay true, what is said of it, and the curriculum that changes a mix exactly."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from train_toys import TINY, make_data, steps_of, train_here

from megatron_lite.data.blend import BlendedDataset, WindowsBlend
from megatron_lite.data.curriculum import load_curriculum, staged_blend
from megatron_lite.data.index_writer import IndexedWriter
from megatron_lite.data.mix import Mix

NAMES = ["x/a", "b: c", "d"]
weights = st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=3, max_size=3).filter(any)


def mix_of(given: list[float]) -> tuple[Mix, WindowsBlend]:
    blend = WindowsBlend(given)
    return Mix(BlendedDataset([None] * 3, blend, NAMES), dict(zip(NAMES, given, strict=True))), blend


@given(weights, weights, weights, st.integers(1, 50), st.integers(0, 50), st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_counts_of_changed_mixes(a: list[float], b: list[float], c: list[float], n: int, m: int, k: int) -> None:
    """Sample by sample over two restarts, each with another mix."""
    seen, end, state = dict.fromkeys(NAMES, 0), 0, None
    for given_weights, length in ((a, n), (b, m), (c, k)):
        mix, blend = mix_of(given_weights)
        mix.go_on(end, state and state["consumed"])
        for i in range(end, end + length):
            seen[NAMES[blend.locate(i)[0]]] += 1
        end += length
        state = mix.state(end)
        assert state["consumed"] == seen and state["places"] == dict(zip(NAMES, blend.consumed(end), strict=True))


@given(weights, weights, st.integers(1, 60))
@settings(max_examples=20, deadline=None)
def test_the_curriculum_that_is_shown_goes_on_where_sources_stand(a: list[float], b: list[float], n: int) -> None:
    (old, blend), (new, _) = mix_of(a), mix_of(b)
    text = new.stages_after(n, old.weights, (), 16)
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / "c.yaml").write_text(text)
        staged = staged_blend(load_curriculum(str(path), 16), NAMES, [1.0] * 3)
    assert [staged.locate(i) for i in range(n)] == [blend.locate(i) for i in range(n)]
    before, after = np.array(blend.consumed(n)), np.array(staged.consumed(n + 40))
    expected = blend.consumed(n + 40) if a == b else (before + WindowsBlend(b).consumed(40)).tolist()
    assert after.tolist() == expected


def test_a_source_that_comes_and_one_that_goes() -> None:
    alone = Mix(BlendedDataset([None], WindowsBlend([1.0]), ["d"]), {"d": 1.0})
    assert alone.state(5)["consumed"] == {"d": 5}
    mix, _ = mix_of([1.0, 1.0, 0.0])
    mix.go_on(5, {"gone": 3, "x/a": 2})
    assert mix.consumed(9) == {"x/a": 4, "b: c": 2, "d": 0, "gone": 3}


def sources(folder: Path) -> list[str]:
    found = [make_data(folder), str(folder / "b"), str(folder / "c")]
    for prefix in found[1:]:
        with IndexedWriter(prefix, vocab_size=61, eod_id=60) as writer:
            for n in range(90):
                writer.add_document([*range(n % 30, n % 30 + 12), 60])
    return found


def shown_stages(text: str) -> str:
    return "\n".join(line[4:] for line in text.splitlines() if re.match("    (stages:|- )", line)) + "\n"


def test_a_mix_that_changes_at_a_restart(tmp_path: Path) -> None:
    """The note says what is read again and skipped; counts stay true; with the curriculum of the note nothing is."""
    a, b, c = sources(tmp_path)
    common = f"{TINY} --split 1 --log-interval 1 --lr-decay-iters 9"
    first = f"{common} --data-path 3 {a} 1 {b} --train-iters 4 --save {tmp_path}/one"
    assert train_here(first).code == 0
    assert steps_of(tmp_path / "one")[4]["source_samples"] == {a: 12, b: 4}
    going_on = f"{common} --load {tmp_path}/one --train-iters 6"
    changed = f"--data-path 1 {a} 2 {b} 1 {c}"
    done = train_here(f"{going_on} {changed} --save {tmp_path}/two")
    assert done.code == 0 and "the run goes on at sample 16 of its data, as if their mix had been this" in done.text
    assert f"{a}: 12 samples were read, it goes on at its sample 4: 8 are read again" in done.text
    assert f"{b}: 4 samples were read, it goes on at its sample 8: 4 are skipped" in done.text
    assert f"{c}: 0 samples were read, it goes on at its sample 4: 4 are skipped" in done.text
    assert steps_of(tmp_path / "two")[6]["source_samples"] == {a: 14, b: 8, c: 2}
    assert f"\n  14 {a}\n" in done.text and f"\n  2 {c}\n" in done.text

    path = tmp_path / "c.yaml"
    path.write_text(shown_stages(done.text))
    exact = train_here(f"{going_on} {changed} --curriculum {path} --log-dir {tmp_path}/exact")
    assert exact.code == 0 and "no sample of a source is read again, and none is skipped" in exact.text, exact.text
    assert steps_of(tmp_path / "exact")[6]["source_samples"] == {a: 14, b: 8, c: 2}

    further = train_here(f"{common} --load {tmp_path}/two --train-iters 8 --log-dir {tmp_path}/further {changed}")
    assert further.code == 0 and "are skipped" not in further.text
    assert steps_of(tmp_path / "further")[8]["source_samples"] == {a: 16, b: 12, c: 4}
    alone = train_here(f"{common} --load {tmp_path}/two --train-iters 7 --log-dir {tmp_path}/alone --data-path {a}")
    assert f"{b}: 12 samples were read, it is not drawn from any more" in alone.text
    assert steps_of(tmp_path / "alone")[7]["source_samples"] == {a: 18, b: 8, c: 2}


def test_what_else_may_differ(tmp_path: Path) -> None:
    """Other samples altogether; the same files elsewhere; the same samples in other steps."""
    a, b, _ = sources(tmp_path)
    common = f"{TINY} --split 1 --lr-decay-iters 9"
    assert train_here(f"{common} --data-path 3 {a} 1 {b} --train-iters 2 --save {tmp_path}/one").code == 0
    going_on = f"{common} --load {tmp_path}/one --train-iters 3 --log-dir {tmp_path}/log"
    other = "which of them the checkpoint's run has read is not known"
    assert other in train_here(f"{going_on} --data-path 3 {a} 1 {b} --seed 5").text
    assert other in train_here(f"{going_on} --data-path 1 {b} 3 {a}").text
    (tmp_path / "d").mkdir()
    sources(tmp_path / "d")
    moved = train_here(f"{going_on} --data-path 3 {tmp_path}/d/{Path(a).name} 1 {tmp_path}/d/b").text
    assert "read again or skipped if these are the same files elsewhere" in moved
