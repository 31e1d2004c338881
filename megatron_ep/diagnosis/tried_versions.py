"""Which versions have run together: `tests/packaging/versions.py` adds to it, `megatron-ep env` warns of others."""

# (Python, torch, Megatron-Core) that `megatron-ep check` has passed with on the host: gradients of every kind of call,
# and this dispatcher against Megatron's.
TRIED = [
    ("3.10", "2.7.1", "0.16.1"),
    ("3.11", "2.13.0", "0.16.1"),
    ("3.12", "2.7.1", "0.16.1"),
    ("3.12", "2.7.1", "0.17.1"),
    ("3.12", "2.7.1", "0.18.2"),
    ("3.12", "2.7.1", "0.19.2"),
    ("3.12", "2.9.1", "0.16.1"),
    ("3.12", "2.9.1", "0.17.1"),
    ("3.12", "2.9.1", "0.18.2"),
    ("3.12", "2.9.1", "0.19.2"),
    ("3.13", "2.14.1", "0.16.1"),
    ("3.13", "2.14.1", "0.17.1"),
    ("3.13", "2.14.1", "0.18.2"),
    ("3.13", "2.14.1", "0.19.2"),
]
