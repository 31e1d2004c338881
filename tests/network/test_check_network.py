"""`megatron-ep check --network`: what it says of good and bad networks, between machines made of namespaces; and
`megatron-ep check` by the ranks of a job on them."""

import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import machines
import pytest
import rank_processes
import torch.distributed as dist
from cards import cards_with, library
from run_on import run_on
from waits import within

from megatron_ep import megatron as megatron_side
from megatron_ep.cli.checks import MEGATRON_LAYERS
from megatron_ep.cli.main import main
from megatron_ep.errors import EPError
from megatron_ep.fabrics import cards as rdma
from megatron_ep.fabrics import choice, verbs
from megatron_ep.meeting import stores
from megatron_ep.meeting.rendezvous import StoreRendezvous
from megatron_ep.tools.network import examination as network_examination
from megatron_ep.tools.network import main as network
from megatron_ep.tools.network import report as network_report

ROOT = Path(__file__).resolve().parents[2]
on_machines = pytest.mark.needs(machines.why_not())
with_filter = pytest.mark.needs(machines.why_no_filter())

LINE = "export MEGATRON_EP_ADDRESS=10.77.0.0/24"


@pytest.fixture
def three():
    with machines.Machines(3) as made:
        yield made


def check(made, folder: Path, *arguments: str, environment: dict[int, dict[str, str]] | None = None) -> tuple[str, int]:
    """What machine 0 prints, and the status that all end with. arguments: `--network` unless others are given."""
    places = {"MASTER_ADDR": made.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
    command = ["-m", "megatron_ep.cli.main", "check", *(arguments or ("--network",)), "--timeout", "30"]
    running = []
    for machine, rank in enumerate(rank_processes.job(made.count, 1, **places)):
        own = rank | (environment or {}).get(machine, {})
        running.append(made.fork(machine, command, [own], log=folder / f"{machine}.log", cwd=ROOT))
    statuses = {process.wait(60) for process in running}
    text = (folder / "0.log").read_text()
    assert len(statuses) == 1, [log.read_text() for log in folder.glob("*.log")]
    return text, statuses.pop()


@on_machines
@with_filter
@pytest.mark.nightly
def test_a_slow_machine_and_one_that_loses_packets(three, tmp_path):
    three.limit(1, "100mbit")
    three.drop(2, "numgen", "random", "mod", "100", "<", "5")
    text, status = check(three, tmp_path)
    assert status == 1 and LINE in text and "3 ranks on 3 machines: machine0, machine1, machine2" in text
    assert "contents and order are right" in text
    found = {line.split(",")[0] for line in text.splitlines() if line.startswith("FAIL")}
    assert found >= {"FAIL  slow: machine1 -> machine0", "FAIL  lossy: machine0 -> machine2"}, text
    assert "FAIL  slow: machine0 -> machine1" not in found, text


@on_machines
@with_filter
def test_a_firewall_and_the_wrong_interface(three, tmp_path):
    three.block(0, "30000-65535")
    text, status = check(three, tmp_path, environment={1: {"MEGATRON_EP_ADDRESS": "127.0.0.1"}})
    assert status == 1 and "no network connects all machines" in text
    for rank in (1, 2):
        assert f"FAIL  machine{rank} (rank {rank}) does not reach machine0 (rank 0) at 10.77.0.1 port" in text
    assert "FAIL  machine2 (rank 2) does not reach machine1 (rank 1) at 127.0.0.1 port" in text
    assert "does not reach machine1 (rank 1) at 10.77.0.2" not in text, "the right one is reached"


@on_machines
@pytest.mark.nightly
def test_the_right_interface_is_told(tmp_path):
    with machines.Machines(2) as two:
        text, status = check(two, tmp_path, environment={0: {"MEGATRON_EP_ADDRESS": "127.0.0.1"}})
    assert status == 1 and text.rstrip().endswith(LINE), text
    assert "machine1 (rank 1) does not reach machine0 (rank 0) at 127.0.0.1 port" in text
    assert "Connection refused" in text


@on_machines
def test_a_good_network_between_machines_that_are_called_alike(tmp_path):
    with machines.Machines(2, "box") as two:
        text, status = check(two, tmp_path)
    wrong = [line for line in text.splitlines() if line.startswith("FAIL")]
    assert status == bool(wrong) and all(line.startswith("FAIL  slow: ") for line in wrong), text  # by the load here
    assert re.search(r"^box/10.77.0.1 +box/10.77.0.2 ", text, re.MULTILINE), text


EXAMINED = """
import sys
from unittest import mock
from megatron_ep.tools.network import main as network
def examined(rendezvous, timeout):
    rendezvous.barrier()
    return "all is well", 0
with mock.patch.object(network, "examine_all", examined):
    sys.exit(network.main_of_rank(30.0))
"""


def test_rank_0_keeps_the_store_until_all_have_left(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(EXAMINED)
    for _ in range(2):
        ends = rank_processes.run_ranks([program], 4)
        assert [status for status, _ in ends] == [0] * 4, ends


@on_machines
@with_filter
@pytest.mark.nightly
def test_packets_that_are_too_large_for_the_way(tmp_path):
    with machines.Machines(2) as two:
        for machine in range(2):
            two.drop(machine, "ip", "length", ">", "900")
        started = time.monotonic()
        _, status = check(two, tmp_path)
        assert status == 1 and time.monotonic() - started < 100
    said = [(tmp_path / f"{machine}.log").read_text() for machine in range(2)]
    assert any("packets above some size are lost" in text for text in said), said


def test_a_store_whose_bytes_do_not_arrive_is_named(monkeypatch):
    """The command then ends by itself, and not by Python, which waits for the call or aborts it."""
    monkeypatch.setattr(network_examination, "TRIAL_S", 0.2)
    arrived = threading.Event()
    store = SimpleNamespace(set=lambda *_: arrived.wait(60), get=mock.Mock(), delete_key=mock.Mock())
    connection = SimpleNamespace(clone=lambda: store)
    rendezvous = SimpleNamespace(connection=lambda: connection, agree=lambda step: step(), gather=lambda mine: [mine])
    assert not stores.has_abandoned_calls()
    with pytest.raises(EPError, match=r"are connected, but of what passes .*: packets above some size are lost"):
        network_examination.Examination._try_store(SimpleNamespace(rank=0, rendezvous=rendezvous))
    assert stores.has_abandoned_calls()
    arrived.set()
    assert within(20, lambda: not stores.has_abandoned_calls())


def test_links_that_are_slow_alike_are_remarked_on():
    half = network_report.Half(1e-3, 1e-3, 1.25e7, 1.25e7)
    findings = network_report.Findings([], [network_report.Link((0, 1), (half, half))], {(0, 1): 0.2}, 1.0, [])
    text, faults = network_report.render(["a", "b"], findings)
    assert "the slowest link has 0.1 Gbit/s, less than 1 Gbit/s" in text
    assert faults == ["lossy: a -> b, 20.00% of the packets had to be sent again"]
    assert network_report.render(["a", "b"], findings, judges=False) == (text, []), "one machine judges no network"


@on_machines
def test_the_ranks_of_a_job_on_two_machines(tmp_path):
    with machines.Machines(2) as two:
        text, status = check(two, tmp_path, "--timeout", "30")
    assert status == 0 and "2 ranks on 2 machines, 2x1, cpu, tcp" in text, text
    verdicts = [line.split()[0] for line in text.splitlines()]
    checks = 3 + (len(MEGATRON_LAYERS) if megatron_side.is_installed() else 0)
    assert verdicts.count("pass") == checks and "FAIL" not in verdicts and "all passed in" in text
    assert "pass" not in (tmp_path / "1.log").read_text(), "rank 0 alone prints"


# ---- without machines


W = 2


def examine() -> tuple[str, int]:
    """With short measurements."""
    with mock.patch.multiple(network_examination, LOAD_S=0.01, REPEATS=1, FIRST_BYTES=1 << 16, MIN_BYTES=1 << 16):
        return network._examine_apart(20.0)


@run_on("ranks")
def test_other_versions_are_named_and_nothing_is_sent():
    with mock.patch.object(network_examination, "_build", lambda: f"megatron_ep 0.{dist.get_rank()}"):
        text, status = examine()
    assert status == 1 and "FAIL  ranks run different builds" in text
    assert "megatron_ep 0.1: " in text and "(rank 1)" in text


@run_on("ranks")
def test_ranks_of_one_machine():
    text, _ = examine()
    assert "2 ranks on 2 machines" in text and "a rehearsal on one machine" in text
    assert "contents and order are right" in text, text
    assert "export MEGATRON_EP_ADDRESS=" in text
    assert "card" not in text, text


def examine_cards(
    library: str, facts: list[dict[str, int]], wanted: str = "verbs", slow: float = 0.0
) -> tuple[str, int]:
    """The two ranks have two cards each. facts: of those of each rank. slow: part of the median link that is slow; 0:
    none is, since other tests share the processors."""
    with (
        mock.patch.object(verbs, "LIBRARY", library),
        mock.patch.object(network_report, "SLOW", slow),
        mock.patch.object(network, "FASTER", 1000.0),  # the tests' cards are slower than TCP
        mock.patch.dict(os.environ, {choice.VARIABLE: wanted}),
        cards_with(**dict(devices=2) | facts[dist.get_rank()]),
    ):
        return examine()


def test_network_cards_are_examined(ranks):
    for text, status in ranks.run(examine_cards, library(), [{}, {}]):
        assert status == 0 and "FAIL" not in text, text
        for number in range(2):
            cards = rf"network cards \S+/0 fake_{number}:1, \S+/1 fake_{number}:1\n"
            assert len(re.findall(cards, text)) == 1, text
        assert text.count("contents and order are right") == text.count("\nnetwork "), "over TCP and by each card"
        assert "export MEGATRON_EP_FABRIC=verbs  # not where" in text and verbs.VARIABLE not in text


def examine_own_queues(library: str, wanted: str, lacks: bool) -> tuple[str, int]:
    """As `examine_cards`; the cards' own queues can be had by all ranks, or not by rank 1."""
    with (
        mock.patch.object(verbs, "MLX5_LIBRARY", "libnone.so" if lacks and dist.get_rank() == 1 else library),
        mock.patch.object(rdma, "has_cards", lambda: True),
    ):
        return examine_cards(library, [{}, {}], wanted)


def test_cards_are_measured_as_jobs_take_them(ranks):
    for text, status in ranks.run(examine_own_queues, library(), "mlx5", False):
        assert status == 0 and "FAIL" not in text, text
        assert "\nby mlx5, as a job takes them" in text and "export MEGATRON_EP_FABRIC=mlx5  # not where" in text, text
        assert text.count("contents and order are right") == text.count("\nnetwork "), "over TCP and by each card"


@run_on("ranks")
def test_a_fabric_that_is_none_is_refused():
    with mock.patch.dict(os.environ, {choice.VARIABLE: "ibgda"}), pytest.raises(ValueError, match="called mlx5 now"):
        examine()


@pytest.mark.nightly
def test_own_queues_that_one_machine_lacks(ranks):
    for text, status in ranks.run(examine_own_queues, library(), "", True):
        assert status == 0 and "by mlx5" not in text and "export MEGATRON_EP_FABRIC=verbs  # not where" in text, text
    for text, status in ranks.run(examine_own_queues, library(), "mlx5", True):
        assert status == 1 and "/1 (rank 1): the mlx5 fabric needs" in text and "FABRIC=mlx5" not in text, text


def test_the_wrong_card_is_named_and_left_out(ranks):
    for text, status in ranks.run(examine_cards, library(), [{}, dict(astray=0)]):
        [fault] = [line for line in text.splitlines() if line.startswith("FAIL")]
        assert status == 1 and "fake_0" in fault and "10.99.9.1" in fault, text
        assert re.search(r"export MEGATRON_EP_FABRIC=verbs  #.*\n    export MEGATRON_EP_CARDS=fake_1:1\n", text), text


@pytest.mark.nightly
def test_a_slow_card_is_named_and_left_out(ranks):
    for text, status in ranks.run(examine_cards, library(), [dict(slow=1), {}], "verbs", network_report.SLOW):
        faults = [line for line in text.splitlines() if line.startswith("FAIL")]
        assert status == 1 and faults, text
        assert all(line.startswith("FAIL  slow: ") and "fake_1:1" in line for line in faults), text
        assert "export MEGATRON_EP_CARDS=fake_0:1\n" in text, text


def test_a_machine_without_cards_is_named(ranks):
    for text, status in ranks.run(examine_cards, library(), [{}, dict(devices=0)]):
        assert status == 1 and "/1 (rank 1): libibverbs finds no network card" in text, text
        assert verbs.VARIABLE not in text and "FABRIC=verbs" not in text


@pytest.mark.parametrize("machines", range(2, 9))
def test_every_pair_is_measured_once_and_no_machine_twice_at_a_time(machines):
    rounds = network_examination.rounds_of(machines)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(machines), 2))
    for pairs in rounds:
        busy = [machine for pair in pairs for machine in pair]
        assert len(set(busy)) == len(busy)


