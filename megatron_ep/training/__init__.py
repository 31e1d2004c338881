"""Recipes and the small training loop that runs them: the YAML schema (`recipe.py`), the launcher of ranks
(`launcher.py`), data, model, loop, log and checkpoints.

Only the command line imports it; it imports `megatron_ep.megatron` and may import `megatron.core`.
"""
