"""Expert-parallel token dispatch and combine for Mixture-of-Experts training.

Shapes are written with T tokens on this rank, R rows received, H hidden, K top-k, E experts, L = E / W local experts,
N nodes, G ranks per node, W = N * G ranks.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ep import reference
    from megatron_ep.buffer.buffer import Buffer, LocalCluster
    from megatron_ep.config import Config, Topology, Tuning
    from megatron_ep.diagnosis.failures import abort_all, raise_if_failed
    from megatron_ep.errors import EPAbortError, EPError, EPMaskedError, EPOverflowError, EPStuckError, EPTimeoutError
    from megatron_ep.low_latency.api import LowLatency
    from megatron_ep.low_latency.received import LowLatencyReceived
    from megatron_ep.low_latency.rejoin import rejoin
    from megatron_ep.normal.api import Received, combine, dispatch
    from megatron_ep.normal.handle import Handle
    from megatron_ep.router.api import grouped_topk

# Imported on first use, so that `megatron_ep.env` works where torch or the extension does not.
_NAMES = {
    "buffer.buffer": ("Buffer", "LocalCluster"),
    "config": ("Config", "Topology", "Tuning"),
    "errors": ("EPError", "EPTimeoutError", "EPStuckError", "EPAbortError", "EPMaskedError", "EPOverflowError"),
    "diagnosis.failures": ("abort_all", "raise_if_failed"),
    "low_latency.api": ("LowLatency",),
    "low_latency.received": ("LowLatencyReceived",),
    "low_latency.rejoin": ("rejoin",),
    "normal.api": ("Received", "combine", "dispatch"),
    "normal.handle": ("Handle",),
    "router.api": ("grouped_topk",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Buffer",
    "LocalCluster",
    "Config",
    "Topology",
    "Tuning",
    "EPError",
    "EPTimeoutError",
    "EPStuckError",
    "EPAbortError",
    "EPMaskedError",
    "EPOverflowError",
    "abort_all",
    "raise_if_failed",
    "Handle",
    "LowLatency",
    "LowLatencyReceived",
    "Received",
    "combine",
    "dispatch",
    "grouped_topk",
    "reference",
    "rejoin",
]


def __getattr__(name: str) -> Any:
    if name == "reference":
        return importlib.import_module("megatron_ep.reference")
    if name == "__version__":
        return importlib.import_module("megatron_ep.diagnosis.env").own_version()
    if name not in _HOMES:
        raise AttributeError(f"module 'megatron_ep' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"megatron_ep.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
