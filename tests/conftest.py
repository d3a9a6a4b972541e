"""What every test shares: no network, one thread, one pool of ranks that ends with the run, and ``--nightly``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from megatron_lite.testing.offline import refuse_network
from megatron_lite.testing.ranks import close_pool

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: threads of several tests at once wait for each other, spinning
refuse_network()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in its background; tests send it


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--nightly`` runs the long forms too."""
    parser.addoption("--nightly", action="store_true", help="also run the long forms of tests (marker nightly)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the long forms unless they are asked for."""
    if config.getoption("--nightly"):
        return
    skip = pytest.mark.skip(reason="a long form: give --nightly")
    for item in items:
        if "nightly" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _pool_of_ranks() -> Iterator[None]:
    """End the ranks of :func:`megatron_lite.testing.ranks.run_ranks` when the run ends."""
    yield
    close_pool()
