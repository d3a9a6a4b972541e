"""Addressed randomness: the generator, the normal and its table, slices, statistics, dropout, initial weights."""

from __future__ import annotations

import hashlib
import importlib.util
import math
from pathlib import Path

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.mesh.collectives import Axis
from megatron_lite.tensor.init import initialise
from megatron_lite.tensor.layers import make_parameter
from megatron_lite.tensor.philox import MASK, name_key, philox4x32, uniform_bits
from megatron_lite.tensor.random import (
    DropoutKey,
    attention_dropout,
    compiled,
    dropout,
    keep_rows,
    normal_of,
    normal_rows,
    normal_slice,
    normal_table,
)
from megatron_lite.tensor.spec import Init, Rectangle, TensorParallel


def whole(*shape: int) -> Rectangle:
    return Rectangle((0,) * len(shape), shape)


def normals(
    seed: int, name: str, shape: tuple[int, ...], box: Rectangle | None = None, **options: object
) -> torch.Tensor:
    box = box or whole(*shape)
    out = torch.empty(box.size, dtype=options.get("dtype", torch.float32))  # type: ignore[call-overload]
    normal_slice(seed, name, shape, box, float(options.get("std", 1.0)), out)  # type: ignore[arg-type]
    return out


# ---- the generator


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers of Salmon et al. 2011
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers(counter: str, key: str, expected: str) -> None:
    words = philox4x32(
        tuple(int(k, 16) for k in key.split()),  # type: ignore[arg-type]
        tuple(torch.tensor([int(c, 16)]) for c in counter.split()),  # type: ignore[arg-type]
    )
    assert [f"{int(w):08x}" for w in words] == expected.split()


def philox_of_integers(key: tuple[int, int], counter: list[int]) -> list[int]:
    """Philox 4x32-10 in Python's integers, as the paper writes it."""
    (k0, k1), c = key, counter
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k0, b & MASK, (a >> 32) ^ c[3] ^ k1, a & MASK]
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c


uint32 = st.one_of(st.integers(0, MASK), st.sampled_from([0, 1, 0x7FFFFFFF, 0x80000000, MASK]))


@given(st.tuples(uint32, uint32), st.lists(uint32, min_size=4, max_size=4))
def test_philox_agrees_with_whole_numbers(key: tuple[int, int], counter: list[int]) -> None:
    words = philox4x32(key, tuple(torch.tensor([c]) for c in counter))  # type: ignore[arg-type]
    assert [int(w) for w in words] == philox_of_integers(key, counter)


@given(st.lists(st.integers(0, (1 << 62) - 64), min_size=1, max_size=3), st.integers(1, 11))
def test_words_stand_at_their_addresses(starts: list[int], length: int) -> None:
    words = uniform_bits((3, 4), torch.tensor(starts), length)
    for r, start in enumerate(starts):
        for i in (0, length - 1):
            block, lane = divmod(start + i, 4)
            assert int(words[r, i]) == philox_of_integers((3, 4), [block & MASK, block >> 32, 0, 0])[lane]


def test_keys_do_not_change() -> None:
    """A changed key would change every run's initial weights and masks."""
    assert name_key(1234, "blocks.0.mlp.up.weight") == (289583318, 3798485021)
    assert len({name_key(s, n) for s in (0, 1, 11) for n in ("a", "b", "1a", "")}) == 12


# ---- the normal


def normal_of_floats(word: int, table: list[list[float]]) -> float:
    """The definition in Python's floats, which are IEEE doubles that nothing fuses."""
    n = 2 * (word % (1 << 31)) + 1
    e = n.bit_length() - 1
    s = n / (1 << e) - 1.5
    z = table[e][13]
    for k in range(12, -1, -1):
        z = z * s
        z = z + table[e][k]
    z = z * (((1 << 32) - n) / (1 << 33))
    return -z if word >> 31 else z


