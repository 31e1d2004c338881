"""The ranks of a buffer that live in this process: all of them (`local.py`), or one, which meets those of other
processes (`distributed.py`). `rank_group.py` is what both have: their life, and what becomes of launches on them.

`any_buffer.py` is what users see of it, the base of Buffer and LocalCluster.
"""
