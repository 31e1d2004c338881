"""Attention on other ranks than the rest of a layer: `plan.py` says which rows go where, `planner.py` makes plans whose
attention is balanced, `reference.py` is the specification of what moving Q, K and V by a plan yields.

`dispatcher.py` moves them, `handles.py` makes handles of the normal mode of a plan, `autograd.py` the gradients.
"""
