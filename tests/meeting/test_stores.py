"""The store of torch.distributed may be slow to take connections, because it looks up names, or silent for a while: no
set-up fails for it, and no failure goes unheard."""

import contextlib
import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_processes import LinkedProcess
from store_relay import StoreRelay
from waits import within

import megatron_ep as ep
from megatron_ep import deep_ep
from megatron_ep.meeting import failure_broadcast, stores
from megatron_ep.meeting.failure_broadcast import Failure, FailureBroadcast
from megatron_ep.meeting.place import place_of
from megatron_ep.meeting.rendezvous import StoreRendezvous

needs_clone = pytest.mark.skipif(not hasattr(dist.Store, "clone"), reason="torch before 2.8 has one connection")
pytestmark = needs_clone

W = 4
FAILURE = Failure(1, "failed", "rank 1 failed", "")


def run_set_ups(rank: int, port: int, timeout: float, link: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=W)
    dist.barrier()
    link.send("ready")
    link.recv()
    place_of(None).publish()
    ids = torch.arange(W)[:, None]
    for nodes in (1, 2):  # of which the second has a network, and carries failures through the store
        machine = f"machine {rank // 2 if nodes == 2 else 0}"
        with (
            mock.patch("socket.gethostname", lambda machine=machine: machine),
            ep.Buffer(None, ep.Config(num_experts=W, timeout=timeout)) as buffer,
        ):
            received = ep.dispatch(torch.full((W, 4), float(rank)), ids, buffer=buffer)
            link.send(received.x[:, 0].tolist())
            dist.barrier()
    door = deep_ep.Buffer(dist.group.WORLD)
    counts = door.get_dispatch_layout(ids, W)[2]
    door.dispatch(
        torch.ones(W, 8).bfloat16(), topk_idx=ids, topk_weights=torch.ones(W, 1), num_tokens_per_expert=counts
    )
    link.send("through the door")
    link.recv()
    os._exit(0)


@contextlib.contextmanager
def ranks_over(relay: StoreRelay, timeout: float):
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(LinkedProcess(run_set_ups, rank, relay.port, timeout)) for rank in range(W)]
        assert [rank.hear() for rank in ranks] == ["ready"] * W
        yield ranks


@pytest.mark.parametrize("silence", [0.0, pytest.param(20.0, marks=pytest.mark.nightly)])
def test_set_ups_over_a_slow_store_with_two_connections_a_process(silence: float) -> None:
    """Each connection takes 1.5 s, so that those of all ranks take longer than a rank may be busy."""
    with StoreRelay() as relay, ranks_over(relay, timeout=5.0) as ranks:
        by_torch = relay.connections
        relay.seconds = 0.0 if silence else 1.5
        for rank in ranks:
            rank.link.send("go")
        if silence:
            relay.fall_silent(silence)
        for _ in range(2):
            assert [rank.hear() for rank in ranks] == [[0.0, 1.0, 2.0, 3.0]] * W
        assert [rank.hear() for rank in ranks] == ["through the door"] * W
        assert relay.connections == by_torch + 2 * W, "of which one hears of failures"


def rendezvous_of(relay: StoreRelay, seconds: float) -> list[StoreRendezvous]:
    return [StoreRendezvous.over(relay.client(), rank, 2, timedelta(seconds=seconds)) for rank in range(2)]


def test_the_silence_of_the_store_is_not_that_of_ranks() -> None:
    """A rank comes after the store was silent for longer than the others wait for ranks."""
    with StoreRelay() as relay, ThreadPoolExecutor(2) as pool:
        ranks = rendezvous_of(relay, 1.5)
        first = pool.submit(ranks[0].gather, 0)
        time.sleep(0.3)
        silence = pool.submit(relay.fall_silent, 3.0)
        time.sleep(0.3)
        assert ranks[1].gather(1) == first.result() == [0, 1]
        silence.result()
        first = pool.submit(ranks[0].gather, 0)
        with pytest.raises(ep.EPError, match=r"^rank 1 did not come to step 2 .* within 1.5 s$"):
            first.result()


