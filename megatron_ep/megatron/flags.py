"""Flags of Megatron's training scripts that concern the dispatcher: translated, without effect, or refused. All other
flags are unchanged; docs/megatron.md has the whole table."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ep.config import MAX_CHANNELS, TIMEOUT_VARIABLE, Config, require_int

OVERLAP = "--overlap-moe-expert-parallel-comm"
DELAYED_WEIGHTS = "--overlap-dispatch-backward-with-experts-wgrad"
TYPE = "--moe-token-dispatcher-type"
BACKEND = "--moe-flex-dispatcher-backend"
DEEPEP = "--moe-enable-deepep"
OWN_SMS, OWN_EXPERTS = "--ep-num-sms", "--ep-experts"
NUM_SMS = ("--moe-flex-dispatcher-num-sms", "--moe-hybridep-num-sms", "--moe-deepep-num-sms")  # by precedence
ROUTER_FUSION = "--moe-router-fusion"
RANK_CAPACITY = "--moe-expert-rank-capacity-factor"
DEVICE_COUNTS = ("--use-transformer-engine-op-fuser", "--moe-use-grouped-tensor")
GRAPHS = "--cuda-graph-impl"
GRAPHED = ("--cuda-graph-modules", "--cuda-graph-scope")  # the second before 0.19
RECOMPUTED = "--recompute-modules"
LATENT = "--moe-latent-size"
SHARED_OVERLAP = "--moe-shared-expert-overlap"
GROUPED = "no effect here: rows arrive grouped by expert"
BUFFERS = "no effect here: it sets up buffers of NCCL EP"
SWITCHES_WITHOUT_EFFECT = {
    "--moe-permute-fusion": GROUPED,
    "--moe-permute-fusion-into-hybridep": GROUPED,
    "--moe-hybridep-pad-uneven-dispatch-inputs": "no effect here: ranks may have different numbers of tokens",
    "--moe-ncclep-static-shape": f"{BUFFERS}; {RANK_CAPACITY} makes shapes static",
    "--moe-ncclep-zero-copy": BUFFERS,
}
VALUES_WITHOUT_EFFECT = {
    "--moe-hybridep-num-blocks-permute": GROUPED,
    "--moe-hybridep-num-blocks-unpermute": GROUPED,
    "--moe-hybridep-num-sms-preprocessing": "no effect here: there is no preprocessing kernel",
}
MXFP8 = "mxfp8 rows are not supported, and others give other numbers"
FSDP = "--use-megatron-fsdp"
REFUSED_SWITCHES = {FSDP: "has never run with this dispatcher"}
FSDP_ALONE = (  # beginnings of flags that Megatron takes, or means, with its FSDP only
    *("--fsdp-", "--megatron-fsdp-", "--data-parallel-sharding-strategy", "--outer-dp-sharding-strategy"),
    *("--init-model-with-meta-device", "--enable-full-sharding-in-hsdp", "--use-nccl-ub"),
)
FSDP_FORMAT, DISTRIBUTED_OPTIMIZER = ("--ckpt-format", "fsdp_dtensor"), "--use-distributed-optimizer"
REFUSED_VALUES = {  # None: every value is refused
    "--moe-megakernel-backend": (None, "its kernels compute the whole MoE layer, and no dispatcher would run"),
    "--moe-dispatch-fwd-dtype": ("mxfp8", MXFP8),
    "--moe-combine-bwd-dtype": ("mxfp8", MXFP8),
}
REFUSED_BY_FUSED_ROUTER = {
    "--moe-router-load-balancing-type": ("sinkhorn", "quantile_balancing"),
    "--moe-router-score-function": ("sqrtsoftplus",),
}
REFUSED_BY_GROUPED_EXPERTS = {  # they treat matrices alone, and would give these weights to Adam
    "--optimizer": ("muon", "dist_muon", "adaptive_muon", "soap"),
}
RESTART = "--inprocess-restart"  # a training script restarts in its processes (nvidia-resiliency-ext)
SOFT_TIMEOUT = "--inprocess-soft-timeout"
SOFT_TIMEOUT_S = 60.0  # Megatron's default
GROUP_TIMEOUT = "--distributed-timeout-minutes"
GROUP_TIMEOUT_MIN = 10.0  # Megatron's default
# A wait gets only a share, because it begins after the last heartbeat, and its report takes time.
SHARE_OF_SOFT_TIMEOUT = 0.75


@dataclass
class Translation:
    """The translation of a training script's flags.

    arguments: arguments of the script, with those that declare the dispatcher to Megatron, and without refused ones.
    num_sms: Config.num_sms by the script's flags; None: they do not set it, or the user does.
    fused_router: whether this project's router can run.
    notes: a line for each flag that is translated or has no effect.
    refusals: a line for each flag that would change results or guarantees.
    """

    arguments: list[str]
    num_sms: int | None
    fused_router: bool
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


def translated(
    arguments: Sequence[str], fused_router: bool = False, num_sms: int | None = None, grouped_experts: bool = False
) -> Translation:
    """Translates the arguments of a training script for this dispatcher.

    Declares "alltoall" to Megatron, or "flex" with "hybridep" if the script asks for flex or `needs_flex` is true.
    Megatron validates settings and frees rows accordingly.

    arguments: arguments of the script, without its name.
    fused_router: whether this project's router replaces Megatron's.
    num_sms: Config.num_sms as set by the user.
    grouped_experts: whether this project's experts replace Megatron's.

    Raises ValueError if a flag has no value.
    """
    given, rest = _parsed(
        _without_fsdp(arguments) if FSDP in arguments else arguments,
        switches=(DEEPEP, *SWITCHES_WITHOUT_EFFECT, *REFUSED_SWITCHES),
        values=(TYPE, BACKEND, *NUM_SMS, *VALUES_WITHOUT_EFFECT),
    )
    read, _ = _parsed(
        rest,
        switches=(OVERLAP, ROUTER_FUSION, SHARED_OVERLAP, *DEVICE_COUNTS),
        values=(RANK_CAPACITY, GRAPHS, LATENT, *REFUSED_VALUES, *REFUSED_BY_GROUPED_EXPERTS),
        lists=(RECOMPUTED, *GRAPHED, *REFUSED_BY_FUSED_ROUTER),
    )
    result = Translation(rest, None, fused_router)
    flags = {**given, **read, OWN_SMS: num_sms, OWN_EXPERTS: grouped_experts}
    for rule in (
        _refuse,
        _refuse_by_experts,
        _fuse_router,
        _drop_buffers,
        _declare,
        _say_what_has_no_effect,
        _take_num_sms,
    ):
        rule(flags, result)
    return result


# Rules. Each takes the flags' values, and adds what it says and changes to the result.


def _refuse(flags: dict[str, Any], result: Translation) -> None:
    for flag, why in REFUSED_SWITCHES.items():
        if flags[flag]:
            result.refusals.append(f"{flag} {why}: leave it out")
    for flag, (value, why) in REFUSED_VALUES.items():
        if flags[flag] is not None and value in (None, flags[flag]):
            result.refusals.append(f"{flag} is {flags[flag]}: {why}: leave it out")
            _, result.arguments = _parsed(result.arguments, values=(flag,))


def _refuse_by_experts(flags: dict[str, Any], result: Translation) -> None:
    for flag, optimizers in REFUSED_BY_GROUPED_EXPERTS.items():
        if flags[OWN_EXPERTS] and flags[flag] in optimizers:
            result.refusals.append(f"{flag} is {flags[flag]}, which treats matrices: leave out {OWN_EXPERTS} grouped")


def _fuse_router(flags: dict[str, Any], result: Translation) -> None:
    if not result.fused_router:
        return
    for flag, values in REFUSED_BY_FUSED_ROUTER.items():
        for value in set(values).intersection(flags[flag] or ()):
            result.refusals.append(f"{flag} is {value}, which --ep-router fused does not have: leave that out")
            result.fused_router = False
    if result.fused_router and flags[ROUTER_FUSION]:
        result.notes.append(f"{ROUTER_FUSION}: no effect here: --ep-router fused takes the router's place")
        _, result.arguments = _parsed(result.arguments, switches=(ROUTER_FUSION,))


def _drop_buffers(flags: dict[str, Any], result: Translation) -> None:
    """A rank capacity without counts on the device is the size of NCCL EP's buffers."""
    capacity = flags[RANK_CAPACITY]
    if flags[BACKEND] == "ncclep" and capacity is not None and not any(flags[flag] for flag in DEVICE_COUNTS):
        result.notes.append(f"{RANK_CAPACITY} {capacity}: {BUFFERS}, and here all rows have room")
        _, result.arguments = _parsed(result.arguments, values=(RANK_CAPACITY,))
        flags[RANK_CAPACITY] = None


