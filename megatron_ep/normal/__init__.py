"""Normal mode, for training and prefill: `api.py` checks the arguments of dispatch and combine, `autograd.py` and
`operators.py` (for torch.compile) make them differentiable, `launches.py` allocates outputs and launches.

`rank_group.py` is what a Buffer and a LocalCluster share, `handle.py` what a dispatch learned.
"""
