"""`deep_ep.utils.event`."""

from megatron_ep.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
