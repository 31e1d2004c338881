"""The compiled host backend, and with CUDA that of GPUs on one machine. Addresses are those of contiguous tensors, 0
where there is none; a stream is a cudaStream_t. Attributes are read-only, except `RankLauncher.watch`."""

from collections.abc import Callable, Sequence
from typing import Any

def build_info() -> dict[str, Any]: ...

# ---- memory

class Segment:
    @staticmethod
    def anonymous(bytes: int) -> Segment: ...
    @staticmethod
    def shared(bytes: int) -> Segment: ...
    @staticmethod
    def open(address: tuple[int, int, int, int], bytes: int) -> Segment: ...
    def address(self) -> tuple[int, int, int, int]: ...
    def replace(self, address: tuple[int, int, int, int]) -> None: ...
    def release(self) -> None: ...
    bytes: int

class CardPort:
    device: str
    number: int
    is_ethernet: bool
    address: str
    lacks: str

def card_ports(library: str, mlx5: str | None = None) -> list[CardPort]: ...

class QueuePair:
    def address(self) -> bytes: ...
    def connect(self, address: bytes) -> None: ...

class Card:
    def __init__(
        self,
        *,
        library: str,
        port: CardPort,
        mlx5: str | None = None,
        traffic_class: int,
        service_level: int,
        pkey_index: int,
        ack_timeout: int,
        retries: int,
    ) -> None: ...
    is_direct: bool
    port_name: str
    def try_queue(self) -> None: ...
    def queue_pair(self) -> QueuePair: ...

class SoftwareNic:
    mirror_bytes: int
    def __init__(self, *, rank: int, segments: Sequence[Segment], cards: Sequence[Card] = ...) -> None: ...
    def start(self, sockets: Sequence[int], pairs: Sequence[QueuePair | None] = ..., limit: float = ...) -> None: ...
    def invite(self, rank: int) -> bytes: ...
    def join(self, rank: int, told: bytes) -> None: ...
    def stop(self, seconds: float) -> None: ...
    def ranks_that_left(self) -> list[int]: ...
    def silence(self, rank: int) -> tuple[float, float]: ...
    def flush_reports(self) -> None: ...
    def tolerate_loss(self) -> None: ...

class NetworkLoad:
    @staticmethod
    def heap_bytes(*, world: int, channels: int, max_bytes: int) -> int: ...
    def __init__(
        self, nic: SoftwareNic, control: Segment, heap: Segment, *, rank: int, world: int, channels: int, max_bytes: int
    ) -> None: ...
    def ping(self, peer: int, *, begins: bool, bytes: int, rounds: int, timeout: float) -> list[float]: ...
    def exchange(
        self,
        *,
        targets: Sequence[int],
        sources: Sequence[int],
        puts: int,
        bytes: int,
        seed: int | None = None,
        timeout: float,
    ) -> float: ...

def pooled_bytes(size: int) -> object: ...
def release_pooled_memory() -> None: ...

# ---- what a GPU's launches are made of, also where there is none

def cuda_channels(*, nodes: int, ranks_per_node: int, num_sms: int, local_ranks: int) -> int: ...
def cuda_roles(
    *, nodes: int, ranks_per_node: int, num_sms: int, channels: int, ring_rows: int, combine: bool
) -> dict[str, int] | None: ...

# ---- dispatch and combine

class Heap:
    def __init__(
        self,
        *,
        nodes: int,
        ranks_per_node: int,
        num_experts: int,
        channels: int,
        nvl_ring_bytes: int,
        rdma_ring_bytes: int,
    ) -> None: ...
    overflow_offset: int
    bytes: int
    bytes_without_network: int
    parts: dict[str, int]
    ranks_per_node: int
    local_experts: int
    channels: int
    nvl_ring_bytes: int
    rdma_ring_bytes: int
    def layout(self, num_tokens: int, topk: int) -> dict[str, int]: ...
    def lay_out(
        self, *, rank: int, topk: int, moves: int, count: int, tokens: int, epoch: int, leaving: int, layout: int
    ) -> Totals: ...

class RowFormat:
    def __init__(
        self, *, payload_bytes: int, scale_bytes: int, weight_bytes: int, topk: int, payload_type: int
    ) -> None: ...
    payload_bytes: int
    topk: int
    slot_bytes: int
    def slots(self, ring_bytes: int) -> int: ...

class Totals:
    received_rows: int
    expert_rows: int
    rail_rows: int
    bad_token: int

# ---- launches

class Phase:
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    notify: Phase
    dispatch: Phase
    dispatch_without_wait: Phase
    speculative_dispatch: Phase
    dispatch_retry: Phase
    combine: Phase
    send: Phase
    receive: Phase
    send_and_receive: Phase

class Call: ...

class Launcher:
    def prepare_dispatch(
        self, format: RowFormat, members: Sequence[dict[str, int]], per_launch: Sequence[str] = ()
    ) -> Call: ...
    def prepare_combine(
        self, format: RowFormat, members: Sequence[dict[str, int]], per_launch: Sequence[str] = ()
    ) -> Call: ...
    def launch(self, call: Call, phase: int, stream: int, per_launch: tuple[Any, ...]) -> Any: ...
    def reset(self) -> None: ...

