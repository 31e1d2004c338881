"""Benchmarks, each beside a baseline measured in the same run: a Megatron layer's exchange on the host (`layer.py`),
the gate (`router.py`), all ranks on one GPU (`cuda.py`), a rank on each GPU (`gpus.py`), the low-latency
mode on GPUs (`low_latency.py`).

All time in one loop (`timing.py`) and report in one form (`report.py`); `main.py` chooses one, `local_ranks.py` holds
the processes that they run in. Only the command line and tests import it; it imports the API and
`megatron_ep.megatron`.
"""
