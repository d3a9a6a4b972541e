"""Which samples a step reads: independent of dp, microbatch size, resumes and ramps; skipped ranges."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.data.indexed import IndexedDataset, IndexedWriter, TokenStream
from megatron_lite.data.sampler import Sampler, merge_ranges
from megatron_lite.data.windows import WindowDataset


def step(consumed, batch, micro, dp, skipped=()):
    """(samples of the global batch by place, consumed after it) read by all ranks."""
    places = {}
    for d in range(dp):
        sampler = Sampler(micro, dp, d, tuple(skipped))
        for m in range(sampler.microbatches(batch)):
            for b, j in enumerate(sampler.rows(consumed, m)):
                places[sampler.first_row(m) + b] = j
    assert sorted(places) == list(range(batch))
    return [places[i] for i in range(batch)], sampler.after(consumed, batch)


def test_the_formula():
    sampler = Sampler(3, dp_size=4, dp_index=2)
    assert sampler.microbatches(24) == 2
    assert sampler.rows(100, 1) == [100 + 1 * (3 * 4) + 2 * 3 + b for b in range(3)] and sampler.first_row(1) == 18


@pytest.mark.parametrize("batch", [0, 5, 7, 3, -4])
def test_batch_must_divide(batch):
    with pytest.raises(
        ValueError, match=rf"global batch of {batch} samples .* 2 \* data-parallel size 2 = 4 must divide it; nearest"
    ):
        Sampler(2, 2).microbatches(batch)


def test_three_epochs_of_23_samples(tmp_path):
    """Batch 4, three epochs: any stop, two stops, and dp 1 to 2 with microbatch 2 to 1, give the same samples."""
    with IndexedWriter(tmp_path / "a", dtype="int32") as writer:
        writer.add_document(range(23 * 5 + 1))
    windows = WindowDataset(TokenStream(IndexedDataset(tmp_path / "a"), range(1)), 5, 7)
    assert windows.locate(0)[0] == 0
    steps = 0
    while windows.locate(steps * 4)[0] < 3:
        steps += 1

    def run(layouts):
        """Layout of each step; nothing but ``consumed`` goes from one step to the next."""
        consumed, seen = 0, []
        for micro, dp in layouts:
            ids, consumed = step(consumed, 4, micro, dp)
            seen.append([windows.locate(j) for j in ids])
        return seen

    whole = run([(2, 1)] * steps)
    for k in range(1, steps):
        assert run([(2, 1)] * k + [(1, 2)] * (steps - k)) == whole
        assert run([(2, 1)] * k + [(1, 2)] * ((steps - k) // 2) + [(4, 1)] * (steps - k - (steps - k) // 2)) == whole
    epochs = {}
    for epoch, start in (x for s in whole for x in s):
        epochs.setdefault(epoch, []).append(start)
    orders = [epochs[e] for e in range(3)]
    assert all(len(set(o)) == len(o) in (22, 23) for o in orders)  # no repeats within an epoch
    assert len({tuple(o) for o in orders}) == 3


@given(
    st.lists(st.sampled_from([12, 24, 36]), min_size=1, max_size=8),
    st.sampled_from([(1, 1), (2, 3), (3, 4), (12, 1), (4, 3)]),
)
def test_ramp_does_not_change_the_stream(batches, layout):
    consumed, seen = 0, []
    for batch in batches:
        ids, consumed = step(consumed, batch, *layout)
        seen += ids
    assert seen == list(range(sum(batches))) and consumed == sum(batches)


ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=4)


@given(ranges, st.integers(0, 50), st.integers(1, 5))
def test_skipped_ranges(skipped, consumed, steps):
    left = [j for j in range(consumed, 500) if not any(a <= j < b for a, b in skipped)]
    at, seen = consumed, []
    for _ in range(steps):
        ids, at = step(at, 12, 2, 3, skipped)
        seen += ids
    assert seen == left[: 12 * steps] and at == seen[-1] + 1
    assert Sampler(1, skipped=tuple(skipped)).after(consumed, 0) == consumed


@given(ranges)
def test_merge_ranges(skipped):
    merged = merge_ranges(skipped)
    assert {j for a, b in merged for j in range(a, b)} == {j for a, b in skipped for j in range(a, b)}
    assert all(a < b for a, b in merged) and all(x[1] < y[0] for x, y in pairwise(merged))
