"""Host ranks of several machines over TCP: what becomes of strangers, of a machine that cannot be reached and of a rank
that goes away. The machines are this one, under several names."""

import contextlib
import dataclasses
import os
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forced_machines import machines_of
from over_networks import IDS, W, X, buffer_of, inputs
from rank_processes import RANK_ENVIRONMENT, Program
from run_on import run_on
from waits import within

import megatron_ep as ep
from megatron_ep import _C
from megatron_ep.buffer import monitor, sizes
from megatron_ep.diagnosis import failures
from megatron_ep.diagnosis.blame import RankStatus
from megatron_ep.diagnosis.disagreement import what_ranks_sent
from megatron_ep.errors import EPError
from megatron_ep.fabrics import choice, tcp
from megatron_ep.megatron import shared_buffers


@run_on("ranks")
def test_a_rank_of_another_machine_cannot_come_back() -> None:
    with machines_of(1), buffer_of() as buffer:
        masking = dict(on_dead_rank="mask", mask_timeout=5.0)
        low_latency = ep.LowLatency(buffer, max_tokens=8, hidden=64, topk=3, dtype=torch.bfloat16, **masking)
        with pytest.raises(EPError, match="which this buffer's fabric, tcp, does not: make a new buffer"):
            low_latency.readmit(1, dist.HashStore())
        dist.barrier()


@run_on("ranks")
def test_a_node_on_two_machines_is_refused_on_all_ranks() -> None:
    with machines_of(2), pytest.raises(ValueError, match=r"topology is .*ranks 0 to 3 run on .*must be on one machine"):
        ep.Buffer(None, ep.Config(num_experts=16), ep.Topology(1, 4))


# ---- what goes wrong


ENDS = """
import sys, time, torch, torch.distributed as dist
import megatron_ep as ep
from megatron_ep.meeting import processes
rank = int(sys.argv[1])
processes.machine = lambda: f"machine {rank}"
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
buffer = ep.Buffer(None, ep.Config(num_experts=2, timeout=60), ep.Topology(2, 1))
x, ids = torch.ones(4, 8), torch.tensor([[0, 1]] * 4)
ep.dispatch(x, ids, buffer=buffer)
if rank == 1:
    exec(sys.argv[3])
start = time.monotonic()
try:
    ep.dispatch(x, ids, buffer=buffer)
except ep.EPError as error:
    print(time.monotonic() - start, str(error).splitlines()[0])
"""


@pytest.mark.parametrize("end", ["sys.exit()", "raise RuntimeError('a bug of its own')"])
def test_nobody_waits_for_a_process_of_another_machine_that_has_ended(end, tmp_path):
    """Not by a signal: it says goodbye."""
    environment = os.environ | RANK_ENVIRONMENT | {choice.VARIABLE: "tcp"}
    waits, ends = (Program(["-c", ENDS, rank, tmp_path / "store", end], environment) for rank in range(2))
    said, errors = waits.communicate(timeout=100)
    assert ("a bug of its own" in ends.communicate(timeout=60)[1]) == ("bug" in end)
    seconds, _, text = said.partition(" ")
    assert float(seconds) < 20, errors
    cause = "stopped waiting: rank 1 has not entered notify 2 (it finished 1); the process of rank 1 has ended"
    assert cause in text, text


def forked_child(buffer: ep.Buffer, connected: set[int], call) -> None:
    """It keeps no connection of its parent's, can use nothing of the buffer, and tells nobody anything."""
    held = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was the list's own
            held.add(os.stat(f"/proc/self/fd/{descriptor}").st_ino)
    assert not held & connected
    for use in (call, buffer.reset, buffer.release, buffer.synchronize, buffer.raise_if_failed, buffer.statistics):
        with pytest.raises(ValueError, match=f"of process {os.getppid()}, must not be used in {os.getpid()}"):
            use()
    with pytest.raises(RuntimeError, match="of the child"), shared_buffers.abort_peers_on_error():
        raise RuntimeError("of the child")
    for tell in (buffer._group.refuse, buffer._group.report_unseen, failures.report_unseen, monitor.stop_all):
        tell()
    buffer.abort("by the child")
    ep.abort_all("by the child")
    shared_buffers.close_buffers()
    buffer.close()


