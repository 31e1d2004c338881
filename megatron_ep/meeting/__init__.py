"""Communication of ranks outside of fabrics: rendezvous through a store, failure messages, processes of a machine."""
