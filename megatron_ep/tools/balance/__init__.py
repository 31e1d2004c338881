"""How evenly a run's tokens fall on experts and ranks. Needs no GPU."""
