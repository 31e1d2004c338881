"""How ranks on GPUs set up a connection together, with stand-ins for CUDA, NVSHMEM and NCCL. Needs no GPU."""

import contextlib
import os
import time
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from run_on import run_on

import megatron_ep as ep
from megatron_ep import _C
from megatron_ep.buffer import connect, cuda
from megatron_ep.fabrics import atomics, choice, gpu, nvshmem, nvshmem_env, peer_memory, verbs
from megatron_ep.fabrics import cards as rdma
from megatron_ep.fabrics.connection import Connection, GpuRank
from megatron_ep.fabrics.rank_info import RankInfo
from megatron_ep.meeting.rendezvous import StoreRendezvous
from megatron_ep.tools.local_ranks import LocalRanks

W = 3
BYTES = 1 << 20


def rendezvous_of(members: tuple[int, ...] = tuple(range(W)), seconds: float = 60.0) -> StoreRendezvous:
    return StoreRendezvous(GROUPS[members], timedelta(seconds=seconds))


GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}
DEVICE = torch.device("cuda", 1)
CURRENT: list[torch.device] = []
FREE = [40 << 30]  # bytes of memory on the GPU


def rank_info(host: str, gpu: str | None = None) -> RankInfo:
    wanted = os.environ[choice.VARIABLE] or None
    return RankInfo(host, host, None, os.getpid(), "cuda", {}, None, 1, gpu, None, None, wanted, None)


