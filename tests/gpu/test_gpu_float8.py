"""megatron_ep.float8: the kernels give the bits that torch gives on the host."""

import left_out
import pytest
import torch

import megatron_ep as ep
from megatron_ep import float8


@pytest.mark.parametrize("hidden", [1, 33, 128, 200, 1000, 7168])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_same_bits_as_on_the_host(hidden, dtype):
    x = (torch.randn(37, hidden, generator=torch.Generator().manual_seed(0)) * 30).to(dtype)
    x[3], x[5, 0], x[7] = 0, torch.nan, 1e-44
    for rows in (x, x[:0]):
        values, scales = float8.quantize(rows)
        on_gpu, gpu_scales = float8.quantize(rows.cuda())
        back, host_back = float8.dequantize(on_gpu, gpu_scales, dtype).cpu(), float8.dequantize(values, scales, dtype)
        assert back.dtype == dtype and torch.equal(back.nan_to_num(-1.5), host_back.nan_to_num(-1.5))
        for ours, expected in ((on_gpu.cpu(), values), (gpu_scales.cpu(), scales)):
            is_nan = expected.float().isnan()
            assert torch.equal(ours.float().isnan(), is_nan)
            bits = torch.uint8 if expected.dtype == torch.float8_e4m3fn else torch.int32
            assert torch.equal(ours.view(bits)[~is_nan], expected.view(bits)[~is_nan])


@pytest.mark.parametrize("hidden", [256, 200])
@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=pytest.mark.needs(left_out.not_summed(dtype))) for dtype in float8.DTYPES]
)
def test_rows_that_travel_as_float8_and_their_gradients_as_on_the_host(dtype, hidden):
    generator, tokens = torch.Generator().manual_seed(hidden), (5, 0, 70, 33)
    ids = [torch.rand(t, 8, generator=generator).topk(3, dim=1).indices for t in tokens]
    x = [torch.randn(t, hidden, generator=generator).to(dtype) for t in tokens]
    results = []
    for device in ("cpu", "cuda"):
        with ep.LocalCluster(2, 2, ep.Config(num_experts=8, timeout=10), device=device) as cluster:
            leaves = [rows.to(device, copy=True).requires_grad_() for rows in x]
            sent = {"buffer": cluster, "expert_alignment": 4, "forward_dtype": torch.float8_e4m3fn}
            rows = ep.dispatch(leaves, [part.to(device) for part in ids], **sent).x
            grads = [torch.arange(float(part.numel())).sin().view_as(part).to(device, dtype) for part in rows]
            torch.autograd.backward(rows, grads)
            results.append([part.detach().cpu() for part in (*rows, *(leaf.grad for leaf in leaves))])
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == dtype and torch.equal(ours, expected)
