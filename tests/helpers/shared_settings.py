"""The buffers that Megatron's layers share, and their settings, in ranks that stay up between tests."""

import contextlib
import os
import sys


@contextlib.contextmanager
def configured(**settings):
    from megatron_ep.megatron import shared_buffers

    shared_buffers.close_buffers()
    shared_buffers.configure(**settings)
    try:
        yield
    finally:
        shared_buffers.close_buffers()
        shared_buffers.configure()


def forget():
    """Closes the buffers, and drops the settings and the attention that Megatron writes to the environment for a
    model. Where Megatron is not installed there are none."""
    shared_buffers = sys.modules.get("megatron_ep.megatron.shared_buffers")
    if shared_buffers is not None:
        shared_buffers.close_buffers()
        shared_buffers.configure()
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]
