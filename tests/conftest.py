"""What all tests share."""

import gc
import sys
from pathlib import Path

import pytest
import torch

from megatron_ep.tools.local_ranks import LocalRanks

sys.path.insert(0, str(Path(__file__).parent / "bench"))
sys.path.insert(0, str(Path(__file__).parent / "helpers"))

import rank_threads
import skips
from gpu_turns import turn
from shared_settings import forget

# Files whose tests take longest: processes that share the tests end together if these come first.
LONGEST = (
    "test_ctest.py",
    "test_one_rank.py",
    "test_over_networks.py",
    "test_package.py",
    "test_loss_curve.py",
    "test_build.py",
    "test_defaults.py",
    "test_train_run.py",
    "test_pretrain.py",
    "test_script_recipe.py",
    "test_check_network.py",
    "test_rendezvous.py",
    "test_compile.py",
    "test_attention.py",
    "test_dispatcher.py",
    "test_dispatch_combine.py",
    "test_binding_threads.py",
)

torch.set_num_threads(1)  # the tensors are small: threads of torch's own would mostly wait for each other


@pytest.fixture(scope="module")
def ranks(request):
    """As many processes as the file's `W` says, which stay up for its tests. `run` bounds every test."""
    with LocalRanks(request.module.W, timeout=300.0) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_started_ranks():
    """Processes that stay up: starting Megatron in each takes seconds. `run` bounds every test."""
    with LocalRanks(4, timeout=60.0) as ranks:
        yield ranks


@pytest.fixture
def four_ranks(four_started_ranks):
    """Without what tests before have left: which those are depends on how processes share the tests."""
    four_started_ranks.run(forget)
    return four_started_ranks


@pytest.fixture
def used_memory():
    """What nothing writes to holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # a GPU has no deterministic form of every operation
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_other_buffers():
    """Those that earlier tests have left in circles are gone: for tests that ask all buffers of this process."""
    gc.collect()


@pytest.fixture
def closed_afterwards():
    """For buffers of ranks that are threads."""
    yield
    rank_threads.close_all()


@pytest.fixture
def gpu_alone():
    """For tests that measure the free memory of a GPU."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    on_gpu = item.path.parent.name == "gpu" or "device" in getattr(item, "fixturenames", ())
    if not on_gpu or skips.no_gpu():
        return (yield)
    with turn("gpu_alone" in getattr(item, "fixturenames", ())):
        return (yield)


def pytest_generate_tests(metafunc):
    """A test with an argument `device` runs on the host and on a GPU; one with an argument `lines`
    both through rings and by lines."""
    if "lines" in metafunc.fixturenames:
        metafunc.parametrize("lines", [False, True], ids=["rings", "lines"])
    if "device" in metafunc.fixturenames:
        gpu = pytest.param("cuda", marks=pytest.mark.needs(skips.no_gpu()))
        metafunc.parametrize("device", ["cpu", gpu], scope="module")


def pytest_collection_modifyitems(items):
    skips.skip(items)
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def pytest_collection_finish():
    """Spares `gc.collect` what imports have made, with which it would take half a second."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    for line in skips.summary(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(line)
