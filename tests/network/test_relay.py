"""Networks between machines that take their time, carry bytes in pieces or break: the bits of one machine, or an error
on all ranks that names the connection, and the bits again after a reset. The machines are this one, under several
names."""

import re
import time

import pytest
import torch
from forced_machines import machines_of
from nightly import at_night
from over_networks import W, inputs, layer
from process_cases import SIZES, check_low_latency_cases
from relay import Conditions, relayed
from run_on import run_on
from waits import patience

import megatron_ep as ep


def check_bits(buffer, expected) -> None:
    x, ids, weights = inputs(64)
    found = layer(buffer, x[buffer.rank], ids[buffer.rank], weights[buffer.rank])
    assert all(torch.equal(mine[0], theirs[buffer.rank]) for mine, theirs in zip(found, expected, strict=True))


def on_one_machine(per_node: int):
    with ep.LocalCluster(W // per_node, per_node, ep.Config(num_experts=16)) as cluster:
        return layer(cluster, *inputs(64))


SLOW = {
    "0.1 ms": Conditions(delay=1e-4, jitter=1e-4),
    "2 ms": Conditions(delay=2e-3, jitter=2e-3, chunk=3000),
    "50 ms": Conditions(delay=5e-2, jitter=5e-2),
    "pieces": Conditions(chunk=50),
}


@pytest.mark.parametrize(("name", "per_node"), [("0.1 ms", 2), ("2 ms", 1), ("50 ms", 2), ("pieces", 1)])
@run_on("ranks")
def test_layers_over_a_network_that_takes_its_time(name, per_node):
    """As the network is made, and as it is made again by a reset."""
    conditions = SLOW[name]
    expected = on_one_machine(per_node)
    config, topology = ep.Config(num_experts=16, timeout=20), ep.Topology(W // per_node, per_node)
    with machines_of(per_node), relayed(conditions, seed=1), ep.Buffer(None, config, topology) as buffer:
        for _ in range(2):
            start = time.monotonic()
            check_bits(buffer, expected)
            assert time.monotonic() - start > 4 * conditions.delay, "there, back, and the same for gradients"
            buffer.reset()


@pytest.mark.parametrize("name", ["2 ms", "50 ms", at_night("0.1 ms"), at_night("pieces")])
@run_on("ranks")
def test_the_low_latency_mode_over_a_network_that_takes_its_time(name):
    config, topology = SIZES["two_channels"].config(), ep.Topology(W, 1)
    with machines_of(1), relayed(SLOW[name], seed=2), ep.Buffer(None, config, topology) as buffer:
        check_low_latency_cases(buffer, range(2))


def run_that_breaks(after: list[int]) -> list[str]:
    """The connection of ranks 2 and 3, after so many bytes, and after a reset after so many more."""
    expected, texts = on_one_machine(1), []
    conditions = [Conditions(reset_after=count, chunk=1 + count // 2) for count in after]
    config = ep.Config(num_experts=16, timeout=60)
    with (
        machines_of(1),
        relayed(*conditions, Conditions(), between=(2, 3), seed=3),
        ep.Buffer(None, config, ep.Topology(W, 1)) as buffer,
    ):
        for _ in after:
            start = time.monotonic()
            with pytest.raises(ep.EPError) as caught:
                for _ in range(1000):
                    check_bits(buffer, expected)
            assert time.monotonic() - start < 30, "long before a wait ends by itself"
            texts.append(str(caught.value).splitlines()[0].partition("; every rank must call buffer.reset()")[0])
            buffer.reset()
        for _ in range(3):
            check_bits(buffer, expected)
    return texts


def test_a_connection_that_breaks_anywhere(ranks):
    """In a header, in what a rank tells of itself, and in rows."""
    by_rank = ranks.run(run_that_breaks, [1, 40, 2600, 30_000, 100_000, 1_000_000])
    for number, texts in enumerate(zip(*by_rank, strict=True)):
        assert len(set(texts)) == 1, (number, texts)
        assert texts[0].startswith(("the connection to rank 2 broke", "the connection to rank 3 broke")), texts


STALLS = {
    "silent": Conditions(stalls_after=2600),
    "silent up": Conditions(stalls_after=0, stalls="up"),
    "silent down": Conditions(stalls_after=30_000, stalls="down"),
    "trickles up": Conditions(stalls_after=2600, stalls="up", rate=1),
    "trickles down": Conditions(stalls_after=30_000, stalls="down", rate=1),
    "half-open": Conditions(stalls_after=30_000, half_open=True),
}
ENDS = (1, 3)  # of the connection, on different machines
WAIT_S, LATE_S = 2.0, 6.0


def run_that_stalls(conditions: Conditions) -> tuple[float, str]:
    expected = on_one_machine(2)
    config, topology = ep.Config(num_experts=16, timeout=WAIT_S), ep.Topology(W // 2, 2)
    with (
        machines_of(2),
        relayed(conditions, Conditions(), between=ENDS, seed=4),
        ep.Buffer(None, config, topology) as buffer,
    ):
        start = time.monotonic()
        with pytest.raises(ep.EPError) as caught:
            for _ in range(1000):
                check_bits(buffer, expected)
        took = time.monotonic() - start
        buffer.reset()
        check_bits(buffer, expected)
    return took, str(caught.value)


@pytest.mark.parametrize(
    "name",
    [name if name in ("silent", "trickles down", "half-open") else at_night(name) for name in STALLS],
)
def test_a_connection_that_stalls(ranks, name):
    """All ranks hear in time who was first to give up, and that an end of the connection is missing, belongs to a ring
    of ranks that wait, or is what the other end waits for."""
    took, texts = zip(*ranks.run(run_that_stalls, STALLS[name]), strict=True)
    assert max(took) < WAIT_S + patience(LATE_S), took
    assert len({text.splitlines()[0].partition("; every rank must call")[0] for text in texts}) == 1, texts
    for text in texts:
        first = text.splitlines()[0]
        assert ("broke" in first) == (name == "half-open"), text
        missing = re.search(r"(?:timed out first, after 2 s: |^the connection to )rank ([\d, ]+\d|\d) ", first)
        if missing:
            named = {int(rank) for rank in missing[1].split(", ")}
            assert named & set(ENDS) and (len(named) > 1) == ("wait for each other" in first), text
        else:
            assert re.search(r"^  rank 1, .* from rank 3: |^  rank 3, .* from rank 1: ", text, re.MULTILINE), text
