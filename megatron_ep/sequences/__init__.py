"""Attention on other ranks than the rest of a layer. `plan.py` defines which rows go where, `planner.py` balances the
attention of ranks, and `reference.py` specifies the results of moving Q, K and V by a plan.

`dispatcher.py` moves them, `handles.py` turns a plan into handles of the normal mode, `autograd.py` has the gradients.
"""