def _declare(flags: dict[str, Any], result: Translation) -> None:
    is_flex = flags[DEEPEP] or (flags[BACKEND] if flags[TYPE] is None else flags[TYPE] == "flex")
    declared = {TYPE: "flex", BACKEND: "hybridep"} if is_flex or needs_flex(flags.get) else {TYPE: "alltoall"}
    for flag in (TYPE, BACKEND):
        if flags[flag] not in (None, declared.get(flag)):
            declares = f", and Megatron is told {declared[flag]}" if flag in declared else ""
            result.notes.append(f"{flag} {flags[flag]}: this project's dispatcher runs{declares}")
    if flags[DEEPEP]:
        result.notes.append(f"{DEEPEP}: this project's dispatcher runs")
    result.arguments += [word for pair in declared.items() for word in pair]


def _say_what_has_no_effect(flags: dict[str, Any], result: Translation) -> None:
    for flag, why in (SWITCHES_WITHOUT_EFFECT | VALUES_WITHOUT_EFFECT).items():
        if flags[flag] not in (False, None):
            result.notes.append(f"{flag}: {why}")


def _take_num_sms(flags: dict[str, Any], result: Translation) -> None:
    for flag in NUM_SMS:
        text = flags[flag]
        if text is None:
            continue
        if flags[OWN_SMS] is not None or result.num_sms is not None:
            winner = NUM_SMS[0] if flags[OWN_SMS] is None else OWN_SMS
            result.notes.append(f"{flag} {text}: no effect here: {winner} is given")
            continue
        try:
            value = int(text)
            Config(num_experts=1, num_sms=value)
        except ValueError as error:
            result.refusals.append(f"{flag} is {text}: {error}")
            continue
        result.num_sms = value
        result.notes.append(f"{flag} {text}: taken as {OWN_SMS} {text}")


