"""`deep_ep.utils`: what its users import of it."""

from megatron_ep.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
