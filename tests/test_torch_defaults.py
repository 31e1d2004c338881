"""Nothing of ours depends on torch's default dtype or device, which programs around it may have changed."""

import ast
from pathlib import Path

import pytest
import torch

import megatron_ep as ep
from megatron_ep import float8

PACKAGE = Path(ep.__file__).parent
# Of what runs inside other programs; the rest are commands of our own.
PACKAGES = ["", "buffer", "fabrics", "meeting", "deep_ep", "low_latency", "megatron", "normal"]
PACKAGES += ["router"]
OF_DEFAULT_DTYPE = {"empty", "empty_strided", "eye", "linspace", "ones", "rand", "randn", "zeros"}
MAKE_TENSORS = OF_DEFAULT_DTYPE | {"arange", "full", "tensor"}


def unsaid(source):
    """(line, what a call that makes a tensor leaves to torch's defaults)."""
    for node in ast.walk(ast.parse(source)):
        function = node.func if isinstance(node, ast.Call) else None
        if not isinstance(function, ast.Attribute) or function.attr not in MAKE_TENSORS:
            continue
        if not isinstance(function.value, ast.Name) or function.value.id != "torch":
            continue
        said = {keyword.arg for keyword in node.keywords}
        if "device" not in said:
            yield node.lineno, "device"
        if function.attr in OF_DEFAULT_DTYPE and "dtype" not in said:
            yield node.lineno, "dtype"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_tensor_has_a_device_and_a_dtype_of_its_own(package):
    files = sorted((PACKAGE / package).glob("*.py"))
    assert files
    assert [f"{file}:{line}: {what}" for file in files for line, what in unsaid(file.read_text())] == []


def test_what_is_left_to_defaults_is_found():
    source = "torch.empty(3)\ntorch.tensor([1])\ntorch.zeros(2, dtype=d, device=e)"
    assert list(unsaid(source)) == [(1, "device"), (1, "dtype"), (2, "device")]


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def odd_defaults(request):
    """The device is one on which no tensor has any memory."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(dtype)


def inputs(world=4, experts=8, topk=2, hidden=256):
    generator = torch.Generator("cpu").manual_seed(0)
    new = {"generator": generator, "device": "cpu"}
    tokens = [3 + rank for rank in range(world)]
    ids = [torch.rand(t, experts, **new).topk(topk, dim=1).indices for t in tokens]
    x = [torch.randn(t, hidden, dtype=torch.float32, **new) for t in tokens]
    weights = [torch.rand(t, topk, dtype=torch.float32, **new) for t in tokens]
    return x, ids, weights


def test_normal_mode(odd_defaults):
    x, ids, weights = inputs()
    leaves = [[t.requires_grad_() for t in x], [w.requires_grad_() for w in weights]]
    with ep.LocalCluster(2, 2, ep.Config(num_experts=8)) as cluster:
        rows = ep.dispatch(leaves[0], ids, leaves[1], buffer=cluster)
        y = ep.combine(rows.x, rows.handle, rows.probs)
        for out, sent, weight in zip(y, x, weights, strict=True):
            torch.testing.assert_close(out, sent * weight.sum(dim=1, keepdim=True))
        torch.autograd.backward(y, [torch.ones_like(out) for out in y])
        for sent, weight in zip(x, weights, strict=True):
            torch.testing.assert_close(weight.grad, sent.sum(dim=1, keepdim=True).expand_as(weight))
        again = ep.dispatch(x, handle=rows.handle, forward_dtype=torch.float8_e4m3fn)
        for ours, exact in zip(again.x, rows.x, strict=True):
            torch.testing.assert_close(ours, exact, rtol=0.07, atol=0.01)
        assert cluster.statistics()["wait_ns"].device.type == "cpu"
        assert all(counts.device.type == "cpu" for counts in rows.tokens_per_expert)


@pytest.mark.parametrize("on_dead_rank", ["raise", "mask"])
def test_low_latency(odd_defaults, on_dead_rank):
    x, ids, weights = inputs()
    with ep.LocalCluster(1, 4, ep.Config(num_experts=8)) as cluster:
        low_latency = ep.LowLatency(
            cluster, max_tokens=8, hidden=256, topk=2, dtype=torch.float32, on_dead_rank=on_dead_rank
        )
        received = low_latency.dispatch(x, ids)
        for out, sent, weight in zip(
            low_latency.combine(received.x, received.handle, weights), x, weights, strict=True
        ):
            torch.testing.assert_close(out, sent * weight.sum(dim=1, keepdim=True))
        rows = low_latency.dispatch([t.bfloat16() for t in x], ids, fp8="fp32", layout="grouped")
        assert all(scales.dtype == torch.float32 for scales in rows.scales)


def test_float8(odd_defaults):
    x = inputs()[0][0]
    values, scales = float8.quantize(x)
    assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    torch.testing.assert_close(float8.dequantize(values, scales, torch.float32), x, rtol=0.07, atol=0.01)
