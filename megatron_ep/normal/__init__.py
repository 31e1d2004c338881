"""Normal mode, for training and prefill. `api.py` has dispatch and combine, whose arguments `checks.py` checks,
`autograd.py` and `operators.py` (for torch.compile) make them differentiable, and `cached_plans.py` finds the
plan of a call, which allocates outputs and launches.

`handle.py` is the layout of a dispatch. `row_counts.py` exchanges or predicts the number of rows, `row_limit.py` checks
for overflow of a fixed number, and `expert_ids.py` checks ids.
"""
