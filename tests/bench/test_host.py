"""`run.py host` without a GPU: which calls it times. Nothing here judges a time."""

import time

import bench_host as host
import host_calls
import pytest
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep import _C


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_call_of_both_modes_is_timed(alone, monkeypatch) -> None:
    monkeypatch.setattr(host_calls, "HIDDEN", 64)
    monkeypatch.setattr(host, "HIDDEN", 64)
    records = host.measure("cpu", num_sms=1, warmup=1, iterations=2)
    ours, v1, v2 = [
        [record["phase"] for record in records if record["implementation"] == name]
        for name in ("host", "deep_ep.Buffer", "deep_ep.ElasticBuffer")
    ]
    low_latency = [
        "low-latency dispatch",
        "low-latency combine",
        "low-latency dispatch, hook",
        "low-latency combine, hook",
    ]
    grouped = ["dispatch from scratch", "dispatch again", "combine"]
    flat = ["flat dispatch from scratch", "flat dispatch again", "flat combine"]
    gradients = [f"{call}, gradient" for call in grouped]
    assert ours == low_latency + grouped + gradients + flat
    assert (v1, v2) == (low_latency + flat, grouped + flat)
    assert len(records) == len(ours) + len(v1) + len(v2)
    assert all(0 < record["seconds_min"] <= record["seconds"] for record in records)


def test_the_parts_of_a_wait(alone, monkeypatch) -> None:
    monkeypatch.setattr(host_calls, "HIDDEN", 64)
    with ep.Buffer(None, ep.Config(num_experts=host_calls.EXPERTS)) as buffer:
        inputs = host_calls.Inputs(buffer.device)
        assert host._parts_of_a_wait(buffer, inputs, 1, 2) == {}, "on the host counts are known at once"
        monkeypatch.setattr(_C.RankLauncher, "count_times", lambda _: [time.monotonic_ns() for _ in range(3)])
        parts = host._parts_of_a_wait(buffer, inputs, 1, 2)
    assert tuple(parts) == host.PARTS
    assert all(sum(of_round) > 0 for of_round in zip(*parts.values(), strict=True))
    assert min(parts["enter"] + parts["launch dispatch"] + parts["return"]) > 0


def test_it_needs_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"run\.py host"):
        host.main([])
