"""What users may name: of a buffer and a config, and what of it is deprecated."""

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
