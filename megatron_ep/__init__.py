"""Expert-parallel token dispatch and combine for Mixture-of-Experts training.

Shapes are written with T tokens on this rank, R rows received, H hidden, K top-k, E experts, L = E / W local experts,
N nodes, G ranks per node, W = N * G ranks.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ep import reference
    from megatron_ep.buffer import Buffer, LocalCluster
    from megatron_ep.config import Config, Topology
    from megatron_ep.errors import EPAbortError, EPError, EPOverflowError, EPStuckError, EPTimeoutError
    from megatron_ep.failures import abort_all, raise_if_failed
    from megatron_ep.functional import Received, combine, dispatch
    from megatron_ep.handle import Handle
    from megatron_ep.low_latency import LowLatency
    from megatron_ep.low_latency_received import LowLatencyReceived
    from megatron_ep.returning import rejoin
    from megatron_ep.router import grouped_topk

# Imported on first use, so that `megatron_ep.env` works where torch or the extension does not.
_HOMES = {
    "Buffer": "buffer",
    "LocalCluster": "buffer",
    "Config": "config",
    "Topology": "config",
    "EPError": "errors",
    "EPTimeoutError": "errors",
    "EPStuckError": "errors",
    "EPAbortError": "errors",
    "EPOverflowError": "errors",
    "abort_all": "failures",
    "raise_if_failed": "failures",
    "Handle": "handle",
    "LowLatency": "low_latency",
    "LowLatencyReceived": "low_latency_received",
    "Received": "functional",
    "combine": "functional",
    "dispatch": "functional",
    "grouped_topk": "router",
    "rejoin": "returning",
}

__all__ = [
    "Buffer",
    "LocalCluster",
    "Config",
    "Topology",
    "EPError",
    "EPTimeoutError",
    "EPStuckError",
    "EPAbortError",
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
    if name not in _HOMES:
        raise AttributeError(f"module 'megatron_ep' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"megatron_ep.{_HOMES[name]}"), name)
    return value
