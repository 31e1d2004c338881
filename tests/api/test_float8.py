"""megatron_ep.float8.quantize on the host."""

import pytest
import torch

import megatron_ep as ep
from megatron_ep import float8

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
    largest = scale * float8.LARGEST
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
    assert scales[2].eq(scales[2, 0]).all() and values[2].float().eq(float8.LARGEST).all()
    assert values[1, 130].float() == float8.LARGEST


def test_no_rows() -> None:
    values, scales = float8.quantize(torch.empty(0, 200))
    assert values.shape == (0, 200) and scales.shape == (0, 2)


def test_what_it_makes_can_be_dispatched() -> None:
    x = [torch.randn(5, 200), torch.randn(3, 200)]
    ids = [torch.randint(0, 4, (len(rows), 1)) for rows in x]
    quantized = [float8.quantize(rows) for rows in x]
    with ep.LocalCluster(1, 2, ep.Config(num_experts=4)) as cluster:
        rows = ep.dispatch([q[0] for q in quantized], ids, scales=[q[1] for q in quantized], buffer=cluster)
    assert sum(len(received) for received in rows.x) == 8


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(3), "x has shape"),
        (torch.ones(4, 3).t(), "must be contiguous"),
        (torch.ones(4, 3).double(), "x is torch.float64, must be one of torch.bfloat16"),
    ],
)
def test_wrong_arguments(x: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        float8.quantize(x)
