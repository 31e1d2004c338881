"""Benchmarks, each with a baseline measured in the same run: a Megatron layer's exchange on the host (`layer.py`), and
those of `NAMES`.

All use one timing loop (`timing.py`) and one form of report (`report.py`); `main.py` chooses one, `local_ranks.py`
starts their processes. Only the command line and tests import it; it imports the API and `megatron_ep.megatron`.
"""

NAMES = {
    "gpus": "dispatch and combine, a rank on each GPU of this machine or a job",
    "low-latency": "the low-latency mode on GPUs",
}