def test_the_normal_numbers_are_these_bits() -> None:
    """The same on every machine: a fused multiply-add or another table would show here."""
    words = uniform_bits(name_key(1234, "golden"), torch.tensor([0]), 4096)[0]
    wide, table = normal_of(words, normal_table()), normal_table().tolist()
    assert wide.tolist() == [normal_of_floats(w, table) for w in words.tolist()]
    digest = hashlib.sha256(normals(1234, "golden", (4096,), std=0.02).numpy().astype("<f4").tobytes()).hexdigest()
    assert digest == "fce504983fef8a16046e5e5303e13a8b6fa105198287c84818dd46139e21cc30"
    masks = uniform_bits(DropoutKey(1, 2, 3, "golden").words(), torch.tensor([0]), 4096)
    digest = hashlib.sha256(masks.contiguous().numpy().astype("<i8").tobytes()).hexdigest()
    assert digest == "8716354ae023c14a28929a22ea9b65c53e7b1657d1b656958f30bbdd5e463846"


def test_the_table_is_what_its_tool_makes() -> None:
    path = Path(__file__).parents[1] / "tools" / "make_normal_table.py"
    spec = importlib.util.spec_from_file_location("make_normal_table", path)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    table = normal_table()
    assert table.shape == (tool.OCTAVES, tool.DEGREE + 1)
    for e in (0, 17, 31):
        assert table[e].tolist() == tool.octave(e)


def test_the_normal_is_the_quantile() -> None:
    generator = torch.Generator().manual_seed(0)
    tails = torch.cat([torch.randint(1 << e, 2 << e, (6,), generator=generator) for e in range(31)])
    tails = torch.cat([torch.tensor([0]), tails.clamp(max=(1 << 31) - 1)])
    z = normal_of(tails, normal_table())
    for word, got in zip(tails.tolist(), z.tolist(), strict=True):
        p = mpmath.mpf(2 * word + 1) / mpmath.mpf(2) ** 33
        with mpmath.workdps(40):
            start = mpmath.sqrt(-2 * mpmath.log(p)) * mpmath.mpf("0.9") if p < 0.2 else mpmath.mpf("0.7")
            exact = mpmath.findroot(lambda v: mpmath.log(mpmath.erfc(v / mpmath.sqrt(2)) / 2) - mpmath.log(p), start)  # noqa: B023
        assert abs(got / exact - 1) < 1.5e-12, (word, got)


def test_the_normal_is_symmetric_and_falls_with_the_word() -> None:
    words = torch.cat([torch.arange(0, 1 << 14), torch.arange((1 << 31) - (1 << 14), 1 << 31)])
    words = torch.cat([words, *(torch.arange((1 << e) - 40, (1 << e) + 40) for e in range(15, 31))]).unique()
    z = normal_of(words, normal_table())
    assert (z[1:] < z[:-1]).all()  # also across the borders of octaves
    assert (z > 0).all() and abs(float(z[0]) - 6.337957754553) < 1e-11
    assert torch.equal(normal_of(words + (1 << 31), normal_table()), -z)


def test_the_normal_does_not_depend_on_threads_vectors_or_chunks() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = normals(7, "w", (331, 257))
        torch.set_num_threads(4)
        assert torch.equal(one, normals(7, "w", (331, 257)))
    finally:
        torch.set_num_threads(before)
    chunked = torch.empty(331, 257)
    normal_slice(7, "w", (331, 257), whole(331, 257), 1.0, chunked, kernel=normal_rows)
    assert torch.equal(one, chunked)
    single = torch.stack([normals(7, "w", (331, 257), Rectangle((200, j), (1, 1))) for j in range(40)]).flatten()
    assert torch.equal(single, one[200, :40])


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_a_box_holds_the_numbers_of_the_full_tensor(shape: list[int], data: st.DataObject) -> None:
    start = [data.draw(st.integers(0, n - 1)) for n in shape]
    size = [data.draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True)]
    full = normals(5, "w", tuple(shape))
    box = normals(5, "w", tuple(shape), Rectangle(tuple(start), tuple(size)))
    assert torch.equal(box, full[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))])