class RankLauncher(Launcher):
    watch: Callable[[], None] | None  # called now and then while notify waits: what it raises ends the wait
    def aborted(self) -> tuple[str, int] | None: ...
    def incidents(self) -> list[dict[str, Any]]: ...
    def rank_statuses(self) -> list[dict[str, Any]]: ...
    def waited(self) -> list[tuple[list[int], list[int]]]: ...
    def abort(self, *, interrupted: bool, failed: bool, reason: str) -> None: ...
    def note_refusal(self, number: int, word: int) -> None: ...
    def finished(self) -> bool: ...
    seconds: float
    def listen(self) -> None: ...
    def drain(self) -> None: ...
    def note_capture(self, stream: int) -> None: ...
    def graphs(self) -> int: ...
    def orders_graphs(self) -> bool: ...
    def retire(self) -> None: ...

class LowLatencyLauncher(Launcher):
    warps: int

def host_launcher(
    *,
    heap: Heap,
    ranks: Sequence[int],
    segments: Sequence[Segment],
    threads: int,
    seed: int | None,
    lost_signal: int,
    stalled: tuple[int, int],
    timeout: float,
    nic: SoftwareNic | None = None,
) -> RankLauncher: ...
def host_low_latency(
    *, launcher: RankLauncher, heap: LowLatencyHeap, segments: Sequence[Segment], warps: int
) -> LowLatencyLauncher: ...

# ---- low-latency mode

class LowLatencyHeap:
    overflow_offset: int
    def __init__(
        self,
        *,
        nodes: int,
        ranks_per_node: int,
        num_experts: int,
        max_tokens: int,
        largest: RowFormat,
        staged: bool,
        channels: int,
        masking: bool,
        lines: bool,
        sums_at_expert: bool = ...,
    ) -> None: ...
    bytes: int
    max_tokens: int
    lines: bool
    def layout(self, *, topk: int, warps: int) -> dict[str, int]: ...

def name_of_wait(wait: int) -> str: ...

class ScaleFormat:
    def __init__(self, value: int) -> None: ...
    none: ScaleFormat
    fp32: ScaleFormat
    pow2: ScaleFormat
    ue8m0: ScaleFormat

# ---- with CUDA

def has_native_atomics(device: int, peer: int) -> bool: ...
def run_deferred() -> None: ...

class DeviceMemory:
    @staticmethod
    def create(device: int, bytes: int, group: str = "", kind: str = "ipc") -> DeviceMemory: ...
    @staticmethod
    def open(device: int, handle: bytes, bytes: int, kind: str = "ipc") -> DeviceMemory: ...
    def handle(self) -> bytes: ...
    def clear(self) -> None: ...
    def replace(self, handle: bytes) -> None: ...
    def release(self) -> None: ...
    def release_left(self) -> None: ...
    def add_one(self) -> None: ...
    def first_word(self) -> int: ...
    is_released: bool
    bytes: int

def cuda_launcher(
    *, heap: Heap, ranks: Sequence[int], memories: Sequence[DeviceMemory], device: int, num_sms: int, timeout: float
) -> RankLauncher: ...
def cuda_low_latency(
    *, launcher: RankLauncher, heap: LowLatencyHeap, memories: Sequence[DeviceMemory], blocks: int
) -> LowLatencyLauncher: ...

class PinnedReport:
    def __init__(self, device: int) -> None: ...

def nic_of_gpu(
    *, rank: int, report: PinnedReport, mirrors: Sequence[Segment], cards: Sequence[Card] = ...
) -> SoftwareNic: ...

class QueueHeap:
    def __init__(
        self, *, nic: SoftwareNic, report: PinnedReport, heap: Heap | LowLatencyHeap, rank: int, device: int
    ) -> None: ...

def queue_launcher(
    *,
    heap: Heap,
    rank: int,
    network: QueueHeap,
    memories: Sequence[DeviceMemory],
    device: int,
    num_sms: int,
    timeout: float,
) -> RankLauncher: ...
def queue_low_latency(
    *, launcher: RankLauncher, heap: LowLatencyHeap, network: QueueHeap, memories: Sequence[DeviceMemory], blocks: int
) -> LowLatencyLauncher: ...
def try_card(card: Card, device: int) -> None: ...
def dequantize_cuda(
    *,
    rows: int,
    hidden: int,
    dtype: int,
    reals: int,
    values: int,
    scales: int,
    value_format: int,
    scale_format: ScaleFormat,
    stream: int,
) -> None: ...
def quantize_cuda(
    *,
    rows: int,
    hidden: int,
    dtype: int,
    reals: int,
    values: int,
    scales: int,
    value_format: int,
    scale_format: ScaleFormat,
    stream: int,
) -> None: ...

# ---- the gate

class ScoreFunction:
    def __init__(self, value: int) -> None: ...
    SIGMOID: ScoreFunction
    PRE_SOFTMAX: ScoreFunction
    POST_SOFTMAX: ScoreFunction

class RouterConfig:
    def __init__(
        self,
        *,
        experts: int,
        topk: int,
        groups: int,
        group_topk: int,
        score: ScoreFunction,
        renormalize: bool,
        scaling_factor: float,
    ) -> None: ...
    topk: int

def router_forward_host(config: RouterConfig, members: dict[str, Any], on: int) -> None: ...
def router_backward_host(config: RouterConfig, members: dict[str, Any], on: int) -> None: ...
def router_forward_cuda(config: RouterConfig, members: dict[str, Any], on: int) -> None: ...
def router_backward_cuda(config: RouterConfig, members: dict[str, Any], on: int) -> None: ...