def connected(
    rendezvous: StoreRendezvous, hosts: str = "aaa", gpu: str | None = None, ranks_per_node: int | None = None
):
    heap = SimpleNamespace(bytes=BYTES, nvl_ring_bytes=1 << 10, channels=5)
    ranks_per_node = ranks_per_node or rendezvous.world_size
    topology = ep.Topology(rendezvous.world_size // ranks_per_node, ranks_per_node)
    infos = rendezvous.gather(rank_info(hosts[rendezvous.rank], gpu))
    rank = gpu_rank(rendezvous, infos, 24)
    fakes = {"synchronize": mock.DEFAULT, "device": current_device, "mem_get_info": lambda device: (FREE[0], 80 << 30)}
    with mock.patch.multiple(torch.cuda, **fakes):
        fabric = choice.choose(rank.machines, [info.fabric for info in infos], rendezvous.gather)
        connection, fabric = connect.connect(rank, topology, heap, fabric)
        backend = cuda.CudaBackend(connection, heap, DEVICE, 24)
    backend.fabric = fabric
    return backend


def gpu_rank(rendezvous: StoreRendezvous, infos: list[RankInfo], blocks: int) -> GpuRank:
    return GpuRank(rendezvous, ep.Config(num_experts=8), infos, DEVICE, blocks, peer_memory.IPC)


@contextlib.contextmanager
def current_device(device: torch.device):
    CURRENT.append(device)
    try:
        yield
    finally:
        CURRENT.pop()


@contextlib.contextmanager
def ranks_with(fabric: str, **loads):
    """This process wants this fabric, "" for none, and loads these."""
    for members in ((0, 1, 2), (0, 1), (0, 2)):  # all ranks take part in making each
        if members not in GROUPS:
            GROUPS[members] = dist.new_group(members)
    loaders = {f"load_{name}": load for name, load in loads.items()}
    with (
        mock.patch.dict(os.environ, {choice.VARIABLE: fabric}),
        mock.patch.dict(choice.NETWORKS, loads),
        mock.patch.object(rdma, "has_cards", lambda: True),
        mock.patch.object(verbs, "usable", mock.Mock(side_effect=ep.EPError("its card is down"))),
        mock.patch.dict(vars(choice), loaders),
        mock.patch.multiple(_C, create=True, DeviceMemory=Memory, cuda_launcher=group_of),
    ):
        yield


def group_of(**settings):
    """Instead of any fabric's group."""
    assert CURRENT == [DEVICE] and settings["device"] == DEVICE.index
    return SimpleNamespace(**settings)


# ---- which fabric


@run_on("ranks")
def test_ranks_that_load_different_libraries_take_one_that_all_load() -> None:
    def lack():
        raise ep.EPError("it lacks something")

    library = Nccl()
    lacking = lack if dist.get_rank() == 1 else lambda: None
    with ranks_with("", nvshmem=lacking, nccl=lambda: library):
        backend = connected(rendezvous_of(), "abc")
        assert backend.launcher.memory.endswith(b"by NCCL")
        assert backend.fabric.name == "nccl"
        assert backend.fabric.reason == (
            "3 machines; it lacks something on rank 1; a separate communicator, 64.0 MiB in addition to the heap"
        )
    tcp = mock.Mock(return_value=Connection(SimpleNamespace(), reason="found"))
    with ranks_with("", nvshmem=lacking, nccl=lacking), mock.patch("megatron_ep.fabrics.proxied.connect", tcp):
        backend = connected(rendezvous_of(), "abc")
        assert backend.fabric == choice.Choice(
            "tcp", "3 machines; it lacks something on rank 1; its card is down; found"
        )


@pytest.mark.parametrize(("fabric", "exchanges"), [("p2p", 4), ("nvshmem", 4), ("nccl", 6)])
@run_on("ranks")
def test_a_set_up_takes_few_exchanges_and_no_collective(fabric: str, exchanges: int) -> None:
    """The introduction is one of them."""
    library = {"p2p": None, "nvshmem": Nvshmem, "nccl": Nccl}[fabric]
    with over(fabric, library()) if library else ranks_with(fabric):
        groups = [group for group in (dist.group.WORLD, *GROUPS.values()) if isinstance(group, dist.ProcessGroup)]
        before = [group._get_sequence_number_for_group() for group in groups]  # of the last collective
        rendezvous = rendezvous_of()
        connected(rendezvous)
        assert before == [group._get_sequence_number_for_group() for group in groups]
        assert rendezvous.exchanges == exchanges


# ---- CUDA IPC


class Memory:
    """Says which processes its memory may be mapped by, as DeviceMemory is told."""

    refuses = False

    def __init__(self, group: str):
        self.group = group

    @classmethod
    def create(cls, device: int, size: int, group: str, kind: str) -> "Memory":
        assert CURRENT == [DEVICE]
        return cls(group)

    @classmethod
    def open(cls, device: int, handle: bytes, size: int, kind: str) -> "Memory":
        return cls(handle.decode())

    def clear(self) -> None:
        pass

    def handle(self) -> bytes:
        if self.refuses:
            raise RuntimeError("cudaIpcGetMemHandle: out of luck")
        return self.group.encode()


@run_on("ranks")
def test_memory_is_reused_by_the_same_processes_only() -> None:
    names = {}
    with ranks_with(""):
        for these in ((0, 1), (0, 2), (0, 1), (0, 1, 2)):
            if dist.get_rank() in these:
                memories = connected(rendezvous_of(these)).launcher.memories
                [name] = {memory.group for memory in memories}  # which members of a buffer name alike
                assert names.setdefault(these, name) == name
    assert len(set(names.values())) == len(names)


class MemoryLeftOver:
    """Of rank 0, as a key of the ranks' store: cleared when it is made, as DeviceMemory is."""

    @classmethod
    def create(cls, *_: object) -> "MemoryLeftOver":
        memory = cls()
        memory.clear()
        return memory

    @classmethod
    def open(cls, *_: object) -> "MemoryLeftOver":
        return cls()

    def clear(self) -> None:
        if dist.get_rank() == 0:
            STORE().set("released", "0")

    def handle(self) -> bytes:
        return b""


STORE = dist.distributed_c10d._get_default_store


@run_on("ranks")
def test_memory_is_cleared_after_the_earlier_calls_of_all_ranks() -> None:
    """The last call of rank 1 is over only when rank 0 has made its memory already."""

    def finish_earlier_calls() -> None:
        if dist.get_rank() == 1:
            time.sleep(0.5)
            STORE().set("released", "1")

    with ranks_with(""), mock.patch.object(_C, "DeviceMemory", MemoryLeftOver):
        peer_memory.peer_memories(rendezvous_of(), finish_earlier_calls, DEVICE, BYTES, "")
    assert STORE().get("released") == b"0"


@run_on("ranks")
def test_a_memory_without_a_handle_is_an_error_everywhere() -> None:
    refused = pytest.raises(ep.EPError, match=r"rank 1 could not set up the buffer: .*out of luck")
    with ranks_with(""), mock.patch.object(Memory, "refuses", dist.get_rank() == 1), refused:
        connected(rendezvous_of())


# ---- native atomics


@contextlib.contextmanager
def gpus_with(pairs: set[tuple[int, int]], sees: int = W):
    """This process sees the first so many of W GPUs, of which these pairs have native atomics."""
    properties = {"get_device_properties": lambda i: SimpleNamespace(uuid=i), "device_count": lambda: sees}
    with (
        mock.patch.multiple(torch.cuda, **properties),
        mock.patch.object(_C, "has_native_atomics", lambda *pair: pair in pairs, create=True),
    ):
        yield


ALL_BUT_1_AND_2 = {(0, 1), (1, 0), (0, 2), (2, 0), (2, 1)}


@run_on("ranks")
def test_gpus_without_native_atomics_are_named_on_all_ranks() -> None:
    one_side = "rank 1 on GPU-1 and rank 2 on GPU-2 cannot share memory: these GPUs have no native atomics on each"
    other_side, rank = "rank 2 on GPU-2 and rank 1 on GPU-1 cannot share memory", dist.get_rank()
    first = rf"({one_side}|{other_side}).*MEGATRON_EP_FABRIC=nvshmem, nccl or tcp"
    says = (first, f"^{one_side}", f"^{other_side}")
    with gpus_with(ALL_BUT_1_AND_2):
        with ranks_with(""), pytest.raises(ep.EPError, match=says[rank]):
            connected(rendezvous_of(), gpu=f"GPU-{rank}")
        with ranks_with(""):  # on one GPU
            connected(rendezvous_of(), gpu="GPU-1")
        for ranks_per_node in (1, W):
            alike = contextlib.nullcontext() if ranks_per_node == 1 else pytest.raises(ep.EPError, match="no native")
            with over("nccl", Nccl()), alike:
                connected(rendezvous_of(), gpu=f"GPU-{rank}", ranks_per_node=ranks_per_node)
    with ranks_with(""), gpus_with(set(), sees=1):  # whose processes see one each
        connected(rendezvous_of(), gpu=f"GPU-{rank}")


def test_the_report_names_gpus_without_native_atomics() -> None:
    with gpus_with(ALL_BUT_1_AND_2), mock.patch.object(_C, "cuda_launcher", None, create=True):
        needs = "GPUs without native atomics on each other's memory, which it needs"
        assert choice.report()["p2p"] == f"built; {needs}: 1 and 2"
    with gpus_with({(0, 1), (1, 0)}, sees=2), mock.patch.object(_C, "cuda_launcher", None, create=True):
        assert choice.report()["p2p"] == "built"


def test_lines_need_atomics_that_are_known() -> None:
    gpus = [f"GPU-{i}" for i in range(W)]
    with gpus_with(ALL_BUT_1_AND_2):
        assert [atomics.are_native(own, gpus) for own in gpus[:3]] == [True, False, False]
        assert atomics.are_native("GPU-1", ["GPU-1", "GPU-0"])
    with gpus_with(set(), sees=1):
        assert atomics.are_native("GPU-2", ["GPU-2"] * W)  # ranks of one GPU
        assert not atomics.are_native("GPU-0", gpus)


# ---- NVSHMEM


class HeapNumber(int):
    """A heap of NVSHMEM's, by which the library tells how it reaches the other ranks."""

    reaches = SimpleNamespace(mapped=0, networked=2, ibgda=True, writes_ordered=True)

    def transport(self, *, heap) -> SimpleNamespace:
        return self.reaches


class Nvshmem:
    """One process's library: what it was initialised for, and the heaps that were allocated in it."""

    def __init__(self):
        self.environment: dict[str, str] = {}  # when it was initialised
        self.served = None
        self.allocated = 0
        self.left: set[int] = set()
        self.group = group_of
        self.low_latency = SimpleNamespace
        self.NvshmemHeap = SimpleNamespace(allocate=self.allocate, reuse=self.reuse)
        self.prepare = mock.Mock()
        self.before_allocation = lambda: None

    def unique_id(self) -> bytes:
        return f"of process {os.getpid()}".encode()

    def initialised_for(self):
        return self.served

    def spare(self, *, bytes: int) -> list[int]:
        assert bytes == BYTES
        return sorted(self.left, reverse=True)

    def allocate(self, *, unique_id: bytes, rank: int, world: int, device: int, bytes: int) -> int:
        self.before_allocation()
        if self.served is None:
            self.environment = {name: value for name, value in os.environ.items() if name.startswith("NVSHMEM_")}
        self.served = self.served or (unique_id, rank, world)
        assert self.served == (unique_id, rank, world)
        self.allocated += 1
        return HeapNumber(self.allocated - 1)

    def reuse(self, *, number: int, device: int) -> int:
        self.left.remove(number)
        return HeapNumber(number)


@contextlib.contextmanager
def over(fabric: str, library):
    with ranks_with(fabric, **{fabric: lambda: library}):
        yield library


def heap_of(rendezvous: StoreRendezvous) -> int:
    return connected(rendezvous).launcher.memory


@run_on("ranks")
def test_nvshmem_heaps_that_all_ranks_have_left_are_reused() -> None:
    rank = dist.get_rank()
    with over("nvshmem", Nvshmem()) as library:
        assert [heap_of(rendezvous_of()) for _ in range(3)] == [0, 1, 2]
        if rank != 1:
            library.left.add(0)  # collected there, and not yet on rank 1
        assert heap_of(rendezvous_of()) == 3
        library.left |= {0, 2} if rank == 1 else {1, 2, 3}
        assert heap_of(rendezvous_of()) == 0 and heap_of(rendezvous_of()) == 2
        assert heap_of(rendezvous_of()) == 4


@run_on("ranks")
def test_nvshmem_serves_one_group_of_ranks() -> None:
    rank = dist.get_rank()
    with over("nvshmem", Nvshmem()) as library:
        if rank != 2:
            assert heap_of(rendezvous_of((0, 1))) == 0
        if rank != 1:
            with pytest.raises(ep.EPError, match=r"one group of ranks .* another one than this on rank 0 already"):
                heap_of(rendezvous_of((0, 2)))
            assert library.allocated == (rank == 0)
        with pytest.raises(ep.EPError, match="another one than this on rank 0, 1 already"):
            heap_of(rendezvous_of())
        if rank != 2:
            assert heap_of(rendezvous_of((0, 1))) == 1


@run_on("ranks")
def test_what_fails_on_one_rank_keeps_all_out_of_nvshmem() -> None:
    with over("nvshmem", Nvshmem()) as library:
        if dist.get_rank() == 1:
            library.prepare.side_effect = ValueError("device is cuda:0, must be cuda:1")
        with pytest.raises(
            ValueError if dist.get_rank() == 1 else ep.EPError, match=r"device is cuda:0, must be cuda:1$"
        ):
            heap_of(rendezvous_of())
        assert library.allocated == 0
        library.prepare.side_effect = None
        assert heap_of(rendezvous_of()) == 0


def run_lost_in_set_up() -> None:
    """NVSHMEM's set-up fails on rank 1, and waits for it elsewhere."""

    def fail() -> None:
        raise RuntimeError("NVSHMEM could not be initialised")

    with over("nvshmem", Nvshmem()) as library, mock.patch.object(nvshmem, "SETUP_S", 1.0):
        library.before_allocation = fail if dist.get_rank() == 1 else lambda: time.sleep(100)
        started = time.monotonic()
        with pytest.raises(
            ep.EPError,
            match="could not be initialised"
            if dist.get_rank() == 1
            else "the ranks did not finish the set-up of NVSHMEM within 1 s",
        ):
            heap_of(rendezvous_of(seconds=1))
        assert time.monotonic() - started < 10


def test_a_wait_in_nvshmem_is_bounded() -> None:
    with LocalRanks(W, 60) as ranks:  # of their own, since threads are left waiting in them
        ranks.run(run_lost_in_set_up)


@contextlib.contextmanager
def network_cards(*names: str, **variables: str):
    """This machine's network cards that IBGDA can use, and what its user has set for NVSHMEM."""
    with mock.patch.dict(os.environ, variables), mock.patch.object(nvshmem_env, "cards", lambda: list(names)):
        yield


SWITCHED_ON = {
    "NVSHMEM_IB_ENABLE_IBGDA": "1",
    "NVSHMEM_IBGDA_NUM_RC_PER_PE": "5",  # channels
    "NVSHMEM_IBGDA_RC_MAP_BY": "cta",
    "NVSHMEM_MAX_TEAMS": "7",
    "NVSHMEM_DISABLE_NVLS": "1",
}
OWN = {"NVSHMEM_IBGDA_NUM_RC_PER_PE": "3", "NVSHMEM_IBGDA_RC_MAP_BY": "cta", "NVSHMEM_MAX_TEAMS": "40"}
OFF = {"NVSHMEM_IB_ENABLE_IBGDA": "0", "NVSHMEM_IBGDA_RC_MAP_BY": "sm"}


@pytest.mark.parametrize(
    ("hosts", "cards", "set_by_user", "environment"),
    [
        ("abc", ["mlx5_0"], {}, SWITCHED_ON),
        ("abc", ["mlx5_0"], OWN, SWITCHED_ON | OWN),
        ("abc", ["mlx5_0"], OFF, OFF),
        ("aaa", ["mlx5_0"], {}, {}),  # no network
        ("abc", [], {}, {}),
    ],
)
@run_on("ranks")
def test_ibgda_is_switched_on_between_machines(hosts: str, cards, set_by_user, environment) -> None:
    with over("nvshmem", Nvshmem()) as library, network_cards(*cards, **set_by_user):
        backend = connected(rendezvous_of(), hosts)
        assert heap_of(rendezvous_of()) == 1  # is not initialised again
    assert library.environment == environment
    if environment is SWITCHED_ON:
        assert not backend.group.fence and backend.fabric.reason.endswith("; IBGDA, 5 queue pairs a rank")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("NVSHMEM_IBGDA_ENABLE_MULTI_PORT", "1", "0 or unset"),
        ("NVSHMEM_IBGDA_ENABLE_MULTI_PORT", "", "0 or unset"),
        ("NVSHMEM_ENABLE_MULTI_PORT", "true", "0 or unset"),
        ("NVSHMEM_IBGDA_RC_MAP_BY", "sm", "cta"),
        ("NVSHMEM_IBGDA_RC_MAP_BY", "warp", "cta"),
    ],
)
@run_on("ranks")
def test_settings_that_break_the_order_are_refused_before_nvshmem_is_initialised(
    name: str, value: str, allowed: str
) -> None:
    own, says = {name: value} if dist.get_rank() == 1 else {}, f"{name} is '{value}', must be {allowed}: "
    with over("nvshmem", Nvshmem()) as library, network_cards("mlx5_0", **own):
        with pytest.raises(ValueError if own else ep.EPError, match=f"environment variable {says}"):
            connected(rendezvous_of(), "abc")
        assert library.allocated == 0


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("NVSHMEM_IBGDA_NUM_RC_PER_PE", ["3", "3", "4"], "is '3' on rank 0 and '4' on rank 2"),
        ("NVSHMEM_IBGDA_NUM_RC_PER_PE", [None, "7", None], "is unset on rank 0 and '7' on rank 1"),
        ("NVSHMEM_IB_ENABLE_IBGDA", ["0", None, None], "is '0' on rank 0 and unset on rank 1"),
        ("NVSHMEM_IBGDA_NUM_RC_PER_PE", [None, "5", None], ""),  # what the others will have
        ("NVSHMEM_HCA_LIST", ["mlx5_0", "mlx5_1", None], ""),
    ],
)
@run_on("ranks")
def test_ranks_that_set_nvshmem_differently_are_refused_alike(name: str, values: list[str | None], says: str) -> None:
    value = values[dist.get_rank()]
    with over("nvshmem", Nvshmem()) as library, network_cards("mlx5_0", **({name: value} if value else {})):
        if not says:
            assert heap_of(rendezvous_of()) == 0
            return
        for hosts in ("abc", "abc", "aaa"):  # a failed attempt sets nothing
            with pytest.raises(ValueError, match=f"^environment variable {name} {says}, must be equal$"):
                connected(rendezvous_of(), hosts)
        assert library.allocated == 0


