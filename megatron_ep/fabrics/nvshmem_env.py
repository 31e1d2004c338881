"""NVSHMEM's environment variables for IBGDA, the transport in which GPUs post to NVIDIA's InfiniBand and RoCE cards
(driver mlx5) themselves. IBGDA is off by default, and a thread of the host carries every put. It is switched on here
before NVSHMEM is initialised, unless the user has set the variables. See "Environment Variables" in NVSHMEM's
documentation.

The order of puts between machines depends on queue pairs: a network card executes the requests of each one in order.
NVSHMEM chooses the queue pair by the calling block, so puts and signals of its warps to a rank share one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megatron_ep.errors import EPError
from megatron_ep.fabrics import cards as rdma

ENABLE = "NVSHMEM_IB_ENABLE_IBGDA"
QUEUE_PAIRS = "NVSHMEM_IBGDA_NUM_RC_PER_PE"
MAP_BY = "NVSHMEM_IBGDA_RC_MAP_BY"
ORDERED_BY = "cta"  # warps of a block signal for each other; with "sm", two launches may use different queue pairs
MULTI_PORT = ("NVSHMEM_IBGDA_ENABLE_MULTI_PORT", "NVSHMEM_ENABLE_MULTI_PORT")  # the latter from NVSHMEM 3.5
DEFAULTS = {
    MAP_BY: ORDERED_BY,
    "NVSHMEM_MAX_TEAMS": "7",  # NVSHMEM's six and one more, instead of 32: each takes memory
    "NVSHMEM_DISABLE_NVLS": "1",  # multicast memory is not used
}
# Variables in ALIKE or with the prefix must be equal on all ranks; others, such as names of cards, may differ.
PREFIX = "NVSHMEM_IBGDA_"
ALIKE = (ENABLE, *MULTI_PORT, *DEFAULTS, "NVSHMEM_REMOTE_TRANSPORT")
DEVICES = Path("/dev/infiniband")

log = logging.getLogger(__name__)


class Transport(Protocol):
    """How an initialised NVSHMEM reaches the ranks of other nodes (`_nvshmem.Transport`)."""

    mapped: int  # ranks whose memory this GPU loads and stores
    networked: int  # other ranks
    ibgda: bool
    writes_ordered: bool  # whether the GPU sees the network's writes in the order in which they were made


def cards() -> list[str]:
    """Returns the network cards of this machine that IBGDA can use and this process may open."""
    if not any(DEVICES.glob("uverbs*")):
        return []
    drivers = {card.name: card / "device" / "driver" for card in rdma.FOLDER.glob("*")}
    return sorted(card for card, driver in drivers.items() if driver.resolve().name.startswith("mlx5"))


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Returns whether the user has not switched IBGDA off."""
    return ENABLE not in environment or _is_true(environment[ENABLE])


def check(environment: Mapping[str, str] = os.environ) -> None:
    """Raises ValueError if variables allow flags to overtake rows."""
    if not is_wanted(environment):
        return
    for name in MULTI_PORT:
        if _is_true(environment.get(name, "0")):
            raise ValueError(
                f"environment variable {name} is {environment[name]!r}, must be 0 or unset: with several network cards "
                "a rank, NVSHMEM's fences miss some of the queue pairs, and flags may overtake rows"
            )
    if environment.get(MAP_BY, ORDERED_BY) != ORDERED_BY:
        raise ValueError(
            f"environment variable {MAP_BY} is {environment[MAP_BY]!r}, must be {ORDERED_BY}: a channel needs the same "
            "queue pair for its rows and their flag"
        )


def given(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables of `environment` that must be equal on all ranks."""
    return {name: value for name, value in environment.items() if name.startswith(PREFIX) or name in ALIKE}


def check_alike(by_rank: Sequence[Mapping[str, str]], queue_pairs: int) -> None:
    """Raises ValueError, on all ranks alike, if variables differ between ranks.

    by_rank: result of `given` on each rank.
    queue_pairs: see `prepare`.
    """
    defaults: Mapping[str, str] = settings(queue_pairs)
    for name in sorted({name for environment in by_rank for name in environment}):
        held = [environment.get(name, defaults.get(name)) for environment in by_rank]
        other = next((rank for rank, value in enumerate(held) if value != held[0]), None)
        if other is not None:
            first, second = (repr(by_rank[rank][name]) if name in by_rank[rank] else "unset" for rank in (0, other))
            raise ValueError(
                f"environment variable {name} is {first} on rank 0 and {second} on rank {other}, must be equal"
            )


def settings(queue_pairs: int | str) -> dict[str, str]:
    """Returns the variables for ranks on several machines, which hold where the user has not set them."""
    return {ENABLE: "1", QUEUE_PAIRS: str(queue_pairs), **DEFAULTS}


def prepare(queue_pairs: int) -> None:
    """Sets the variables before NVSHMEM is initialised for ranks on several machines. Raises ValueError as `check`.

    queue_pairs: queue pairs per remote rank, one for each block of a launch that puts.
    """
    check()
    if not is_wanted(os.environ):
        log.warning("%s=%s: a thread of the host carries NVSHMEM's puts", ENABLE, os.environ[ENABLE])
        return
    if not cards():
        log.warning("no network card here for NVSHMEM's IBGDA (driver mlx5, %s): a thread of the host may do", DEVICES)
        return
    for name, value in settings(queue_pairs).items():
        os.environ.setdefault(name, value)


def judge(transport: Transport) -> tuple[bool, str]:
    """Returns whether signals need a fence, and a description of the transport that NVSHMEM has set up.

    The fence waits for all puts of the rank to all ranks. Raises ValueError as `check`, EPError if flags could overtake
    rows in spite of fences.
    """
    if not transport.networked:
        return True, "no network: all ranks share memory"
    if not transport.writes_ordered:
        raise EPError(
            "this GPU may see what the network writes in another order than it was written (CUDA: "
            "cudaDevAttrGPUDirectRDMAWritesOrdering is none), which the nvshmem fabric does not provide for"
        )
    if not transport.ibgda:
        log.warning("NVSHMEM does not use IBGDA: a thread of the host carries its puts (NVSHMEM_DEBUG=INFO says why)")
        return True, "without IBGDA"
    check()
    queue_pairs = os.environ.get(QUEUE_PAIRS, "2")
    if not transport.mapped and queue_pairs.isdigit() and int(queue_pairs):
        return False, f"IBGDA, {queue_pairs} queue pairs a rank"
    why = "ranks of other nodes share memory" if transport.mapped else f"{QUEUE_PAIRS} is {queue_pairs}"
    log.warning("every signal of the nvshmem fabric waits for all puts of its rank: %s", why)
    return True, f"IBGDA, {why}: signals behind fences"


def report() -> str:
    """Describes IBGDA on this machine, for `megatron-ep env`."""
    try:
        check()
    except ValueError as error:
        return str(error)
    if not is_wanted(os.environ):
        return f"off: {ENABLE} is {os.environ[ENABLE]!r}"
    if not (found := cards()):
        return "no network card for it (driver mlx5)"
    own = [f"{name}={os.environ.get(name, value)}" for name, value in settings("(a block each)").items()]
    return f"{', '.join(found)}; between machines {' '.join(own)}"


def _is_true(value: str) -> bool:
    """Parses a switch as NVSHMEM does."""
    return value[:1] not in tuple("0nNfF")
