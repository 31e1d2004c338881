"""Flags of Megatron's training scripts that concern the dispatcher: what must be set, and what contradicts it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

OVERLAP = "--overlap-moe-expert-parallel-comm"
TYPE = "--moe-token-dispatcher-type"
BACKEND = "--moe-flex-dispatcher-backend"
DEEPEP = "--moe-enable-deepep"
ROUTER_FUSION = "--moe-router-fusion"
# They set up dispatchers that never run here: to take them and do nothing would be a lie.
OF_OTHERS = {
    "--moe-deepep-num-sms": "--ep-num-sms",
    "--moe-hybridep-num-sms": "--ep-num-sms",
    "--moe-flex-dispatcher-num-sms": "--ep-num-sms",
}


def with_dispatcher(arguments: Sequence[str], fused_router: bool = False) -> list[str]:
    """The arguments of a training script, completed by what Megatron must be told about the dispatcher.

    Megatron is to believe in "alltoall", or, with 1F1B overlap, "flex" with "hybridep": by this it decides what to
    validate and which rows it may free early.

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
    for flag in (TYPE, BACKEND, *OF_OTHERS):
        parser.add_argument(flag, dest=flag)
    given, _ = parser.parse_known_args(arguments)
    chosen, backend = getattr(given, TYPE), getattr(given, BACKEND)

    for flag, ours in OF_OTHERS.items():
        if getattr(given, flag) is not None:
            raise ValueError(f"{flag} sets up another dispatcher; leave it out, {ours} sets up this one")
    if given.moe_enable_deepep:
        raise ValueError(f"{DEEPEP} asks for another dispatcher; leave it out")
    if fused_router and given.moe_router_fusion:
        raise ValueError(f"{ROUTER_FUSION} asks for Transformer Engine's router, --ep-router fused for another one")
    overlap = given.overlap_moe_expert_parallel_comm
    allowed = ("flex",) if overlap else ("alltoall", "flex")
    if chosen is not None and chosen not in allowed:
        why = f" with {OVERLAP}" if overlap else ""
        raise ValueError(f"{TYPE} is {chosen}{why}; leave it out, or give {' or '.join(allowed)}")
    if backend is not None and backend != "hybridep":
        raise ValueError(f"{BACKEND} is {backend}, which asks for another dispatcher; leave it out, or give hybridep")
    if chosen is None:
        chosen = "flex" if overlap or backend is not None else "alltoall"
    flags = [TYPE, chosen]
    if chosen == "flex":
        flags += [BACKEND, "hybridep"]
    return [*arguments, *flags]
