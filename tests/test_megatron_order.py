"""The megatron order against a plain statement of its rules: concatenate shuffled epochs, cut, shuffle."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megatron_lite.data import megatron_order
from megatron_lite.data.indexed import IndexedDataset, IndexedWriter
from megatron_lite.data.megatron_order import MegatronDataset, plan_epochs, sample_index, samples_asked
from megatron_lite.ops.library import index_module


def make(path, lengths) -> IndexedDataset:
    """A dataset whose token ids are positions in the file."""
    position = 0
    with IndexedWriter(path, dtype="int32") as writer:
        for length in lengths:
            writer.add_document(range(position, position + length))
            position += length
    return IndexedDataset(path)


def brute_force(lengths, seq_length, asked, seed, part=None):
    """Samples in order, as lists of positions in the file, by the rules alone; also the plan in words."""
    part = range(len(lengths)) if part is None else part
    documents = {d: list(range(sum(lengths[:d]), sum(lengths[: d + 1]))) for d in part}
    tokens = sum(lengths[d] for d in part)
    epochs = 1
    while epochs * tokens < asked * seq_length + 1:
        epochs += 1
    separate = False
    if epochs > 1:
        prior = ((epochs - 1) * tokens - 1) // seq_length
        separate = asked - prior < int(0.80 * ((tokens - 1) // seq_length))
    rng = np.random.RandomState(seed)

    def shuffled(values):
        values = np.array(values, dtype=np.int32)
        rng.shuffle(values)
        return values.tolist()

    order = shuffled(list(part) * (epochs - 1)) + shuffled(part) if separate else shuffled(list(part) * epochs)
    stream = [t for d in order for t in documents[d]]
    cut = [stream[k * seq_length : k * seq_length + seq_length + 1] for k in range((len(stream) - 1) // seq_length)]
    n = len(cut)
    places = shuffled(range(prior)) + shuffled(range(prior, n)) if separate else shuffled(range(n))
    return [cut[k] for k in places], epochs, separate


@pytest.mark.parametrize("chunk", range(4))
def test_sweep(tmp_path, monkeypatch, chunk):
    """Tokens 5 to 60, S 1 to 8, samples 1 to 100: every row of every case, with and without the compiled helper."""
    if chunk % 2:
        monkeypatch.setattr(megatron_order, "_index", None)
    generator = random.Random(chunk)
    for tokens in range(5 + chunk, 61, 4):
        cuts = sorted(generator.sample(range(1, tokens), min(generator.randint(0, 9), tokens - 1)))
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
        if generator.random() < 0.5:
            lengths.insert(generator.randint(0, len(lengths)), 0)
        dataset = make(tmp_path / f"t{tokens}", lengths)
        part = range(len(lengths))
        for seq_length in range(1, 9):
            for asked in generator.sample(range(1, 101), 6):
                if tokens < seq_length + 1:
                    with pytest.raises(ValueError, match="too few for one sample"):
                        MegatronDataset(dataset, part, seq_length, asked, 7)
                    continue
                ours = MegatronDataset(dataset, part, seq_length, asked, 7)
                rows, epochs, separate = brute_force(lengths, seq_length, asked, 7)
                assert (ours.plan.epochs, ours.plan.separate, len(ours)) == (epochs, separate, len(rows))
                assert len(ours) >= asked
                assert [ours.row(j).tokens.tolist() for j in range(len(ours))] == rows


def test_every_token_once_in_each_complete_epoch(tmp_path):
    """Inputs of the samples cover E * T - 1 tokens of the stream, whatever the shuffles."""
    lengths = [3, 1, 8, 5, 13, 2]
    dataset = make(tmp_path / "a", lengths)
    for seq_length, asked in ((1, 64), (31, 2), (4, 24)):
        ours = MegatronDataset(dataset, range(6), seq_length, asked, 1)
        seen = np.bincount(np.concatenate([ours.row(j).tokens[:-1] for j in range(len(ours))]), minlength=32)
        epochs = ours.plan.epochs
        assert seen.max() <= epochs and seen.sum() == len(ours) * seq_length
        assert seen.sum() > epochs * 32 - 1 - seq_length
        if (epochs * 32 - 1) % seq_length == 0:
            assert sorted(seen)[1:] == [epochs] * 31  # one token is only a target


def test_last_epoch_may_have_one_sample_more():
    """43 tokens, S = 4, 21 samples: the last epoch gives 11 of them while an epoch alone has 10; that is legal."""
    plan = plan_epochs(43, 4, 21)
    assert (plan.epochs, plan.samples, plan.prior, plan.separate) == (2, 21, 21, False)
    assert ((plan.epochs - 1) * 43 - 1) // 4 == 10


def test_separate_last_epoch():
    plan = plan_epochs(401, 4, 150)  # 100 an epoch, 50 of the second: below 80
    assert (plan.epochs, plan.samples, plan.prior, plan.separate) == (2, 200, 100, True)
    assert not plan_epochs(401, 4, 180).separate
    assert plan_epochs(401, 4, 179).separate
    assert plan_epochs(401, 4, None) == plan_epochs(401, 4, 100) == plan_epochs(401, 4, 1)
    assert plan_epochs(5 * 10**12, 4096, 3 * 10**9).samples == (3 * 5 * 10**12 - 1) // 4096  # wide


def test_part_and_seed(tmp_path):
    lengths = [4, 6, 3, 9, 5, 7]
    dataset = make(tmp_path / "a", lengths)
    for part in (range(1, 4), range(3, 6)):
        for seed in (0, 1234):
            ours = MegatronDataset(dataset, part, 3, 20, seed)
            assert [ours.row(j).tokens.tolist() for j in range(len(ours))] == brute_force(lengths, 3, 20, seed, part)[0]
    with pytest.raises(IndexError, match=r"sample 25 of 2\d; the run asked for 20|sample 25 of"):
        MegatronDataset(dataset, range(1, 4), 3, 20, 0).row(25)


def test_documents_from_eod(tmp_path):
    """Several end tokens in a row, one at either end of the inputs, one as the last target (which begins nothing)."""
    with IndexedWriter(tmp_path / "a", dtype="uint8") as writer:
        writer.add_document([9, 1, 9, 9, 2, 9, 9])
    dataset = IndexedDataset(tmp_path / "a")
    assert MegatronDataset(dataset, range(1), 6, 1, 0, eod_id=9).row(0).starts.tolist() == [0, 1, 3, 4, 6]
    assert MegatronDataset(dataset, range(1), 6, 1, 0, eod_id=7).row(0).starts.tolist() == [0]
    assert MegatronDataset(dataset, range(1), 6, 1, 0).row(0).starts.tolist() == [0]
    with pytest.raises(ValueError, match="token id 9, but the model's vocabulary has 9"):
        MegatronDataset(dataset, range(1), 6, 1, 0, vocab_size=9).row(0)


def test_compiled_helper_equals_numpy(monkeypatch):
    helper = index_module()[0] or pytest.skip("the data helper has not been built")
    rng = np.random.default_rng(0)
    for _ in range(300):
        lengths = rng.integers(0, 9, size=rng.integers(1, 12)).astype(np.int32)
        if lengths.sum() < 2:
            continue
        order = np.tile(np.arange(len(lengths), dtype=np.int32), rng.integers(1, 4))
        rng.shuffle(order)
        seq_length = int(rng.integers(1, 7))
        samples = (int(lengths[order].sum()) - 1) // seq_length
        if samples < 1:
            continue
        monkeypatch.setattr(megatron_order, "_index", None)
        plain = sample_index(lengths, order, seq_length, samples)
        monkeypatch.setattr(megatron_order, "_index", helper)
        assert np.array_equal(sample_index(lengths, order, seq_length, samples), plain)


def test_wide_sample_index():
    """Documents of 2^31 - 1 tokens: positions beyond 2^32 stay exact."""
    lengths = np.full(8, 2**31 - 1, dtype=np.int32)
    order = np.arange(8, dtype=np.int32)
    seq_length = 2**20
    samples = (8 * (2**31 - 1) - 1) // seq_length
    index = sample_index(lengths, order, seq_length, samples)
    tokens = index[:, 0] * (2**31 - 1) + index[:, 1]
    assert np.array_equal(tokens, np.arange(samples + 1) * seq_length) and index[:, 1].max() < 2**31 - 1


def test_wide_dtypes(monkeypatch):
    """Numbers of documents beyond 2^31 and of samples beyond 2^32 are held in 64 bits (the arrays are not made)."""
    made = []

    def arange(*args, dtype):
        made.append(np.dtype(dtype))
        return np.zeros(1, dtype)

    monkeypatch.setattr(megatron_order.np, "arange", arange)
    random = np.random.RandomState(0)
    for documents, expected in ((2**31 - 1, np.int32), (2**31, np.int64)):
        megatron_order.document_index(documents, plan_epochs(10**13, 4096, None), random)
        assert made.pop() == expected
    for samples, expected in ((2**32 - 3, np.uint32), (2**32, np.int64)):
        megatron_order.shuffle_index(plan_epochs(samples * 2 + 1, 2, None), random)
        assert made.pop() == expected


def test_samples_asked():
    asked = {"global_batch_size": 8, "train_iters": 100, "train_samples": None, "eval_interval": 30, "eval_iters": 5}
    assert samples_asked(**asked) == (800, 4 * 5 * 8, 40)
    assert samples_asked(**{**asked, "train_samples": 799}) == (799, 160, 40)
    assert samples_asked(**{**asked, "train_iters": None, "train_samples": 800}) == (800, 160, 40)
    assert samples_asked(**{**asked, "eval_iters": 0}) == (800, 0, 0)
    assert (
        samples_asked(**{**asked, "eval_interval": None})
        == samples_asked(**{**asked, "eval_interval": 0})
        == (800, 40, 40)
    )


def test_known_order(tmp_path):
    """NumPy's RandomState is frozen; these numbers are what it gave for this case."""
    ours = MegatronDataset(make(tmp_path / "a", [5, 4, 7, 3]), range(4), 4, 6, 1234)
    assert ours.order.tolist() == [0, 1, 2, 3, 1, 2, 3, 0]
    assert ours.shuffle.tolist() == [0, 2, 3, 1, 4, 8, 7, 6, 5]
