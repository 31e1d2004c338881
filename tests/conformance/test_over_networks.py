"""What holds over every fabric between machines: the bits of one machine in both modes, and errors on every machine.
The machines are this one, under several names, and the cards those of tests/csrc/fake_ibverbs.cpp."""

import errno
import time
from unittest import mock

import cards
import cpp
import pytest
import torch
import torch.distributed as dist
from cards import cards_with
from forced_machines import machines_of
from over_networks import W, run_layers, run_low_latency
from waits import within

import megatron_ep as ep
from megatron_ep.buffer import monitor, rank_group
from megatron_ep.tools.local_ranks import LocalRanks

FABRICS = ("tcp", "verbs", "ibgda")
X, IDS = torch.ones(8, 16), torch.arange(16).view(8, 2)


@pytest.fixture(scope="module")
def over():
    """Runs a function on ranks that have the cards' libraries which a fabric needs."""
    with LocalRanks(W, 120) as ranks:

        def run(fabric, function, *arguments):
            if fabric != "tcp":
                ranks.run(cards.use_library, str(cpp.build("fake_ibverbs") / "libfake_ibverbs.so"), fabric)
            return ranks.run(function, *arguments, fabric)

        yield run


def buffer_of(timeout: float, per_node: int = 1) -> ep.Buffer:
    return ep.Buffer(None, ep.Config(num_experts=16, timeout=timeout), ep.Topology(W // per_node, per_node))


@pytest.mark.parametrize(("per_machine", "per_node", "stripes"), [(1, 1, ""), (2, 2, "1"), (2, 1, "2")])
@pytest.mark.parametrize("fabric", FABRICS)
def test_the_bits_of_one_machine(over, fabric, per_machine, per_node, stripes):
    over(fabric, run_layers, per_machine, per_node, stripes)


@pytest.mark.parametrize("per_machine", [1, 2])
@pytest.mark.parametrize("fabric", FABRICS)
def test_the_low_latency_mode(over, fabric, per_machine):
    over(fabric, run_low_latency, per_machine)


def run_with_one_that_goes(how: str, fabric: str) -> str:
    with machines_of(2, fabric):
        buffer = buffer_of(3, per_node=2)
        ep.dispatch(X, IDS, buffer=buffer)
        dist.barrier()
        if dist.get_rank() == W - 1:
            if how == "refuses":
                with pytest.raises(ValueError):
                    ep.dispatch(X, IDS + 100, buffer=buffer)
            elif how == "aborts":
                buffer.abort("enough")
        start = time.monotonic()
        with pytest.raises(ep.EPError) as caught:
            ep.dispatch(X, IDS, buffer=buffer)
        assert time.monotonic() - start < 2
        buffer.reset()
        again = ep.dispatch(X, IDS, buffer=buffer)
        assert torch.equal(again.x, torch.ones(again.x.shape))
        buffer.close()
    return str(caught.value)


@pytest.mark.parametrize(("how", "told"), [("refuses", "rank 3 refused its arguments"), ("aborts", "rank 3 was told")])
@pytest.mark.parametrize("fabric", FABRICS)
def test_a_failure_is_heard_on_every_machine(over, fabric, how, told):
    for text in over(fabric, run_with_one_that_goes, how):
        assert text.startswith(told)


def run_late(fabric: str) -> str:
    """The last rank comes when the others have given up."""
    with machines_of(1, fabric):
        buffer = buffer_of(2)
        ep.dispatch(X, IDS, buffer=buffer)
        if dist.get_rank() == W - 1:
            time.sleep(4)
        with pytest.raises(ep.EPError) as caught:
            ep.dispatch(X, IDS, buffer=buffer)
        buffer.reset()
        ep.dispatch(X, IDS, buffer=buffer)
        buffer.close()
    return str(caught.value)


@pytest.mark.parametrize("fabric", FABRICS)
def test_an_absent_rank_is_named_on_every_machine(over, fabric):
    for text in over(fabric, run_late):
        assert "rank 3 has not entered notify 2 (it finished 1)" in text


def run_closed_early(fabric: str) -> None:
    with machines_of(1, fabric):
        buffer = buffer_of(20)
    rows = ep.dispatch(X, IDS, buffer=buffer)
    ep.combine(rows.x, rows.handle)
    if dist.get_rank() != W - 1:
        assert within(10, lambda: W - 1 in buffer._group._network.nic.ranks_that_left())
        time.sleep(3 * monitor.INTERVAL_S)
        buffer.raise_if_failed()
    buffer.close()


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_rank_that_has_done_its_part_may_close_its_buffer(over, fabric):
    over(fabric, run_closed_early)


# ---- over cards


def run_until_broken(facts: dict[str, int], fabric: str) -> str:
    """The card of rank 1 does what it should not, then it is in order again."""
    with machines_of(1, fabric), buffer_of(30) as buffer:
        expected = ep.dispatch(X, IDS, buffer=buffer).x
        dist.barrier()
        with cards_with(retry_ms=500, **facts if dist.get_rank() == 1 else {}):
            start = time.monotonic()
            with pytest.raises(ep.EPError) as caught:
                for _ in range(2):  # in the first one a rank may have all that it needs before it hears
                    ep.dispatch(X, IDS, buffer=buffer)
            assert time.monotonic() - start < 5
            dist.barrier()
        buffer.reset()
        assert torch.equal(ep.dispatch(X, IDS, buffer=buffer).x, expected)
    return str(caught.value)


SAYS_NOTHING = "confirmed nothing of what was sent"


@pytest.mark.parametrize(
    ("fabric", "facts", "what"),
    [
        ("verbs", dict(silent_after=0), SAYS_NOTHING),
        ("verbs", dict(unposted=errno.ENOMEM), "ibv_post_send: Cannot allocate memory"),
        ("ibgda", dict(silent_after=0), SAYS_NOTHING),
        ("ibgda", dict(refused_after=0), "broke: fake_0 port 1 (10.99.0.1)"),
    ],
)
def test_a_card_that_fails_is_named_on_every_rank(over, fabric, facts, what):
    for text in over(fabric, run_until_broken, facts):
        assert "broke" in text and "rank" in text and what in text, text
        assert what != SAYS_NOTHING or "fake_0 port 1 (10.99.0.1)" in text, text
        assert fabric == "verbs" or text.startswith("the connection to rank"), text


def run_refused(facts: dict[str, int], fabric: str) -> str:
    """The card of rank 2 cannot be used."""
    with (
        machines_of(1, fabric),
        cards_with(**facts if dist.get_rank() == 2 else {}),
        pytest.raises(ep.EPError) as caught,
    ):
        buffer_of(20)
    return str(caught.value)


IS_DOWN = "fake_0 port 1 (RoCE): it is down on rank 2"


@pytest.mark.parametrize(
    ("fabric", "facts", "what"),
    [
        ("verbs", dict(unregistered=errno.EPERM), "fake_0 port 1: ibv_reg_mr: Operation not permitted"),
        ("verbs", dict(down=1), IS_DOWN),
        ("verbs", dict(devices=0), "libibverbs finds no network card on rank 2"),
        ("verbs", dict(network=9), "10.99.9.1"),
        ("ibgda", dict(mlx5=0), "fake_0 port 1 (RoCE): it is no card of the driver mlx5 on rank 2"),
        ("ibgda", dict(down=1), IS_DOWN),
        ("ibgda", dict(stride=128), "its driver keeps queues in another form than mlx5's on rank 2"),
        ("ibgda", dict(network=9), "10.99.9.1"),
    ],
)
def test_a_card_that_cannot_be_used_is_refused_on_every_rank(over, fabric, facts, what):
    for text in over(fabric, run_refused, facts):
        assert what in text


def run_said(fabric: str) -> list[str]:
    say = mock.Mock()
    with machines_of(1, fabric), mock.patch.object(rank_group.set_up_log, "info", say):
        buffer_of(20).close()
    return [text % tuple(values) for text, *values in (call.args for call in say.call_args_list)]


@pytest.mark.parametrize("fabric", FABRICS)
def test_one_line_at_the_start_names_fabric_and_card(over, fabric):
    [line], *others = over(fabric, run_said)
    card = "" if fabric == "tcp" else "; rank 0 has fake_0 port 1"
    assert f"fabric: {fabric} (host backend on 4 machines, MEGATRON_EP_FABRIC says so{card});" in line
    assert not any(others)
