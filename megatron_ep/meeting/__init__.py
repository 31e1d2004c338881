"""How ranks meet, hear of each other and part: through a store, and the processes of a machine."""
