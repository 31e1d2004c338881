"""Everything that imports megatron.core. This module itself does not."""

from importlib.util import find_spec


def is_installed() -> bool:
    """Whether megatron-core can be imported here, without importing it."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None
