"""Low-latency mode, for few tokens. `api.py` is `LowLatency`; `checks.py` checks arguments, `plans.py` has the plan of
a checked call, `calls.py` launches its send and receive halves, `rows.py` defines the format of rows, and `autograd.py`
the gradients. `received.py` is the result of a dispatch, `handle.py` its layout.

`membership.py` manages masked ranks, `rejoin.py` brings back a rank whose process was started again.
"""
