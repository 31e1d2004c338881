"""How ranks agree over the store of torch.distributed: what one cannot do fails on all, and every wait has a bound."""

import dataclasses
import os
import pickle
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist
from ports import free_port
from rank_processes import RANK_ENVIRONMENT, Program
from run_on import run_on
from torch.distributed.distributed_c10d import _get_default_store

import megatron_ep as ep
from megatron_ep.fabrics.tcp import Listening
from megatron_ep.meeting import codec, place, processes
from megatron_ep.meeting.rendezvous import PIECE_BYTES, RankEndedError, StoreRendezvous, agreed_name

W = 3
PATIENCE = 1.0


def meet(seconds: float = 60.0) -> StoreRendezvous:
    return StoreRendezvous(dist.group.WORLD, timedelta(seconds=seconds))


def absence(rank: int, step: str) -> str:
    """Matches the error about a rank that did not come within PATIENCE. On a busy machine others may have been late."""
    return rf"^rank (\d, )*{rank}(, \d)* did not come to step {step} within {PATIENCE:g} s(; the process .*)?$"


def apart() -> None:
    """Returns when all ranks have come here, by other means than a rendezvous."""
    dist.barrier()


@run_on("ranks")
def test_exchanges() -> None:
    rendezvous, rank = meet(), dist.get_rank()
    assert rendezvous.gather((rank, bytes([0, 255, rank])), kind=tuple[int, bytes]) == [
        (other, bytes([0, 255, other])) for other in range(W)
    ]
    kept, told = rendezvous.exchange(lambda: (f"kept by {rank}", 10 * rank))
    assert kept == f"kept by {rank}" and told == [0, 10, 20]
    assert rendezvous.agree(lambda: rank) == rank
    assert meet().gather(rank) == [0, 1, 2], "another rendezvous of the group is apart from this one"
    assert rendezvous.gather(-rank) == [0, -1, -2]


def start_anew() -> None:
    """This process's ranks are taken for others, started in the place of ranks that crashed, over one store."""
    place._places.clear()


@run_on("ranks")
def test_ranks_that_are_restarted_meet_anew() -> None:
    """Before they crashed rank 0 had come to three rendezvous, rank 1 to one, rank 2 to none. Then they meet, whichever
    comes first, and again when they are started once more."""
    start_anew()
    for _ in range({0: 3, 1: 1, 2: 0}[dist.get_rank()]):
        with pytest.raises(ep.EPError, match="did not come to step 1"):
            meet(0.3).gather(None)
    for first in range(W):
        start_anew()
        apart()
        if dist.get_rank() != first:
            time.sleep(0.2)
        assert meet(20).gather(dist.get_rank()) == [0, 1, 2]
        assert meet(20).gather(-dist.get_rank()) == [0, -1, -2]


@run_on("ranks")
def test_a_rendezvous_that_somebody_else_names() -> None:
    """Somebody else than rank 0 answers."""
    if dist.get_rank() == 2:
        with mock.patch("megatron_ep.meeting.rendezvous.new_name", return_value="asked"):
            rendezvous = meet(5)
            rendezvous._connection.set("answer/asked", b"../x" * 1000)
            with pytest.raises(ep.EPError, match="somebody else than rank 0 has answered") as caught:
                rendezvous.barrier()
        assert len(str(caught.value)) < 200
    apart()


def run_start(absent: int | None) -> str:
    """As training starts its own group."""
    store = dist.PrefixStore(f"without {absent}", _get_default_store())
    apart()
    if dist.get_rank() == absent:
        apart()
        return ""
    try:
        return agreed_name(store, dist.get_rank(), W, timedelta(seconds=20 if absent is None else PATIENCE))
    except ep.EPError as error:
        return str(error)
    finally:
        if absent is not None:
            apart()


