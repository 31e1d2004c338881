"""The calls that ranks of the host launch."""

from unittest import mock

from megatron_ep.buffer.host import HostBackend
from megatron_ep.normal import plan


class Calls:
    """What is sent while it is open: how often counts are asked for, rows dispatched and combined."""

    def __enter__(self):
        self._phases, launch = [], HostBackend.launch

        def noted(backend, group, call, phase, *given, part=None):
            self._phases.append(phase)
            return launch(backend, group, call, phase, *given, part=part)

        self._patch = mock.patch.object(HostBackend, "launch", noted)
        self._patch.start()
        return self

    def __exit__(self, *_):
        self._patch.stop()

    @property
    def counts(self):
        return [self._phases.count(phase) for phase in (plan.NOTIFY, plan.DISPATCH, plan.COMBINE)]
