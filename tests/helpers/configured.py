"""Settings of the buffers that layers share, for a while."""

import contextlib

from megatron_ep.megatron import shared_buffers


@contextlib.contextmanager
def configured(**settings):
    shared_buffers.close_buffers()
    shared_buffers.configure(**settings)
    try:
        yield
    finally:
        shared_buffers.close_buffers()
        shared_buffers.configure()
