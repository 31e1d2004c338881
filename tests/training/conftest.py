import pytest

from megatron_ep.bench.local_ranks import LocalRanks


@pytest.fixture(scope="session")
def four_ranks():
    """Processes that stay up: starting Megatron in each takes seconds. `run` bounds every test."""
    with LocalRanks(4, timeout=60.0) as ranks:
        yield ranks
