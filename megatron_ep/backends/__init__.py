"""What implements a buffer: the host backend and the CUDA backend behind one small interface (`interface.py`), how the
ranks of several processes find each other's memory (`rendezvous.py`, `connect.py`), and which fabric carries their
bytes (`fabrics.py`).

Buffers and both modes import it, and the command line for what a machine has; it imports `megatron_ep._C`, `diagnosis`,
`config` and `errors`.
"""