def test_a_start_of_all_ranks(ranks) -> None:
    (name,) = {*ranks.run(run_start, None)}
    (again,) = {*ranks.run(run_start, None)}
    assert len(name) == len(again) == 32 and name != again
    for absent in (0, 2):
        said = ranks.run(run_start, absent)
        said.pop(absent)
        assert all(re.match(absence(absent, "1 of the job's start"), text) for text in said), said


@pytest.mark.parametrize("kind", [ValueError, ep.EPError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("first", [False, True], ids=["later", "in the first step"])
@run_on("ranks")
def test_what_fails_on_one_rank_fails_on_all(kind: type[BaseException], first: bool) -> None:
    def step() -> None:
        if dist.get_rank() == 1:
            raise kind("out of luck")

    own = dist.get_rank() == 1 and kind is not RuntimeError
    rendezvous = meet()
    if not first:
        rendezvous.barrier()
    started = time.monotonic()
    with pytest.raises(kind if own else ep.EPError) as caught:
        rendezvous.agree(step)
    expected = "out of luck" if own else "rank 1 could not set up the buffer: "
    assert str(caught.value).startswith(expected) and str(caught.value).endswith("out of luck")
    assert time.monotonic() - started < 10
    apart()
    (meet() if first else rendezvous).barrier()


def run_absence(absent: int) -> float:
    """A rank comes to an exchange when the others have given up; all of them meet again after that. Returns for how
    long this rank has waited."""
    rendezvous = meet()
    rendezvous.barrier()
    apart()
    if dist.get_rank() == absent:
        apart()
    else:
        rendezvous.timeout = timedelta(seconds=PATIENCE)
    started = time.monotonic()
    with pytest.raises(ep.EPError, match=absence(absent, "2 of .*")):
        rendezvous.gather(None)
    waited = time.monotonic() - started
    if dist.get_rank() != absent:
        apart()
    rendezvous.timeout = timedelta(seconds=60.0)
    assert rendezvous.gather(dist.get_rank()) == list(range(W))
    return waited


@pytest.mark.parametrize("absent", [0, 2])  # rank 0 decides
def test_a_rank_that_comes_late_hears_that_the_others_gave_up(ranks, absent: int) -> None:
    waited = ranks.run(run_absence, absent)
    assert waited.pop(absent) < 30, "the decision was there already"
    assert 0.9 * PATIENCE < max(waited) < 30


@pytest.mark.parametrize("absent", [0, 2])  # rank 0 decides
@run_on("ranks")
def test_a_rank_that_missed_a_rendezvous_comes_to_the_next(absent: int) -> None:
    """A rank does not even begin, and begins later: with the others, if they begin once more."""
    if dist.get_rank() != absent:
        with pytest.raises(ep.EPError, match=absence(absent, "1 of .+ set-up")):
            meet(PATIENCE).gather(None)
    apart()
    if dist.get_rank() != absent:
        time.sleep(0.3)
    assert meet().gather(dist.get_rank()) == list(range(W))


@pytest.mark.parametrize("first", [False, True], ids=["later", "in the first step"])
@run_on("ranks")
def test_a_rank_whose_process_has_ended_is_not_waited_for(first: bool) -> None:
    """Of rank 2 all that is left is what its process, which has ended, had told."""
    rendezvous, rank = meet(30), dist.get_rank()
    if not first:
        rendezvous.barrier()
    apart()
    if rank == 2:
        ended = subprocess.Popen(["true"])
        ended.wait()
        with mock.patch("os.getpid", lambda: ended.pid):
            place.place_of(None).write(rendezvous._connection)
    apart()
    started = time.monotonic()
    if rank != 2:
        with pytest.raises(
            RankEndedError, match=r"^rank 2 does not come to step \d of .+: the process has ended$"
        ) as caught:
            rendezvous.barrier()
        assert caught.value.ranks == {2} and time.monotonic() - started < 10
    apart()
    if rank == 2:  # in the place of the process that has ended, which the others would find until this one has come
        place.place_of(None).write(rendezvous._connection)
    apart()
    meet().barrier()


@pytest.mark.parametrize("rank", [0, 2])
@run_on("ranks")
def test_a_rank_that_fails_before_a_rendezvous_is_heard_of_once(rank: int) -> None:
    """A rank fails before it comes to a rendezvous; the next one is of all ranks again."""
    if dist.get_rank() == rank:
        place.place_of(None).publish(f"rank {rank} failed: out of memory")
    apart()
    started = time.monotonic()
    if dist.get_rank() != rank:
        with pytest.raises(ep.EPError, match=f"^rank {rank} failed: out of memory$"):
            meet(30).barrier()
        assert time.monotonic() - started < 10
    apart()
    if dist.get_rank() == rank:
        time.sleep(0.2)
    meet().barrier()
    with mock.patch.object(processes, "started", lambda: time.time() + 60):  # what earlier processes have left
        apart()
        if dist.get_rank() == rank:
            place.place_of(None).publish("of an earlier job")
        apart()
        meet().barrier()


@run_on("ranks")
def test_a_failure_told_before_others_have_come_is_heard() -> None:
    """All make a mistake in a set-up. In the next one rank 1 makes another one before the others have come to it."""

    def fail() -> None:
        raise ValueError("a mistake")

    with pytest.raises((ValueError, ep.EPError), match="a mistake"):
        meet(30).agree(fail)
    apart()
    if dist.get_rank() != 1:
        time.sleep(0.5)
    started = time.monotonic()
    with pytest.raises((ValueError, ep.EPError), match="a mistake"):
        meet(30).agree(fail if dist.get_rank() == 1 else lambda: None)
    assert time.monotonic() - started < 10
    apart()
    meet().barrier()


@run_on("ranks")
def test_a_store_that_falls_silent_is_not_waited_for() -> None:
    """The store takes what it is sent, and does not answer."""
    rendezvous = meet()
    rendezvous.barrier()
    rendezvous.timeout = timedelta(seconds=PATIENCE)
    silent = mock.Mock(check=lambda keys: time.sleep(20), compare_set=lambda *_: time.sleep(20))
    started = time.monotonic()
    with (
        mock.patch.object(rendezvous, "_store", silent),
        mock.patch.object(rendezvous, "_reconnect"),
        mock.patch("megatron_ep.meeting.stores.STORE_S", 0.5),  # less than the others may be busy
        pytest.raises(ep.EPError, match=r"^the store of torch.distributed did not answer within 1 s$"),
    ):
        rendezvous.barrier()
    assert time.monotonic() - started < 10


def run_threads(port: int) -> None:
    """Two threads of each rank meet at two places, which begin in another order on each rank, while a third one waits
    at the store of the process, whose connection serves one thread at a time."""
    rank = dist.get_rank()
    store = dist.TCPStore("localhost", port, is_master=rank == 0, wait_for_workers=False)
    places = [dist.PrefixStore(name, store) for name in ("first", "second")]
    with ThreadPoolExecutor(3) as pool:
        waits, met = pool.submit(store.wait, [f"late {rank}"], timedelta(seconds=60)), []
        time.sleep(0.2)
        for one in places if rank else reversed(places):
            rendezvous = StoreRendezvous.over(one, rank, W, timedelta(seconds=30))
            met.append(pool.submit(rendezvous.gather, rank))
            time.sleep(0.2)
        assert [one.result() for one in met] == [[0, 1, 2]] * 2
        assert not waits.done()
        store.clone().set(f"late {rank}", "")
        waits.result()
    apart()  # the store ends with rank 0


@pytest.mark.skipif(not hasattr(dist.Store, "clone"), reason="torch before 2.8 has one connection to a store")
def test_threads_do_not_wait_for_each_other_at_the_store(ranks) -> None:
    ranks.run(run_threads, free_port())


class Wrapped(dist.ProcessGroup):
    """As trainers make it around groups that they destroy and make again: torch has no record of it."""

    def __init__(self, inner: dist.ProcessGroup):
        super().__init__(inner.rank(), inner.size())
        self.inner = inner


@run_on("ranks")
def test_groups_that_torch_has_no_record_of_meet_apart() -> None:
    gather = dist.all_gather_object
    for members in ([0, 1], [2]):
        group = dist.new_group(members)
        if dist.get_rank() in members:
            wrapped = Wrapped(group)
            with mock.patch.object(
                dist, "all_gather_object", lambda everyone, one, group: gather(everyone, one, group=group.inner)
            ):
                rendezvous = StoreRendezvous(wrapped, timedelta(seconds=30))
            assert rendezvous.gather(dist.get_rank()) == members and rendezvous.rank == group.rank()
            dist.destroy_process_group(group)
            assert StoreRendezvous(wrapped, timedelta(seconds=30)).gather(-dist.get_rank()) == [-one for one in members]


@run_on("ranks")
def test_a_step_may_take_the_time_that_was_given_to_it() -> None:
    slow = dist.get_rank() == 1
    meet(PATIENCE).agree(lambda: time.sleep(2.5 * PATIENCE) if slow else None, 10.0)


@run_on("ranks")
def test_the_own_failure_is_said_before_another_ranks_absence() -> None:
    """Rank 1 fails, and rank 2 does not come: rank 1 says why it failed."""
    rendezvous = meet(PATIENCE)
    if dist.get_rank() == 2:
        return apart()

    def step() -> None:
        if dist.get_rank() == 1:
            raise ValueError("out of luck")

    failure = (ValueError, "^out of luck$") if dist.get_rank() == 1 else (RuntimeError, "")
    with pytest.raises(failure[0], match=failure[1]):
        rendezvous.agree(step)
    apart()


@run_on("ranks")
def test_what_was_told_does_not_stay_in_the_store() -> None:
    rendezvous = meet()
    for _ in range(4):
        rendezvous.gather(bytes(1 << 10))
    apart()
    count = _get_default_store().num_keys()
    apart()
    for _ in range(20):
        rendezvous.gather(bytes(1 << 10))
    apart()
    assert _get_default_store().num_keys() <= count
    apart()
    for _ in range(3):
        meet().barrier()
        apart()
        left = _get_default_store().num_keys()
        apart()
    for _ in range(8):
        if dist.get_rank():
            time.sleep(0.05)  # rank 0 looks whether anybody asks where to meet
        meet().barrier()
    apart()
    assert _get_default_store().num_keys() <= left + W + 3, "of at most one more rendezvous"
    apart()


@run_on("ranks")
def test_groups_meet_apart() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for pair, members in zip(pairs, ([0, 1], [1, 2]), strict=True):
        if dist.get_rank() in members:
            rendezvous = StoreRendezvous(pair, timedelta(seconds=60))
            assert rendezvous.gather(dist.get_rank()) == members and rendezvous.rank == members.index(dist.get_rank())


# ---- large groups


def test_an_invitation_for_each_of_many_ranks() -> None:
    """What a rank of 1024 tells over mlx5."""
    told = Listening("::1", 1, [bytes(16)] * 1024, [bytes(16)] * 1024, [bytes(1240)] * 1024, ["mlx5_0:1"], {})
    data = codec.encode(told)
    assert codec.decode(data, Listening, codec.most_bytes(1024)) == told
    with pytest.raises(ValueError, match=r"bytes, at most \d+ are expected"):
        codec.decode(data, Listening, codec.most_bytes(8))


@pytest.mark.parametrize(
    ("size", "piece", "pieces"),
    [(3 << 20, PIECE_BYTES, 5), (1, 16, 9), (1, 12, 12)],
    ids=["over 8 MiB", "of 132 bytes", "the last one empty"],
)
def test_answers_that_are_more_than_a_value_of_the_store(size: int, piece: int, pieces: int) -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    before = server.num_keys()

    def run(rank: int) -> list[list[bytes]]:
        store = dist.TCPStore("localhost", server.port, is_master=False)
        rendezvous = StoreRendezvous.over(store, rank, W, timedelta(seconds=30))
        return [rendezvous.gather(bytes([rank]) * size) for _ in range(3)]

    with (
        mock.patch("megatron_ep.meeting.rendezvous.PIECE_BYTES", piece),
        mock.patch.object(codec, "MAX_BYTES", 8 << 20),
        ThreadPoolExecutor(W) as pool,
    ):
        told = list(pool.map(run, range(W)))
    assert told == [[[bytes([rank]) * size for rank in range(W)]] * 3] * W
    assert server.num_keys() == before + 2 * W + 1 + pieces, "of the last exchange, and who the ranks are"


# ---- what somebody else writes into the store


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def run_hostile(hostile: int, written: dict[str, bytes], kind: type) -> str:
    """This rank does not take part in an exchange: it writes these values into the store. What the others hear."""
    rendezvous = meet()
    rendezvous.barrier()
    if dist.get_rank() == hostile:
        for key, value in written.items():
            rendezvous._store.set(f"2/{key}", value)
        apart()
        return ""
    apart()
    with pytest.raises(ep.EPError) as caught:
        rendezvous.gather(kind(), kind=kind)
    return str(caught.value)


HOSTILE = [
    (b"{not JSON", int, "Expecting property name"),
    (b"\xff\xfe\xff", int, "codec can't decode"),
    (b"", int, "Expecting value"),
    (b"true", int, "True where int is expected"),
    (b'"1"', int, "'1' where int is expected"),
    (b"1" * 5000, int, "a number of 5000 digits"),
    (b"1e999", float, "1e999 is no finite number"),
    (b"NaN", float, "NaN is no finite number"),
    (b'"not base 64!"', bytes, "base64"),
    (b"[" * 100_000, int, "nested too deeply"),
    (b" " * (1 << 21), int, "2097152 bytes, at most 1060864 are expected"),
]


@pytest.mark.parametrize(("value", "kind", "why"), HOSTILE, ids=[why for *_, why in HOSTILE])
def test_a_value_that_no_rank_has_told_is_an_error(ranks, value: bytes, kind: type, why: str) -> None:
    for said in ranks.run(run_hostile, 2, {"2": value}, kind)[:2]:
        says = r"holds at key megatron_ep/.+/[0-9a-f]+/2/2 a value that no rank has written: "
        assert re.search(says, said) and why in said and len(said) < 400


def told_by_all(value: bytes) -> dict[str, bytes]:
    """What all ranks are said to have told."""
    return {"0": b"0", "all": value, "decision": b"agreed"}


def test_what_is_read_from_the_store_runs_nothing(ranks, tmp_path) -> None:
    bomb = pickle.dumps(Bomb(str(tmp_path / "ran")))
    both = pickle.dumps([pickle.dumps((None, Bomb(str(tmp_path / "ran"))))] * W)
    for hostile, written, key in ((2, {"2": bomb}, "2"), (0, told_by_all(both), "all")):
        heard = ranks.run(run_hostile, hostile, written, int)
        heard.pop(hostile)
        assert all(f"2/{key} a value that no rank has written" in said for said in heard)
    assert not (tmp_path / "ran").exists()
    pickle.loads(bomb)
    assert (tmp_path / "ran").exists(), "the bomb works"


def test_answers_of_other_ranks_than_these(ranks) -> None:
    for value in (codec.encode([b"1"] * (W + 1)), b'{"a": 1}', b"null"):
        for said in ranks.run(run_hostile, 0, told_by_all(value), int)[1:]:
            assert "2/all a value that no rank has written" in said


def test_a_verdict_is_shown_as_bounded_text(ranks) -> None:
    for said in ranks.run(run_hostile, 0, {"decision": b"\x1b[2J\xff" + b"x" * (1 << 20)}, int)[1:]:
        assert said.startswith("?[2J\ufffdxxx") and len(said) < 5000


@dataclasses.dataclass(frozen=True)
class Pair:
    topology: ep.Topology | None
    settings: dict[str, codec.Plain]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Pair(ep.Topology(2, 4), {"a": 1, "b": 1.5, "c": None, "d": True, "e": "é\x00"}), Pair),
        (Pair(None, {}), Pair),
        (
            (None, [3, 2**63], b"\x00\xff", {"A": "1"}),
            tuple[tuple[bytes, int] | None, list[int], bytes, dict[str, str]],
        ),
        (((b"id", 1), [], b"", {}), tuple[tuple[bytes, int] | None, list[int], bytes, dict[str, str]]),
        ([b"", b"1"], list[bytes]),
        (None, type(None)),
    ],
)
def test_what_ranks_tell_arrives_as_it_was(value: object, kind: object) -> None:
    back = codec.decode(codec.encode(value), kind)
    assert back == value and repr(back) == repr(value), "True is not 1"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"topology": {"nodes": 0, "ranks_per_node": 4}, "settings": {}}', Pair),
        ('{"topology": null, "settings": {"a": [1]}}', Pair),
        ('{"topology": null}', Pair),
        ('{"topology": null, "settings": {}, "__class__": "os"}', Pair),
        ("[1, 2, 3]", tuple[int, int]),
        ("[1, 2.5]", tuple[int, int]),
        ('[["a"]]', list[str]),
        ('{"a": 1}', dict[str, str]),
    ],
)
def test_a_wrong_shape_is_refused(text: str, kind: object) -> None:
    with pytest.raises(ValueError):
        codec.decode(text.encode(), kind)


