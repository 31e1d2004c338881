"""Flags of Megatron's training scripts that concern the dispatcher: what must be set, and what contradicts it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from megatron_ep.config import TIMEOUT_VARIABLE, Config

OVERLAP = "--overlap-moe-expert-parallel-comm"
TYPE = "--moe-token-dispatcher-type"
BACKEND = "--moe-flex-dispatcher-backend"
DEEPEP = "--moe-enable-deepep"
ROUTER_FUSION = "--moe-router-fusion"
RANK_CAPACITY = "--moe-expert-rank-capacity-factor"
MEGATRON_FSDP = "--use-megatron-fsdp"
RESTART = "--inprocess-restart"
SOFT_TIMEOUT = "--inprocess-soft-timeout"
SOFT_TIMEOUT_S = 60.0  # Megatron's own default
GROUP_TIMEOUT = "--distributed-timeout-minutes"
GROUP_TIMEOUT_MIN = 10.0  # likewise
# For one wait, which begins after the last sign of life and whose report takes a while.
SHARE_OF_SOFT_TIMEOUT = 0.75
# They set up dispatchers that never run here: to take them and do nothing would be a lie.
OF_OTHERS = {
    "--moe-deepep-num-sms": "--ep-num-sms",
    "--moe-hybridep-num-sms": "--ep-num-sms",
    "--moe-flex-dispatcher-num-sms": "--ep-num-sms",
}


def with_dispatcher(arguments: Sequence[str], fused_router: bool = False) -> list[str]:
    """The arguments of a training script, completed by what Megatron must be told about the dispatcher.

    Megatron is to believe in "alltoall", or, with 1F1B overlap or its own rank capacity, "flex" with "hybridep": by
    this it decides what to validate and which rows it may free early.

    Args:
        arguments: of the script, without its name.
        fused_router: whether this project's router replaces Megatron's.

    Raises:
        ValueError: a flag contradicts; names it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(OVERLAP, action="store_true")
    parser.add_argument(DEEPEP, action="store_true")
    parser.add_argument(ROUTER_FUSION, action="store_true")
    parser.add_argument(MEGATRON_FSDP, action="store_true")
    for flag in (TYPE, BACKEND, RANK_CAPACITY, *OF_OTHERS):
        parser.add_argument(flag, dest=flag)
    given, _ = parser.parse_known_args(arguments)
    chosen, backend = getattr(given, TYPE), getattr(given, BACKEND)

    for flag, ours in OF_OTHERS.items():
        if getattr(given, flag) is not None:
            raise ValueError(f"{flag} sets up another dispatcher; leave it out, {ours} sets up this one")
    if given.moe_enable_deepep:
        raise ValueError(f"{DEEPEP} asks for another dispatcher; leave it out")
    if given.use_megatron_fsdp:
        raise ValueError(f"{MEGATRON_FSDP} has never run with this dispatcher; leave it out")
    if fused_router and given.moe_router_fusion:
        raise ValueError(f"{ROUTER_FUSION} asks for Transformer Engine's router, --ep-router fused for another one")
    reasons = {
        OVERLAP: given.overlap_moe_expert_parallel_comm,
        RANK_CAPACITY: getattr(given, RANK_CAPACITY) is not None,
    }
    needs_flex = [flag for flag, is_given in reasons.items() if is_given]
    allowed = ("flex",) if needs_flex else ("alltoall", "flex")
    if chosen is not None and chosen not in allowed:
        why = f" with {needs_flex[0]}" if needs_flex else ""
        raise ValueError(f"{TYPE} is {chosen}{why}; leave it out, or give {' or '.join(allowed)}")
    if backend is not None and backend != "hybridep":
        raise ValueError(f"{BACKEND} is {backend}, which asks for another dispatcher; leave it out, or give hybridep")
    if chosen is None:
        chosen = "flex" if needs_flex or backend is not None else "alltoall"
    flags = [TYPE, chosen]
    if chosen == "flex":
        flags += [BACKEND, "hybridep"]
    return [*arguments, *flags]


def has_restarter(arguments: Sequence[str]) -> bool:
    """Whether a training script with these arguments restarts in its processes (nvidia-resiliency-ext)."""
    return RESTART in arguments


def fitting_timeout(arguments: Sequence[str], timeout: float | None) -> float | None:
    """Config.timeout for a training script with these arguments.

    The in-process restarter takes a process that runs no Python for its soft timeout for hung, and one that waits for
    another rank on the host runs none. So that the report of who was missing comes first, the default becomes
    three quarters of the soft timeout if that is less.

    Args:
        arguments: of the script, without its name.
        timeout: what the user wants, in seconds; None: MEGATRON_EP_TIMEOUT, or the limit of torch's own collectives.

    Raises:
        ValueError: the user's own is not below the soft timeout: a rank that keeps the others waiting as long as he
            allows, for a save say, would be restarted; or it is no number of seconds.
    """
    seconds = Config(num_experts=1, timeout=timeout).timeout_seconds
    if not has_restarter(arguments):
        return timeout
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(SOFT_TIMEOUT, dest="soft", type=float, default=SOFT_TIMEOUT_S)
    parser.add_argument(GROUP_TIMEOUT, dest="minutes", type=float, default=GROUP_TIMEOUT_MIN)
    given = parser.parse_known_args(arguments)[0]
    soft: float = given.soft
    is_chosen = timeout is not None or bool(os.environ.get(TIMEOUT_VARIABLE))
    if not is_chosen:
        return min(60 * given.minutes, SHARE_OF_SOFT_TIMEOUT * soft)
    if seconds >= soft:
        name = TIMEOUT_VARIABLE if timeout is None else "timeout (--ep-timeout)"
        raise ValueError(
            f"{name} is {seconds:g} s, must be below {SOFT_TIMEOUT} ({soft:g} s), or the restarter takes a rank that "
            f"waits for hung: raise {SOFT_TIMEOUT}, and --inprocess-hard-timeout above it"
        )
    return seconds
