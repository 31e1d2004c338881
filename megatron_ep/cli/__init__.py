"""The command `megatron-ep`: `main.py` reads the arguments, `check.py` is the sub-command of that name.

Nobody imports it; it imports everything else, each part when a sub-command needs it.
"""
