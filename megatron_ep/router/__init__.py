"""The MoE gate: grouped top-k with gradients (`api.py`)."""
