"""What every test shares: no network, and one pool of ranks that ends with the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_lite.testing.offline import refuse_network
from megatron_lite.testing.ranks import close_pool

refuse_network()


@pytest.fixture(scope="session", autouse=True)
def _pool_of_ranks() -> Iterator[None]:
    """End the ranks of :func:`megatron_lite.testing.ranks.run_ranks` when the run ends."""
    yield
    close_pool()
