"""Groups and collectives on real gloo ranks: values, bytes, order of addition, queues, agreement."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from megatron_lite.config.problem import ConfigError
from megatron_lite.mesh.agreement import agree, code_digest
from megatron_lite.mesh.collectives import Axis, Traffic, sum_in_order
from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.mesh import COMPOSITION, ProcessMesh
from megatron_lite.testing.ranks import RankFailed, run_ranks

# ---- one rank


def test_a_mesh_of_one_rank_opens_nothing_and_is_the_identity() -> None:
    assert not dist.is_initialized()
    with ProcessMesh.open(Layout(), kv_heads=2) as mesh:
        assert not dist.is_initialized()
        assert (mesh.rank, mesh.backend, mesh.device.type) == (0, "none", "cpu")
        for name in (*COMPOSITION, "kv_replica"):
            axis = mesh.axis(name)
            assert (axis.size, axis.index, axis.ranks) == (1, 0, (0,))
        assert mesh.tie_axis((0,)).size == 1
        agree(mesh, {"anything": 1})
    with pytest.raises(KeyError, match="no axis 'ep': there are tp"):
        mesh = ProcessMesh.open(Layout())
        mesh.axis("ep")


def test_every_collective_of_a_single_axis_is_the_identity() -> None:
    axis = Axis.single()
    t = torch.arange(6.0).view(2, 3)
    for call in (axis.all_gather, axis.reduce_scatter, axis.ordered_reduce_scatter, axis.all_to_all):
        out = torch.zeros(2, 3)
        call(out, t, async_op=True).wait()
        assert torch.equal(out, t)
        call(t, t).wait()  # the same buffer
    axis.all_reduce(t).wait()
    axis.ordered_all_reduce(t)
    axis.broadcast(t)
    axis.barrier()
    assert torch.equal(t, torch.arange(6.0).view(2, 3))
    assert axis.gather_json({"a": (1, 2)}) == [{"a": [1, 2]}]
    assert axis.traffic.as_dict() == {}


def test_sizes_that_do_not_fit_are_refused() -> None:
    axis = Axis.single()
    with pytest.raises(AssertionError):
        axis.all_gather(torch.zeros(3), torch.zeros(2))
    with pytest.raises(AssertionError):
        axis.all_gather(torch.zeros(2, dtype=torch.float64), torch.zeros(2))
    with pytest.raises(AssertionError, match="contiguous"):
        axis.reduce_scatter(torch.zeros(3, 2), torch.zeros(2, 3).t())


def test_half_precision_is_added_in_fp32_and_rounded_once() -> None:
    parts = torch.full((3, 1), 1.0, dtype=torch.bfloat16)
    parts[0] = 256.0  # 256 + 1 rounds to 256 in bf16; 256 + 1 + 1 = 258 does not
    out = torch.empty(1, dtype=torch.bfloat16)
    sum_in_order(out, parts)
    assert out.item() == 258.0


# ---- several ranks: values and bytes


def collectives_and_bytes():
    mesh = ProcessMesh.open(Layout(tp=3))
    axis, me, n = mesh.axis("tp"), mesh.rank, 3
    assert mesh.traffic.as_dict() == {}  # opening is not counted
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        mesh.traffic.reset()
        whole = torch.arange(n * 4).to(dtype).view(n * 2, 2) + me  # 12 elements
        part = whole[:2].clone()  # 4 elements
        for async_op in (False, True):
            t = whole.clone()
            axis.all_reduce(t, async_op=async_op).wait()
            assert torch.equal(t, (3 * torch.arange(n * 4).view(n * 2, 2) + 3).to(dtype))
            out = torch.empty(n * 2, 2, dtype=dtype)
            axis.all_gather(out, part, async_op=async_op).wait()
            expected = torch.cat([torch.arange(4).view(2, 2) + r for r in range(n)])
            assert torch.equal(out, expected.to(dtype))
            for reduce in (axis.reduce_scatter, axis.ordered_reduce_scatter):
                t, out = whole.clone(), torch.empty(2, 2, dtype=dtype)
                reduce(out, t, async_op=async_op).wait()
                assert torch.equal(out, (3 * (torch.arange(4).view(2, 2) + 4 * me) + 3).to(dtype))
                assert torch.equal(t, whole)  # the input is left alone
            out = torch.empty(n * 2, 2, dtype=dtype)
            axis.all_to_all(out, whole, async_op=async_op).wait()
            expected = torch.cat([torch.arange(4).view(2, 2) + 4 * me + r for r in range(n)])
            assert torch.equal(out, expected.to(dtype))
        b = whole.element_size()
        assert mesh.traffic.counts == {
            ("tp", "all_reduce"): (2, 2 * 12 * b),
            ("tp", "all_gather"): (2, 2 * 4 * b),
            ("tp", "reduce_scatter"): (2, 2 * 12 * b),
            ("tp", "all_to_all"): (4, 4 * 12 * b),
        }
    mesh.traffic.reset()
    for op, expected in (("max", 2.0), ("min", 0.0)):
        t = torch.tensor([float(me)])
        axis.all_reduce(t, op=op).wait()
        assert t.item() == expected
    t = torch.full((5,), float(me))
    axis.broadcast(t, src_index=2)
    assert t.tolist() == [2.0] * 5
    axis.barrier()
    empty = torch.empty(0)
    axis.all_reduce(empty).wait()
    axis.all_gather(empty, empty).wait()
    assert mesh.traffic.as_dict() == {
        "tp.all_reduce": {"calls": 2, "bytes": 8},
        "tp.barrier": {"calls": 1, "bytes": 0},
        "tp.broadcast": {"calls": 1, "bytes": 20},
    }
    # Objects are JSON: of different lengths, not only ASCII, tuples as lists.
    answers = axis.gather_json({"rank": me, "text": "ü" * me, "pair": (me, None)})
    assert answers == [{"rank": r, "text": "ü" * r, "pair": [r, None]} for r in range(n)]
    mesh.close()


def in_place():
    mesh = ProcessMesh.open(Layout(dp=3))
    axis, me = mesh.axis("dp"), mesh.rank
    for async_op in (False, True):
        whole = torch.full((12,), -1.0)
        whole[4 * me : 4 * me + 4] = float(me)
        axis.all_gather(whole, whole[4 * me : 4 * me + 4], async_op=async_op).wait()
        assert whole.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
        for reduce in (axis.reduce_scatter, axis.ordered_reduce_scatter):
            whole = torch.arange(12.0) + me
            reduce(whole[4 * me : 4 * me + 4], whole, async_op=async_op).wait()
            assert whole[4 * me : 4 * me + 4].tolist() == [3.0 * i + 3 for i in range(4 * me, 4 * me + 4)]
    mesh.close()


def test_a_shard_may_lie_in_the_whole() -> None:
    run_ranks(3, in_place)


def test_values_and_bytes_of_collectives() -> None:
    run_ranks(3, collectives_and_bytes)


def ordered_sums(numel: int):
    mesh = ProcessMesh.open(Layout(dp=4))
    axis, n = mesh.axis("dp"), 4
    everyone = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) * 10.0 ** (r - 2) for r in range(n)]
    in_order = everyone[0] + everyone[1] + everyone[2] + everyone[3]
    mine = everyone[mesh.rank]
    total = mine.clone()
    axis.ordered_all_reduce(total)
    assert torch.equal(total, in_order)
    # A rotation of the buffer moves every element to another place, often to another shard: no bit may change.
    moved = mine.roll(numel // 3)
    axis.ordered_all_reduce(moved)
    assert torch.equal(moved.roll(-(numel // 3)), in_order)
    shard = numel // n
    out = torch.empty(shard)
    axis.ordered_reduce_scatter(out, mine[: shard * n].clone()).wait()
    assert torch.equal(out, in_order[mesh.rank * shard : (mesh.rank + 1) * shard])
    ring = mine.clone()
    axis.all_reduce(ring).wait()
    kinds = mesh.traffic.as_dict()
    mesh.close()
    return int((ring != in_order).sum()), kinds


def test_ordered_sums_are_in_rank_order_whatever_the_place() -> None:
    small = run_ranks(4, ordered_sums, 1001)
    large = run_ranks(4, ordered_sums, 10_001)
    # The ordinary all-reduce adds in another order for some elements: the check above is not met by doing nothing.
    assert all(differ > 0 for differ, _ in large)
    # Small tensors: one gather of the whole. Large ones: all-to-all of the whole (padded) and a gather of the shard.
    assert small[0][1]["dp.all_gather"] == {"calls": 2, "bytes": 2 * 1001 * 4}
    assert large[0][1]["dp.all_gather"] == {"calls": 2, "bytes": 2 * 2501 * 4}
    assert large[0][1]["dp.all_to_all"] == {"calls": 3, "bytes": (2 * 4 * 2501 + 10_000) * 4}


def test_an_operation_in_flight_is_overlapped_and_kept_alive() -> None:
    assert all(r == [float(4 * i + 6) for i in range(20)] for r in run_ranks(4, many_in_flight))


def many_in_flight():
    mesh = ProcessMesh.open(Layout(dp=4))
    tensors = [torch.full((1000,), float(mesh.rank + i)) for i in range(20)]
    handles = [mesh.axis("dp").all_reduce(t, async_op=True) for t in tensors]
    for handle in reversed(handles):
        handle.wait()
        handle.wait()  # again: nothing
    mesh.close()
    return [t[0].item() for t in tensors]


# ---- groups


def groups_of(layout: Layout, kv_heads: int | None):
    mesh = ProcessMesh.open(layout, kv_heads=kv_heads)
    found = {}
    for name in (*COMPOSITION, "kv_replica"):
        axis = mesh.axis(name)
        assert axis.ranks[axis.index] == mesh.rank and axis.size == len(axis.ranks)
        t = torch.zeros(layout.world_size)
        t[mesh.rank] = 1
        axis.all_reduce(t).wait()
        assert t.nonzero().flatten().tolist() == list(axis.ranks)  # the group is who the axis says
        found[name] = axis.ranks
    opened = len(dist.distributed_c10d._world.pg_map)
    mesh.close()
    left = len(dist.distributed_c10d._world.pg_map)
    return found, opened, left


@pytest.mark.parametrize(
    ("layout", "kv_heads", "groups"),
    [
        (Layout(tp=4), 2, 1),  # kv_replica
        (Layout(tp=4), 1, 0),  # the replicas are the whole job: the default group
        (Layout(tp=2, dp=2), None, 2),
        (Layout(cp=2, dp=2), None, 2),
        (Layout(tp=2, pp=2), 1, 2 + 2),  # tp (its replicas too), pp, two queues
        (Layout(dp=4), None, 0),
        (Layout(pp=4, virtual=2), None, 4),  # only the queues: pp is the whole job
    ],
)
def test_axes_are_the_layouts_groups_and_only_needed_groups_are_opened(layout, kv_heads, groups) -> None:
    for rank, (found, opened, left) in enumerate(run_ranks(4, groups_of, layout, kv_heads)):
        for name, axes in COMPOSITION.items():
            assert found[name] == layout.group(rank, axes), name
        replicas = layout.kv_replica_groups(kv_heads) if kv_heads else [(rank,)]
        assert found["kv_replica"] in replicas
        # The default group, and a group for each axis (or set of queues) of more than one rank that this rank is in.
        assert opened == 1 + groups, (opened, groups)
        assert left == 1


def wrong_size():
    ProcessMesh.open(Layout(tp=2, dp=2))


def test_a_layout_of_another_size_than_the_group() -> None:
    with pytest.raises(RankFailed, match="4 ranks; 2 processes"):
        run_ranks(2, wrong_size)
    with pytest.raises(ConfigError, match="1 processes"):
        ProcessMesh.open(Layout(tp=2))


def ties(layout: Layout):
    mesh = ProcessMesh.open(layout)
    ends = mesh.tie_axis((layout.pp - 1, 0, 0))
    again = mesh.tie_axis((0, layout.pp - 1))
    alone = mesh.tie_axis((1,))
    t = torch.tensor([1.0 + mesh.rank])
    ends.all_reduce(t).wait()
    again.all_reduce(torch.zeros(1)).wait()
    mesh.close()
    return ends.ranks, again.ranks, alone.size, t.item(), mesh.traffic.as_dict()


def test_tie_axis_joins_the_holders_with_my_coordinates() -> None:
    layout = Layout(tp=2, pp=3)
    results = run_ranks(6, ties, layout)
    for rank, (ends, again, alone, value, traffic) in enumerate(results):
        c = layout.coords(rank)
        holders = (c.tp, c.tp + 4) if c.pp in (0, 2) else (rank,)
        assert ends == again == holders
        assert alone == 1
        assert value == sum(1.0 + r for r in holders)
        assert traffic == ({"tie.all_reduce": {"calls": 2, "bytes": 8}} if len(holders) == 2 else {})


# ---- queues


def fifo(count: int):
    mesh = ProcessMesh.open(Layout(pp=2), numbered=True)
    assert mesh.traffic.as_dict() == {}
    values = []
    if mesh.rank == 0:
        queue = mesh.queue(0, 1)
        for i in range(count):  # many at once, each tensor forgotten at once: the queue keeps them alive
            queue.send(torch.full((5000,), float(i)), label=i)
        kept = queue.unsent
        assert kept == 2 * count, kept
        answer = torch.empty(3)
        mesh.queue(1, 0).recv(answer).wait()
        queue.flush()
        assert queue.unsent == 0
        return answer.tolist(), mesh.traffic.as_dict()
    time.sleep(0.3)
    for i in range(count):
        t = torch.empty(5000)
        mesh.queue(0, 1).recv(t, label=i).wait()
        values.append((t.min().item(), t.max().item()))
    sent = mesh.queue(1, 0).send(torch.tensor([1.0, 2.0, 3.0]))
    sent.wait()
    assert mesh.queue(1, 0).unsent == 0
    assert values == [(float(i), float(i)) for i in range(count)]
    return values, mesh.traffic.as_dict()


def test_messages_arrive_in_order_and_tensors_live_until_sent() -> None:
    (answer, sent), (_, received) = run_ranks(2, fifo, 6)
    assert answer == [1.0, 2.0, 3.0]
    assert sent == {"forward.send": {"calls": 6, "bytes": 6 * 20_000}, "backward.recv": {"calls": 1, "bytes": 12}}
    assert received == {"forward.recv": {"calls": 6, "bytes": 6 * 20_000}, "backward.send": {"calls": 1, "bytes": 12}}


def fails_with_a_message_unsent():
    with ProcessMesh.open(Layout(pp=2)) as mesh:
        if mesh.rank == 0:
            mesh.queue(0, 1).send(torch.zeros(1_000_000))
            raise KeyError("first failure")
        time.sleep(1)


def test_a_failing_rank_does_not_wait_for_its_messages_to_go() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match="first failure"):
        run_ranks(2, fails_with_a_message_unsent)
    assert time.monotonic() - start < 15


def wrong_label():
    mesh = ProcessMesh.open(Layout(pp=2), numbered=True)
    if mesh.rank == 0:
        mesh.queue(0, 1).send(torch.zeros(2), label=3).wait()
    else:
        mesh.queue(0, 1).recv(torch.empty(2), label=4).wait()


def test_a_numbered_queue_notices_a_message_out_of_order() -> None:
    with pytest.raises(RankFailed, match=r"forward queue from rank 0: message .* \[1, 3, 2\], expected \[1, 4, 2\]"):
        run_ranks(2, wrong_label)


def independent():
    """A forward message that nobody takes yet does not hold up the backward queue, nor another edge."""
    mesh = ProcessMesh.open(Layout(pp=3))
    stage = mesh.coords.pp
    if stage < 2:
        mesh.queue(stage, stage + 1).send(torch.ones(100_000))
    if stage > 0:
        mesh.queue(stage, stage - 1).send(torch.full((2,), float(stage)))
    got = torch.zeros(2)
    if stage < 2:
        mesh.queue(stage + 1, stage).recv(got).wait()
    if stage > 0:
        mesh.queue(stage - 1, stage).recv(torch.empty(100_000)).wait()
    mesh.close()  # waits for what was sent
    return got.tolist()


def test_queues_do_not_wait_for_each_other() -> None:
    assert run_ranks(3, independent) == [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]]


def ring(layout: Layout):
    mesh = ProcessMesh.open(layout)
    stage, pp = mesh.coords.pp, layout.pp
    after, before = (stage + 1) % pp, (stage - 1) % pp
    got = {}
    for kind, to, source in (("forward", after, before), ("backward", before, after)):
        mesh.queue(stage, to, kind).send(torch.tensor([float(mesh.rank), 0.0 if kind == "forward" else 1.0]))
        t = torch.empty(2)
        mesh.queue(source, stage, kind).recv(t).wait()
        got[kind] = t.tolist()
    mesh.close()
    return got


@pytest.mark.parametrize("layout", [Layout(pp=2, virtual=2), Layout(pp=3, virtual=2), Layout(tp=2, pp=2, virtual=3)])
def test_virtual_stages_make_the_pipeline_a_ring(layout: Layout) -> None:
    results = run_ranks(layout.world_size, ring, layout)
    for rank, got in enumerate(results):
        c = layout.coords(rank)
        before, after = layout.rank(tp=c.tp, pp=(c.pp - 1) % layout.pp), layout.rank(tp=c.tp, pp=(c.pp + 1) % layout.pp)
        assert got == {"forward": [float(before), 0.0], "backward": [float(after), 1.0]}


def test_a_ring_of_two_needs_the_kind() -> None:
    mesh = ProcessMesh.open(Layout(pp=2, virtual=2), backend="fake")
    with pytest.raises(AssertionError, match="say which"):
        mesh.queue(0, 1)
    mesh.close()


# ---- back ends


def test_a_thousand_imaginary_ranks_on_the_meta_device() -> None:
    layout = Layout(tp=8, cp=2, dp=8, pp=8, virtual=2)
    start = time.monotonic()
    mesh = ProcessMesh.open(layout, backend="fake", rank=777, kv_heads=2)
    elapsed = time.monotonic() - start
    try:
        assert elapsed < 2.0
        assert mesh.device.type == "meta" and mesh.coords == layout.coords(777)
        assert [mesh.axis(a).size for a in ("tp", "cp", "dp", "pp", "dp_cp", "tp_pp", "world", "kv_replica")] == [
            *(8, 2, 8, 8, 16, 64, 1024, 4)
        ]
        tp = mesh.axis("tp")
        t = torch.empty(4, 6, device="meta", dtype=torch.bfloat16)
        gathered = torch.empty(32, 6, device="meta", dtype=torch.bfloat16)
        tp.all_gather(gathered, t, async_op=True).wait()
        tp.reduce_scatter(t, gathered).wait()
        tp.ordered_reduce_scatter(t, gathered, async_op=True).wait()
        tp.all_to_all(gathered, gathered.clone()).wait()
        tp.all_reduce(t, async_op=True).wait()
        tp.ordered_all_reduce(torch.empty(100_000, device="meta"))
        tp.broadcast(t)
        tp.barrier()
        pp, stage = layout.pp, mesh.coords.pp
        mesh.queue(stage, (stage + 1) % pp).send(t).wait()
        mesh.queue((stage - 1) % pp, stage).recv(t).wait()
        assert mesh.axis("world").gather_json({"a": 1}) == [{"a": 1}] * 1024
        assert mesh.traffic.bytes("tp", "all_gather") == 4 * 6 * 2 + 100_000 // 8 * 4
        assert mesh.traffic.bytes("tp", "reduce_scatter") == 32 * 6 * 2
        assert mesh.traffic.bytes("forward") == 2 * 48
        assert mesh.tie_axis((0, stage)).size == 2
    finally:
        mesh.close()
    assert not dist.is_initialized()


def other_backend(path: str):
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    if not hasattr(dist.Backend, "OURS"):
        dist.Backend.register_backend(
            "ours", lambda store, r, n, timeout: dist.ProcessGroupGloo(store, r, n, timeout=timeout), devices=["cpu"]
        )
    dist.init_process_group("ours", store=dist.FileStore(path, size), rank=rank, world_size=size)
    with ProcessMesh.open(Layout(tp=2, pp=2), backend="ours", device="cpu") as mesh:
        t = torch.tensor([1.0 + mesh.rank])
        mesh.axis("tp").all_reduce(t).wait()
        if mesh.coords.pp == 0:
            mesh.queue(0, 1).send(t).wait()
        else:
            mesh.queue(0, 1).recv(t).wait()
        return mesh.backend, t.item()


def test_any_registered_backend(tmp_path) -> None:
    assert run_ranks(4, other_backend, str(tmp_path / "store")) == [("ours", 3.0)] * 4


# ---- agreement


def agreement(differ: dict):
    mesh = ProcessMesh.open(Layout(dp=4))
    what = {"code": "abc", "config": {"lr": 1e-3, "layers": [1, 2]}}
    agree(mesh, what)
    once = mesh.traffic.bytes()
    what["config"] = what["config"] | differ.get(mesh.rank, {})
    try:
        agree(mesh, what)
    except ValueError as error:
        return str(error), once
    finally:
        mesh.close()
    return "", once


def test_agreement_names_ranks_and_keys() -> None:
    results = run_ranks(4, agreement, {2: {"lr": 2e-3}, 3: {"extra": "x" * 100}})
    texts = {text for text, _ in results}
    assert len(texts) == 1  # every rank says the same
    text = texts.pop()
    assert "config.lr: 0.001 on ranks 0-1, 3; 0.002 on rank 2" in text
    assert "config.extra: (not given) on ranks 0-2; " in text and "(digest " in text
    assert "layers" not in text and "code:" not in text
    assert results[0][1] < 100  # bytes when all is well


def test_code_digest_sees_names_and_contents(tmp_path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "sub" / "b.py").write_text("y = 2\n")
    (tmp_path / "notes.txt").write_text("not code")
    first = code_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("changed")
    assert code_digest(tmp_path) == first
    (tmp_path / "sub" / "b.py").write_text("y = 3\n")
    second = code_digest(tmp_path)
    (tmp_path / "sub" / "b.py").rename(tmp_path / "sub" / "c.py")
    assert len({first, second, code_digest(tmp_path)}) == 3


def test_traffic_sums_and_resets() -> None:
    traffic = Traffic()
    traffic.add("tp", "all_reduce", 8)
    traffic.add("tp", "all_reduce", 4)
    traffic.add("dp", "all_gather", 2)
    assert traffic.counts["tp", "all_reduce"] == (2, 12)
    assert (traffic.bytes(), traffic.bytes("tp"), traffic.bytes(kind="all_gather")) == (14, 12, 2)
    traffic.reset()
    assert traffic.bytes() == 0
