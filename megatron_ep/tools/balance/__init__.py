"""How evenly a run's tokens fall on experts and ranks, and what copies of hot experts would gain. Needs no GPU."""