def transport(reaches: dict[str, object], queue_pairs: str = "9") -> tuple[bool, str]:
    """Whether signals go behind fences, and what is said of that, where NVSHMEM reaches other ranks like this."""
    reached = SimpleNamespace(**(vars(HeapNumber.reaches) | reaches))
    cards = network_cards("mlx5_0", NVSHMEM_IBGDA_NUM_RC_PER_PE=queue_pairs)
    with over("nvshmem", Nvshmem()), cards, mock.patch.object(HeapNumber, "reaches", reached):
        backend = connected(rendezvous_of(), "abc")
    return backend.launcher.fence, backend.fabric.reason.partition("; ")[2]


@pytest.mark.parametrize(
    ("reaches", "queue_pairs", "fence", "words"),
    [
        ({}, "9", False, "IBGDA, 9 queue pairs a rank"),
        ({"networked": 0, "mapped": 2, "writes_ordered": False}, "9", True, "no network: all ranks share memory"),
        ({"ibgda": False}, "9", True, "without IBGDA"),
        ({}, "0", True, "IBGDA, NVSHMEM_IBGDA_NUM_RC_PER_PE is 0: signals behind fences"),
        ({"networked": 1, "mapped": 1}, "9", True, "IBGDA, ranks of other nodes share memory: signals behind fences"),
    ],
)
@run_on("ranks")
def test_signals_go_without_a_fence_only_where_queue_pairs_keep_the_order(
    reaches: dict[str, object], queue_pairs: str, fence: bool, words: str
) -> None:
    assert transport(reaches, queue_pairs) == (fence, words)


