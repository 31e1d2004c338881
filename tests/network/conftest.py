import cards
import pytest

from megatron_ep.fabrics import verbs


@pytest.fixture
def own_library(monkeypatch):
    """In this process network cards and their queues are those of the tests."""
    monkeypatch.setattr(verbs, "LIBRARY", cards.library())
    monkeypatch.setattr(verbs, "MLX5_LIBRARY", cards.library())
