"""Which rank the others blame when one stops for ever, or ends, at any wait of any step. Time does not pass here."""

import itertools
from dataclasses import replace

import pytest
import torch
from nightly import at_night

import megatron_ep as ep

TOPOLOGIES = [(2, 2), at_night((1, 3)), at_night((3, 1))]
EXPERTS, T, H, K = 12, 3, 4, 2
# rings of one row: everybody waits for everybody's credit
CONFIG = ep.Config(num_experts=EXPERTS, tuning=ep.Tuning(channels=1, nvl_ring_bytes=128, rdma_ring_bytes=128))


def inputs(world):
    generator = torch.Generator().manual_seed(world)
    ids = [torch.rand(T, EXPERTS, generator=generator).topk(K, dim=1).indices for _ in range(world)]
    return [torch.ones(T, H)] * world, ids, [torch.ones(T, K)] * world


def transfers(cluster):
    """Two of each step. Nobody can do the second notify without all others."""
    for _ in range(2):
        rows = ep.dispatch(*inputs(cluster.topology.world_size), buffer=cluster)
        ep.combine(rows.x, rows.handle)


def low_latency(cluster):
    """Three of each half. Nobody can send the third without what all others have done of the first."""
    x, ids, _ = inputs(cluster.topology.world_size)
    mode = ep.LowLatency(cluster, max_tokens=T, hidden=H, topk=K, dtype=torch.float32)
    for _ in range(3):
        received, receive = mode.dispatch(x, ids, return_recv_hook=True)
        receive()
        _, receive = mode.combine(received.x, received.handle, return_recv_hook=True)
        receive()


STEPS = {
    transfers: {"notify", "dispatch", "combine"},
    low_latency: {"dispatch_sent", "dispatch_received", "combine_sent", "combine_received"},
}


def step_of(status):
    """The step in which this rank is, as it counts, and its name in a report."""
    kind, number = status.inside, status.entered[status.inside]
    step = ("combine", "dispatch")[number % 2] if kind == "transfer" else kind.removesuffix("_0").removesuffix("_1")
    return step, status.call


def check_who_is_named(program, topology, stalled, wait):
    """The step in which this rank stops at its wait of this number; None: it has made fewer waits."""
    config = replace(CONFIG, tuning=replace(CONFIG.tuning, local_pass=wait % 2 == 1))
    with ep.LocalCluster(*topology, config, seed=wait, stalled=(stalled, wait)) as cluster:
        try:
            program(cluster)
        except ep.EPTimeoutError as error:
            slow = error
        else:
            return None
        step, name = step_of(cluster._group._backend.rank_statuses()[stalled])
        cluster._group._fate_of = {stalled: "has ended"}.get
        with pytest.raises(ep.EPTimeoutError) as dead:
            cluster.raise_if_failed()
        for said, fate in (slow, ""), (dead.value, f"; the process of rank {stalled} has ended"):
            assert str(said).splitlines()[0].endswith(f": rank {stalled} is in {name} and does not go on{fate}")
        cluster.reset()
        program(cluster)  # it goes on
        return step


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("program", STEPS)
def test_the_rank_that_stops_is_named(program, topology):
    steps = set()
    for stalled in range(topology[0] * topology[1]):
        of_rank = (check_who_is_named(program, topology, stalled, wait) for wait in itertools.count(1))
        steps.update(itertools.takewhile(lambda step: step is not None, of_rank))
    assert steps == STEPS[program]
