"""The helpers that DeepEP's tests import."""

import math
import os
from pathlib import Path

import pytest
import rank_processes
import torch
from deep_ep_test_utils.deep_ep.utils import gate, refs, testing
from deep_ep_test_utils.deep_ep.utils import math as numbers

TESTS = Path(__file__).parents[1]
FIRST, SECOND = TESTS / "helpers/deep_ep_test_utils", TESTS.parent / "megatron_ep/deep_ep/shim"  # as in deep_ep.sh
OWN_TEST = f"""
import subprocess, sys
import deep_ep, megatron_ep.deep_ep
from deep_ep.utils import EventHandle
from deep_ep.utils.envs import dist_print, get_global_seed, init_dist, init_seed
from deep_ep.utils.gate import get_unbalanced_scores
from deep_ep.utils.math import align, calc_diff, ceil_div, count_bytes, create_grouped_scores, hash_tensor
from deep_ep.utils.math import inplace_unique, per_token_cast_back, per_token_cast_to_fp8, safe_div
from deep_ep.utils.refs import combine, dispatch, generate_pre_combine_data, ordered_accumulate
from deep_ep.utils.testing import bench, bench_kineto

assert deep_ep.__file__.startswith({str(FIRST)!r}) and deep_ep.Buffer is megatron_ep.deep_ep.Buffer
assert deep_ep.utils.refs.get_global_seed is get_global_seed
assert EventHandle is deep_ep.EventHandle
sys.exit(subprocess.call([sys.executable, "-c", "import deep_ep.utils.envs"]))
"""


def test_the_module_that_deep_eps_tests_import(tmp_path):
    script = (TESTS / "gpu/deep_ep.sh").read_text()
    assert all(f"$PWD/{folder.relative_to(TESTS.parent)}:" in script for folder in (FIRST, SECOND))
    (tmp_path / "own_test.py").write_text(OWN_TEST)
    # `python -m` puts the working directory before these.
    paths = os.pathsep.join(map(str, [tmp_path, FIRST, SECOND, os.environ.get("PYTHONPATH", "")]))
    done = rank_processes.run_one(["-m", "megatron_ep.deep_ep", "own_test.py"], tmp_path, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr


def test_numbers():
    assert numbers.ceil_div(7, 3) == 3 and numbers.align(129, 128) == 256 and numbers.align(0, 8) == 0
    assert numbers.safe_div(0, 0) == 0 and numbers.safe_div(1, 4) == 0.25
    assert numbers.count_bytes(torch.zeros(3, dtype=torch.bfloat16), (torch.zeros(2, dtype=torch.uint8), None)) == 8
    x = torch.arange(8, dtype=torch.int32).view(2, 4)
    assert numbers.hash_tensor(x) == 28
    assert numbers.hash_tensor(torch.tensor([-1], dtype=torch.int32)) == -1


def test_difference():
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert numbers.calc_diff(x, x) == 0
    y = x + 0.01
    a, b = x.double() + 1, y.double() + 1
    assert math.isclose(numbers.calc_diff(x, y), float(((a - b) ** 2).sum() / (a * a + b * b).sum()), rel_tol=1e-6)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_float8(tokens):
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[:, :128] = 0
    values, scales = numbers.per_token_cast_to_fp8(x)
    assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32 and scales.shape == (tokens, 2)
    assert (scales[:, 0] == torch.tensor(1e-4) / 448).all() and scales.is_contiguous()
    torch.testing.assert_close(numbers.per_token_cast_back(values, scales), x, rtol=0.07, atol=0.01)


def test_packed_exponents():
    values = torch.ones(2, 512).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[127, 128, 126, 130], [127, 127, 120, 127]], dtype=torch.uint8)
    back = numbers.per_token_cast_back(values, exponents.view(torch.int32))
    assert back.view(2, 4, 128).float().mean(dim=2).tolist() == (2.0 ** (exponents.float() - 127)).tolist()


def test_unique():
    x = torch.tensor([[3, 1, 3, -1], [-1, -1, -1, -1], [0, 2, 1, 3]])
    numbers.inplace_unique(x, 4)
    assert x.tolist() == [[3, 1, -1, -1], [-1] * 4, [3, 2, 1, 0]]
    x = torch.tensor([[1, 1, 0]])
    numbers.inplace_unique(x, 2)
    assert x.tolist() == [[1, 0, -1]]


def test_grouped_scores():
    scores = torch.arange(8.0).view(1, 8) + 1
    assert numbers.create_grouped_scores(scores, torch.tensor([[0, 3]]), 4).tolist() == [[1, 2, 0, 0, 0, 0, 7, 8]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="scores are drawn on the GPU there")
def test_unbalanced_scores():
    torch.manual_seed(0)

    def tokens_of_ranks(ratio):
        ranks = gate.get_unbalanced_scores(2000, 32, 4, 2, ratio).topk(2, dim=1).indices // 8
        return torch.stack([(ranks == rank).any(dim=1).sum() for rank in range(4)]).float()

    even, uneven = tokens_of_ranks(1.0), tokens_of_ranks(1.8)
    assert (even / even.mean() - 1).abs().max() < 0.15
    assert 1.6 < uneven[0] / uneven[1:].mean() < 2.0
    with pytest.raises(NotImplementedError, match=r"precise is True with ratio 1\.5"):
        gate.get_unbalanced_scores(8, 8, 2, 2, 1.5, True)


def test_names_of_kernels():
    sources = "".join(path.read_text() for path in (Path(__file__).parents[2] / "csrc/launch/cuda").glob("*.h"))
    for names in testing.KERNELS.values():
        assert all(f" {name}(const __grid_constant__" in sources for name in names), names


def test_seconds_of_kernels():
    launches = [("void dispatch_kernel<x>", 1.0, 10.0), ("dispatch_kernel", 3.0, 30.0), ("other", 2.0, 5.0)]
    assert testing.seconds_of(launches, ("dispatch_kernel",), 2, 1) == 20e-6
    assert testing.seconds_of(launches, ("dispatch_kernel",), 1, 2) == [10e-6, 30e-6]
    assert math.isnan(testing.seconds_of(launches, ("combine_kernel",), 2, 1)), "a kernel that did not run took no time"


def sums_over_ranks(bias):
    """Of one rank's own choices: experts 0 and 1 on a rank, 2 and 3 on the next."""
    y = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([[0, 2, 1], [3, 2, 0], [1, -1, 3], [0, 1, 2], [-1, -1, -1]])
    y[ids < 0] = 0
    return y, refs.combine(y, ids, 1, 2, 4, bias, True, False)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_reference_of_combine(count):
    biases = tuple(torch.full((5, 4), 0.3 + i).bfloat16() for i in range(count))
    y, ours = sums_over_ranks(biases if count == 2 else biases[0] if count else None)
    start = torch.zeros(5, 4)
    for bias in biases:
        start += bias
    first = (start[0] + y[0, 1]) + (y[0, 0].float() + y[0, 2]).bfloat16()  # the rank of experts 0 and 1 comes last
    assert torch.equal(ours[0], first.bfloat16())
    second = (start[1] + (y[1, 0].float() + y[1, 1]).bfloat16()) + y[1, 2]
    assert torch.equal(ours[1], second.bfloat16())
    assert torch.equal(ours[4], start[4].bfloat16()) and torch.equal(
        refs.ordered_accumulate(y[2:3])[0], (y[2, 0].float() + y[2, 2]).bfloat16()
    )
