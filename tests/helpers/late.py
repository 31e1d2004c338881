"""A host backend that is as late as a GPU: a call returns as if nothing had happened, its failure is known later."""

from unittest import mock

from megatron_ep.buffer.host import HostBackend


class LateBackend(HostBackend):
    _is_known = False

    def launch(self, group, call, phase, stream, given, part=None):
        told = super().launch(group, call, phase, stream, given, part=part)
        if part is None:
            self._is_known = told is not None  # this rank has waited for the counts
        return told

    def aborted(self):
        return super().aborted() if self._is_known else None

    def finished(self):
        return self._is_known and super().finished()

    def abort(self, **kwargs):
        super().abort(**kwargs)
        self._is_known = True

    def finish_launches(self):
        self._is_known = True

    def synchronize(self):
        self._is_known = True


def late():
    """Buffers on the host that are made inside have such a backend."""
    return mock.patch("megatron_ep.buffer.host.HostBackend", LateBackend)
