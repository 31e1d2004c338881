"""megatron_ep.float8: the kernels give the bits that torch gives on the host."""

import pytest
import torch

from megatron_ep import float8


@pytest.mark.parametrize("hidden", [1, 33, 128, 200, 1000, 7168])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale_format", float8.SCALE_FORMATS)
@pytest.mark.parametrize("value_dtype", float8.VALUE_DTYPES)
def test_same_bits_as_on_the_host(hidden, dtype, scale_format, value_dtype):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-20, 12, (37, 1), generator=generator))
    x = (torch.randn(37, hidden, generator=generator) * sizes).to(dtype)
    x[3], x[5, 0], x[7] = 0, torch.nan, 1e-44
    for rows in (x, x[:0]):
        values, scales = float8.quantize(rows, scale_format, value_dtype)
        on_gpu, gpu_scales = float8.quantize(rows.cuda(), scale_format, value_dtype)
        back, host_back = float8.dequantize(on_gpu, gpu_scales, dtype).cpu(), float8.dequantize(values, scales, dtype)
        assert back.dtype == dtype and torch.equal(back.nan_to_num(-1.5), host_back.nan_to_num(-1.5))
        for ours, expected in ((on_gpu.cpu(), values), (gpu_scales.cpu(), scales)):
            is_nan = expected.float().isnan()
            assert torch.equal(ours.float().isnan(), is_nan)
            bits = torch.uint8 if expected.dtype == value_dtype else torch.int32
            assert torch.equal(ours.view(bits)[~is_nan], expected.view(bits)[~is_nan])