def test_a_box_computes_no_more_than_itself() -> None:
    seen: list[tuple[int, ...]] = []

    def counting(out: torch.Tensor, table: torch.Tensor, start: torch.Tensor, *rest: object) -> None:
        seen.append(tuple(out.shape))
        normal_rows(out, table, start, *rest)  # type: ignore[arg-type]

    out = torch.empty(3, 200_000)
    shape = (1 << 20, 1 << 20)  # 2^40 elements: nothing of the full size is made
    normal_slice(1, "w", shape, Rectangle((1 << 19, 1 << 18), (3, 200_000)), 1.0, out, kernel=counting)
    assert sum(math.prod(s) for s in seen) == out.numel()
    assert max(math.prod(s) for s in seen) <= 1 << 22
    column = torch.empty(100_000, 1)
    normal_slice(1, "w", shape, Rectangle((0, 77), (100_000, 1)), 1.0, column, kernel=counting)
    index = ((1 << 19) + 2) * (1 << 20) + (1 << 18) + 199_999
    words = uniform_bits(name_key(1, "w"), torch.tensor([index]), 1)
    assert float(out[2, -1]) == float(normal_of(words, normal_table()).float())


def test_dtypes_hold_the_same_numbers_rounded() -> None:
    exact = normals(3, "w", (64, 65), std=0.02)
    assert torch.equal(normals(3, "w", (64, 65), std=0.02, dtype=torch.float64), exact.double())
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(normals(3, "w", (64, 65), std=0.02, dtype=dtype), exact.to(dtype))
    strided = torch.empty(65, 64).t()
    normal_slice(3, "w", (64, 65), whole(64, 65), 0.02, strided)
    assert torch.equal(strided, exact)


def test_statistics_of_a_million() -> None:
    n = 1 << 20
    x = normals(1234, "blocks.0.mlp.up.weight", (n,)).double()
    se = n**-0.5  # standard error of the mean
    assert abs(x.mean()) < 4 * se
    assert abs(x.var() - 1) < 4 * math.sqrt(2) * se
    assert abs((x**3).mean()) < 4 * math.sqrt(15) * se
    assert abs((x**4).mean() - 3) < 4 * math.sqrt(96) * se
    # Kolmogorov-Smirnov: P(D sqrt(n) > 1.95) = 0.001
    cdf = 0.5 * torch.erfc(-x.sort().values / math.sqrt(2))
    grid = torch.arange(n + 1, dtype=torch.float64) / n
    d = max(float((grid[1:] - cdf).max()), float((cdf - grid[:-1]).max()))
    assert d * math.sqrt(n) < 1.95
    assert len(x.unique()) > 0.99 * n  # fp32 has fewer values than words


@pytest.mark.parametrize("other", [(1234, "blocks.1.mlp.up.weight"), (1235, "blocks.0.mlp.up.weight")])
def test_tensors_of_other_names_and_seeds_are_independent(other: tuple[int, str]) -> None:
    n = 1 << 18
    x, y = normals(1234, "blocks.0.mlp.up.weight", (n,)).double(), normals(*other, (n,)).double()
    for lag in range(5):
        assert abs((x[lag:] * y[: n - lag]).mean()) < 4 * n**-0.5
        assert abs(((x[lag:] ** 2 - 1) * (y[: n - lag] ** 2 - 1)).mean()) < 4 * 2 * n**-0.5
        if lag:
            assert abs((x[lag:] * x[: n - lag]).mean()) < 4 * n**-0.5


# ---- dropout

KEYED = DropoutKey(seed=1, step=5, layer=2, site="mlp_output")


def addresses(tokens: int, seq_length: int, first_row: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    t = torch.arange(tokens)
    return first_row + t // seq_length, t % seq_length


def test_dropout_keeps_the_right_share_and_scales_it() -> None:
    x = torch.full((512, 256), 3.0, requires_grad=True)
    for p in (0.1, 0.5, 0.75):
        y = dropout(x, p, KEYED, *addresses(512, 128))
        kept = y != 0
        share = float(kept.double().mean())
        assert abs(share - (1 - p)) < 4 * math.sqrt(p * (1 - p) / x.numel())
        assert torch.allclose(y[kept], torch.tensor(3.0 / (1 - p)))
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad != 0, kept)
        assert torch.allclose(grad[kept], torch.tensor(1 / (1 - p)))
    assert dropout(x, 0.0, KEYED, *addresses(512, 128)) is x
    assert not dropout(x, 1.0, KEYED, *addresses(512, 128)).any()
    with pytest.raises(ValueError, match=r"1\.5 is not in \[0, 1\]"):
        dropout(x, 1.5, KEYED, *addresses(512, 128))


