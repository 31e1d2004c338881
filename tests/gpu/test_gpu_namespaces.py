"""GPU ranks on two machines made of namespaces, which share nothing but GPUs and a network: the host's bits, and a
machine that is gone. As root; a GPU for each machine, or one for both."""

import re
import sys
import time

import pytest
from jobs_on_machines import ROOT, log_of, run_for_ever, start, torchrun, wait_for

sys.path.append(str(ROOT / "tests" / "network"))
import machines

pytestmark = pytest.mark.skipif(bool(machines.why_not()), reason=str(machines.why_not()))

SAME_BITS = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "gpu")!r}, {str(ROOT / "tests" / "helpers")!r}]
import torch.distributed as dist
import test_gpu_fabrics
dist.init_process_group("gloo")
refused = test_gpu_fabrics.over("tcp", test_gpu_fabrics.run_cases, 2)
assert refused is None, refused
dist.barrier()
print("ALL THE SAME", flush=True)
"""


@pytest.fixture
def two():
    with machines.Machines(2) as made:
        yield made


def test_the_host_s_bits(two, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SAME_BITS)
    statuses = [process.wait(300) for process in start(two, tmp_path, torchrun(two, str(program), ranks=1))]
    for machine in range(2):
        text = log_of(tmp_path, machine).read_text()
        assert "ALL THE SAME" in text, (statuses, text)


def test_a_machine_that_is_gone_is_heard_of_on_the_other(two, tmp_path):
    run_for_ever(two, tmp_path, 1, 30, "cuda", 90)
    killed = time.time()
    two.stop(1)
    [heard] = wait_for(tmp_path, r"RANK 0 AT ([\d.]+): (.*)", 1, 20)
    assert float(heard[1]) - killed < 2, heard[0]
    assert re.search(r"connection to rank 1 broke|rank 1", heard[2]), heard[2]
