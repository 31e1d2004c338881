"""`deep_ep.utils`: the names that programs import from it. Helpers of DeepEP's tests are not here."""

from megatron_ep.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
