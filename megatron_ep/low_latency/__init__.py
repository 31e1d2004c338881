"""Low-latency mode, for few tokens: `api.py` is `LowLatency`, `checks.py` its arguments, `calls.py` the send and
receive halves as launches, `autograd.py` their gradients, `received.py` and `handle.py` what a dispatch returns and
learned.

`membership.py` holds the masked ranks, `rejoin.py` brings back one whose process was started anew.
"""
