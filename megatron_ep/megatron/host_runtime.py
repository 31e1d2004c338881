"""Where `stand_ins.host_runtime` was in 0.1.0."""

import warnings

from megatron_ep.megatron.stand_ins.host_runtime import enable

__all__ = ["enable"]

warnings.warn(
    "megatron_ep.megatron.host_runtime is megatron_ep.megatron.stand_ins.host_runtime now",
    DeprecationWarning,
    stacklevel=2,
)
