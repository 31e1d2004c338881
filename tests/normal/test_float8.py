"""megatron_ep.float8 on the host, and rows that travel as it makes them."""

from dataclasses import replace

import pytest
import torch
from cases import Case, assert_all_equal, need_sums
from nightly import a_third

import megatron_ep as ep
from megatron_ep import float8, reference

pytestmark = pytest.mark.numerical


@pytest.mark.parametrize("hidden", [1, 128, 200, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_times_scales_are_close(hidden: int, dtype: torch.dtype) -> None:
    x = (torch.randn(17, hidden, generator=torch.Generator().manual_seed(0)) * 30).to(dtype)
    x[3] = 0
    values, scales = float8.quantize(x)
    assert values.dtype == torch.float8_e4m3fn and values.shape == x.shape and values.is_contiguous()
    assert scales.shape == (17, -(-hidden // 128))
    scale = scales.repeat_interleave(128, dim=1)[:, :hidden]
    largest = scale * reference.E4M3_MAX
    # half a unit of the last of e4m3's 3 bits, or of its smallest number
    bound = x.float().abs() * 2**-4 + scale * 2**-10
    assert ((values.float() * scale - x.float()).abs() <= bound).all()
    assert (x.float().abs() <= largest * (1 + 1e-6)).all()
    assert not values[3].float().any() and (scales[3] == 1).all()


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
        (float8.dequantize, (FLOAT8.T, torch.ones(256, 1)), "must be torch.float8_e4m3fn .*, contiguous"),
        (float8.dequantize, (FLOAT8, torch.ones(4, 2), torch.float64), "dtype is torch.float64"),
        (float8.dequantize, (FLOAT8, torch.ones(4, 2).half()), "scales is torch.float16"),
        (float8.dequantize, (FLOAT8, torch.ones(4, 1)), r"must be \(4, 2\) on cpu"),
        (float8.dequantize, (FLOAT8, torch.ones(1, 2)), r"must be \(4, 2\) on cpu"),
        (float8.dequantize, (None, torch.ones(1, 2)), "values is a NoneType, must be a tensor"),
        (float8.dequantize, (FLOAT8, [1.0]), "scales is a list, must be a tensor"),
        (float8.quantize, (None,), "x is a NoneType, must be a tensor"),
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
def test_back_to_values(hidden: int, dtype: torch.dtype) -> None:
    x = (torch.randn(9, hidden, generator=torch.Generator().manual_seed(1)) * 30).to(dtype)
    values, scales = float8.quantize(x)
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
