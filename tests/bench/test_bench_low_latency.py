"""`megatron-ep bench low-latency`: what its records say. The GPU and what runs there are stand-ins."""

import contextlib
import dataclasses
import json
import types

import torch

import megatron_ep as ep
from megatron_ep.tools.bench import low_latency


def test_ranks_that_share_a_gpu(monkeypatch, tmp_path, capsys):
    """SMs in title and record are those that ran; bytes are a rank's mean."""
    ran = []

    def cluster(nodes, ranks_per_node, config, device):
        ran.append(config.num_sms)
        return contextlib.nullcontext()

    def inputs(case, rank):
        """A token of an odd rank goes to two ranks, of the others to one."""
        ids = torch.tensor([[0, 1 + rank % 2]]).expand(case.tokens, 2)
        return ids, ids, ids

    def measure(case, cluster, x, ids, weights, num_rows, *_):
        return [low_latency.Measured(str(case), "dispatch", "eager", [1.0], num_rows, dataclasses.asdict(case))]

    monkeypatch.setattr(ep, "LocalCluster", cluster)
    monkeypatch.setattr(low_latency, "_inputs", inputs)
    monkeypatch.setattr(low_latency, "_measure", measure)
    monkeypatch.setattr(low_latency, "require_gpu", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(multi_processor_count=132))
    file = tmp_path / "bench.json"
    arguments = ["--num-sms", "8", "24", "32", "--batch", "1", "4", "--experts", "16", "--topk", "2"]
    assert low_latency.main([*arguments, "--json", str(file)]) == 0
    records = json.loads(file.read_text())["records"]
    assert [record["num_sms"] for record in records] == ran == [8, 8, 16, 16], "each once"
    assert [record["bytes"] for record in records] == [1.5, 6.0] * 2
    text = capsys.readouterr().out
    assert "8 ranks share 132 SMs: at most 16 of a rank" in text
    assert "8 on one GPU sms=16 T=4 " in text and "sms=24" not in text
