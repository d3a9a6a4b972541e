"""ParamSpec arithmetic against brute force: which elements a rank holds, and boxes of a flat range."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.mesh.collectives import Axis
from megatron_lite.tensor.spec import (
    SPLIT_OVER,
    Init,
    ParamSpec,
    Rectangle,
    TensorParallel,
    axes_or_none,
    flat_range_rectangles,
)

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


def parallel_of(tp: int, index: int, **options: object) -> TensorParallel:
    """As rank ``index`` of tp sees it; no collective is called."""
    return TensorParallel(Axis("tp", tuple(range(tp)), index, group=object()), **options)  # type: ignore[arg-type]


def indices(shape: tuple[int, ...], box: Rectangle) -> np.ndarray:
    """Flat indices of a box, in row-major order."""
    whole = np.arange(math.prod(shape)).reshape(shape)
    return whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))].ravel()


@given(shapes, st.data())
def test_boxes_of_a_flat_range_are_that_range_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    boxes = flat_range_rectangles(shape, begin, end)
    assert [b.numel for b in boxes] == [len(indices(shape, b)) for b in boxes]
    found = [i for b in boxes for i in indices(shape, b)]
    assert found == list(range(begin, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)  # three for a matrix
    if (begin, end) == (0, numel):
        assert boxes == [Rectangle((0,) * len(shape), shape)]


def test_flat_ranges_of_scalars_and_of_nothing() -> None:
    assert flat_range_rectangles((), 0, 1) == [Rectangle((), ())]
    assert flat_range_rectangles((4, 0), 0, 0) == []
    assert flat_range_rectangles((4, 5), 7, 7) == []


def test_a_flat_range_of_a_tensor_too_large_to_exist() -> None:
    wide = (1 << 20, 1 << 20)  # 2^40 elements: beyond 32 bits
    begin, end = (1 << 39) + 5, (1 << 39) + (3 << 20) + 7
    assert flat_range_rectangles(wide, begin, end) == [
        Rectangle((1 << 19, 5), (1, (1 << 20) - 5)),
        Rectangle(((1 << 19) + 1, 0), (2, 1 << 20)),
        Rectangle(((1 << 19) + 3, 0), (1, 7)),
    ]


@given(
    tp=st.sampled_from([1, 2, 3, 4, 8]),
    kv_heads=st.sampled_from([None, 1, 2, 4, 8]),
    axes=st.lists(st.sampled_from([*SPLIT_OVER, None]), min_size=1, max_size=3),
    multiple=st.sampled_from([1, 2, 8]),
    data=st.data(),
)
def test_the_shards_of_a_tensor_cover_each_element_as_often_as_it_is_held(
    tp: int, kv_heads: int | None, axes: list[str | None], multiple: int, data: st.DataObject
) -> None:
    if kv_heads and tp % kv_heads and kv_heads % tp:
        kv_heads = None
    ranks = [parallel_of(tp, i, kv_heads=kv_heads, vocab_multiple=multiple) for i in range(tp)]
    shape = []
    for axis in axes:
        unit = ranks[0].shards(SPLIT_OVER[axis] if axis else None)[0]
        shape.append(data.draw(st.integers(1, 20)) if axis == "vocab" else unit * data.draw(st.integers(1, 3)))
    if sum(SPLIT_OVER[a] is not None for a in axes if a) > 1:
        return  # a tensor is split along one dim
    spec = ParamSpec("w", tuple(shape), tuple(axes), Init("normal", 1.0))
    counts = np.zeros(spec.numel, dtype=int)
    for rank in ranks:
        box = rank.rectangle(spec)
        counts[indices(spec.full_shape, box)] += 1
        local = rank.local_shape(spec.axes, spec.full_shape)
        assert all(a <= b for a, b in zip(box.size, local, strict=True))
    part = next((p for p in spec.split_over() if p is not None), None)
    held = {None: tp, "tp": 1, "kv_shard": ranks[0].kv_replicas}[part]
    assert (counts == held).all()


def test_replicas_of_a_key_value_head_are_neighbours() -> None:
    spec = ParamSpec("k", (2 * 8, 4), ("kv_heads", "embed"), Init("normal", 1.0))
    boxes = [parallel_of(8, i, kv_heads=2).rectangle(spec) for i in range(8)]
    assert [b.start[0] for b in boxes] == [0, 0, 0, 0, 8, 8, 8, 8]
    assert parallel_of(8, 0, kv_heads=2).kv_replicas == 4
    assert parallel_of(2, 0, kv_heads=8).kv_replicas == 1


def test_a_padded_vocabulary_has_true_rows_only_in_its_boxes() -> None:
    spec = ParamSpec("e", (61, 4), ("vocab", "embed"), Init("normal", 1.0))
    for multiple, padded, sizes in ((1, 64, [16, 16, 16, 13]), (8, 64, [16, 16, 16, 13]), (128, 512, [61, 0, 0, 0])):
        ranks = [parallel_of(4, i, vocab_multiple=multiple) for i in range(4)]
        assert ranks[0].padded_vocab(61) == padded
        assert [r.rectangle(spec).size[0] for r in ranks] == sizes
        assert {r.local_shape(spec.axes, spec.full_shape) for r in ranks} == {(padded // 4, 4)}


def test_sizes_that_do_not_divide_and_unknown_axes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"63 .ffn. cannot be split over 2 .* divides 63"):
        parallel_of(2, 0).local_shape(("ffn", "embed"), (63, 8))
    with pytest.raises(ValueError, match="unknown logical axis 'fnn': known are embed"):
        axes_or_none(("fnn",))


def test_a_spec_counts_its_elements() -> None:
    spec = ParamSpec("w", (3, 5), (None, "ffn"), None)
    assert (spec.numel, spec.split_over()) == (15, (None, "tp"))
    assert torch.empty(spec.full_shape).numel() == spec.numel