@pytest.mark.parametrize("per_machine", [1, 2, W])
@run_on("ranks")
def test_a_forked_child_leaves_the_buffer_to_its_parent(per_machine: int) -> None:
    rank = dist.get_rank()
    x, ids, weights = (tensors[rank] for tensors in inputs(33))
    with machines_of(per_machine):
        buffer = shared_buffers.shared_buffer(dist.group.WORLD, 16, torch.device("cpu"), {"timeout": 20})
    low_latency = ep.LowLatency(buffer, max_tokens=4, hidden=33, topk=3, dtype=torch.float32)

    def call():
        rows = ep.dispatch(x, ids, weights, buffer=buffer)
        return ep.combine(rows.x, rows.handle, weights=rows.probs)

    before = call()
    _, receive = low_latency.dispatch(x[:4], ids[:4], return_recv_hook=True)
    network = buffer._group._network
    descriptors = network._descriptors.values() if network is not None else ()
    connected = {os.stat(f"/proc/self/fd/{descriptor}").st_ino for descriptor in descriptors}
    assert len(connected) == W - per_machine
    if rank == 1:
        child = os.fork()
        if not child:
            try:
                forked_child(buffer, connected, call)
                with pytest.raises(ValueError, match="forked"):
                    receive()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        assert os.waitpid(child, 0) == (child, 0)
    dist.barrier()
    receive()
    assert torch.equal(call(), before)
    buffer.reset()
    assert torch.equal(call(), before)
    shared_buffers.close_buffers()


class Telling(_C.SoftwareNic):
    """Counts how often this rank has waited until the others have what it knows."""

    told = 0

    def flush_reports(self):
        self.told += threading.current_thread() is threading.main_thread()  # a monitor of the buffer does so, too
        super().flush_reports()


@run_on("ranks")
def test_whoever_raises_an_error_has_told_the_others() -> None:
    """A process may end with it, before its thread for the network has said why."""
    with machines_of(1), mock.patch.object(_C, "SoftwareNic", Telling):
        buffer = buffer_of()
    nic = buffer._group._network.nic
    dist.barrier()
    if dist.get_rank() == W - 1:
        buffer.abort("enough")
    dispatch, times = lambda: ep.dispatch(X, IDS, buffer=buffer), nic.told
    for call in (dispatch, dispatch, buffer.raise_if_failed):  # it fails, was known to have failed, and is asked for
        with pytest.raises(EPError):
            call()
        times += 1
        assert nic.told == times
    buffer.abort("enough")
    assert nic.told == times + 1
    buffer.reset()
    dispatch()
    buffer.synchronize()
    assert nic.told == times + 1
    buffer.close()


@run_on("ranks")
def test_a_network_that_is_not_made_keeps_no_connection() -> None:
    connect_all = tcp._connect_all

    def join(*arguments):
        made = connect_all(*arguments)
        if dist.get_rank() == 0:
            for connection in made.values():
                connection.close()
            raise EPError("a cable was pulled")
        return made

    def sockets() -> int:
        links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()]
        return sum(link.startswith("socket:") for link in links)

    before = sockets()
    with (
        machines_of(1),
        mock.patch.object(tcp, "_connect_all", join),
        pytest.raises(EPError, match="a cable was pulled"),
    ):
        buffer_of()
    assert within(10, lambda: sockets() == before)  # a thread may not have let go of its own yet


@run_on("ranks")
def test_more_heaps_than_a_byte_can_number():
    """More low-latency modes one after the other than a byte can number."""
    with machines_of(1, "tcp"), ep.Buffer(None, ep.Config(num_experts=W, timeout=30), ep.Topology(W, 1)) as buffer:
        for _ in range(260):
            mode = ep.LowLatency(buffer, max_tokens=4, hidden=32, topk=1, dtype=torch.float32)
        ids = torch.arange(W).reshape(W, 1)
        received = mode.dispatch(torch.full((W, 32), 1.0 + buffer.rank), ids)
        assert received.recv_counts.tolist() == [W]
        assert received.x[0, :W, 0].tolist() == [1.0, 2.0, 3.0, 4.0]


@run_on("ranks")
def test_a_reset_ends_when_a_rank_closes():
    """Rank 3 closes its buffer while the others wait for it in a reset; its process goes on."""
    with machines_of(1, "tcp"):
        buffer = buffer_of(60)
    dist.barrier()
    if dist.get_rank() == 3:
        time.sleep(2)
        buffer.close()
    else:
        started = time.monotonic()
        with pytest.raises(EPError, match=r"rank 3 does not come to step \d+ of the buffer's reset: .*closed"):
            buffer.reset()
        assert time.monotonic() - started < 30
        buffer.close()
    dist.barrier()