def test_a_slice_of_tokens_or_features_has_the_masks_of_the_whole() -> None:
    x, (rows, positions) = torch.ones(48, 30), addresses(48, 16, first_row=6)
    full = dropout(x, 0.5, KEYED, rows, positions)
    for a, b in ((0, 24), (24, 48), (7, 9)):  # a rank's slice under sequence parallelism
        assert torch.equal(dropout(x[a:b], 0.5, KEYED, rows[a:b], positions[a:b]), full[a:b])
    for a, b in ((0, 30), (15, 30), (3, 10)):  # a run of features
        assert torch.equal(dropout(x[:, a:b], 0.5, KEYED, rows, positions, first_feature=a), full[:, a:b])
    # microbatches of one row, in any order, on any data-parallel rank
    for b in range(3):
        again = dropout(torch.ones(16, 30), 0.5, KEYED, *addresses(16, 16, first_row=6 + b))
        assert torch.equal(again, full[16 * b : 16 * (b + 1)])


def test_masks_differ_by_everything_in_the_address() -> None:
    x, where = torch.ones(32, 64), addresses(32, 16)
    masks = [dropout(x, 0.5, KEYED, *where)]
    for change in ({"seed": 2}, {"step": 6}, {"layer": 3}, {"site": "attention_output"}):
        key = DropoutKey(**{**KEYED.__dict__, **change})  # type: ignore[arg-type]
        masks.append(dropout(x, 0.5, key, *where))
    masks.append(dropout(x, 0.5, KEYED, *addresses(32, 16, first_row=2)))
    masks += [masks[0].roll(16, 0), masks[0].roll(1, 0), masks[0].roll(1, 1), masks[0].roll(4, 1)]
    for i in range(len(masks)):
        for j in range(i):
            equal = float((masks[i] == masks[j]).double().mean())
            assert abs(equal - 0.5) < 4 * 0.5 / math.sqrt(x.numel()), (i, j)


def test_attention_masks_are_those_of_the_position_and_the_head() -> None:
    key = DropoutKey(1, 5, 2, "attention")
    zero, row = torch.tensor([0]), torch.tensor([3])
    full = attention_dropout(torch.ones(1, 4, 16, 16), 0.5, key, row, zero)
    assert abs(float((full != 0).double().mean()) - 0.5) < 4 * 0.5 / math.sqrt(full.numel())
    heads = attention_dropout(torch.ones(1, 2, 16, 16), 0.5, key, row, zero, first_head=2)  # of the second tp rank
    assert torch.equal(heads, full[:, 2:])
    # two documents of length 5, at positions 2 and 7 of the row
    parts = attention_dropout(torch.ones(2, 4, 5, 5), 0.5, key, row.expand(2), torch.tensor([2, 7]))
    assert torch.equal(parts[0], full[0, :, 2:7, 2:7])
    assert torch.equal(parts[1], full[0, :, 7:12, 7:12])
    assert not torch.equal(full[0, 0], full[0, 1])
    assert not torch.equal(attention_dropout(torch.ones(1, 4, 16, 16), 0.5, key, row + 1, zero), full)
    same = torch.ones(1, 4, 16, 16)
    assert attention_dropout(same, 0.0, key, row, zero) is same


def test_dropout_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    dropout(torch.ones(8, 8), 0.5, KEYED, *addresses(8, 8))
    normals(0, "w", (8, 8))
    assert torch.equal(torch.get_rng_state(), before)


# ---- initial weights


