from megatron_ep.deep_ep.events import EventHandle as EventHandle
from megatron_ep.deep_ep.events import EventOverlap as EventOverlap
