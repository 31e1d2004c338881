"""`megatron-ep check` by the ranks of a job, here on one machine: what rank 0 says, and what all end with. On several
machines: tests/network/test_check_network.py."""

import pytest
import rank_processes

from megatron_ep import megatron as megatron_side

# The last rank goes wrong in the way that it is told.
PROGRAM = """
import os, sys
import torch
import megatron_ep as ep
from megatron_ep.cli import checks
from megatron_ep.cli.main import main

checks.CASES = 3
checks.MEGATRON_LAYERS = {"": (1, {}), ", TP 3": (3, {})}
how = sys.argv[1] if os.environ["RANK"] == "1" else "well"
dispatch, combine, calls = ep.dispatch, ep.combine, []

def other_gradient(x, *more, **options):
    rows = dispatch(x, *more, **options)
    if rows.x.requires_grad:
        rows.x.register_hook(lambda grad: grad * 1.001)
    return rows

def ends(*arguments, **options):
    calls.append(None)
    if len(calls) == 3:
        os._exit(7)
    return dispatch(*arguments, **options)

ep.dispatch = {"other gradient": other_gradient, "ends": ends}.get(how, dispatch)
if sys.argv[1] == "few sums":
    checks.summable_dtypes = lambda device: (torch.bfloat16, torch.float32)
if how == "other sum":
    ep.combine = lambda *arguments, **options: combine(*arguments, **options) + 1e-9
sys.exit(main(["check", "--timeout", "30"]))
"""


@pytest.fixture
def check(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return lambda how, **variables: rank_processes.run_ranks([program, how], 2, **variables)


def verdicts(text):
    return [line.split()[0] for line in text.splitlines() if line.startswith(("pass", "FAIL"))]


def test_everything_passes_and_rank_0_alone_says_so(check):
    (first, text), other = check("well")
    assert first == 0 and other == (0, ""), text
    assert "2 ranks on 1 machine, 1x2, cpu, shared memory" in text
    if megatron_side.is_installed():
        assert verdicts(text) == ["pass"] * 4 and "Megatron's dispatcher, EP 2 " in text and "TP 3" not in text
    assert "all passed" in text


def test_nodes_are_those_of_a_buffer(check):
    (status, text), _ = check("well", MEGATRON_EP_RANKS_PER_NODE="1")
    assert status == 0 and "2 ranks on 1 machine, 2x1, cpu, shared memory" in text


@pytest.mark.parametrize(
    ("how", "failed", "told"),
    [
        ("other gradient", 1, "derivatives differ by up to"),
        ("other sum", 2, "sums of rank 1 differ from the specification"),
    ],
)
def test_what_one_rank_finds_fails_on_all(check, how, failed, told):
    (first, text), other = check(how)
    assert first == 1 and other == (1, ""), text
    assert verdicts(text)[:3] == ["FAIL" if number == failed else "pass" for number in range(3)]
    assert told in text and "failed in" in text


def test_where_fp64_is_not_summed_it_is_fp32(check):
    (status, text), _ = check("few sums")
    assert status == 0 and "gradients in fp32" in text, text


def test_a_rank_that_ends_is_no_pass(check):
    (first, text), (other, _) = check("ends")
    assert (first, other) == (1, 7), text
    assert "all passed" not in text


def test_a_mistake_ends_all_ranks_alike(check):
    for status, text in check("well", MEGATRON_EP_RANKS_PER_NODE="3"):
        assert status == 2, text
        assert "megatron-ep check: environment variable MEGATRON_EP_RANKS_PER_NODE is '3', must be a divisor" in text
        assert "Traceback" not in text
