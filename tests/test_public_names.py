"""What users may name: of a buffer and a config, and what of it is deprecated."""

import dataclasses
import pickle
import re
from pathlib import Path

import pytest

import megatron_ep as ep

SHARED = {
    *("abort", "close", "config", "device", "is_open", "num_local_experts"),
    *("raise_if_failed", "reset", "statistics", "synchronize", "topology"),
}


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_table_of_stable_names_is_complete():
    page = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    [row] = re.findall(r"^\| names of `megatron_ep` \| (.*) \|$", page, flags=re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", row)) == sorted(ep.__all__)


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


def test_settings_of_tuning_are_taken_by_config_with_a_warning():
    given = r"channels=\.\.\., nvl_ring_bytes=\.\.\."
    said = rf"Config\({given}\) is Config\(tuning=Tuning\({given}\)\) now"
    with pytest.warns(DeprecationWarning, match=said) as warnings:
        former = ep.Config(num_experts=8, nvl_ring_bytes=4096, channels=2, timeout=3)
    assert former == ep.Config(8, timeout=3, tuning=ep.Tuning(channels=2, nvl_ring_bytes=4096))
    assert [warning.filename for warning in warnings] == [__file__]
    with pytest.warns(DeprecationWarning, match=r"Config\.channels is Config\.tuning\.channels now"):
        assert former.channels == 2
    with pytest.warns(DeprecationWarning, match="local_pass"):
        changed = dataclasses.replace(former, local_pass=True)
    assert changed.tuning == ep.Tuning(channels=2, nvl_ring_bytes=4096, local_pass=True)
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match=r"Tuning\.nvl_ring_bytes is 3, must be"):
        ep.Config(num_experts=8, nvl_ring_bytes=3)
    assert pickle.loads(pickle.dumps(former)) == former


def test_tuning_must_be_one():
    with pytest.raises(ValueError, match=r"Config\.tuning is \{'channels': 2\}, must be a megatron_ep\.Tuning"):
        ep.Config(num_experts=8, tuning={"channels": 2})


@pytest.mark.parametrize(
    ("make", "meant"),
    [
        (lambda: ep.Config(8, num_sm=3), r"Config has no setting num_sm; did you mean num_sms\?"),
        (
            lambda: ep.Config(8, nvl_ring_byte=3),
            r"nvl_ring_byte; did you mean tuning=Tuning\(nvl_ring_bytes=\.\.\.\)\?",
        ),
        (lambda: ep.Tuning(chanels=3), r"Tuning has no setting chanels; did you mean channels\?"),
        (lambda: ep.Config(8, colour=3), "Config has no setting colour$"),
    ],
)
def test_a_misspelt_setting_is_told_the_nearest_name(make, meant):
    with pytest.raises(TypeError, match=meant):
        make()
