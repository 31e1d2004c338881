"""Predicts times of dispatch and combine on larger clusters, by running the protocol's roles in virtual time.

A `Case` is what is simulated, a `Machine` has the durations of operations, `predict` returns the times. See
docs/simulate.md for what they do not include.
"""

from megatron_ep.tools.simulate.case import Case
from megatron_ep.tools.simulate.machine import Machine
from megatron_ep.tools.simulate.predict import Phase, Prediction, predict

__all__ = ["Case", "Machine", "Phase", "Prediction", "predict"]
