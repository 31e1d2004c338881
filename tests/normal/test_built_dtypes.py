"""A build for GPUs that sums bf16 and fp32 alone, here on the host as if it were a GPU: what it refuses, and what it
need not."""

import pytest
import torch

import megatron_ep as ep
from megatron_ep import _C
from megatron_ep.buffer import arguments
from megatron_ep.sequences.dispatcher import SequenceDispatcher
from megatron_ep.sequences.plan import SequencePlan, Shard

REFUSED = "must be one of torch.bfloat16, torch.float32, .* MEGATRON_EP_DTYPES=all"
E, H = 4, 8


@pytest.fixture
def few_sums(monkeypatch):
    monkeypatch.setattr(arguments, "summable_dtypes", lambda device_type: (torch.bfloat16, torch.float32))


@pytest.fixture
def cluster(few_sums):
    with ep.LocalCluster(1, 2, ep.Config(num_experts=E, timeout=10)) as cluster:
        yield cluster


def rows(dtype, **options):
    return [torch.ones(3, H, dtype=dtype, **options) for _ in range(2)]


IDS = [torch.tensor([[0, 3], [1, 2], [3, 0]])] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_what_is_not_summed_is_refused_before_anything_is_sent(cluster, dtype):
    received = ep.dispatch(rows(dtype), IDS, buffer=cluster)  # moves bytes
    with pytest.raises(ValueError, match=f"x is {dtype}, {REFUSED}"):
        ep.combine(received.x, received.handle)
    cluster.reset()
    with pytest.raises(ValueError, match=f"the gradient of x is {dtype}, {REFUSED}"):
        ep.dispatch(rows(dtype, requires_grad=True), IDS, buffer=cluster)
    cluster.reset()
    weights = [torch.ones(3, 2, requires_grad=True) for _ in range(2)]  # their gradients come beside those of x
    with pytest.raises(ValueError, match=f"the gradient of x is {dtype}, {REFUSED}"):
        ep.dispatch(rows(dtype), IDS, weights, buffer=cluster)


def test_bf16_and_fp32_are_summed(cluster):
    for dtype in (torch.bfloat16, torch.float32):
        x = rows(dtype, requires_grad=True)
        received = ep.dispatch(x, IDS, [torch.ones(3, 2, dtype=torch.float64)] * 2, buffer=cluster)
        sums = ep.combine(received.x, received.handle)
        sum(y.sum() for y in sums).backward()
        assert all(torch.equal(y, 2 * own) and torch.equal(own.grad, 2 * own) for y, own in zip(sums, x, strict=True))


def test_low_latency(cluster):
    with pytest.raises(ValueError, match=f"dtype is torch.float64, {REFUSED}"):
        ep.LowLatency(cluster, max_tokens=4, hidden=H, topk=2, dtype=torch.float64)
    low_latency = ep.LowLatency(cluster, max_tokens=4, hidden=H, topk=2)
    received = low_latency.dispatch(rows(torch.float16), IDS)
    with pytest.raises(ValueError, match=f"x is torch.float16, {REFUSED}"):
        low_latency.combine(received.x, received.handle)
    cluster.reset()
    with pytest.raises(ValueError, match=f"the gradient of x is torch.float16, {REFUSED}"):
        low_latency.dispatch(rows(torch.float16, requires_grad=True), IDS)


def test_weights_in_fp64_beside_float8_need_no_sums_in_fp64(cluster, monkeypatch):
    summed = []
    combine = ep.low_latency.calls.LowLatencyCalls.combine

    def noted(self, handle, backend, plan, inputs, pending):
        summed.append(inputs[0][0].dtype)
        return combine(self, handle, backend, plan, inputs, pending)

    monkeypatch.setattr(ep.low_latency.calls.LowLatencyCalls, "combine", noted)
    weights = [torch.rand(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    low_latency = ep.LowLatency(cluster, max_tokens=4, hidden=H, topk=2)
    received = low_latency.dispatch(rows(torch.bfloat16), IDS, weights, fp8="fp32")
    sum(probs.sum() for probs in received.probs).backward()
    assert summed == [torch.float32]
    assert all(torch.equal(weight.grad, torch.ones_like(weight)) for weight in weights)


def test_gradients_of_sequences(cluster):
    plan = SequencePlan.build([Shard(0, i, i, 1 - i, 3) for i in range(2)], 2)
    dispatcher = SequenceDispatcher(cluster)
    dispatcher.dispatch(*(rows(torch.float16) for _ in "qkv"), plan)
    with pytest.raises(ValueError, match=f"the gradient of k and v is torch.float16, {REFUSED}"):
        dispatcher.dispatch(*(rows(torch.float16, requires_grad=True) for _ in "qkv"), plan)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"cuda": None}, ("bfloat16", "float16", "float32", "float64")),
        ({"dtypes": "bf16,fp32"}, ("bfloat16", "float32")),
        ({"dtypes": "bf16,fp16,fp32"}, ("bfloat16", "float16", "float32")),
    ],
)
def test_the_extension_says_which(monkeypatch, info, expected):
    monkeypatch.setattr(_C, "build_info", lambda: info)
    assert arguments._built_dtypes() == tuple(getattr(torch, name) for name in expected)


def test_the_host_sums_everything(monkeypatch):
    monkeypatch.setattr(arguments, "_BUILT_DTYPES", (torch.bfloat16, torch.float32))
    assert torch.float64 in arguments.summable_dtypes("cpu")
    assert torch.float64 not in arguments.summable_dtypes("cuda")
