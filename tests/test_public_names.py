"""What users may name: of a buffer and a config, and what of it is deprecated."""

import re
from pathlib import Path

import pytest
import torch

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


def test_what_a_session_shows():
    assert set(ep.__all__) < set(dir(ep)) and re.match(r"\d+\.\d+", ep.__version__)
    with ep.LocalCluster(1, 2, ep.Config(num_experts=4)) as cluster:
        assert repr(cluster) == "LocalCluster(1 x 2 ranks, 4 experts, cpu)"
        x, ids = (
            [torch.ones(3, 8), torch.ones(0, 8)],
            [torch.tensor([[0, 1]] * 3), torch.empty(0, 2, dtype=torch.int64)],
        )
        rows = ep.dispatch(x, ids, [torch.rand(3, 2), torch.rand(0, 2)], buffer=cluster)
        assert repr(rows) == "Received(x: [6, 8] and [0, 8] torch.float32, probs: [6] and [0] torch.float32)"
        assert type(rows).__name__ == "Received" and isinstance(rows, ep.Received)
        assert repr(rows.handle) == "Handle(grouped, K = 2, 3 tokens to 6 rows, 0 tokens to 0 rows)"
        low_latency = ep.LowLatency(cluster, max_tokens=4, hidden=8, topk=2, dtype=torch.float32)
        received = low_latency.dispatch(x, ids)
        assert repr(received) == "LowLatencyReceived(x: [2, 8, 8] and [2, 8, 8] torch.float32)"
    assert repr(cluster).endswith("cpu, closed)")
