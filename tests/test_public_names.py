"""What users may name: of a buffer, and what of it is deprecated."""

import pytest

import megatron_ep as ep

SHARED = {
    *("abort", "close", "config", "device", "is_open", "num_local_experts"),
    *("raise_if_failed", "reset", "statistics", "synchronize", "topology"),
}


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def test_a_buffer_shows_what_users_call():
    assert public(ep.LocalCluster) == SHARED
    assert public(ep.Buffer) == SHARED | {"fabric", "rank", "release"}
    with ep.LocalCluster(1, 2, ep.Config(num_experts=2)) as cluster:
        assert public(cluster) == SHARED


@pytest.mark.parametrize(
    ("name", "now"),
    [("ranks", "LocalCluster.topology"), ("heap", "env --plan"), ("raise_if_aborted", "raise_if_failed")],
)
def test_names_that_a_buffer_had_say_what_to_use(name, now):
    with ep.LocalCluster(1, 2, ep.Config(num_experts=2)) as cluster:
        with pytest.warns(DeprecationWarning, match=rf"LocalCluster\.{name} is internal now: use .*{now}") as said:
            former = getattr(cluster, name)
        assert former == getattr(cluster._group, name) and said[0].filename == __file__
        with pytest.raises(AttributeError, match="no attribute 'rank'"):
            cluster.rank  # noqa: B018
