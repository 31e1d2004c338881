"""Benchmarks, each beside a baseline measured in the same run: a Megatron layer's exchange on the host (`layer.py`),
and those of `NAMES`.

All time in one loop (`timing.py`) and report in one form (`report.py`); `main.py` chooses one, `local_ranks.py` holds
the processes that they run in. Only the command line and tests import it; it imports the API and
`megatron_ep.megatron`.
"""

NAMES = {
    "router": "the router (gate), on the CPU or a GPU",
    "agreement": "what a step costs to look for failed calls before it",
    "cuda": "dispatch and combine of all ranks on one GPU",
    "gpus": "dispatch and combine, a rank on each GPU of this machine or a job",
    "low-latency": "the low-latency mode on GPUs",
    "sequences": "attention on other ranks: the way there and back, and what balance gains",
    "network": "dispatch, combine and single puts between machines",
    "host": "what the host does for a call on a GPU",
    "compare": "two JSON files of measurements, side by side",
    "tables": "the tables of a JSON file again",
}
