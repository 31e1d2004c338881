"""What a Megatron user needs: the dispatcher, the MoE layer and the spec that puts it into a model, the fused router,
the buffers that layers share, and the opt-in modules that let Megatron run without its usual hardware.

`megatron_ep.training`, `megatron_ep.tools.bench` and the command line import it; it imports the API. Its modules import
`megatron.core`; this one does not.
"""

from importlib.util import find_spec


def is_installed() -> bool:
    """Whether megatron-core can be imported here, without importing it."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None
