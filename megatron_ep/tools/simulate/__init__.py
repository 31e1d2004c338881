"""Predicted times of dispatch and combine on larger clusters: the protocol's own roles in virtual time.

A `Case` says what is simulated, a `Machine` how long things take there, `predict` returns the times. What is not in
them: docs/simulate.md.
"""

from megatron_ep.tools.simulate.case import Case
from megatron_ep.tools.simulate.machine import Machine
from megatron_ep.tools.simulate.predict import Phase, Prediction, predict

__all__ = ["Case", "Machine", "Phase", "Prediction", "predict"]