def shards(
    tp: int, axes: tuple[str | None, ...], shape: tuple[int, ...], dtype: torch.dtype, **options: object
) -> list:
    parameters = []
    for index in range(tp):
        axis = Axis("tp", tuple(range(tp)), index, group=object())
        parallel = TensorParallel(axis, dtype=dtype, vocab_multiple=8, **options)  # type: ignore[arg-type]
        parameter = make_parameter(parallel, shape, axes, Init("normal", 0.02))
        parameter.spec = parameter.spec.__class__(**{**parameter.spec.__dict__, "name": "blocks.0.w"})
        parameter.data.fill_(torch.nan)
        initialise({"anything": parameter}, seed=9)
        parameters.append(parameter)
    return parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        (("ffn", "embed"), (24, 10)),
        (("embed", "ffn"), (10, 24)),
        (("kv_heads", "embed"), (6, 10)),
        (("vocab", "embed"), (61, 10)),
        (("position", "embed"), (7, 10)),
    ],
)
def test_every_tp_starts_from_the_same_bits(axes: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    expected = normals(9, "blocks.0.w", shape, std=0.02).to(dtype)
    for tp in (1, 2, 4):
        full = torch.full(shape, torch.nan, dtype=dtype)
        for parameter in shards(tp, axes, shape, dtype, kv_heads=2):
            box = parameter.rectangle
            inside = parameter.data[tuple(slice(0, n) for n in box.size)]
            full[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))] = inside
            assert not parameter.data[box.size[0] :].any()  # padding
        assert torch.equal(full, expected)


def test_ties_start_alike_and_ordinary_parameters_keep_their_values() -> None:
    parallel = TensorParallel(Axis.single(), vocab_multiple=1)
    one, two = (make_parameter(parallel, (6, 4), ("vocab", "embed"), Init("normal", 1.0)) for _ in range(2))
    kept = torch.nn.Parameter(torch.ones(3))
    bias = make_parameter(parallel, (4,), ("embed",), Init("constant", 0.5))
    for parameter, changes in (
        (one, {"name": "embed.tokens.weight", "tie": "embed.tokens.weight"}),
        (two, {"name": "head.output.weight", "tie": "embed.tokens.weight"}),
        (bias, {"name": "b"}),
    ):
        parameter.spec = parameter.spec.__class__(**{**parameter.spec.__dict__, **changes})
    kept.spec = bias.spec.__class__("k", (3,), (None,), None)  # type: ignore[attr-defined]
    initialise({"one": one, "two": two, "kept": kept, "bias": bias}, seed=2)
    assert torch.equal(one, two) and torch.equal(kept, torch.ones(3)) and torch.equal(bias, torch.full((4,), 0.5))
    bias.spec = bias.spec.__class__(**{**bias.spec.__dict__, "init": Init("uniform", 1.0)})
    with pytest.raises(ValueError, match="no initialisation called 'uniform'"):
        initialise({"bias": bias}, seed=2)


def test_on_the_meta_device_nothing_is_computed() -> None:
    parallel = TensorParallel(Axis.single(), device=torch.device("meta"))
    parameter = make_parameter(parallel, (1 << 20, 1 << 20), ("ffn", "embed"), Init("normal", 1.0))
    parameter.spec = parameter.spec.__class__(**{**parameter.spec.__dict__, "name": "w"})
    initialise({"w": parameter}, 0)
    x = torch.empty(4, 8, device="meta")
    rows = torch.empty(4, dtype=torch.int64, device="meta")
    assert dropout(x, 0.5, KEYED, rows, rows).shape == x.shape


def test_compiled_kernels_stand_in_bit_for_bit() -> None:
    normal, keep = (compiled(name, torch.device("cpu")) for name in ("philox_normal", "philox_keep"))
    if normal is None or keep is None:
        pytest.skip("no compiled kernels")
    start = torch.tensor([0, 5, 1 << 32, (1 << 33) + 3])
    above = [torch.tensor([i, MASK, 7, 0]) for i in range(3)]
    for length in (1, 2, 3, 4, 5, 63, 1024, 70_001):
        values = [torch.empty(4, length) for _ in range(2)]
        for kernel, out in zip((normal_rows, normal), values, strict=True):
            kernel(out, normal_table(), start << 16, 11, MASK, 0.02)
        assert torch.equal(*values)
        for threshold in (0, 1, 1 << 31, MASK, 1 << 32):
            masks = [torch.empty(4, length, dtype=torch.bool) for _ in range(2)]
            for kernel, out in zip((keep_rows, keep), masks, strict=True):
                kernel(out, start, *above, 11, MASK, threshold)
            assert torch.equal(*masks)