def test_a_failure_is_told_after_a_silence() -> None:
    def fail() -> None:
        raise ValueError("out of luck")

    with StoreRelay() as relay, ThreadPoolExecutor(2) as pool:
        ranks = rendezvous_of(relay, 30.0)
        waits = pool.submit(ranks[0].barrier)
        with mock.patch("megatron_ep.meeting.rendezvous.DECISION_S", 0.2):  # less than the silence
            silence, began = pool.submit(relay.fall_silent, 1.5), time.monotonic()
            time.sleep(0.3)
            with pytest.raises(ValueError, match="out of luck"):
                ranks[1].agree(fail)
            assert time.monotonic() - began > 1.0, "this process may end now"
        silence.result()
        with pytest.raises(ep.EPError, match=r"^rank 1 could not set up the buffer: ValueError: out of luck$"):
            waits.result()


def test_an_optional_message_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "STORE_S", 0.3)
    with StoreRelay() as relay, ThreadPoolExecutor(1) as pool:
        place = rendezvous_of(relay, 30.0)[0]._place
        silence = pool.submit(relay.fall_silent, 1.5)
        time.sleep(0.1)
        place.publish()
        silence.result()
        relay.cut()
        place.publish("rank 0 failed")
        place.publish("rank 0 failed again")  # over a new connection
        presence = place.read(dist.PrefixStore("megatron_ep", relay.client()), 0)
        assert presence is not None and presence.failure == "rank 0 failed again"


def test_whoever_stops_has_told_its_failure() -> None:
    store = dist.HashStore()
    for epoch in range(20):
        tells, hears = (FailureBroadcast(store, 2) for _ in range(2))
        for each in (tells, hears):
            each._epoch = epoch
        tells.publish(FAILURE)
        tells.stop()
        assert store.check([f"first failure/{epoch}"]), "this process may end now"
        assert within(20, lambda hears=hears: hears.first == FAILURE)
        hears.stop()


def test_the_end_of_a_broadcast_waits_for_a_silent_store() -> None:
    with StoreRelay() as relay, ThreadPoolExecutor(1) as pool:
        tells = FailureBroadcast(relay.client(), 2)
        silence = pool.submit(relay.fall_silent, failure_broadcast.END_S + 1.0)
        time.sleep(0.2)
        tells.publish(FAILURE)
        tells.stop()
        silence.result()
        assert relay.client().check(["first failure/0"])


def test_a_connection_is_kept_until_it_breaks_or_its_store_is_gone() -> None:
    with StoreRelay() as relay:
        store = relay.client()
        for _ in range(3):
            stores.ask(store, lambda own: stores.write(own, "key", "value"))
        assert relay.connections == 2
        relay.cut()
        again = relay.client()
        assert stores.ask(again, lambda own: stores.read(own, "key")) == b"value"
        assert stores.ask(store, lambda own: stores.read(own, "key")) == b"value"
        assert relay.open == 3, "two connections of this process, and that of the second store"
        del store, again
        gc.collect()
        assert within(20, lambda: relay.open == 0)


def test_threads_share_the_connection_and_a_forked_child_has_its_own() -> None:
    with StoreRelay(0.1) as relay:
        store = relay.client()
        with ThreadPoolExecutor(8) as pool:
            connections = {id(one) for one in pool.map(lambda _: stores.connected(store), range(8))}
        assert len(connections) == 1 and relay.connections == 2
        child = os.fork()
        if child == 0:
            stores.connected(store).set("from", "the child")
            os._exit(0)
        parent = stores.connected(store)
        assert all(stores.read(parent, "nothing") is None for _ in range(100))
        assert os.waitpid(child, 0)[1] == 0 and parent.get("from") == b"the child"
        assert relay.connections == 3


@pytest.mark.parametrize("kind", ["tcp", "hash", "file"])
def test_reading_what_is_not_there_does_not_wait(kind: str, tmp_path) -> None:
    store = {
        "tcp": lambda: dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False),
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
    }[kind]()
    for _ in range(2):
        assert stores.read(store, "key") is None and not store.check(["key"])
    for value in ("", "value", "x" * (4 << 20)):
        store.set("key", value)
        assert stores.read(store, "key") == value.encode()


@pytest.mark.parametrize("purpose", [stores.CALLS, stores.FAILURES])
def test_a_connection_that_was_cut_between_two_calls_is_no_failure(purpose: str) -> None:
    with StoreRelay() as relay:
        store = relay.client()
        stores.connected(store, purpose)
        stores.ask(store, lambda connection: stores.write(connection, "key", "value"))
        relay.cut()
        assert stores.ask(store, lambda connection: stores.read(connection, "key")) == b"value"
        relay.cut()
        assert stores.read(stores.answering(store, purpose), "key") == b"value"