@run_on("ranks")
def test_a_gpu_that_sees_writes_out_of_order_is_an_error_everywhere() -> None:
    with pytest.raises(ep.EPError, match="cudaDevAttrGPUDirectRDMAWritesOrdering is none"):
        transport({"writes_ordered": dist.get_rank() != 1})


# ---- NCCL


class Nccl:
    def __init__(self):
        self.ids = 0
        self.left: list[bytes] = []
        self.group = group_of
        self.low_latency = SimpleNamespace

    def unique_id(self) -> bytes:
        self.ids += 1
        return f"{self.ids} of process {os.getpid()} by NCCL".encode()

    def kept(self, *, heap, rank: int, device: int) -> list[bytes]:
        return self.left

    def NcclHeap(self, *, unique_id: bytes, heap, rank: int, device: int, timeout: float) -> bytes:
        FREE[0] -= heap.bytes + (64 << 20)
        return unique_id


def run_kept() -> list[bytes]:
    with over("nccl", Nccl()) as library:
        first = heap_of(rendezvous_of())
        library.left = [] if dist.get_rank() == 1 else [first]
        second = heap_of(rendezvous_of())
        library.left = [second, first]
        return [first, second, heap_of(rendezvous_of())]


def test_nccl_connections_that_all_ranks_have_left_are_reused(ranks) -> None:
    by_rank = ranks.run(run_kept)
    assert by_rank[1:] == by_rank[:-1]
    first, second, third = by_rank[0]
    assert first != second and third == min(first, second)


