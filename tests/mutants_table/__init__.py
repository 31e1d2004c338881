"""The mutants that mutants.py makes: each takes a fence, a wait or an order from the kernels."""

from mutants_table import calls, low_latency, networks, warps
from mutants_table.mutant import Mutant, mutants_of

MUTANTS = [mutant for table in (warps, calls, networks, low_latency) for mutant in mutants_of(table.MUTANTS)]

__all__ = ["MUTANTS", "Mutant"]
