"""Backends of the host that do what a GPU's does, and a count of what backends launch."""

from unittest import mock

from megatron_ep.buffer.host import HostBackend
from megatron_ep.normal import plan


class LateBackend(HostBackend):
    """As late as a GPU: a call returns as if nothing had happened, its failure is known later."""

    _is_known = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.aborted = lambda: self.launcher.aborted() if self._is_known else None

    def launch(self, launcher, call, phase, stream, values, part=None):
        told = super().launch(launcher, call, phase, stream, values, part=part)
        if part is None:
            self._is_known = told is not None  # this rank has waited for the counts
        return told

    def finished(self):
        return self._is_known and super().finished()

    def abort(self, **kwargs):
        super().abort(**kwargs)
        self._is_known = True

    def finish_launches(self):
        self._is_known = True

    def synchronize(self):
        self._is_known = True


class AheadBackend(HostBackend):
    """Launches a dispatch ahead of its counts, as a GPU's does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.speculates = True
        self.guesses = []  # whether they were right

    def launch(self, launcher, call, phase, stream, values, part=None):
        told = super().launch(launcher, call, phase, stream, values, part=part)
        if phase == plan.SPECULATIVE:
            self.guesses.append(told[1])
        return told


def with_backend(backend):
    """Buffers on the host that are made inside have such a backend."""
    return mock.patch("megatron_ep.buffer.host.HostBackend", backend)


class Launches:
    """What is sent while it is open: how often counts are asked for, rows dispatched and combined."""

    def __enter__(self):
        self._phases, launch = [], HostBackend.launch

        def noted(backend, launcher, call, phase, *values, part=None):
            self._phases.append(phase)
            return launch(backend, launcher, call, phase, *values, part=part)

        self._patch = mock.patch.object(HostBackend, "launch", noted)
        self._patch.start()
        return self

    def __exit__(self, *_):
        self._patch.stop()

    @property
    def counts(self):
        return [self._phases.count(phase) for phase in (plan.NOTIFY, plan.DISPATCH, plan.COMBINE)]
