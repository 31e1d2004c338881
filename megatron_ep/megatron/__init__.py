"""The integration with Megatron-Core: the dispatcher, the MoE layer and the spec that puts it into a model, the fused
router, the buffers that layers share, and opt-in modules.

`megatron_ep.training`, `megatron_ep.tools.bench` and the command line import it; it imports the API. Its modules import
`megatron.core`; this one does not.
"""

from importlib.util import find_spec


def is_installed() -> bool:
    """Returns whether megatron-core can be imported, without importing it."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None