FRAME = struct.Struct("<BxHIQQ")  # csrc/fabric/queue/link.h


def received(connection: socket.socket, size: int) -> bytes:
    return connection.recv(size, socket.MSG_WAITALL)


def test_a_status_with_bits_that_no_rank_sets():
    """Another rank's, all ones, and of the size that ranks send: what it says is not known, and that is all."""
    heap = sizes.host_heap(ep.Topology(2, 1), ep.Config(num_experts=2))
    segments = [[_C.Segment.anonymous(heap.bytes) for _ in range(2)] for _ in range(2)]
    hears, says = (_C.SoftwareNic(rank=rank, segments=segments[rank]) for rank in range(2))
    options = dict(threads=1, seed=None, lost_signal=0, stalled=(0, 0), timeout=5.0)
    group = _C.host_launcher(heap=heap, ranks=[0], segments=segments[0], **options, nic=hears)
    (to_says, its_end), (to_hears, own_end) = socket.socketpair(), socket.socketpair()
    with to_says, to_hears:
        says.start([its_end.detach(), -1])
        hears.start([-1, own_end.detach()])
        to_says.settimeout(10)
        header = received(to_says, FRAME.size)
        status = received(to_says, FRAME.unpack(header)[2])
        to_hears.sendall(header + b"\xff" * len(status))
        assert within(10, lambda: group.rank_statuses()[1]["sends"])
        found = group.rank_statuses()[1]
        for nic in (says, hears):
            nic.stop(0.0)
    assert {sent["kind"] for sent in found["sends"]} == {"?"}
    assert {(i["outcome"], i["role"], i["waiting_for"]) for i in found["incidents"]} == {("?", "?", "?")}
    mismatch = dict(outcome="mismatch", role="receiver", call=found["sends"][0]["call"])
    statuses = [RankStatus(0, {}, {}, [mismatch], ""), RankStatus(**found)]
    assert "sent a ?, " in what_ranks_sent(0, statuses, 2)


def test_a_process_that_reads_nothing_is_sent_little():
    """So that its connection never fills, however long it is stopped; once it says something it is told more."""
    heap = sizes.host_heap(ep.Topology(2, 1), ep.Config(num_experts=2))
    nic = _C.SoftwareNic(rank=0, segments=[_C.Segment.anonymous(heap.bytes) for _ in range(2)])
    with socket.create_server(("127.0.0.1", 0)) as server:
        own, (other, _) = socket.create_connection(server.getsockname()), server.accept()

    def sent_in(seconds: float) -> int:
        time.sleep(seconds)
        return len(other.recv(1 << 20, socket.MSG_PEEK))

    with other:
        nic.start([-1, own.detach()])
        first = received(other, FRAME.size)
        size = FRAME.size + FRAME.unpack(first)[2]
        received(other, size - FRAME.size)
        assert sent_in(2.5) < 5 * size, "five are sent in a second, where they are answered"
        assert nic.silence(1)[0] > 2.0 and nic.silence(1)[1] < 2.0, "its process is silent, its machine is not"
        before = sent_in(0)
        other.sendall(first[:1])
        assert within(10, lambda: sent_in(0) > before)
        nic.stop(0.0)


# ---- what another machine may say


def carry_spoilt(own: socket.socket, real: socket.socket, counts: bool, heap: _C.Heap) -> None:
    """What is sent at `own` goes to the other machine: the first block of counts with a negative one, in a sum that is
    right; or a write behind the part of the heap that is the network's goes first."""
    if not counts:
        real.sendall(FRAME.pack(1, 0, 8, heap.bytes - 8, 0) + bytes(8))
    # Rows may overtake counts, which have a queue of their own, so the address decides: the rings are the heap's end.
    rings = sum(size for name, size in heap.parts.items() if name.startswith("network rings"))
    first_ring = heap.bytes - heap.bytes_without_network - rings
    data = b""
    while part := own.recv(1 << 16):
        data += part
        while len(data) >= FRAME.size and len(data) >= FRAME.size + (size := FRAME.unpack_from(data)[2]):
            head, body, data = data[: FRAME.size], data[FRAME.size : FRAME.size + size], data[FRAME.size + size :]
            kind, _, _, address, _ = FRAME.unpack(head)
            if counts and kind == 1 and address < first_ring:  # of experts, of two channels
                told = list(struct.unpack(f"<{size // 4}i", body))
                told[4] -= 10**6
                told[5] += 10**6
                body, counts = struct.pack(f"<{size // 4}i", *told), False
            real.sendall(head + body)


