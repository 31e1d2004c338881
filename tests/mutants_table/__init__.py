"""The mutants that mutants.py makes: each takes a fence, a wait or an order from the kernels."""

from mutants_table import calls, low_latency, networks, warps
from mutants_table.mutant import Mutant

MUTANTS: list[Mutant] = [*warps.MUTANTS, *calls.MUTANTS, *networks.MUTANTS, *low_latency.MUTANTS]

__all__ = ["MUTANTS", "Mutant"]
