"""Ranks of one machine, or of several by name that a fabric joins."""

import functools
from types import SimpleNamespace

import cards
import pytest
from over_networks import W, between_machines

from megatron_ep.fabrics import choice
from megatron_ep.tools.local_ranks import LocalRanks


@pytest.fixture
def fabric():
    """On one machine, unless a test is parametrized."""
    return ""


@pytest.fixture
def ranks(over, fabric):
    """For tests whose body runs over a fabric."""
    return SimpleNamespace(run=functools.partial(over, fabric))


@pytest.fixture(scope="module")
def over():
    """over(fabric, function, *arguments) on every rank; no fabric: on one machine."""
    with LocalRanks(W, 120) as ranks:

        def run(fabric, function, *arguments):
            if fabric in choice.BY_CARD:
                ranks.run(cards.use_library, cards.library(), fabric)
            if not fabric:
                return ranks.run(function, *arguments)
            return ranks.run(between_machines, fabric, function, *arguments)

        yield run