def run_spoilt(counts: bool) -> str:
    """What rank 1 sends to rank 0 is spoilt on the way."""
    connect_all = tcp._connect_all
    config = ep.Config(num_experts=16, timeout=20, tuning=ep.Tuning(channels=2))
    heap = sizes.host_heap(ep.Topology(W, 1), config)

    def connect(*arguments):
        made = connect_all(*arguments)
        real = made[0]
        made[0], other = socket.socketpair()
        made[0].setblocking(False)
        real.setblocking(True)
        for run, *ends in ((carry_spoilt, other, real, counts, heap), (carry_back, real, other)):
            threading.Thread(target=run, args=ends, daemon=True).start()
        return made

    with machines_of(1), contextlib.ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.enter_context(mock.patch.object(tcp, "_connect_all", connect))
        buffer = stack.enter_context(ep.Buffer(None, config, ep.Topology(W, 1)))
        with pytest.raises(EPError) as caught:
            for _ in range(2):  # a rank that has what it needs when rank 0 gives up hears of it in the next call
                ep.dispatch(X, IDS, buffer=buffer, layout="flat")
        return str(caught.value)


def carry_back(real: socket.socket, own: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := real.recv(1 << 16):
            own.sendall(part)


def test_false_counts_end_the_call_on_all_ranks(ranks):
    for text in ranks.run(run_spoilt, True):
        assert "rank 0 was sent counts of rows that no rank can have, by rank 1" in text, text


def test_a_machine_writes_where_the_network_does_alone(ranks):
    assert any("sent what no rank sends" in text for text in ranks.run(run_spoilt, False))


# ---- who may connect


class Listening:
    """Ranks that listen, what each has told of that, and strangers. A context manager, which closes all of it."""

    def __init__(self, ranks: int = 2):
        self.listeners = [tcp.listen() for _ in range(ranks)]
        self.told = [tcp.Listening.by(listener, ranks) for listener in self.listeners]
        self.strangers: list[socket.socket] = []

    def __enter__(self) -> "Listening":
        return self

    def __exit__(self, *_: object) -> None:
        for one in (*self.strangers, *self.listeners):
            one.close()

    def stranger(self, says: bytes = b"", rank: int = 0) -> socket.socket:
        """Connects to a rank."""
        self.strangers.append(socket.create_connection((self.told[rank].host, self.told[rank].port), 5))
        self.strangers[-1].sendall(says)
        return self.strangers[-1]

    def hello(self, token: bytes, version: int = tcp.VERSION, rank: int = 1) -> bytes:
        return tcp.HELLO.pack(tcp.MAGIC, version, rank, token)

    def join(self, rank: int, limit: float = 20.0) -> dict[int, socket.socket]:
        others = [other for other in range(len(self.told)) if other != rank]
        made = tcp._connect_all(rank, others, self.told, self.listeners[rank], ["a", "b"], limit)
        self.strangers.extend(made.values())
        return made

    def join_both(self) -> list[socket.socket]:
        """The connection that each of two ranks has then."""
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(self.join, range(2))
        assert first.keys() == {1} and second.keys() == {0}
        return [first[1], second[0]]

    def wait(self, look: Callable[..., None], error: str, others: Sequence[int] = (1,)) -> None:
        """Rank 0 waits for others until a look at the connections made ends that."""
        with pytest.raises(EPError, match=error):
            tcp.join(0, others, self.told, self.listeners[0], 60.0, look)


@pytest.fixture(autouse=True)
def own_address(monkeypatch):
    monkeypatch.setenv(tcp.VARIABLE, "127.0.0.1")


@pytest.fixture
def ears(own_address):
    with Listening() as ears:
        yield ears


def test_strangers_are_turned_away_and_keep_nobody_out(ears):
    own, others = ears.told[0].tokens
    says = [b"GET / HTTP/1.1\r\n\r\n" * 10, ears.hello(own), ears.hello(bytes(16)), b""]
    says += [ears.hello(others, version=99), ears.hello(others, rank=2)]
    for word in says * 7:
        ears.stranger(word)
    first, second = ears.join_both()
    for connection in (first, second):
        connection.setblocking(True)
    first.sendall(b"hello")
    assert second.recv(5) == b"hello"


def test_a_connection_that_is_there_is_not_replaced():
    """Also for one that knows its token, but not the other's."""
    with Listening(3) as ears:
        both = [ears.stranger(ears.hello(ears.told[0].tokens[1])) for _ in range(2)]
        made: dict[int, socket.socket] = {}
        looks = iter(range(3))

        def look(others, why):
            """Rank 2 does not come."""
            made.update(others)
            if next(looks) == 2:
                raise EPError("enough")

        ears.wait(look, "enough", (1, 2))
        ears.strangers.extend(made.values())
        assert made.keys() == {1}
        heard = sorted(one.recv(tcp.TOKEN_BYTES) for one in both)
        assert heard == [b"", ears.told[0].answers[1]], "the second is turned away"


def test_strangers_who_take_their_time_are_few_and_leave_in_time(ears, monkeypatch):
    monkeypatch.setattr(tcp, "HELLO_S", 0.5)
    closed: set[socket.socket] = set()

    def trickle() -> None:
        """A byte of the right words now and then."""
        hello = ears.hello(ears.told[0].tokens[1])
        for _ in range(100):
            ears.stranger()
        for at in range(200):
            for stranger in [one for one in ears.strangers if one not in closed]:
                try:
                    stranger.sendall(hello[at : at + 1] if at < len(hello) - 1 else b"")
                    stranger.setblocking(False)
                    if stranger.recv(1) == b"":
                        closed.add(stranger)
                except BlockingIOError:
                    pass
                except OSError:
                    closed.add(stranger)
            if len(closed) == len(ears.strangers):
                break
            time.sleep(0.1)

    thread = threading.Thread(target=trickle)
    thread.start()

    def look(made, why):
        if made or len(closed) == 100 or not thread.is_alive():
            raise EPError(f"{len(made)} have joined, {len(closed)} were turned away")

    ears.wait(look, "0 have joined, 100 were turned away")
    thread.join()


def test_of_many_strangers_the_first_to_come_is_turned_away(ears, monkeypatch):
    monkeypatch.setattr(tcp, "HELLO_S", 60)  # none leaves before both have joined
    strangers = [ears.stranger() for _ in range(tcp.MAX_STRANGERS)]
    ears.join_both()
    assert strangers[0].recv(1) == b""


def test_who_is_turned_away_while_it_says_something(ears, monkeypatch):
    """Both are seen in the same moment."""
    monkeypatch.setattr(tcp, "MAX_STRANGERS", 1)
    ears.stranger()

    def look(made, why):
        ears.stranger()
        ears.strangers[-2].sendall(b"x")
        if len(ears.strangers) == 4:
            raise EPError("enough")

    ears.wait(look, "enough")


SECRET = "of sixteen or more"


def test_with_a_secret_a_token_is_not_enough(ears, monkeypatch):
    """Nor is what was said on another connection."""
    token = ears.told[0].tokens[1]
    strangers = [ears.stranger() for _ in range(3)]

    def word(stranger: socket.socket, secret: str) -> bytes:
        monkeypatch.setenv(tcp.SECRET, secret)
        return tcp._Joining(1, ears.told).word(stranger, b"hello", token, True)

    foreign, other = word(strangers[1], SECRET + "!"), word(strangers[0], SECRET)
    for stranger, said in zip(strangers, (token, foreign, other), strict=True):
        stranger.sendall(ears.hello(said))
    ears.join_both()
    assert [stranger.recv(1) for stranger in strangers] == [b""] * 3


@run_on("ranks")
def test_a_secret_is_the_same_on_all_ranks():
    settings, rank = (None, ep.Config(num_experts=16, timeout=20), ep.Topology(2, 2)), dist.get_rank()
    with machines_of(2), mock.patch.dict(os.environ, {tcp.SECRET: SECRET}):
        ep.Buffer(*settings).close()
        for other in (SECRET + "!", ""):
            own = mock.patch.dict(os.environ, {tcp.SECRET: other if rank == 2 else SECRET})
            with own, pytest.raises(ValueError, match=f"environment variable {tcp.SECRET} must be the same") as caught:
                ep.Buffer(*settings)
            text = str(caught.value)
            assert SECRET not in text and f"on rank {0 if rank == 2 else 2} it is another" in text


def test_what_was_changed_in_the_store_is_refused(ears, monkeypatch):
    monkeypatch.setenv(tcp.SECRET, SECRET)
    told = [one.proved(rank) for rank, one in enumerate(ears.told)]
    changes = (dict(host="10.9.8.7"), dict(port=1), dict(pairs=[b"x"]), dict(tokens=told[0].tokens))
    for second in (*(dataclasses.replace(told[1], **change) for change in changes), told[0]):
        shown = [told[0], second]
        with pytest.raises(ValueError, match="or what rank 1 told"):
            tcp.check_proofs([one.proof for one in shown], [one.proved(i).proof for i, one in enumerate(shown)])


def test_a_secret_that_is_too_short(monkeypatch):
    monkeypatch.setenv(tcp.SECRET, "short")
    with pytest.raises(ValueError, match=f"variable {tcp.SECRET} has 5 characters, must have at least 16"):
        tcp.proof(b"")


def test_a_machine_that_cannot_be_reached_is_named_in_time(ears):
    ears.listeners[0].close()  # nobody listens there any more
    start = time.monotonic()
    says = rf"rank 1 did not reach rank 0 \(a, 127.0.0.1 port {ears.told[0].port}\) within 1 s: Connection refused"
    with pytest.raises(EPError, match=f"{says}.*{tcp.VARIABLE}"):
        ears.join(1, 1.0)
    assert time.monotonic() - start < 10


def test_who_waits_for_a_connection_looks_whether_it_may_still_come(ears):
    looks = []

    def look(made, why):
        looks.append((dict(made), dict(why)))
        if len(looks) == 2:
            raise EPError("rank 0 has failed")

    start = time.monotonic()
    with pytest.raises(EPError, match="rank 0 has failed"):
        tcp.join(1, [0], ears.told, ears.listeners[1], 30.0, look)
    assert 1.5 < time.monotonic() - start < 10 and looks == [({}, {})] * 2
    connection, _ = ears.listeners[0].accept()
    with connection:
        connection.settimeout(10)
        assert connection.recv(tcp.HELLO.size, socket.MSG_WAITALL) and connection.recv(1) == b"", "it was not closed"


class CannotStart(_C.SoftwareNic):
    def start(self, *_):
        raise OSError("no descriptors left")


@pytest.mark.parametrize("where", ["nic", "join", "start"])
@run_on("ranks")
def test_a_rank_that_cannot_connect_is_not_waited_for(where):
    """Rank 3 fails where the others wait for its connections, or before or after that."""
    fails = mock.Mock(side_effect=OSError("no descriptors left"), mirror_bytes=_C.SoftwareNic.mirror_bytes)
    place = {"join": (tcp, "join", fails), "nic": (_C, "SoftwareNic", fails), "start": (_C, "SoftwareNic", CannotStart)}
    start = time.monotonic()
    with (
        machines_of(1),
        mock.patch.object(*place[where]) if dist.get_rank() == W - 1 else contextlib.nullcontext(),
        pytest.raises(EPError, match=r"^rank 3 could not set up the buffer: (OSError: )?no descriptors left$"),
    ):
        buffer_of(60)
    assert time.monotonic() - start < 20


def test_an_address_by_its_network(monkeypatch):
    monkeypatch.setenv(tcp.VARIABLE, "127.0.0.0/8")
    with tcp.listen() as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "value",
    [
        "nowhere",
        "192.0.2.1",
        "198.51.100.0/24",
        "10.0.0.1/8",
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "fe80::1%lo",
        "::ffff:0:0",
    ],
)
def test_an_address_that_is_none_of_this_machine(value, monkeypatch):
    monkeypatch.setenv(tcp.VARIABLE, value)
    with pytest.raises(ValueError, match=rf"environment variable {tcp.VARIABLE} is '{value}', must be an? "):
        tcp.listen()


def test_an_address_is_called_what_it_is(monkeypatch):
    wrong = "192.0.2.1"
    with pytest.raises(ValueError, match=f"^address is '{wrong}', must be an address of this machine"):
        tcp.listen(wrong)
    monkeypatch.delenv(tcp.VARIABLE)
    monkeypatch.setenv("MASTER_ADDR", "the.store")
    monkeypatch.setattr(tcp, "own_address", lambda: wrong)
    with pytest.raises(ValueError, match=rf"^the address from which .* reaches the.store \(.*\) is '{wrong}', must be"):
        tcp.listen()
