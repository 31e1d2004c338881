"""A host backend that launches a dispatch ahead of its counts, as a GPU's does."""

from unittest import mock

from megatron_ep.buffer.host import HostBackend
from megatron_ep.normal import plan


class AheadBackend(HostBackend):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.launches_ahead = True
        self.guesses = []  # whether they were right

    def launch(self, group, call, phase, stream, given, part=None):
        told = super().launch(group, call, phase, stream, given, part=part)
        if phase == plan.AHEAD:
            self.guesses.append(told[1])
        return told


def ahead():
    """Buffers on the host that are made inside have such a backend."""
    return mock.patch("megatron_ep.buffer.host.HostBackend", AheadBackend)