ENDS_WITH_AN_ABANDONED_CALL = """
import os, subprocess, sys, time
from datetime import timedelta
import torch.distributed as dist
from megatron_ep.cli import check, main
from megatron_ep.errors import EPError
from megatron_ep.meeting.stores import bounded

class Late:
    def __del__(self):  # the interpreter is ending, and lets other threads run
        time.sleep(3)

def run_check(arguments):
    store = dist.TCPStore("localhost", int(os.environ["PORT"]), is_master=False)
    try:
        bounded(0.3, lambda: store.wait(["never"], timedelta(seconds=2)))
    except EPError as error:
        print(error)
        sys.modules["late"] = Late()
        return 3

check.main = run_check
sys.argv[1:] = ["check"]
main.run()
"""


def test_a_command_whose_call_of_the_store_never_returned_ends_with_its_status() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {"PORT": str(store.port)}
    command = [sys.executable, "-c", ENDS_WITH_AN_ABANDONED_CALL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    assert done.stdout == "the store of torch.distributed did not answer within 0.3 s\n"


RETURNS = """
import sys, time, torch.distributed as dist
import megatron_ep as ep
from megatron_ep.meeting import place
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
place.place_of(None).publish()
dist.barrier()
if rank == 0:
    start = time.monotonic()
    try:
        ep.Buffer(None, ep.Config(num_experts=2, timeout=60), ep.Topology(1, 2))
    except ep.EPError as error:
        print(time.monotonic() - start, error)
"""


def test_a_rank_that_returns_before_its_first_call_is_not_waited_for(tmp_path) -> None:
    """Its process ends as if all was well."""
    environment = os.environ | RANK_ENVIRONMENT
    waits, returns = (Program(["-c", RETURNS, rank, tmp_path / "store"], environment) for rank in range(2))
    said, _ = waits.communicate(timeout=100)
    assert returns.communicate(timeout=60)[0] == "" and returns.returncode == 0
    seconds, _, text = said.strip().partition(" ")
    assert float(seconds) < 20
    assert text == "rank 1 does not come to step 1 of the buffer's set-up: the process has ended"
