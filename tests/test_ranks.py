"""The pool of ranks: it gives results, tells what failed, survives a hang, and reaches no network."""

from __future__ import annotations

import os
import socket
import time

import pytest
import torch
import torch.distributed as dist

from megatron_lite.testing.offline import NetworkRefused, is_local
from megatron_lite.testing.ranks import RankFailed, RankHang, RankPool, run_ranks


def who(*args):
    t = torch.ones(1)
    dist.all_reduce(t)
    return dist.get_rank(), dist.get_world_size(), int(t.item()), torch.get_num_threads(), os.getpid(), args


def fails_on(bad: int):
    meaning_of_life = 41 + dist.get_rank()
    if dist.get_rank() == bad:
        raise KeyError(f"no {meaning_of_life}")
    dist.all_reduce(torch.ones(1))


def hangs_on(bad: int):
    if dist.get_rank() == bad:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def dies_on(bad: int):
    if dist.get_rank() == bad:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def leaves_a_mess():
    first = torch.rand(1).item()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    dist.new_group([0])
    return first


def is_clean():
    return torch.get_default_dtype() == torch.float32, torch.get_num_threads(), torch.rand(1).item()


def reaches_out():
    for connect in (
        lambda: socket.create_connection(("192.0.2.1", 80), 1),
        lambda: socket.socket().connect(("8.8.8.8", 53)),
    ):
        try:
            connect()
        except NetworkRefused:
            continue
        return "reached"
    return "refused"


def test_every_rank_runs_and_the_pool_is_reused() -> None:
    first = run_ranks(2, who, "a", [1])
    assert [r[:4] for r in first] == [(0, 2, 2, 1), (1, 2, 2, 1)]
    assert all(r[5] == ("a", [1]) for r in first)
    more = run_ranks(3, who)  # grows
    assert [r[2] for r in more] == [3, 3, 3]
    assert [r[4] for r in more[:2]] == [r[4] for r in first]  # the same processes
    assert run_ranks(1, who)[0][:3] == (0, 1, 1)  # and a smaller job


def test_a_failure_shows_that_ranks_traceback_and_values() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed) as error:
        run_ranks(2, fails_on, 1)
    text = str(error.value)
    assert "rank 1 of 2 failed" in text
    assert 'raise KeyError(f"no {meaning_of_life}")' in text
    assert "meaning_of_life = 42" in text
    assert time.monotonic() - start < 15  # the other rank waits in a collective; nobody waits for its timeout
    assert run_ranks(2, who)[1][2] == 2


def test_a_hang_is_shown_and_the_next_job_works() -> None:
    run_ranks(2, who)  # spawn outside of the time taken below
    start = time.monotonic()
    with pytest.raises(RankHang) as error:
        run_ranks(2, hangs_on, 1, timeout=2)
    assert time.monotonic() - start < 10
    text = str(error.value)
    assert "rank 0, 1 of 2 not done after 2 s" in text
    assert "--- rank 1" in text and "hangs_on" in text
    assert run_ranks(2, who)[0][2] == 2


def test_a_rank_that_dies() -> None:
    with pytest.raises(RankFailed, match=r"exit code 7|Connection closed|reset by peer"):
        run_ranks(2, dies_on, 0)
    assert run_ranks(2, who)[0][2] == 2


def test_a_job_does_not_see_the_one_before() -> None:
    first = run_ranks(2, leaves_a_mess)
    assert run_ranks(2, is_clean) == [(True, 1, first[0]), (True, 1, first[1])]  # the seed is the same in every job


def test_too_many_ranks() -> None:
    with pytest.raises(ValueError, match="1 to 8"):
        run_ranks(9, who)


def test_closing_ends_the_processes() -> None:
    pool = RankPool()
    pool.run(1, who, (), 60.0)
    (pid,) = pool.pids
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_no_network_here_or_in_a_rank() -> None:
    assert reaches_out() == "refused"
    assert run_ranks(1, reaches_out) == ["refused"]
    with pytest.raises(NetworkRefused, match="example"):
        socket.create_connection(("example.org", 443), 1)
    with socket.create_server(("127.0.0.1", 0)) as server:  # this machine is fine
        socket.create_connection(server.getsockname(), 1).close()


@pytest.mark.parametrize(
    ("address", "local"),
    [
        (("127.0.0.1", 1), True),
        (("localhost", 1), True),
        (("::1", 1, 0, 0), True),
        (("::1%lo", 1, 0, 0), True),
        ("/tmp/socket", True),
        (("10.0.0.1", 1), False),
        (("huggingface.co", 443), False),
        (("2001:db8::1", 1, 0, 0), False),
    ],
)
def test_which_addresses_are_local(address, local: bool) -> None:
    assert is_local(address) is local
