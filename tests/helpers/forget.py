"""Cleans up ranks that stay up between tests, in a module that pickle finds by name: there are several conftest."""

import os
import sys


def forget():
    """Our buffers and settings, and the attention that Megatron writes to the environment for a model."""
    shared_buffers = sys.modules.get("megatron_ep.megatron.shared_buffers")
    if shared_buffers is not None:
        shared_buffers.close_buffers()
        shared_buffers.configure()
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]
