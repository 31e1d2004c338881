"""Normal mode, for training and prefill: `api.py` checks the arguments of dispatch and combine, `autograd.py` and
`operators.py` (for torch.compile) make them differentiable, `launches.py` allocates outputs and launches.

`handle.py` is what a dispatch learned. `row_counts.py` asks how many rows come, or guesses it; `row_limit.py` watches
over a number that is fixed. `expert_ids.py` says which ids a token may have.
"""
