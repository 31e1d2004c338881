"""Attention on other ranks than the rest of a layer: `plan.py` says which rows go where, `planner.py` makes plans whose
attention is balanced, `reference.py` is the specification of what moving Q, K and V by a plan yields."""