def run_examinations(ranks: int, timeout: float, work: Callable[[network_examination.Examination], object]) -> list:
    """By each rank, a thread."""
    store = dist.HashStore()

    def run(rank: int) -> object:
        rendezvous = StoreRendezvous.over(store, rank, ranks, timedelta(seconds=timeout))
        return work(network_examination.Examination(rendezvous, timeout, apart=True))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def test_a_rank_in_no_pair_waits_for_slow_ones():
    """A measurement takes several waits, each within the limit of one."""
    timeout, half = 1.0, network_report.Half(1e-3, 2e-3, 1.0, 1.0)

    def after(seconds: float, result: object) -> Callable[..., object]:
        return lambda *_: time.sleep(seconds) or result

    with mock.patch.multiple(
        network_examination.Examination, _try=after(1.3 * timeout, 1.0), _measure=after(2.3 * timeout, half)
    ):
        found = run_examinations(3, timeout, lambda examination: examination._measure_all(None, [(0, 1)]))
    assert found == [([network_report.Link((0, 1), (half, half))], [])] * 3


def test_errors_say_that_the_network_is_examined():
    def fail(examination: network_examination.Examination) -> str:
        with pytest.raises(EPError) as caught:
            examination.rendezvous.agree(lambda: 1 // (1 - examination.rank))
        return str(caught.value)

    assert all(text.startswith("rank 1 could not examine the network: ") for text in run_examinations(2, 20.0, fail))
    alone = StoreRendezvous.over(dist.HashStore(), 0, 2, timedelta(seconds=0.1))
    with pytest.raises(EPError, match="rank 1 did not come to step 1 of the network's examination within"):
        network_examination.Examination(alone, 0.1)


def test_ranks_go_with_the_network(capsys):
    with pytest.raises(SystemExit):
        main(["check", "--ranks", "2"])
    assert "--ranks goes with --network" in capsys.readouterr().err