@run_on("ranks")
def test_a_closed_backend_lets_its_group_go() -> None:
    with over("nccl", Nccl()):
        backend = connected(rendezvous_of())
    graphs = [2]
    backend.launcher.graphs = lambda: graphs[0]
    assert backend.launcher.watch is not None
    with (
        mock.patch.object(cuda, "GRAPHS_S", 0.0),
        mock.patch.object(torch.cuda, "is_current_stream_capturing") as is_on,
    ):
        is_on.return_value = True
        assert backend.needs_memory() == "a CUDA graph is being captured"
        is_on.return_value = False
        assert backend.needs_memory() == "2 CUDA graphs may replay its launches, must be deleted before"
        graphs[0] = 0
        assert backend.needs_memory() == ""
        backend.close()
    assert backend.launcher.watch is None, "the group, which its memory lives with, would never go"


# ---- the low-latency mode over a network


def low_latency_memory(rendezvous: StoreRendezvous, backend, fabric: str):
    heap = SimpleNamespace(bytes=BYTES)
    rank = gpu_rank(rendezvous, rendezvous.gather(rank_info("a")), 3)
    fakes = {"synchronize": mock.DEFAULT, "device": current_device, "mem_get_info": lambda device: (FREE[0], 80 << 30)}
    with mock.patch.multiple(torch.cuda, **fakes):
        made = connect.low_latency(rank, heap, fabric, backend.connection)
    launches = made.launcher
    assert (launches.launcher, launches.heap, launches.blocks) == (backend.launcher, heap, 3)
    assert launches.memory is made.network_memory and not made.memories
    return launches.memory


