"""Tested combinations of versions. `tests/packaging/versions.py` adds to them, `megatron-ep env` warns of others."""

# Megatron-Core, by Python and torch, with which `megatron-ep check` has passed on the host: gradients of every kind of
# call, and this dispatcher against Megatron's.
TRIED = {
    ("3.10", "2.7.1"): ["0.16.1"],
    ("3.10", "2.9.1"): ["0.16.1"],
    ("3.11", "2.7.1"): ["0.16.1"],
    ("3.11", "2.13.0"): ["0.16.1", "0.20.0 (main)"],
    ("3.12", "2.7.1"): ["0.16.1", "0.17.1", "0.18.2", "0.19.2"],
    ("3.12", "2.9.1"): ["0.16.1", "0.17.1", "0.18.2", "0.19.2"],
    ("3.12", "2.14.1"): ["0.16.1", "0.17.1", "0.18.2", "0.19.2"],
    ("3.13", "2.9.1"): ["0.16.1", "0.17.1", "0.18.2", "0.19.2"],
    ("3.13", "2.14.1"): ["0.16.1", "0.17.1", "0.18.2", "0.19.2"],
}
