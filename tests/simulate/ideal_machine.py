"""Machines of tests in which only what is named takes time."""

from megatron_ep import _simulate
from megatron_ep.tools.simulate import Machine

RATES = {"warp_copy", "warp_sum", "warp_quantize", "sm_store", "sm_read", "sm_sum", "memory", "link", "card"}


def ideal(**constants: float) -> Machine:
    """All that is not named takes no time; rates in GB/s, the rest in ns."""
    nothing = {name: 1e12 if name in RATES else 0.0 for name in _simulate.CONSTANTS}
    return Machine("ideal", 132, nothing | constants, {}, {})
