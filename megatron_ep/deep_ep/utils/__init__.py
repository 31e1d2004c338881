"""`deep_ep.utils`: the names that users import from it."""

from megatron_ep.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
