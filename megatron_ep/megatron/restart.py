"""Support for nvidia-resiliency-ext's in-process restart: ends and rebuilds the buffers of this library.

Its `inprocess.Wrapper` runs the training again in the same processes when a rank has failed. A thread of it calls
`abort` while the main thread may be waiting; once that has left the training, the main thread calls `finalize`.
nvidia-resiliency-ext is optional: this module can be imported without it.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import megatron_ep as ep
from megatron_ep.megatron.shared_buffers import close_buffers

if TYPE_CHECKING:
    from nvidia_resiliency_ext.inprocess.abort import Abort
    from nvidia_resiliency_ext.inprocess.finalize import Finalize
    from nvidia_resiliency_ext.inprocess.state import FrozenState
else:
    try:
        from nvidia_resiliency_ext.inprocess.abort import Abort
        from nvidia_resiliency_ext.inprocess.finalize import Finalize
    except ImportError as error:
        _missing = f"{error}"

        class _Needed:
            def __init__(self) -> None:
                name = type(self).__name__
                raise ImportError(
                    f"{name} needs nvidia-resiliency-ext: pip install 'megatron_ep[restart]' ({_missing})"
                )

        Abort = Finalize = _Needed

log = logging.getLogger(__name__)

_enabled = False

REASON = "the job restarts in its processes"


class AbortEP(Abort):
    """Ends the waits of all buffers of this process, on this rank and on reachable ranks, without waiting.

    `inprocess.Compose` runs from right to left. AbortEP comes first, so it is listed last, after AbortTorchDistributed:
    Compose(AbortTransformerEngine(), AbortTorchDistributed(), ..., AbortEP()). In the other order the main thread
    could continue from an ended collective into a wait of this library.

    Raises ImportError if it is created without nvidia-resiliency-ext.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        ep.abort_all(REASON)
        return state


class FinalizeEP(Finalize):
    """Closes the buffers that layers share, so that the next run of the training creates its own. Needs no other rank.

    Logs a failure that no call has raised, because that run is over. Close your own buffers yourself.

    Raises ImportError if it is created without nvidia-resiliency-ext.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        try:
            close_buffers()
        except ep.EPError as failure:
            log.error("before the restart: %s", failure)
        return state


def enable() -> None:
    """Makes every `inprocess.Wrapper` created in this process from now on also run AbortEP and FinalizeEP, before its
    own.

    Idempotent; lasts until the process ends. Use it for scripts that you do not want to edit, such as Megatron-LM's.

    Raises ImportError without nvidia-resiliency-ext.
    """
    global _enabled
    ours = {"abort": AbortEP(), "finalize": FinalizeEP()}
    from nvidia_resiliency_ext.inprocess import Compose, Wrapper

    if _enabled:
        return
    make = Wrapper.__init__

    @functools.wraps(make)
    def with_ours(wrapper: Any, **options: Any) -> None:
        for name, step in ours.items():
            given = options.get(name, make.__kwdefaults__[name])
            options[name] = step if given is None else Compose(given, step)
        make(wrapper, **options)

    Wrapper.__init__ = with_ours
    _enabled = True
