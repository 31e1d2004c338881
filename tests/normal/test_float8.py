"""megatron_ep.float8 on the host, and rows that travel as it makes them."""

from dataclasses import replace

import pytest
import torch
from blockwise_experts import te_rounded
from cases import Case, assert_all_equal, need_sums
from nightly import a_third

import megatron_ep as ep
from megatron_ep import float8, reference

pytestmark = pytest.mark.numerical


@pytest.mark.parametrize("hidden", [1, 128, 200, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale_format", float8.SCALE_FORMATS)
@pytest.mark.parametrize("value_dtype", float8.VALUE_DTYPES)
def test_values_times_scales_are_close(hidden, dtype, scale_format, value_dtype) -> None:
    x = (torch.randn(17, hidden, generator=torch.Generator().manual_seed(0)) * 30).to(dtype)
    x[3] = 0
    values, scales = float8.quantize(x, scale_format, value_dtype)
    assert values.dtype == value_dtype and values.shape == x.shape and values.is_contiguous()
    assert scales.shape == (17, -(-hidden // 128)) and scales.dtype == torch.float32
    scale = scales.repeat_interleave(128, dim=1)[:, :hidden]
    info = torch.finfo(value_dtype)
    # half a unit of the last bit behind the point, or of the smallest number
    bound = x.float().abs() * info.eps / 2 + scale * info.tiny * info.eps / 2
    assert ((values.float() * scale - x.float()).abs() <= bound).all()
    assert (x.float().abs() <= scale * info.max * (1 + 1e-6)).all()
    assert not values[3].float().any() and (scales[3] == 1).all()
    if scale_format == "pow2":
        assert (scales.frexp().mantissa == 0.5).all()


NUMBERS = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)  # all bits of 16


@pytest.mark.parametrize("value_dtype", float8.VALUE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_with_pow2_scales_are_rounded_to_themselves(dtype, value_dtype) -> None:
    """By the rule of Transformer Engine: every number as the largest of a block. docs/megatron.md has the limits."""
    generator = torch.Generator().manual_seed(0)
    is_e4m3 = value_dtype == torch.float8_e4m3fn
    if dtype == torch.float32:
        least = -116 if is_e4m3 else -109
        largest = torch.exp2(torch.empty(1 << 14).uniform_(least, 127.8, generator=generator))
        edges = torch.exp2(torch.arange(float(least), 127)) * 1.75  # where the scale steps up
        largest = torch.cat([largest, edges, edges.nextafter(edges * 2), edges.nextafter(edges / 2)])
    else:
        largest = NUMBERS.view(dtype).float()
        most = {torch.bfloat16: 2.0**127, torch.float16: 2.0**15}[dtype] * (1.9375 if is_e4m3 else 1.875)
        largest = largest[largest.isfinite() & (largest.abs() < most)]
    factors = torch.rand(len(largest), 128, generator=generator) * 2 - 1
    factors *= torch.exp2(-30 * torch.rand(len(largest), 128, generator=generator))
    factors[:, 0], factors[::3, 1], factors[::5, 64:] = 1, 0.5, 0
    x = (factors * largest.unsqueeze(1)).to(dtype)
    rows = float8.dequantize(*float8.quantize(x, "pow2", value_dtype), dtype)
    assert rows.isfinite().all()
    assert torch.equal(te_rounded(rows, value_dtype), te_rounded(x, value_dtype))
    assert not torch.equal(rows, x)
    once = float8.quantize(x, "fp32", value_dtype)
    assert not torch.equal(te_rounded(float8.dequantize(*once, dtype), value_dtype), te_rounded(x, value_dtype))


def test_tiny_blocks_are_zeros_and_blocks_with_nan_are_nan() -> None:
    x = torch.zeros(3, 256)
    x[0, 0], x[1, 1], x[1, 130], x[2] = 1e-44, torch.nan, 1, 1
    values, scales = float8.quantize(x)
    assert scales[0].tolist() == [1, 1] and not values[0].float().any()
    assert scales[1, 0].isnan() and values[1, :128].float().isnan().all()
    assert scales[2].eq(scales[2, 0]).all() and values[2].float().eq(reference.E4M3_MAX).all()
    assert values[1, 130].float() == reference.E4M3_MAX


FLOAT8 = torch.ones(4, 256).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("convert", "arguments", "message"),
    [
        (float8.dequantize, (torch.ones(4, 256), torch.ones(4, 2)), "values is torch.float32 of shape"),
        (float8.dequantize, (FLOAT8.T, torch.ones(256, 1)), "must be torch.float8_e4m3fn or .*, contiguous"),
        (float8.dequantize, (FLOAT8, torch.ones(4, 2), torch.float64), "dtype is torch.float64"),
        (float8.dequantize, (FLOAT8, torch.ones(4, 2).half()), "scales is torch.float16"),
        (float8.dequantize, (FLOAT8, torch.ones(4, 1)), r"must be \(4, 2\) on cpu"),
        (float8.dequantize, (FLOAT8, torch.ones(1, 2)), r"must be \(4, 2\) on cpu"),
        (float8.dequantize, (None, torch.ones(1, 2)), "values is a NoneType, must be a tensor"),
        (float8.dequantize, (FLOAT8, [1.0]), "scales is a list, must be a tensor"),
        (float8.quantize, (None,), "x is a NoneType, must be a tensor"),
        (float8.quantize, (torch.ones(4, 3), "ue8m0"), "scales is 'ue8m0', must be one of 'fp32', 'pow2'"),
        (
            float8.quantize,
            (torch.ones(4, 3), "pow2", torch.int8),
            "dtype is torch.int8, must be one of torch.float8_e4",
        ),
        (float8.quantize, (torch.ones(3),), "x has shape"),
        (float8.quantize, (torch.ones(4, 3).t(),), "must be contiguous"),
        (float8.quantize, (torch.ones(4, 3).double(),), "x is torch.float64, must be one of torch.bfloat16"),
    ],
)
def test_what_cannot_be_converted(convert, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        convert(*arguments)


@pytest.mark.parametrize("hidden", [1, 128, 200, 1024])
@pytest.mark.parametrize("dtype", float8.DTYPES)
@pytest.mark.parametrize("value_dtype", float8.VALUE_DTYPES)
def test_back_to_values(hidden: int, dtype: torch.dtype, value_dtype: torch.dtype) -> None:
    x = (torch.randn(9, hidden, generator=torch.Generator().manual_seed(1)) * 30).to(dtype)
    values, scales = float8.quantize(x, dtype=value_dtype)
    rows = float8.dequantize(values, scales, dtype)
    expected = (values.double() * scales.repeat_interleave(128, dim=1)[:, :hidden]).float()
    assert rows.dtype == dtype and torch.equal(rows, expected.to(dtype))
    none = float8.quantize(x[:0])
    assert [len(part) for part in none] == [0, 0] and float8.dequantize(*none, dtype).shape == (0, hidden)


@pytest.mark.parametrize("seed", a_third(range(6)))
def test_rows_travel_as_float8_and_their_gradients_as_they_are(seed: int, device: str) -> None:
    case = Case(6000 + seed, max_tokens=40, device=device)
    case.dtype = tuple(float8.DTYPES)[seed % 3]
    need_sums(case.dtype, device)
    case.config = replace(
        case.config, tuning=replace(case.config.tuning, nvl_ring_bytes=1 << 15, rdma_ring_bytes=1 << 15)
    )
    tokens = case.num_tokens()
    ids, weights, x = case.ids(tokens), case.weights(tokens), case.reals(tokens)
    results = []
    with case.cluster() as cluster:
        for forward_dtype in (None, torch.float8_e4m3fn):
            leaves = [rows.to(device, copy=True).requires_grad_() for rows in x]
            weight_leaves = [one.to(device, copy=True).requires_grad_() for one in weights]
            sent = {"expert_alignment": case.alignment, "forward_dtype": forward_dtype}
            received = ep.dispatch(leaves, case.there(ids), weight_leaves, buffer=cluster, **sent)
            again = ep.dispatch(leaves, handle=received.handle, forward_dtype=forward_dtype)
            assert received.scales is None and all(torch.equal(*two) for two in zip(again.x, received.x, strict=True))
            outputs = (*received.x, *received.probs)
            grads = [torch.arange(float(part.numel())).sin().view_as(part).to(part) for part in outputs]
            torch.autograd.backward(outputs, grads)
            results.append([leaf.grad for leaf in (*leaves, *weight_leaves)])
    rounded = [float8.dequantize(*float8.quantize(rows), case.dtype) for rows in x]
    expected = reference.dispatch(rounded, ids, weights, case.num_experts, case.alignment)
    assert_all_equal([*received.x, *received.probs], [*expected[0], *expected[1]])
    for straight, plain in zip(*results, strict=True):
        assert torch.equal(straight, plain)


@pytest.mark.parametrize("seed", a_third(range(6)))
def test_gradients_travel_as_float8(seed: int, device: str) -> None:
    """Rows of the backward pass of combine are those of a dispatch of rounded gradients; sums are not rounded."""
    case = Case(6100 + seed, max_tokens=40, device=device)
    case.dtype = tuple(float8.DTYPES)[seed % 3]
    value_dtype = tuple(float8.VALUE_DTYPES)[seed // 3]
    need_sums(case.dtype, device)
    case.config = replace(
        case.config, tuning=replace(case.config.tuning, nvl_ring_bytes=1 << 15, rdma_ring_bytes=1 << 15)
    )
    tokens = case.num_tokens()
    ids, weights, x = case.ids(tokens), case.weights(tokens), case.reals(tokens)
    with case.cluster() as cluster:
        received = ep.dispatch(case.there(x), case.there(ids), buffer=cluster, expert_alignment=case.alignment)
        leaves = [rows.clone().requires_grad_() for rows in received.x]
        plain = ep.combine(received.x, received.handle)
        sums = ep.combine(leaves, received.handle, backward_dtype=value_dtype)
        assert all(torch.equal(*two) for two in zip(sums, plain, strict=True))
        grads = [one.to(device) for one in x]
        gradients = torch.autograd.grad(sums, leaves, grads, create_graph=True)
        rounded = [float8.dequantize(*float8.quantize(one, "pow2", value_dtype), case.dtype) for one in x]
        expected = reference.dispatch(rounded, ids, weights, case.num_experts, case.alignment)
        assert_all_equal([*gradients], [*expected[0]])


def test_gradients_of_gradients_are_those_of_unrounded_ones() -> None:
    with ep.LocalCluster(1, 2, ep.Config(num_experts=2)) as cluster:
        ids = [torch.tensor([[0, 1], [1, 0], [0, -1]]), torch.tensor([[1, 0]])]
        received = ep.dispatch([torch.zeros(3, 5), torch.zeros(1, 5)], ids, buffer=cluster)
        leaves = [rows.clone().requires_grad_() for rows in received.x]
        sums = ep.combine(leaves, received.handle, backward_dtype=torch.float8_e4m3fn)
        grads = [torch.randn(len(one), 5, generator=torch.Generator().manual_seed(0)).requires_grad_() for one in ids]
        gradients = torch.autograd.grad(sums, leaves, grads, create_graph=True)
        onward = [torch.ones_like(one) for one in gradients]
        twice = torch.autograd.grad(gradients, grads, onward)
        assert [one[:, 0].tolist() for one in twice] == [[2, 2, 1], [2]]
