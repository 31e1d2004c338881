"""Benchmarks, each beside a baseline measured in the same run: a Megatron layer's exchange on the host (`layer.py`),
all ranks on one GPU (`cuda.py`), a rank on each GPU (`gpus.py`), the gate (`router.py`), and the processes that they
run in (`local_ranks.py`).

Only the command line and tests import it; it imports the API and `megatron_ep.megatron`.
"""