@run_on("ranks")
def test_the_low_latency_mode_has_memory_of_its_own() -> None:
    rank = dist.get_rank()
    with over("nvshmem", Nvshmem()) as library:
        rendezvous = rendezvous_of()
        backend = connected(rendezvous)
        assert [low_latency_memory(rendezvous, backend, "nvshmem") for _ in range(2)] == [1, 2]
        library.left |= {1} if rank == 1 else {1, 2}
        assert low_latency_memory(rendezvous, backend, "nvshmem") == 1
        if rank == 2:
            library.prepare.side_effect = RuntimeError("out of luck")
        with pytest.raises(ep.EPError, match=r"rank 2 could not set up the buffer: .*out of luck"):
            low_latency_memory(rendezvous, backend, "nvshmem")
        assert library.allocated == 3
    with over("nccl", Nccl()) as library:
        rendezvous = rendezvous_of()
        backend = connected(rendezvous)
        memory = low_latency_memory(rendezvous, backend, "nccl")
        assert memory.startswith(b"2 of") and memory != backend.launcher.memory
        library.left = [memory]
        assert low_latency_memory(rendezvous, backend, "nccl") == memory


# ---- a launch that does not end


@run_on("ranks")
def test_no_buffer_is_made_where_a_launch_does_not_end() -> None:
    stuck = mock.patch.object(gpu, "_stuck", [object()] if dist.get_rank() == 1 else [])
    refused = pytest.raises(ep.EPError, match="an earlier launch of this process does not end")
    with over("nccl", Nccl()), stuck, refused:
        connected(rendezvous_of())
