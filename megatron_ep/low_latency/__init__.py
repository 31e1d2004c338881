"""Low-latency mode, for few tokens: `api.py` is `LowLatency`, `checks.py` its arguments, `plans.py` a checked call but
for its addresses, `calls.py` the send and receive halves as launches, `rows.py` how rows travel, `autograd.py` their
gradients, `received.py` and `handle.py` what a dispatch returns and learned.

`membership.py` holds the masked ranks, `rejoin.py` brings back one whose process was started anew.
"""