def _without_fsdp(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments without those of Megatron's FSDP, but the flag itself, with the distributed optimizer."""
    kept, is_alone = [], False
    for word in arguments:
        is_alone = word.startswith(FSDP_ALONE) if word.startswith("--") else is_alone  # or a value of the flag before
        kept += [] if is_alone else [word]
    flag, value = FSDP_FORMAT
    found, others = _parsed(kept, values=(flag,))
    kept = others if found[flag] == value else kept
    return kept if DISTRIBUTED_OPTIMIZER in kept else [*kept, DISTRIBUTED_OPTIMIZER]


def needs_flex(setting: Callable[[str], Any]) -> bool:
    """Returns whether flex with hybridep must be declared: under another type Megatron frees too much, or refuses a
    setting.

    - 1F1B overlap would free rows that the experts still need.
    - A rank capacity is refused.
    - Under alltoall, a graph of moe_preprocess frees the recomputed input of the layer, because Megatron's own
      all-to-all returns a copy of it. This dispatcher, and flex, return the input itself. With latent experts or
      overlapped shared experts Megatron goes by these.

    setting: returns the value of a flag, or a false one.
    """
    graphed = {getattr(part, "name", part) for flag in GRAPHED for part in setting(flag) or ()}
    frees_input = (
        setting(GRAPHS) == "transformer_engine"
        and "moe_preprocess" in graphed
        and "layernorm" in (setting(RECOMPUTED) or ())
        and not (setting(LATENT) or setting(SHARED_OVERLAP))
    )
    return bool(setting(OVERLAP)) or setting(RANK_CAPACITY) is not None or frees_input


def declare(config: Any) -> None:
    """Declares flex with hybridep in a model's config if `needs_flex`; for layers that no translated flags have made.

    config: a TransformerConfig.
    """
    if needs_flex(lambda flag: getattr(config, field_of(flag), None)) and not declares_grouped(config):
        config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend = "flex", "hybridep"


def declares_grouped(config: Any) -> bool:
    """Returns whether the config declares a dispatcher whose rows arrive grouped by expert, as they do here."""
    return config.moe_token_dispatcher_type == "flex" and config.moe_flex_dispatcher_backend in ("hybridep", "ncclep")


def num_sms_of(config: Any) -> int | None:
    """Returns Config.num_sms by a model's config: of the fields of `NUM_SMS`, the first that is not left at Megatron's
    default; None if all are.

    Raises ValueError if it is out of range.
    """
    for name in map(field_of, NUM_SMS):
        value = getattr(config, name, None)
        defaults = [vars(kind)[name] for kind in type(config).__mro__ if name in vars(kind)]
        if value is not None and defaults and value != defaults[-1]:
            require_int(name, value, 1, MAX_CHANNELS)
            return value
    return None


def field_of(flag: str) -> str:
    """Returns the field of TransformerConfig that a flag sets."""
    return flag[2:].replace("-", "_")


def _parsed(
    arguments: Sequence[str], switches: Sequence[str] = (), values: Sequence[str] = (), lists: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Returns the values of these flags (False or None if absent), and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in switches:
        parser.add_argument(flag, dest=flag, action="store_true")
    for flag in values:
        parser.add_argument(flag, dest=flag)
    for flag in lists:
        parser.add_argument(flag, dest=flag, nargs="+")
    try:
        given, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    return vars(given), rest


def fitting_timeout(arguments: Sequence[str], timeout: float | None) -> float | None:
    """Returns Config.timeout for a training script with these arguments.

    The in-process restarter restarts a process that runs no Python for its soft timeout, such as one that waits for
    another rank on the host. The default is at most three quarters of the soft timeout, so that the error that names
    the missing rank comes first.

    arguments: arguments of the script, without its name.
    timeout: the user's timeout in seconds; None: MEGATRON_EP_TIMEOUT, or the limit of torch's own collectives.

    Raises ValueError if the user's timeout is invalid, or not below the soft timeout: ranks that wait as long as it
    allows, for example during a save, would be restarted.
    """
    seconds = Config(num_experts=1, timeout=timeout).timeout_seconds
    if RESTART not in arguments:
        return timeout
    given, _ = _parsed(arguments, values=(SOFT_TIMEOUT, GROUP_TIMEOUT))
    soft, minutes = float(given[SOFT_TIMEOUT] or SOFT_TIMEOUT_S), float(given[GROUP_TIMEOUT] or GROUP_TIMEOUT_MIN)
    is_chosen = timeout is not None or bool(os.environ.get(TIMEOUT_VARIABLE))
    if not is_chosen:
        return min(60 * minutes, SHARE_OF_SOFT_TIMEOUT * soft)
    if seconds >= soft:
        name = TIMEOUT_VARIABLE if timeout is None else "timeout (--ep-timeout)"
        raise ValueError(
            f"{name} is {seconds:g} s, must be below {SOFT_TIMEOUT} ({soft:g} s), or the restarter takes a rank that "
            f"waits for hung: raise {SOFT_TIMEOUT}, and --inprocess-hard-timeout above it"
        )
    return seconds
