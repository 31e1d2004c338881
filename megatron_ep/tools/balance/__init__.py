"""The balance of a run's tokens over experts and ranks. Needs no GPU."""
