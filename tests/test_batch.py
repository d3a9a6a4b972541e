"""Batches: positions, masks and offsets at document borders."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.data.batch import Row, make_batch
from megatron_lite.data.megatron_order import eod_starts

E = 9


def row_of(tokens, index=0):
    tokens = np.array(tokens, dtype=np.int64)
    return Row(tokens, eod_starts(tokens, E), index)


def test_documents_in_a_row():
    """[5, 6, E, 7, 8, E, 9], S = 6: positions restart, nothing crosses, no loss where the input is E, loss on -> E."""
    batch = make_batch([row_of([5, 6, E, 7, 8, E, 9])], first_row=3)
    assert batch.tokens.tolist() == [5, 6, E, 7, 8, E] and batch.targets.tolist() == [6, E, 7, 8, E, 9]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 3, 6, 6, 6, 6, 6] and batch.num_documents == 2
    assert batch.loss_mask.tolist() == [1, 1, 0, 1, 1, 0] and batch.valid_tokens == 4
    assert (
        batch.max_seqlen == 3
        and batch.squared_lengths == 18
        and batch.first_row == 3
        and (batch.rows, batch.seq_length) == (1, 6)
    )
    allowed = [
        [
            i >= j and batch.positions[i] - batch.positions[j] == i - j and all(t != E for t in batch.tokens[j:i])
            for j in range(6)
        ]
        for i in range(6)
    ]
    blocks = np.zeros((6, 6), dtype=bool)
    blocks[:3, :3] = blocks[3:, 3:] = np.tril(np.ones((3, 3), dtype=bool))
    assert np.array_equal(allowed, blocks)


@pytest.mark.parametrize(
    ("tokens", "positions", "mask"),
    [
        ([5, E, E, 7, 8, 6, 4], [0, 1, 0, 0, 1, 2], [1, 0, 0, 1, 1, 1]),  # two ends in a row
        ([E, 5, 6, 7, 8, 6, 4], [0, 0, 1, 2, 3, 4], [0, 1, 1, 1, 1, 1]),  # at position 0
        ([5, 6, 7, 8, 6, 4, 3], [0, 1, 2, 3, 4, 5], [1, 1, 1, 1, 1, 1]),  # none
        ([5, 6, 7, 8, 6, 4, E], [0, 1, 2, 3, 4, 5], [1, 1, 1, 1, 1, 1]),  # as the last target
        ([E, E, E, E, E, E, E], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]),
    ],
)
def test_odd_rows(tokens, positions, mask):
    batch = make_batch([row_of(tokens)])
    assert (
        batch.positions.tolist() == positions and batch.loss_mask.tolist() == mask and batch.valid_tokens == sum(mask)
    )


def test_without_document_mask():
    row = row_of([5, 6, E, 7, 8, E, 9])
    batch = make_batch([row, row], document_mask=False)
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5] * 2
    assert batch.cu_seqlens.tolist() == [0, 6] + [12] * 11 and batch.num_documents == 2
    assert batch.valid_tokens == 12
    batch = make_batch([row, row], document_mask=False, eod_id=E, eod_mask_loss=True)
    assert batch.loss_mask.tolist() == [1, 1, 0, 1, 1, 0] * 2 and batch.valid_tokens == 8 and batch.num_documents == 2


def test_border_without_end_token():
    """In the windows order borders come from the index: the target across one is not trained, E or not."""
    batch = make_batch([Row(np.array([1, 2, 3, 4, 5]), np.array([0, 2, 4]), 0)])
    assert batch.loss_mask.tolist() == [1, 0, 1, 0] and batch.positions.tolist() == [0, 1, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 4, 4]


@given(st.lists(st.lists(st.sampled_from([1, 2, 3, E]), min_size=7, max_size=7), min_size=1, max_size=4))
def test_rows_are_independent(rows):
    """A batch of rows is the rows' own batches, side by side; and all fields say the same thing."""
    batch = make_batch([row_of(tokens, i) for i, tokens in enumerate(rows)])
    alone = [make_batch([row_of(tokens)]) for tokens in rows]
    for name in ("tokens", "targets", "positions", "loss_mask"):
        assert torch.equal(getattr(batch, name), torch.cat([getattr(b, name) for b in alone]))
    offsets = [6 * i + o for i, b in enumerate(alone) for o in b.cu_seqlens[: b.num_documents].tolist()]
    total = 6 * len(rows)
    assert batch.cu_seqlens.tolist() == offsets + [total] * (total + 1 - len(offsets))
    assert [i for i, p in enumerate(batch.positions.tolist()) if p == 0] == offsets
    lengths = np.diff([*offsets, total])
    assert batch.max_seqlen == lengths.max() and batch.squared_lengths == (lengths**2).sum()
    assert batch.valid_tokens == batch.loss_mask.sum() == sum(b.valid_tokens for b in alone)
    expected = {
        "tokens": torch.int64,
        "targets": torch.int64,
        "positions": torch.int64,
        "cu_seqlens": torch.int32,
        "loss_mask": torch.float32,
    }
    assert {name: getattr(batch, name).dtype for name in expected} == expected


def test_moving():
    batch = make_batch([row_of([1, 2, 3])])
    assert (
        batch.to(torch.device("meta")).tokens.device.type == "meta" and batch.to(torch.device("cpu")).valid_tokens == 2
    )
